"""Small networks of our own, with the weights we trained (see `recipes/train_digits.py`)."""

from __future__ import annotations

from importlib.resources import as_file, files

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["SmallResNet", "digits_resnet"]


class Block(nn.Module):
    """A residual block whose branch is skipped, a sample, with probability `drop` in training (stochastic depth)."""

    def __init__(self, inside: int, outside: int, stride: int, drop: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.drop_path = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Identity plus branch."""
        branch = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.shortcut(x) + self.drop_path(branch))


class DropPath(nn.Module):
    """Leaves a sample's branch out with probability `drop`, in training only; the rest is scaled to the same mean."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Drop, or pass."""
        if not self.training or self.drop == 0:
            return x
        keep = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self.drop
        return x * keep / (1 - self.drop)


class SmallResNet(nn.Module):
    """A residual network for small images, with stochastic depth growing linearly to `drop`."""

    def __init__(
        self,
        widths: tuple[int, ...] = (16, 32, 64),
        depth: int = 2,
        channels: int = 1,
        classes: int = 10,
        drop: float = 0.2,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        total = len(widths) * depth
        blocks: list[nn.Module] = []
        inside = widths[0]
        for stage, width in enumerate(widths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(inside, width, stride, drop * len(blocks) / (total - 1)))
                inside = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def digits_resnet() -> SmallResNet:
    """The demo's network, trained on clean digits."""
    model = SmallResNet()
    with as_file(files("acclimate") / "weights" / "digits_resnet.safetensors") as path:
        model.load_state_dict(load_file(path))
    return model.eval()
