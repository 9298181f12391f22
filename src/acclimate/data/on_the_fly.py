"""ImageNet-C-style corruption of any clean images, on the device, as they come: no stored copies."""

from __future__ import annotations

from functools import partial

from torch import Generator, Tensor

from .corruptions import BENCHMARK, EXTRA, corrupted, parameters_of
from .severities import Like
from .types import ImageSet, Part, Suite

__all__ = ["Corrupted"]


class Corrupted(Suite):
    """Clean images, and the fifteen corruptions of them. Results on these are ImageNet-C-style, never ImageNet-C."""

    def __init__(
        self, name: str, images: ImageSet, classes: tuple[int, ...] | None = None, *, like: Like = "imagenet-c"
    ) -> None:
        self.name, self.images, self.classes, self.like = name, images, classes, like
        self.shifts, self.extra = BENCHMARK, EXTRA

    def part(self, shift: str, severity: int) -> Part:
        """One corruption at one severity."""
        parameters_of(shift, severity, self.like)
        return Part(self.images, partial(_change, shift, severity, self.like))

    def clean(self) -> Part:
        """The images as they are."""
        return Part(self.images)


def _change(shift: str, severity: int, like: Like, x: Tensor, generator: Generator) -> Tensor:
    return corrupted(x, shift, severity, generator, like)
