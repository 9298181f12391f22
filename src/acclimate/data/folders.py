"""Images in class folders, root/class/image.jpg, read as uint8 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..extras import install_command
from .types import DataError

__all__ = ["SUFFIXES", "ImageFolder", "Preprocess", "Tensors", "existing_folder", "read_image"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side, then crop the centre; None skips a step.

    `squash` resizes both sides to `resize` instead, without keeping the aspect ratio.
    """

    resize: int | None = None
    crop: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    squash: bool = False


def read_image(path: Path, preprocess: Preprocess) -> Tensor:
    """Return an image file as uint8 (3, H, W)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading images needs Pillow: {install_command('bench')}") from error
    try:
        with Image.open(path) as opened:
            opened.load()
            picture = opened if opened.mode == "RGB" else _eight_bits(opened).convert("RGB")
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read ({error}). Fetch it again, or remove it") from error
    if preprocess.resize is not None:
        picture = picture.resize(
            _resized(picture.size, preprocess), getattr(Image.Resampling, preprocess.interpolation.upper())
        )
    if preprocess.crop is not None:
        width, height = picture.size
        if min(width, height) < preprocess.crop:
            raise DataError(f"{path} has {width}×{height} pixels: too small for a crop of {preprocess.crop}")
        left, top = (round((side - preprocess.crop) / 2) for side in (width, height))
        picture = picture.crop((left, top, left + preprocess.crop, top + preprocess.crop))
    return torch.from_numpy(np.stack([np.asarray(band) for band in picture.split()]))


def _resized(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Return the new (width, height). As in torchvision, the longer side is rounded down."""
    wanted = preprocess.resize or min(size)
    if preprocess.squash:
        return wanted, wanted
    width, height = size
    return (wanted, int(wanted * height / width)) if width <= height else (int(wanted * width / height), wanted)


def _eight_bits(picture: Any) -> Any:
    """Reduce 16-bit grey levels to 8 bits. Pillow's own conversion would clip them."""
    if not picture.mode.startswith("I"):
        return picture
    from PIL import Image

    return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def existing_folder(root: Path, what: str) -> Path:
    """Return `root`, or raise an error that starts with `what`."""
    if root.is_dir():
        return root
    if root.exists():
        raise DataError(f"{what}: {root} is a file, not a folder. Unpack it and give the folder")
    nearest = next(parent for parent in root.parents if parent.is_dir())
    raise DataError(f"{what}: there is no folder {root}; the path exists as far as {nearest}")


def _class_folders(root: Path, what: str, classes: int | None = None) -> list[Path]:
    """Return the class folders in `root`, sorted by name; `classes` is the number expected."""
    found = sorted(
        path for path in existing_folder(root, what).iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    packed = [path.name for path in root.iterdir() if path.name.endswith((".tar", ".zip", ".tgz", ".tar.gz"))]
    if not found:
        hint = f"unpack {packed[0]}" if packed else "expected one folder per class"
        raise DataError(f"{what}: {root} has no class folder: {hint}")
    if classes is not None and len(found) != classes:
        hint = f"unpack {packed[0]}" if packed else "only partly unpacked?"
        raise DataError(f"{what}: {root} has {len(found)} class folders, expected {classes}: {hint}")
    return found


class ImageFolder:
    """Images in class folders. The label is the index of the class folder in alphabetical order."""

    def __init__(
        self,
        root: Path | str,
        preprocess: Preprocess | None = None,
        *,
        what: str = "image folder",
        classes: int | None = None,
        each: int | None = None,
    ) -> None:
        self.root, self.preprocess = Path(root), preprocess or Preprocess()
        folders = _class_folders(self.root, what, classes)
        self.classes = [path.name for path in folders]
        self.paths: list[Path] = []
        self.labels: list[int] = []
        for label, path in enumerate(folders):
            images = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
            if not images:
                raise DataError(f"{what}: {path} has no image: only partly unpacked?")
            if each is not None and len(images) != each:
                raise DataError(f"{what}: {path} has {len(images)} images, expected {each}: only partly unpacked?")
            self.paths += images
            self.labels += [label] * len(images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.paths[index], self.preprocess), self.labels[index]

    def __len__(self) -> int:
        return len(self.paths)

    def keep(self, indices: Sequence[int]) -> ImageFolder:
        """Keep only these images, and return self."""
        self.paths, self.labels = [self.paths[i] for i in indices], [self.labels[i] for i in indices]
        return self


class Tensors:
    """Images and labels in memory."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels.tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.x)
