"""Any clean images, corrupted on the device as batches are read. Nothing is stored."""

from __future__ import annotations

from functools import partial

from torch import Generator, Tensor

from .corruptions import BENCHMARK, EXTRA, corrupted
from .severities import Like, parameters_of
from .types import ImageSet, Part, Suite

__all__ = ["Corrupted"]


class Corrupted(Suite):
    """Clean images under the corruptions of ImageNet-C. Results are ImageNet-C-style, never ImageNet-C."""

    shifts = BENCHMARK
    extra = EXTRA

    def __init__(
        self, name: str, images: ImageSet, classes: tuple[int, ...] | None = None, *, like: Like = "imagenet-c"
    ) -> None:
        self.name, self.images, self.classes, self.like = name, images, classes, like

    def part(self, shift: str, severity: int) -> Part:
        """Return the images with one corruption at one severity."""
        parameters_of(shift, severity, self.like)  # raises for an unknown shift or severity
        return Part(self.images, partial(_change, shift, severity, self.like))

    def clean(self) -> Part:
        """Return the images without change."""
        return Part(self.images)


def _change(shift: str, severity: int, like: Like, x: Tensor, generator: Generator) -> Tensor:
    return corrupted(x, shift, severity, generator, like)
