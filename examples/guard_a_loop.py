"""A guard around your own loop: Tent at a rate that is far too high, on a stream of corrupted digits.

python examples/guard_a_loop.py
"""

from __future__ import annotations

import copy
import warnings

import torch

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data.corruptions import corrupt
from acclimate.data.digits import load_digits

warnings.simplefilter("ignore")  # the guard warns at its first alarm
net = load_network("digits-vit", "cpu").model
train, test = load_digits()

reckless = acclimate.Tent(copy.deepcopy(net), lr=0.1)
guarded = acclimate.Guard(acclimate.Tent(copy.deepcopy(net), lr=0.1), probe=train.x[:256])

generator = torch.Generator().manual_seed(0)
right = {"without a guard": 0, "with a guard": 0}
seen = 0
for corruption in ("speckle_noise", "motion_blur", "fog", "contrast"):
    for x, y in zip(test.x[:640].split(64), test.y[:640].split(64), strict=True):
        x = corrupt(x, corruption, 4, generator)
        for name, model in (("without a guard", reckless), ("with a guard", guarded)):
            right[name] += int((model(x).argmax(1) == y).sum())
        seen += len(y)

for name, count in right.items():
    print(f"{name:16} {100 * count / seen:.1f} % right")
print(guarded.health)
