"""
A method of your own
====================

A method writes one function, ``adapt``. Reset, snapshots, files, counted passes and the benchmark come with it.
"""

# %%
# Minimise the entropy of certain samples, and keep the mean prediction diverse, so that it does not collapse:
import copy

import matplotlib.pyplot as plt
import torch

import acclimate
from acclimate.bench.networks import load_network
from acclimate.contract import PROMISES, Subject
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt
from acclimate.functional import entropy


class Diverse(acclimate.Adapter):
    """min_θ mean H(p) − w·H(mean p), over samples of entropy below `most`."""

    selective = True
    presets = {"resnet50": {"lr": 2.5e-4}, "vit-base": {"lr": 1e-3}}  # noqa: RUF012

    def __init__(self, model, *, most=1.0, weight=1.0, **options):
        super().__init__(model, **options)
        self.most, self.weight = most, weight

    def adapt(self, x):
        batch = self.predict(x)
        kept = batch.kept(entropy(batch.logits) < self.most)
        # kept.logits may have rows that do not count: kept.mean leaves them out
        mean = torch.stack([kept.mean(p) for p in kept.logits.softmax(1).unbind(1)])
        self.update(
            when=kept.any,
            entropy=kept.mean(entropy(kept.logits)),
            diversity=-self.weight * torch.special.entr(mean).sum(),
        )
        return batch.logits


# %%
# Does it keep what every method promises? ``acclimate check`` runs the same on the command line.
for name, promise in PROMISES.items():
    promise(Subject(Diverse, "bn"))
    print("✓", name)

# %%
# Against Tent, at a rate at which Tent collapses:
net = load_network("digits-vit").model
test = load_digits()[1]
generator = torch.Generator().manual_seed(0)
stream = [
    (corrupt(x, name, 3, generator), y)
    for name in ("speckle_noise", "motion_blur", "contrast")
    for x, y in zip(test.x[:320].split(64), test.y[:320].split(64), strict=True)
]
methods = {
    "Source": acclimate.Source(net),
    "Tent": acclimate.Tent(copy.deepcopy(net), lr=0.05),
    "Diverse": Diverse(copy.deepcopy(net), lr=0.05, most=2.0),
}
plt.figure(figsize=(7, 3))
for name, model in methods.items():
    accuracy = [100 * float((model(x).argmax(1) == y).float().mean()) for x, y in stream]
    plt.plot(accuracy, label=name)
    print(f"{name:8} {sum(accuracy) / len(accuracy):.1f} % right; {model!r}")
plt.xlabel("batch")
plt.ylabel("accuracy (%)")
plt.legend()
plt.tight_layout()
