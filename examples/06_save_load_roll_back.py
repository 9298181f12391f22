"""
Saving, loading and rolling back
================================

What an adapter learns is a small state of its own: it can be copied, saved, loaded into another process and undone.
"""

# %%
# Adapt to a stream, and keep a snapshot of the state before it turns bad:
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt

train, test = load_digits()
generator = torch.Generator().manual_seed(0)
contrast = corrupt(test.x[:640], "contrast", 4, generator)


def make() -> acclimate.Adapter:
    return acclimate.EATA(load_network("digits-resnet").model, source=train.x[:256], lr=5e-3)


def accuracy(model: acclimate.Adapter) -> float:
    """Predict without learning; nothing is counted or changed."""
    return 100 * float((model.predict_only(contrast).argmax(1) == test.y[:640]).float().mean())


model = make()
history = [accuracy(model)]
for x in contrast.split(64):
    model(x)
    history.append(accuracy(model))
healthy = model.snapshot()

# %%
# A file has what changed, not the network. It fits the same network and method only; anything else is refused.
path = Path(tempfile.mkdtemp()) / "state.safetensors"
model.save(path)
print(f"{path.stat().st_size / 1024:.0f} KiB")
other = make()
other.load(path)
print("the loaded adapter predicts the same:", torch.equal(other.predict_only(contrast), model.predict_only(contrast)))

# %%
# Something goes wrong: a broken camera sends noise, at a rate that is far too high. Then roll back, and then reset.
model.optimizer.param_groups[0]["lr"] = 5.0
for x in torch.rand(192, 1, 32, 32, generator=generator).split(32):
    model(x)
    history.append(accuracy(model))
model.restore(healthy)
history.append(accuracy(model))
print("rolled back, bit for bit:", torch.equal(other.predict_only(contrast), model.predict_only(contrast)))
model.reset()
history.append(accuracy(model))

# %%
plt.figure(figsize=(7, 3))
plt.plot(history, "o-")
for place, text in ((10.5, "noise"), (16.5, "restore"), (17.5, "reset")):
    plt.axvline(place, color="grey", lw=0.8)
    plt.annotate(text, (place + 0.1, 3), fontsize=8)
plt.ylim(0, 100)
plt.xlabel("step")
plt.ylabel("accuracy under contrast (%)")
plt.tight_layout()
