"""A cache of decoded images on disk. Each file is decoded once; later reads take its pixels from the cache.

    images = Decoded(ImageFolder(root, Preprocess(256, 224)), Path("cache"))

Many methods and seeds read the same images, and a fast step consumes them faster than a CPU decodes JPEGs.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import warn
from .folders import ImageFolder, Preprocess
from .types import DataError, Part, Suite

__all__ = ["Decoded", "DecodedSuite", "NoRoomError"]

_FORMAT = 2  # increase when `read_image` returns other pixels for the same file


class NoRoomError(OSError):
    """The disk of the cache has too little free space."""


class Decoded:
    """An image folder with a fixed crop, cached in a file that several processes may read and fill at once.

    Each image has a checksum, the sum of its pixels as 64-bit integers. An image is decoded again if its pixels do not
    match, because they were never written or only in part.
    """

    def __init__(self, images: ImageFolder, folder: Path) -> None:
        crop = images.preprocess.crop
        if crop is None:
            raise DataError("only images of one size can be cached: give Preprocess(crop=…)")
        self.images, self.shape = images, (3, crop, crop)
        self.words = -(-3 * crop * crop // 8)  # 64-bit integers per image
        self.file = folder / f"{images.root.parent.name}-{images.root.name}-{_fingerprint(images)}.pixels"
        self.checksums = self.file.with_suffix(".marks")
        self._maps: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def bytes_to_write(self) -> int:
        """The number of bytes that the file will still grow by."""
        size = 8 * self.words * len(self)
        if not self.file.is_file():
            return size
        blocks = getattr(self.file.stat(), "st_blocks", None)  # not on Windows, where files are not sparse
        return 0 if blocks is None else max(size - 512 * blocks, 0)

    def rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these indices."""
        pixels, checksums = self._open()
        words = np.asarray(pixels[list(indices)])
        for row, index in enumerate(indices):
            if _checksum(words[row]) != checksums[index]:
                self._as_images(words[row])[:] = self.images[index][0].numpy()
                self._write(index, words[row])
        labels = torch.tensor([self.images.labels[index] for index in indices])
        return torch.from_numpy(self._as_images(words)), labels

    def _write(self, index: int, words: np.ndarray) -> None:
        """Write one image. On a full disk a write fails with an error; a write to a memory map ends the process."""
        try:
            for path, values in ((self.file, words), (self.checksums, _checksum(words))):
                with path.open("r+b", buffering=0) as file:
                    file.seek(index * values.nbytes)
                    file.write(values.tobytes())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            warn(f"{self.file.parent} is full: further images are decoded on every read")

    def _as_images(self, words: np.ndarray) -> np.ndarray:
        pixels = words.view(np.uint8)[..., : 3 * self.shape[1] * self.shape[2]]
        return pixels.reshape(*words.shape[:-1], *self.shape)

    def _open(self) -> tuple[np.ndarray, np.ndarray]:
        """Return memory maps of the two files, once per process. New files are sparse and have their full length."""
        if self._maps is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            maps = []
            for path, shape in ((self.file, (len(self), self.words)), (self.checksums, (len(self),))):
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


def _checksum(words: np.ndarray) -> np.uint64:
    """Return the sum of the words, at least 1: zero means that nothing was written."""
    return max(np.add.reduce(words, dtype=np.uint64), np.uint64(1))


def _fingerprint(images: ImageFolder) -> str:
    """Return a hash of the files, their preprocessing and the decoder's version."""
    from PIL import __version__ as pillow
    from PIL import features

    preprocess = images.preprocess
    if preprocess.resize is None:
        preprocess = Preprocess(crop=preprocess.crop)  # the other fields make no difference
    decoder = f"{_FORMAT} {pillow} {features.version('libjpeg_turbo')}"
    digest = hashlib.sha256(f"{decoder} {preprocess} {images.upright} {images.root.resolve()}".encode())
    for path in images.paths:
        stat = path.stat()
        digest.update(f"\n{path.parent.name}/{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


class DecodedSuite(Suite):
    """A suite with its images cached. Anything but image files with a fixed crop is passed through."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self.suite, self.folder = suite, folder
        self.name, self.shifts, self.extra, self.classes = suite.name, suite.shifts, suite.extra, suite.classes
        self.graded, self.task, self.outputs = suite.graded, suite.task, suite.outputs
        self.kept: dict[tuple[Any, ...], Decoded] = {}

    def part(self, shift: str, severity: int) -> Part:
        """Return a shifted version."""
        return self._cached(self.suite.part(shift, severity))

    def clean(self) -> Part:
        """Return the version without shift."""
        return self._cached(self.suite.clean())

    def check_classes(self, outputs: int) -> None:
        """Check the classes of the wrapped suite."""
        self.suite.check_classes(outputs)

    def class_note(self) -> str:
        """Return the note of the wrapped suite."""
        return self.suite.class_note()

    def missing(self) -> list[str]:
        """Return the messages of the wrapped suite."""
        return self.suite.missing()

    def _cached(self, part: Part) -> Part:
        images = part.images
        if not isinstance(images, ImageFolder) or images.preprocess.crop is None:
            return part
        key = images.root, images.preprocess, len(images)
        if key not in self.kept:
            self.kept[key] = Decoded(images, self.folder)
            self._check_room()
        return replace(part, images=self.kept[key])

    def _check_room(self) -> None:
        needed = sum(images.bytes_to_write for images in self.kept.values())
        existing = next(path for path in (self.folder, *self.folder.resolve().parents) if path.is_dir())
        if needed > (free := shutil.disk_usage(existing).free):
            raise NoRoomError(
                f"the cache needs {needed / 1e9:.1f} GB more for these images, and {self.folder} has "
                f"{free / 1e9:.1f} GB: choose another folder, or run without a cache"
            )
