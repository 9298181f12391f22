"""Draw every corruption at every severity for the docs: `python -m benchmarks.draw_corruptions OUT.png`.

The scene is drawn by this script, so the repository needs no photograph.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from acclimate.data.corruptions import CORRUPTIONS, corrupt


def scene(size: int = 128) -> Tensor:
    """Return a house, a tree and a sun by the sea: (1, 3, size, size)."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")

    def colour(red: float, green: float, blue: float) -> Tensor:
        return torch.tensor([red, green, blue]).view(3, 1, 1)

    waves = 0.05 * torch.sin(60 * y + 6 * torch.sin(9 * x))
    picture = colour(0.45, 0.7, 0.95) + 0.25 * (0.6 - y)
    picture = torch.where(y > 0.6, colour(0.1, 0.35, 0.6) + waves, picture)
    picture = torch.where(
        y > 0.72 + 0.04 * torch.sin(5 * x), colour(0.35, 0.55, 0.2) + 0.05 * torch.sin(90 * x), picture
    )
    picture = torch.where((x - 0.8) ** 2 + (y - 0.2) ** 2 < 0.008, colour(1.0, 0.9, 0.4), picture)
    house = (x > 0.15) & (x < 0.5) & (y > 0.5) & (y < 0.82)
    bricks = 0.1 * ((y * 40).floor() % 2) + 0.05 * ((x * 30 + (y * 40).floor() % 2 / 2).floor() % 2)
    picture = torch.where(house, colour(0.7, 0.3, 0.22) + bricks, picture)
    roof = (y > 0.3) & (y < 0.5) & ((x - 0.325).abs() < (y - 0.3) * 1.15)
    picture = torch.where(roof, colour(0.35, 0.15, 0.12) + 0.04 * torch.sin(150 * y), picture)
    for left in (0.2, 0.37):
        window = (x > left) & (x < left + 0.09) & (y > 0.57) & (y < 0.68)
        bars = ((x - left - 0.045).abs() < 0.006) | ((y - 0.625).abs() < 0.006)
        picture = torch.where(window & ~bars, colour(0.9, 0.95, 1.0), picture)
    picture = torch.where((x > 0.69) & (x < 0.73) & (y > 0.55) & (y < 0.85), colour(0.35, 0.22, 0.1), picture)
    angle = torch.atan2(y - 0.47, x - 0.71)
    crown = ((x - 0.71) ** 2 + (y - 0.47) ** 2).sqrt() < 0.13 + 0.015 * torch.sin(11 * angle)
    leaves = 0.12 * torch.sin(70 * x) * torch.sin(80 * y + math.pi / 3)
    picture = torch.where(crown, colour(0.15, 0.45, 0.15) + leaves, picture)
    return picture.clamp(0, 1)[None]


def main() -> None:
    """Write the picture."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "corruptions.png")
    x = scene()
    half = (len(CORRUPTIONS) + 1) // 2
    figure = Figure(figsize=(14, 1.22 * half), layout="constrained")
    axes = figure.subplots(half, 11)
    for ax in axes.flat:
        ax.axis("off")
    for index, name in enumerate(CORRUPTIONS):
        row, side = index % half, index // half
        for severity in range(1, 6):
            ax = axes[row, 6 * side + severity - 1]
            image = corrupt(x, name, severity, torch.Generator().manual_seed(severity))[0]
            ax.imshow(image.movedim(0, -1).numpy())
            if severity == 1:
                ax.set_title(name.replace("_", " "), loc="left", fontsize=9)
    figure.savefig(out, dpi=72)


if __name__ == "__main__":
    main()
