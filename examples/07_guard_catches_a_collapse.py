"""
The guard catches a collapse
============================

Tent at a rate that is far too high, on a stream of corrupted digits: alone it ends at chance. A guard notices, rolls
back to the last healthy state and pauses.
"""

# %%
# The same method twice, once guarded. ``probe`` has clean images that the method does not learn from.
import copy
import warnings

import matplotlib.pyplot as plt
import torch

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt

warnings.filterwarnings("ignore", category=UserWarning)  # the guard warns at its first alarm
net = load_network("digits-vit").model
train, test = load_digits()
models = {
    "source": acclimate.Source(copy.deepcopy(net)),
    "Tent": acclimate.Tent(copy.deepcopy(net), lr=0.2),
    "Tent with a guard": acclimate.Guard(acclimate.Tent(copy.deepcopy(net), lr=0.2), probe=train.x[:256]),
}

generator = torch.Generator().manual_seed(0)
right: dict[str, list[float]] = {name: [] for name in models}
for corruption in ("shot_noise", "pixelate", "zoom_blur", "speckle_noise"):
    for x, y in zip(test.x[:512].split(64), test.y[:512].split(64), strict=True):
        x = corrupt(x, corruption, 5, generator)
        for name, model in models.items():
            right[name].append(100 * float((model(x).argmax(1) == y).float().mean()))

for name, values in right.items():
    print(f"{name:18} {sum(values) / len(values):.1f} % right")

# %%
# What it saw and did:
health = models["Tent with a guard"].health
print(health)

# %%
# A cross is an alarm:
plt.figure(figsize=(7, 3.2))
for name, values in right.items():
    plt.plot(values, label=name)
guarded = right["Tent with a guard"]
alarms = [alarm.batch for alarm in health.alarms if alarm.batch < len(guarded)]
plt.plot(alarms, [guarded[batch] for batch in alarms], "kx", ms=8)
plt.xlabel("batch")
plt.ylabel("accuracy (%)")
plt.legend()
plt.tight_layout()
