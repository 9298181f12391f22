"""
Reliability diagrams
====================

How often is a prediction of 90 % confidence right? Bars below the diagonal mean overconfidence.
"""

# %%
# Measure a stream: predictions go into a meter, labels never into the adapter.
import copy

import matplotlib.pyplot as plt
import torch

import acclimate
from acclimate.bench.metrics import BINS, Meter
from acclimate.bench.networks import load_network
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt

net = load_network("digits-vit").model
train, test = load_digits()
generator = torch.Generator().manual_seed(0)
stream = [
    (corrupt(x, name, 3, generator), y)
    for name in ("gaussian_noise", "pixelate", "motion_blur")
    for x, y in zip(test.x[:320].split(64), test.y[:320].split(64), strict=True)
]
models = {
    "Source": acclimate.Source(copy.deepcopy(net)),
    "Tent": acclimate.Tent(copy.deepcopy(net), lr=5e-3),
    "EATA": acclimate.EATA(copy.deepcopy(net), source=train.x[:256], lr=5e-3, beta=800.0),
    "EATA-C": acclimate.EATAC(copy.deepcopy(net), source=train.x[:256], lr=2e-2, drop=0.4),
}
meters = {name: Meter() for name in models}
for x, y in stream:
    for name, model in models.items():
        meters[name].update(model(x), y)

# %%
# Accuracy by confidence:
figure, axes = plt.subplots(1, 4, figsize=(10, 2.9), sharey=True)
for axis, (name, meter) in zip(axes, meters.items(), strict=True):
    count, _, correct = meter.bins
    centres = (torch.arange(BINS) + 0.5) / BINS
    axis.bar(centres.numpy(), (correct / count.clamp(min=1)).numpy(), width=0.9 / BINS)
    axis.plot([0, 1], [0, 1], "--", color="grey")
    axis.set(title=f"{name}\naccuracy {100 * meter.accuracy:.1f}, ECE {100 * meter.ece:.1f}", xlabel="confidence")
axes[0].set_ylabel("accuracy")
figure.tight_layout()

# %%
# How many predictions there are of each confidence: most are in the last bin, so that bin decides the ECE.
figure, axis = plt.subplots(figsize=(7, 2.8))
for name, meter in meters.items():
    axis.plot(centres.numpy(), (100 * meter.bins[0] / meter.total).numpy(), "o-", label=name)
axis.set(xlabel="confidence", ylabel="share of predictions (%)", yscale="log")
axis.legend()
figure.tight_layout()
