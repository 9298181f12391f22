"""What an adapter warns about while it runs."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from ..checks import warn
from ..parts.sharing import changed_by
from .step import Passes

__all__ = ["Notices"]


class Notices:
    """Warnings that an adapter gives once; `changes` counts the changes of its network that it has looked at."""

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.drops = self.single = False

    def others(self, method: str, changes: int, parameters: Iterable[Parameter]) -> None:
        """Warn if another adapter has changed parameters that this one does not restore."""
        if self.changes == changes:
            return
        self.changes = changes
        if other := changed_by(parameters):
            warn(
                f"{other} has changed this network, so {method} predicts with what it has learned. Call reset() of the "
                "other adapter first, or give each a copy of the network"
            )

    def dropped(self, passes: Passes) -> None:
        """Warn about dropped steps."""
        if self.drops or not passes.known_drops():
            return
        self.drops = True
        warn(
            "the step of a batch was dropped: its gradient was NaN, infinite or too large, or a parameter would have "
            "become so. The batch was predicted; `passes.dropped` counts such steps. Does the network divide by zero, "
            "or take a root of it?"
        )

    def single_image(self) -> None:
        """Warn about batch statistics of one image."""
        if self.single:
            return
        self.single = True
        warn(
            "a batch of one image: BatchNorm's statistics of a single image are poor. Use larger batches, or "
            'statistics="source"'
        )
