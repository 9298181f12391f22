"""Images decoded once: their pixels are kept in a file, and whoever reads them again does not decode them.

    images = Decoded(ImageFolder(root, Preprocess(256, 224)), Path("cache"))

Many methods and seeds meet the same images, and a fast step takes them faster than a machine's cores decode JPEGs.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..stream import ImageSet, Part
from .folders import DataError, ImageFolder

if TYPE_CHECKING:
    from ..scenarios import Suite

__all__ = ["Decoded", "DecodedSuite"]


class Decoded:
    """A folder of images that are cut to one size. The file fills as they are read, by any number of processes.

    Each image has a mark, the sum of its pixels as 64-bit numbers: one that does not fit it, since it was never written
    or not to its end, is decoded.
    """

    def __init__(self, images: ImageFolder, folder: Path) -> None:
        self.images = images
        crop = images.preprocess.crop
        if crop is None:
            raise DataError("only images that are cut to one size can be kept decoded: Preprocess(crop=…)")
        self.shape = (3, crop, crop)
        self.numbers = -(-3 * crop * crop // 8)  # 64-bit numbers an image
        self.file = folder / f"{images.root.name}-{_version(images)}.pixels"
        self._made()
        self._maps: tuple[np.ndarray, np.ndarray] | None = None

    def _made(self) -> None:
        """Both files at their full size, without taking it up yet."""
        sizes = {self.file: 8 * self.numbers * len(self), self._marks: 8 * len(self)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(size for path, size in sizes.items() if not path.is_file())
        if needed > (free := shutil.disk_usage(self.file.parent).free):
            told = f"{needed / 1e9:.1f} GB decoded, and {self.file.parent} has {free / 1e9:.1f} GB left"
            raise DataError(f"{len(self):,} images take {told}: choose another folder, or fewer images")
        for path, size in sizes.items():
            with path.open("ab") as file:
                file.truncate(size)

    @property
    def _marks(self) -> Path:
        return self.file.with_suffix(".marks")

    def rows(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """These images and their labels."""
        kept, marks = self._opened()
        taken = kept[list(places)]
        for row, place in enumerate(places):
            if _mark(taken[row]) != marks[place]:
                self._pixels(taken[row])[:] = self.images[place][0].numpy()
                kept[place], marks[place] = taken[row], _mark(taken[row])
        labels = torch.tensor([self.images.labels[place] for place in places])
        return torch.from_numpy(self._pixels(taken)), labels

    def _pixels(self, numbers: np.ndarray) -> np.ndarray:
        pixels = numbers.view(np.uint8)[..., : 3 * self.shape[1] * self.shape[2]]
        return pixels.reshape(*numbers.shape[:-1], *self.shape)

    def _opened(self) -> tuple[np.ndarray, np.ndarray]:
        """Each process opens the files by itself."""
        if self._maps is None:
            kept = np.memmap(self.file, np.uint64, "r+", shape=(len(self), self.numbers))
            self._maps = kept, np.memmap(self._marks, np.uint64, "r+", shape=(len(self),))
        return self._maps

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, labels = self.rows([index])
        return images[0], int(labels[0])

    def __len__(self) -> int:
        return len(self.images)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": None}


def _mark(numbers: np.ndarray) -> np.uint64:
    """Never nought, which stands where nothing was written."""
    return max(np.add.reduce(numbers, dtype=np.uint64), np.uint64(1))


def _version(images: ImageFolder) -> str:
    """Of files, of what is done to them, and of who decodes them."""
    from PIL import __version__ as pillow

    told = hashlib.sha256(f"{pillow} {images.preprocess} {images.root.resolve()}\n".encode())
    for path in images.paths:
        stat = path.stat()
        told.update(f"{path.parent.name}/{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return told.hexdigest()[:16]


class DecodedSuite:
    """A suite whose images are decoded once; what is not an image file of a fixed size is as it was."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self.suite, self.folder = suite, folder
        self.name, self.shifts, self.extra, self.classes = suite.name, suite.shifts, suite.extra, suite.classes
        self._known: dict[int, tuple[ImageSet, Decoded]] = {}

    def part(self, shift: str, severity: int) -> Part:
        """A shifted version."""
        return self._decoded(self.suite.part(shift, severity))

    def clean(self) -> Part:
        """The version without shift."""
        return self._decoded(self.suite.clean())

    def _decoded(self, part: Part) -> Part:
        images = part.images
        if not isinstance(images, ImageFolder) or images.preprocess.crop is None:
            return part
        if id(images) not in self._known:  # the images are kept, so that no others have their id
            self._known[id(images)] = images, Decoded(images, self.folder)
        return replace(part, images=self._known[id(images)][1])

    def __getattr__(self, name: str) -> Any:
        """What some suites tell besides, such as their task."""
        if name == "suite":  # a copy in the making
            raise AttributeError(name)
        return getattr(self.suite, name)
