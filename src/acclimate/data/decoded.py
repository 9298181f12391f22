"""Images decoded once: their pixels are kept in a file, and whoever reads them again does not decode them.

    images = Decoded(ImageFolder(root, Preprocess(256, 224)), Path("cache"))

Many methods and seeds meet the same images, and a fast step takes them faster than a machine's cores decode JPEGs.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .folders import ImageFolder, Preprocess
from .types import DataError, Part, Suite

__all__ = ["Decoded", "DecodedSuite", "NoRoomError"]

_FORM = 1  # counts on when `read_image` comes to other pixels


class NoRoomError(OSError):
    """The folder has too little room."""


class Decoded:
    """A folder of images that are cut to one size. The file fills as they are read, by any number of processes.

    Each image has a mark, the sum of its pixels as 64-bit numbers: one that does not fit it, since it was never written
    or not to its end, is decoded.
    """

    def __init__(self, images: ImageFolder, folder: Path) -> None:
        crop = images.preprocess.crop
        if crop is None:
            raise DataError("only images that are cut to one size can be kept decoded: Preprocess(crop=…)")
        self.images, self.shape = images, (3, crop, crop)
        self.numbers = -(-3 * crop * crop // 8)  # 64-bit numbers an image
        self.file = folder / f"{images.root.parent.name}-{images.root.name}-{_version(images)}.pixels"
        self.marks = self.file.with_suffix(".marks")
        self._maps: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def missing(self) -> int:
        """Bytes that it will take up yet."""
        size = 8 * self.numbers * len(self)
        if not self.file.is_file():
            return size
        blocks = getattr(self.file.stat(), "st_blocks", None)  # not on Windows, where a file takes up its size
        return 0 if blocks is None else max(size - 512 * blocks, 0)

    def rows(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """These images and their labels."""
        kept, marks = self._opened()
        taken = np.asarray(kept[list(places)])
        for row, place in enumerate(places):
            if _mark(taken[row]) != marks[place]:
                self._pixels(taken[row])[:] = self.images[place][0].numpy()
                self._keep(place, taken[row])
        labels = torch.tensor([self.images.labels[place] for place in places])
        return torch.from_numpy(self._pixels(taken)), labels

    def _keep(self, place: int, numbers: np.ndarray) -> None:
        """By plain writes: a map of a file whose disk is full would end the process."""
        try:
            for path, values in ((self.file, numbers), (self.marks, _mark(numbers))):
                with path.open("r+b", buffering=0) as file:
                    file.seek(place * values.nbytes)
                    file.write(values.tobytes())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            warnings.warn(f"{self.file.parent} is full: the other images are decoded each time", stacklevel=2)

    def _pixels(self, numbers: np.ndarray) -> np.ndarray:
        pixels = numbers.view(np.uint8)[..., : 3 * self.shape[1] * self.shape[2]]
        return pixels.reshape(*numbers.shape[:-1], *self.shape)

    def _opened(self) -> tuple[np.ndarray, np.ndarray]:
        """Each process opens the files by itself; they have their full size at once, and take it up as they fill."""
        if self._maps is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            maps = []
            for path, shape in ((self.file, (len(self), self.numbers)), (self.marks, (len(self),))):
                with path.open("ab") as file:
                    if file.tell() != (size := 8 * int(np.prod(shape))):
                        file.truncate(size)
                maps.append(np.memmap(path, np.uint64, "r", shape=shape))
            self._maps = maps[0], maps[1]
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
    from PIL import features

    how = images.preprocess
    cut = how if how.resize is not None else Preprocess(crop=how.crop)  # where the rest makes no difference
    decoder = f"{_FORM} {pillow} {features.version('libjpeg_turbo')}"
    told = hashlib.sha256(f"{decoder} {cut} {images.root.resolve()}".encode())
    for path in images.paths:
        stat = path.stat()
        told.update(f"\n{path.parent.name}/{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return told.hexdigest()[:16]


class DecodedSuite(Suite):
    """A suite whose images are decoded once; what is not an image file of a fixed size is as it was."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self.suite, self.folder = suite, folder
        self.name, self.shifts, self.extra, self.classes = suite.name, suite.shifts, suite.extra, suite.classes
        self.graded, self.task = suite.graded, suite.task
        self.kept: dict[tuple[Any, ...], Decoded] = {}

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
        key = images.root, images.preprocess, len(images)
        if key not in self.kept:
            self.kept[key] = Decoded(images, self.folder)
            self._check_room()
        return replace(part, images=self.kept[key])

    def _check_room(self) -> None:
        needed = sum(images.missing for images in self.kept.values())
        above = next(path for path in (self.folder, *self.folder.resolve().parents) if path.is_dir())
        if needed > (free := shutil.disk_usage(above).free):
            told = f"{needed / 1e9:.1f} GB more, decoded, and {self.folder} has {free / 1e9:.1f} GB"
            raise NoRoomError(f"these images take {told}: choose another folder for the cache, or go without one")

    def missing(self) -> list[str]:
        """Return the messages of the suite that is cached."""
        return self.suite.missing()
