"""
A selector of your own
======================

A selector gives each sample a weight S(x); zero means that the method does not learn from it. EATA multiplies two:
``Reliable(0.4) * NonRedundant("auto")``. This one keeps a fixed share of the most certain samples of a batch.
"""

# %%
# A selector is a module: logits in, weights out. State goes into buffers.
import copy

import matplotlib.pyplot as plt
import torch

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt
from acclimate.functional import entropy


class MostCertain(acclimate.Selector):
    """Keep this share of each batch: the samples of lowest entropy."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, logits):
        uncertain = entropy(logits)
        return (uncertain <= uncertain.quantile(self.share)).float()

    def extra_repr(self):
        return str(self.share)


# %%
# It multiplies with the others:
select = MostCertain(0.5) * acclimate.NonRedundant(0.4)
print(select(torch.tensor([[9.0, 0.0], [1.0, 0.9], [0.0, 5.0], [0.2, 0.1]])))

# %%
# Every method that selects takes one. How much to keep, on a transformer at a high rate?
net = load_network("digits-vit").model
test = load_digits()[1]
generator = torch.Generator().manual_seed(0)
stream = [
    (corrupt(x, name, 4, generator), y)
    for name in ("gaussian_noise", "motion_blur", "pixelate")
    for x, y in zip(test.x[:256].split(64), test.y[:256].split(64), strict=True)
]

shares = (0.05, 0.25, 0.5, 0.75, 1.0)
accuracy = []
for share in shares:
    model = acclimate.ETA(copy.deepcopy(net), lr=0.03, select=MostCertain(share))
    right = torch.cat([model(x).argmax(1) == y for x, y in stream])
    accuracy.append(100 * float(right.float().mean()))
    print(f"share {share:.2f}: {accuracy[-1]:.1f} % right, {int(model.passes.backwards)} backward passes")

# %%
plt.figure(figsize=(6, 3))
plt.plot([100 * share for share in shares], accuracy, "o-")
plt.xlabel("share of samples learned from (%)")
plt.ylabel("accuracy (%)")
plt.tight_layout()
