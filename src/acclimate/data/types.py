"""What a data set is made of: images with labels, a change applied on the device, and a suite of shifted versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Generator, Tensor

__all__ = ["IGNORE", "BrokenImageError", "Change", "DataError", "ImageSet", "Part", "Rows", "Suite"]

IGNORE = 255
"""The label of pixels that are not scored."""

Change: TypeAlias = Callable[[Tensor, Generator], Tensor]
"""A change applied to a batch of images on the device, such as a corruption."""


class DataError(ValueError):
    """The data is missing, incomplete or unreadable. The message says what to do."""


class BrokenImageError(DataError):
    """A file that is not an image, is damaged, or has pixels whose range is unknown. A stream can leave it out."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} cannot be read ({self.reason}). Fetch it again, remove it, or use --skip-broken"


class ImageSet(Protocol):
    """Images as uint8 (C, H, W), or floating point in [0, 1], with one label per image or one per pixel (H, W)."""

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Rows(Protocol):
    """Images stored in one array, so that a whole batch is read in one call."""

    def rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these indices."""
        ...


@dataclass(frozen=True)
class Part:
    """Images, and the change applied to them on the fly."""

    images: ImageSet
    change: Change | None = None
    ordered: bool = False
    """Keep the images in their own order, as video recordings require."""


class Suite(ABC):
    """A data set in its clean and its shifted versions."""

    name: str
    """Its name in error messages."""
    shifts: Sequence[str]
    """Names of the shifted versions: corruptions, conditions, or the set itself."""
    extra: Sequence[str] = ()
    """Further shifts, used only when named."""
    classes: tuple[int, ...] | None = None
    """The subset of the network's classes that occurs in the data; None means all."""
    outputs: int | None = None
    """The number of outputs that a network for this data has; None if it is not known."""
    graded: bool = True
    """Whether the severity makes a difference."""
    task: str = "classification"
    """`"classification"` or `"segmentation"`."""

    @abstractmethod
    def part(self, shift: str, severity: int) -> Part:
        """Return a shifted version."""

    @abstractmethod
    def clean(self) -> Part:
        """Return the version without shift, or raise `DataError` if there is none."""

    def check_classes(self, outputs: int) -> None:
        """Raise `DataError` if the labels are not classes of a network with this many outputs."""
        if self.outputs not in (None, outputs):
            raise DataError(
                f"{self.name} is for networks with {self.outputs:,} outputs, and this one has {outputs:,}: choose a "
                "network that was trained for these classes"
            )

    def class_note(self) -> str:
        """Return which class each folder is, in short, where the data set does not define it; else an empty text."""
        return ""

    def missing(self) -> list[str]:
        """Return messages about parts of the data that are absent."""
        return []
