"""Any clean images, corrupted on the device as batches are read. Nothing is stored."""

from __future__ import annotations

from functools import partial

from torch import Generator, Tensor

from .corruptions import BENCHMARK, EXTRA, corrupted
from .folders import ImageFolder
from .severities import Like, parameters_of
from .types import ImageSet, Part, Suite

__all__ = ["Corrupted"]


class Corrupted(Suite):
    """Clean images under the corruptions of ImageNet-C. Results are ImageNet-C-style, never ImageNet-C."""

    shifts = BENCHMARK
    extra = EXTRA

    def __init__(
        self,
        name: str,
        images: ImageSet,
        classes: tuple[int, ...] | None = None,
        *,
        like: Like = "imagenet-c",
        outputs: int | None = None,
    ) -> None:
        self.name, self.images, self.classes, self.like, self.outputs = name, images, classes, like, outputs
        self.folders = images.folders if isinstance(images, ImageFolder) and classes is None else None

    def part(self, shift: str, severity: int) -> Part:
        """Return the images with one corruption at one severity."""
        parameters_of(shift, severity, self.like)  # raises for an unknown shift or severity
        return Part(self.images, partial(_change, shift, severity, self.like))

    def check_classes(self, outputs: int) -> None:
        """Raise `DataError` if the labels are not classes of a network with this many outputs."""
        super().check_classes(outputs)
        if self.folders is not None:
            self.folders.check(outputs, self.name)

    def class_note(self) -> str:
        """Return which class each folder is, in short."""
        return "" if self.folders is None else str(self.folders)

    def clean(self) -> Part:
        """Return the images without change."""
        return Part(self.images)


def _change(shift: str, severity: int, like: Like, x: Tensor, generator: Generator) -> Tensor:
    return corrupted(x, shift, severity, generator, like)
