"""Options that every method takes, their defaults, and hyper-parameters by network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict

from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from ..engine import Engine, Precision
from ..parts.parameters import Parameters
from ..parts.ranks import SharedBy
from .prediction import Asked, Strategy

__all__ = ["FEW_CLASSES", "NETWORKS", "Defaults", "MakeOptimizer", "Options", "Presets", "Running", "override"]

MakeOptimizer: TypeAlias = Callable[[list[Parameter]], Optimizer]
"""A function from parameters to an optimizer, such as `partial(Adam, lr=1e-4)`."""

Presets: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Keyword arguments of a method for the networks in `NETWORKS`, by name."""

FEW_CLASSES = {"resnet50": "cifar-resnet", "vit-base": "cifar-vit"}
"""The preset to try instead of the paper's if there are about ten classes.

The paper's learning rates are for 1,000 classes. With ten, a prediction has up to three times less entropy, and EATA's
weights are up to six times smaller (10^0.4 against 1000^0.4). These presets suit two networks of 0.9 million parameters
on CIFAR-10 (docs/results.md): a starting point, not the paper's. Tent and SAR share EATA's rate, as in the paper;
CoTTA, ROID and TEA have their authors' settings for CIFAR-10, except for the rates of CoTTA and TEA on the ViT.
"""

NETWORKS = ("resnet50", "vit-base", "segformer-b5", *FEW_CLASSES.values())
"""The networks that methods have presets for: the paper's three, and two small ones."""

_SGD = partial(SGD, momentum=0.9)


class Running(TypedDict, total=False):
    """Options of every method."""

    engine: Engine | Literal["eager", "recorded", "auto"]
    precision: Precision | None
    classes: Sequence[int] | None
    seed: int
    ranks: SharedBy


class Options(Running, total=False):
    """Options of every method that learns."""

    lr: float | None
    optimizer: MakeOptimizer | None
    parameters: Parameters | None
    statistics: Literal["batch", "source"]
    detach_statistics: bool
    strategy: Asked | None
    max_step: float | None


@dataclass(frozen=True)
class Defaults:
    """What a method uses unless the user chooses otherwise."""

    lr: float = 2.5e-4
    optimizer: Callable[..., Optimizer] = _SGD
    parameters: Parameters | None = "norm"
    """None: the method learns nothing."""
    strategy: Strategy = "masked"


def override(preset: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset overridden by arguments; an optimizer replaces its rate, and a rate goes to its optimizer."""
    settings, given = deepcopy(dict(preset)), dict(arguments)
    if given.get("optimizer") is not None:
        settings.pop("lr", None)
    if given.get("lr") is not None and (made := settings.pop("optimizer", None)) is not None:
        given |= {"lr": None, "optimizer": partial(made, lr=given["lr"])}
    return {**settings, **given}
