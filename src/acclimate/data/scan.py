"""Find the broken files of a data set before a run does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from .decoded import Decoded
from .folders import ImageFolder, Preprocess, read_image
from .scenes import Scenes, read_labels
from .types import BrokenImageError, DataError, Part, Suite

__all__ = ["image_files", "scan"]

_Reader = Callable[[Path], object]
_read_image = partial(read_image, preprocess=Preprocess())


def image_files(suite: Suite, severity: int = 5, shifts: Sequence[str] | None = None) -> dict[Path, _Reader]:
    """Return the files of a suite, each once, with the function that reads it; clean images are among them."""
    parts = [suite.part(shift, severity) for shift in shifts or suite.shifts]
    with contextlib.suppress(DataError):  # not every suite has clean images
        parts.append(suite.clean())
    files = {path: reader for part in parts for path, reader in _files(part)}
    if not files:
        raise DataError(f"{suite.name} is not made of image files: there is nothing to scan")
    return files


def scan(files: dict[Path, _Reader], workers: int = 0) -> Iterator[tuple[Path, str | None]]:
    """Read every file, and yield it with the reason why it cannot be used, or None."""
    loader: DataLoader[Any] = DataLoader(_Checked([*files.items()]), batch_size=None, num_workers=workers)
    yield from loader


def _files(part: Part) -> Iterator[tuple[Path, _Reader]]:
    images = part.images.images if isinstance(part.images, Decoded) else part.images
    if isinstance(images, ImageFolder):
        yield from ((path, _read_image) for path in images.paths)
    elif isinstance(images, Scenes):
        for image, labels in images.pairs:
            yield image, _read_image
            yield labels, read_labels


class _Checked(Dataset[tuple[Path, "str | None"]]):
    def __init__(self, files: Sequence[tuple[Path, _Reader]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Path, str | None]:
        path, reader = self.files[index]
        try:
            reader(path)
        except DataError as error:
            return path, error.reason if isinstance(error, BrokenImageError) else str(error)
        return path, None
