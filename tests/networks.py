"""Tiny networks, one of each family: fewer than 50,000 parameters, milliseconds a step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 10


class ResidualBlock(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)

    def forward(self, x: Tensor) -> Tensor:
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
        y = self.head(self.drop(self.blocks(self.stem(x))))
        return y if self.dense else y.mean((2, 3))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.3)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(TransformerBlock(width), TransformerBlock(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT)).mean(1))


class Residual(nn.Module):
    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class SignalNet(nn.Module):
    """A residual classifier of signals (B, 3, L), with BatchNorm1d after convolutions or LayerNorm over channels."""

    def __init__(self, *, layer_norm: bool, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(self._block(width, layer_norm=layer_norm) for _ in range(2)))
        self.head = nn.Linear(width, CLASSES)
        self.channels_last = layer_norm

    @staticmethod
    def _block(width: int, *, layer_norm: bool) -> nn.Module:
        if layer_norm:
            return Residual(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        return Residual(nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = self.blocks(y.mT) if self.channels_last else self.blocks(y).mT
        return self.head(y.mean(1))


class FeatureNet(nn.Sequential):
    """A residual classifier of feature vectors (B, F)."""

    def __init__(self, features: int = 16, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(features, width), nn.BatchNorm1d(width))
        self.blocks = nn.Sequential(*(Residual(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2)))
        self.head = nn.Linear(width, CLASSES)


def batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bn": lambda: ConvNet(batch_norm),
    "ln": TinyViT,
    "gn": lambda: ConvNet(group_norm),
    "seg": lambda: ConvNet(batch_norm, dense=True),
}

NOT_IMAGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "signals, BatchNorm1d": (lambda: SignalNet(layer_norm=False), lambda x: x.mean(2)),
    "signals, LayerNorm": (lambda: SignalNet(layer_norm=True), lambda x: x.mean(2)),
    "features, BatchNorm1d": (FeatureNet, lambda x: x.mean((1, 2))),
}
"""Networks for other inputs than images, and what makes such inputs of images."""


def make(family: str, seed: int = 0) -> nn.Module:
    return copy.deepcopy(_made(family, seed))


@functools.cache
def _made(family: str, seed: int) -> nn.Module:
    """A network with settled statistics, unlike ones at initialisation, and logits spread enough to be selected."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        build, of_images = NOT_IMAGES.get(family) or (FAMILIES[family], lambda x: x)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            model.train()
            for seed in range(40):
                model(of_images(images(16, seed)))
            model.eval()
            weight, bias = list(model.parameters())[-2:]
            for _ in range(2):  # spread the logits over the classes: entropies then lie on both sides of E0
                logits = model(of_images(images(64))).movedim(1, -1).flatten(0, -2)
                spread = 3 / logits.std(0)
                weight.mul_(spread.view(-1, *[1] * (weight.dim() - 1)))
                bias.mul_(spread).sub_(logits.mean(0) * spread)
    return model


def images(count: int = 8, seed: int = 0, size: int = 16) -> Tensor:
    """Blobs of colour, each image unlike the others."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 3, 3, generator=generator)
    fine = torch.rand(count, 3, size, size, generator=generator)
    return 0.8 * nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") + 0.2 * fine


def stream(batches: int = 4, size: int = 8, seed: int = 100) -> list[Tensor]:
    """Batches that drift: contrast and brightness change along the way, in [0, 1]."""
    return [(images(size, seed + i) * (1 + 0.3 * i) - 0.1 * i).clamp(0, 1) for i in range(batches)]
