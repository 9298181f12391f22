"""The tiny networks of the contract, and some that take other inputs than images."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch import Tensor, nn

from acclimate.contract.networks import (
    CLASSES,
    FAMILIES,
    ConvNet,
    TinyViT,
    batch_norm,
    images,
    settled,
    stream,
    tiny_network,
)

__all__ = [
    "CLASSES",
    "FAMILIES",
    "NOT_IMAGES",
    "ConvNet",
    "TinyViT",
    "batch_norm",
    "images",
    "make",
    "stream",
]


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


NOT_IMAGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "signals, BatchNorm1d": (lambda: SignalNet(layer_norm=False), lambda x: x.mean(2)),
    "signals, LayerNorm": (lambda: SignalNet(layer_norm=True), lambda x: x.mean(2)),
    "features, BatchNorm1d": (FeatureNet, lambda x: x.mean((1, 2))),
}
"""Networks for other inputs than images, and what makes such inputs of images."""


def make(family: str, seed: int = 0) -> nn.Module:
    return copy.deepcopy(_made(family, seed)) if family in NOT_IMAGES else tiny_network(family, seed)


@functools.cache
def _made(family: str, seed: int) -> nn.Module:
    return settled(*NOT_IMAGES[family], seed=seed)
