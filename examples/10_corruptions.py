"""
Corruptions as pictures
=======================

The fifteen corruptions of ImageNet-C and four more, at five severities, made on any device, for images of any size.
"""

# %%
import matplotlib.pyplot as plt
import torch

from acclimate.bench.figures import examples
from acclimate.data import load_digits
from acclimate.data.corruptions import BENCHMARK, EXTRA, corrupt

digits = load_digits()[1].x[:8]

# %%
# A picture with colours and edges:
side = torch.linspace(0, 1, 96)
red, green = torch.meshgrid(side, side, indexing="ij")
circle = ((red - 0.5) ** 2 + (green - 0.5) ** 2 < 0.1).float()
picture = torch.stack([0.3 + 0.5 * red, 0.8 - 0.5 * green, 0.2 + 0.7 * circle])[None].clamp(0, 1)

names = [*BENCHMARK, *EXTRA]
figure, axes = plt.subplots(4, 5, figsize=(8, 7))
for axis, name in zip(axes.flat, ["clean", *names], strict=False):
    shown = picture if name == "clean" else corrupt(picture, name, 4, torch.Generator().manual_seed(1))
    axis.imshow(shown[0].movedim(0, -1).numpy())
    axis.set_title(name.replace("_", " "), fontsize=8)
for axis in axes.flat:
    axis.axis("off")
figure.tight_layout()

# %%
# Severities of one corruption, on digits:
generator = torch.Generator().manual_seed(0)
rows = [(f"fog {severity}", corrupt(digits, "fog", severity, generator)) for severity in range(1, 6)]
figure, axes = plt.subplots(5, 8, figsize=(7, 4.4))
for line, (name, images) in zip(axes, rows, strict=True):
    for axis, image in zip(line, images, strict=True):
        axis.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
    line[0].set_title(name, fontsize=8, loc="left")
figure.tight_layout()

# %%
# ``acclimate.bench.figures.examples`` arranges such rows for a report:
print(examples(rows))
