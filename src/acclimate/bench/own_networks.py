"""Small networks of our own, and the weights we trained for them (see `training/`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = [
    "NETWORKS",
    "SmallResNet",
    "SmallViT",
    "cifar10_resnet",
    "cifar10_vit",
    "digits_resnet",
    "digits_vit",
    "tiny_imagenet_resnet",
    "tiny_imagenet_vit",
    "weights",
]

Network = TypeVar("Network", bound=nn.Module)


class Block(nn.Module):
    """A residual block. In training its branch is dropped per sample with probability `drop` (stochastic depth)."""

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
    """Drop a sample's branch with probability `drop`, in training only; the rest is scaled to the same mean."""

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
        stride: int = 2,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, stride, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
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


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) to tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, each a residual branch under stochastic depth."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.drop_path1 = DropPath(drop)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_path2 = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Identity plus branch, twice."""
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        y: Tensor = x + self.drop_path2(self.mlp(self.norm2(x)))
        return y


class SmallViT(nn.Module):
    """A vision transformer with 64 patches, LayerNorm, and stochastic depth growing linearly to `drop`.

    Patches are embedded by one convolution, or by `stem` convolutions of stride two, which learn more from few images.
    """

    def __init__(
        self,
        width: int = 48,
        depth: int = 4,
        heads: int = 4,
        channels: int = 1,
        classes: int = 10,
        drop: float = 0.2,
        patch: int = 4,
        stem: int = 0,
    ) -> None:
        super().__init__()
        self.patches: nn.Module = nn.Conv2d(channels, width, patch, patch)
        if stem:
            widths = [channels, *(width // 2**i for i in range(stem - 1, -1, -1))]
            layers = [[nn.Conv2d(a, b, 3, 2, 1), nn.GELU()] for a, b in pairwise(widths)]
            self.patches = nn.Sequential(*[layer for pair in layers for layer in pair][:-1])
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, drop * i / (depth - 1)) for i in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        tokens = self.patches(x).flatten(2).mT + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def digits_resnet() -> SmallResNet:
    """The demo's BatchNorm network, trained on clean digits."""
    return _trained(SmallResNet(), "digits_resnet")


def digits_vit() -> SmallViT:
    """The demo's LayerNorm network, trained on clean digits."""
    return _trained(SmallViT(), "digits_vit")


def cifar10_resnet() -> SmallResNet:
    """A BatchNorm network for CIFAR-10, of 0.9 million parameters; without weights."""
    return SmallResNet((28, 56, 96), depth=4, channels=3, drop=0.1, stride=1)


def cifar10_vit() -> SmallViT:
    """A LayerNorm network for CIFAR-10, of 0.9 million parameters; without weights."""
    return SmallViT(width=96, depth=8, heads=3, channels=3, drop=0.1)


def tiny_imagenet_resnet() -> SmallResNet:
    """A BatchNorm network for Tiny-ImageNet, of 5.0 million parameters; without weights."""
    return SmallResNet((48, 96, 192, 320), depth=2, channels=3, classes=200, drop=0.1, stride=1)


def tiny_imagenet_vit() -> SmallViT:
    """A LayerNorm network for Tiny-ImageNet, of twelve blocks and 5.6 million parameters; without weights."""
    return SmallViT(width=192, depth=12, heads=3, channels=3, classes=200, drop=0.1, stem=3)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "digits-resnet": SmallResNet,
    "digits-vit": SmallViT,
    "cifar10-resnet": cifar10_resnet,
    "cifar10-vit": cifar10_vit,
    "tiny-imagenet-resnet": tiny_imagenet_resnet,
    "tiny-imagenet-vit": tiny_imagenet_vit,
}
"""Networks by their name on the command line, without weights."""


def weights(name: str) -> Path | None:
    """Return the file of a network's weights, in the package or in the repository's `weights/`; None where absent."""
    package, repository = Path(__file__).parents[1], Path(__file__).parents[3]
    file = f"{name.replace('-', '_')}.safetensors"
    return next((path for path in (package / "weights" / file, repository / "weights" / file) if path.is_file()), None)


def _trained(model: Network, name: str) -> Network:
    file = weights(name)
    if file is None:
        raise FileNotFoundError(f"the weights of {name} are missing: reinstall the package")
    model.load_state_dict(load_file(file))
    return model.eval()
