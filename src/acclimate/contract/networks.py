"""Tiny networks, one of each family: fewer than 50,000 parameters, milliseconds a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

__all__ = ["CLASSES", "FAMILIES", "ConvNet", "TinyViT", "images", "settled", "stream", "tiny_network"]

CLASSES = 10
"""Classes of the tiny networks."""


class ResidualBlock(nn.Module):
    """x + f(x) of two convolutions."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    """A residual classifier, or a segmenter (`dense=True`), with a given normalisation and a trap: dropout."""

    def __init__(self, norm: Callable[[int], nn.Module], *, dense: bool = False, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), norm(width), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(width, norm), ResidualBlock(width, norm))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Conv2d(width, CLASSES, 1)
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y: Tensor = self.head(self.drop(self.blocks(self.stem(x))))
        return y if self.dense else y.mean((2, 3))


class TransformerBlock(nn.Module):
    """Attention and a small network, each with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.3)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class TinyViT(nn.Module):
    """A transformer of two blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(TransformerBlock(width), TransformerBlock(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT)).mean(1))
        return logits


def batch_norm(width: int) -> nn.Module:
    """Return BatchNorm."""
    return nn.BatchNorm2d(width)


def group_norm(width: int) -> nn.Module:
    """Return GroupNorm of two groups."""
    return nn.GroupNorm(2, width)


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "bn": lambda: ConvNet(batch_norm),
    "ln": TinyViT,
    "gn": lambda: ConvNet(group_norm),
    "seg": lambda: ConvNet(batch_norm, dense=True),
}
"""With BatchNorm, LayerNorm and GroupNorm, and a segmenter with BatchNorm."""


def tiny_network(family: str, seed: int = 0) -> nn.Module:
    """Return a network of a family with random weights: the same ones for the same seed.

    >>> tiny_network("ln")(stream()[0]).shape
    torch.Size([8, 10])
    """
    return copy.deepcopy(_tiny(family, seed))


@cache
def _tiny(family: str, seed: int) -> nn.Module:
    return settled(FAMILIES[family], seed=seed)


def settled(
    build: Callable[[], nn.Module], of_images: Callable[[Tensor], Tensor] = lambda x: x, *, seed: int = 0
) -> nn.Module:
    """Return a network with settled statistics, unlike ones at initialisation, and logits spread enough to select.

    `of_images` makes the network's inputs of images.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            model.train()
            for number in range(40):
                model(of_images(images(16, number)))
            model.eval()
            weight, bias = list(model.parameters())[-2:]
            for _ in range(2):  # spread the logits over the classes: entropies then lie on both sides of E0
                logits = model(of_images(images(64))).movedim(1, -1).flatten(0, -2)
                spread = 3 / logits.std(0)
                weight.mul_(spread.view(-1, *[1] * (weight.dim() - 1)))
                bias.mul_(spread).sub_(logits.mean(0) * spread)
    return model


def images(count: int = 8, seed: int = 0, size: int = 16) -> Tensor:
    """Return blobs of colour, each image unlike the others."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 3, 3, generator=generator)
    fine = torch.rand(count, 3, size, size, generator=generator)
    return 0.8 * nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") + 0.2 * fine


def stream(batches: int = 4, size: int = 8, seed: int = 100) -> list[Tensor]:
    """Return batches that drift: contrast and brightness change along the way, in [0, 1]."""
    return [(images(size, seed + i) * (1 + 0.3 * i) - 0.1 * i).clamp(0, 1) for i in range(batches)]
