"""Which strategy computes the gradient of the kept samples: the one asked for, or what suits method and network."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol

from ..checks import warn
from ..engine import Runner
from .options import Defaults
from .prediction import Asked, Strategy

__all__ = ["choose_strategy"]


class Chooser(Protocol):
    """What the choice depends on; see `Adapter`."""

    defaults: ClassVar[Defaults]
    selective: ClassVar[bool]
    subset: ClassVar[bool]
    detach_statistics: bool
    names: tuple[str, ...]
    runner: Runner

    @property
    def coupled(self) -> bool:
        """Whether the samples of a batch depend on each other."""


def choose_strategy(adapter: Chooser, asked: Asked | None) -> Strategy:
    """Return the strategy that was asked for, or the one that suits method, network and engine."""
    apart = not adapter.coupled or adapter.detach_statistics
    if asked == "sparse":
        adapter.runner.engine = replace(adapter.runner.asked, compiled=True)
        if not apart:
            warn(
                'strategy="sparse" runs the full backward: batch statistics of BatchNorm make samples depend on each '
                'other. strategy="replay-subset" runs it on the kept samples'
            )
    if asked == "fastest" and adapter.subset and not apart:
        return "replay-subset"
    sparse = adapter.selective and adapter.runner.asked.compiled and apart
    usual: Strategy = "sparse" if sparse else adapter.defaults.strategy
    chosen = usual if asked is None or asked == "fastest" else asked
    if adapter.names and adapter.coupled and (adapter.detach_statistics or chosen == "replay"):
        _warn_of_trap(adapter, "detach_statistics=True" if adapter.detach_statistics else 'strategy="replay"')
    return chosen


def _warn_of_trap(adapter: Chooser, setting: str) -> None:
    sound = '"replay-subset"' if adapter.defaults.strategy == "replay-subset" else '"replay-subset" or "masked"'
    also = " and no detach_statistics" * adapter.detach_statistics
    warn(
        f"{type(adapter).__name__}: {setting} stops gradients through the batch statistics of BatchNorm. Networks then "
        f"adapt less and forget: several points of accuracy in our measurements. Use strategy={sound}{also}"
    )
