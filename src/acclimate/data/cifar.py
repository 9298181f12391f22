"""CIFAR-10-C and CIFAR-100-C in their published layout: one array per corruption, and one of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .corruptions import BENCHMARK
from .folders import existing_folder
from .severities import check_severity
from .types import DataError, ImageSet, Part, Suite

__all__ = ["CIFARC", "clean_images"]


class CIFARC(Suite):
    """Images of root/gaussian_noise.npy and so on, with root/labels.npy; the arrays are memory-mapped.

    Each array has 50,000 × 32 × 32 × 3 bytes: 10,000 images per severity, from 1 to 5.
    """

    def __init__(self, root: Path | str, name: str = "cifar10-c") -> None:
        self.root, self.name = existing_folder(Path(root), name.upper()), name
        self.outputs = 100 if name.startswith("cifar100") else 10
        self.shifts = tuple(shift for shift in BENCHMARK if (self.root / f"{shift}.npy").is_file())
        if not self.shifts:
            raise DataError(f"{name}: {self.root} has no gaussian_noise.npy, shot_noise.npy, …: is it another folder?")
        self.labels = _load(self.root, "labels", name)

    def part(self, shift: str, severity: int) -> Part:
        """Return the images with one corruption at one severity."""
        check_severity(severity)
        images = _load(self.root, shift, self.name)
        each = len(images) // 5
        rows = slice(each * (severity - 1), each * severity)
        return Part(_Arrays(images[rows], self.labels[rows]))

    def clean(self) -> Part:
        """Return the test images of root/clean.npy."""
        return Part(clean_images(self.root, self.name))


def clean_images(
    root: Path | str, name: str = "cifar10", stems: tuple[str, str] = ("clean", "labels"), part: str = ""
) -> ImageSet:
    """Return the images of root/clean.npy with root/labels.npy, as `python -m training.cifar10 unpack` writes them.

    The part `tune` has every fifth image, `judge` the others.
    """
    folder = existing_folder(Path(root), name.upper())
    images, labels = (_load(folder, stem, name) for stem in stems)
    labels = labels[: len(images)]
    if part:
        chosen = (np.arange(len(images)) % 5 == 0) == (part == "tune")
        images, labels = images[chosen[: len(images)]], labels[chosen[: len(labels)]]
    return _Arrays(images, labels)


def _load(root: Path, stem: str, name: str) -> np.ndarray:
    path = root / f"{stem}.npy"
    if not path.is_file():
        raise DataError(f"{name}: there is no {path.name} in {root}")
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): the download may be incomplete. Fetch it again") from error
    if "labels" not in stem and (array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8):
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}: expected uint8 images (N, H, W, 3)")
    return array


class _Arrays:
    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if len(images) > len(labels):
            raise DataError(f"{len(images)} images have only {len(labels)} labels: is labels.npy of another data set?")
        self.images, self.labels = images, labels

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.array(self.images[index])).movedim(-1, 0).contiguous(), int(self.labels[index])

    def rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these indices."""
        images = torch.from_numpy(self.images[list(indices)]).movedim(-1, 1).contiguous()
        return images, torch.from_numpy(self.labels[list(indices)].astype(np.int64))

    def __len__(self) -> int:
        return len(self.images)
