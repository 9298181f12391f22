"""What a data set is made of: images with labels, a change made to them on the device, and a suite of shifts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Generator, Tensor

__all__ = ["IGNORE", "Change", "ImageSet", "Part", "Rows", "Suite"]

IGNORE = 255
"""The label of pixels that are not scored."""

Change: TypeAlias = Callable[[Tensor, Generator], Tensor]
"""A change made to a batch of images on the device, such as a corruption."""


class ImageSet(Protocol):
    """Images as uint8 (C, H, W), or floating point in [0, 1], with one label per image or one per pixel (H, W)."""

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Rows(Protocol):
    """Images stored in one array, so that a batch is read at once."""

    def rows(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these indices."""
        ...


@dataclass(frozen=True)
class Part:
    """Images, and the change that is made to them on the fly."""

    images: ImageSet
    change: Change | None = None
    ordered: bool = False
    """Keep the images in their own order, as recordings need it."""


class Suite(Protocol):
    """A data set in its clean and its shifted versions."""

    @property
    def name(self) -> str:
        """Its name in error messages."""
        ...

    @property
    def shifts(self) -> Sequence[str]:
        """Names of the shifted versions: corruptions, conditions, or the set itself."""
        ...

    @property
    def extra(self) -> Sequence[str]:
        """Further shifts, used only when named."""
        ...

    @property
    def classes(self) -> tuple[int, ...] | None:
        """The subset of the network's classes that occurs in the data; None means all."""
        ...

    def part(self, shift: str, severity: int) -> Part:
        """Return a shifted version."""
        ...

    def clean(self) -> Part:
        """Return the version without shift."""
        ...
