"""CIFAR-10-C and CIFAR-100-C in their published layout: an array a corruption, and one of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .corruptions import BENCHMARK
from .folders import folder
from .types import DataError, ImageSet, Part, Suite

__all__ = ["CIFARC", "clean_images"]

_EACH = 10_000


class CIFARC(Suite):
    """root/gaussian_noise.npy of 50,000 × 32 × 32 × 3 bytes, 10,000 a severity, and root/labels.npy. Read as needed."""

    def __init__(self, root: Path | str, name: str = "cifar10-c") -> None:
        self.root, self.name = folder(Path(root), name.upper()), name
        self.shifts = tuple(shift for shift in BENCHMARK if (self.root / f"{shift}.npy").is_file())
        if not self.shifts:
            raise DataError(f"{name}: {self.root} has no gaussian_noise.npy, shot_noise.npy, …: is it another folder?")
        self.labels = _array(self.root, "labels", name)

    def part(self, shift: str, severity: int) -> Part:
        """One corruption at one severity."""
        if severity not in (1, 2, 3, 4, 5):
            raise ValueError(f"severity={severity}: expected 1 to 5")
        images = _array(self.root, shift, self.name)
        each = len(images) // 5
        rows = slice(each * (severity - 1), each * severity)
        return Part(_Rows(images[rows], self.labels[rows]))

    def clean(self) -> Part:
        """The test images, where they lie beside as clean.npy."""
        return Part(clean_images(self.root, self.name))


def clean_images(root: Path | str, name: str = "cifar10") -> ImageSet:
    """root/clean.npy, the test images, and root/labels.npy (`python -m training.cifar10 unpack` makes them)."""
    images, labels = (_array(folder(Path(root), name.upper()), part, name) for part in ("clean", "labels"))
    return _Rows(images, labels[: len(images)])


def _array(root: Path, part: str, name: str) -> np.ndarray:
    path = root / f"{part}.npy"
    if not path.is_file():
        raise DataError(f"{name}: there is no {path.name} in {root}")
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): a broken download? Fetch it again") from error
    if part != "labels" and (array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8):
        raise DataError(f"{path} holds {array.dtype} of {array.shape}, not images of (N, H, W, 3) bytes")
    return array


class _Rows:
    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if len(images) > len(labels):
            raise DataError(f"{len(images)} images have only {len(labels)} labels: is labels.npy another set's?")
        self.images, self.labels = images, labels

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.array(self.images[index])).movedim(-1, 0).contiguous(), int(self.labels[index])

    def rows(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """These images and their labels, read at once."""
        images = torch.from_numpy(self.images[list(places)]).movedim(-1, 1).contiguous()
        return images, torch.from_numpy(self.labels[list(places)].astype(np.int64))

    def __len__(self) -> int:
        return len(self.images)
