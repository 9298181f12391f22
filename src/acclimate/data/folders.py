"""Images in class folders, root/class/image.jpg, read as uint8 tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..extras import install_command
from .classes import class_folders
from .types import BrokenImageError, DataError, ImageSet

__all__ = [
    "SUFFIXES",
    "ImageFolder",
    "Preprocess",
    "Tensors",
    "existing_folder",
    "naming_broken_files",
    "prepare_image",
    "read_image",
    "unread_files",
]

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


def read_image(path: Path, preprocess: Preprocess, *, upright: bool = True) -> Tensor:
    """Return an image file as uint8 (3, H, W).

    Palettes, grey levels and CMYK become RGB as Pillow converts them, and alpha is dropped. 16-bit grey levels are
    scaled by 65535. Floating-point pixels must be in [0, 1]. Of several frames the first is read.

    Args:
        path: the file.
        preprocess: how to resize and crop.
        upright: turn the image as its EXIF orientation says.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading images needs Pillow: {install_command('bench')}") from error
    with naming_broken_files(path), path.open("rb") as file, Image.open(file) as opened:  # Pillow maps paths
        return prepare_image(path, opened, preprocess, upright=upright)


def prepare_image(path: Path, opened: Any, preprocess: Preprocess, *, upright: bool = True) -> Tensor:
    """Return an image that Pillow has opened as uint8 (3, H, W): decoded, upright, resized and cropped."""
    from PIL import Image

    opened.load()
    picture = opened if opened.mode == "RGB" else _rgb(path, opened)
    if upright:
        picture = _turned(picture, opened)
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


@contextmanager
def naming_broken_files(path: Path) -> Iterator[None]:
    """Raise what a decoder raises, which may be anything, as one line that names the file.

    Only a file with wrong content, a folder and a link to nothing are broken. What is absent or not readable may be
    there tomorrow.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            if path.is_dir() or (path.is_symlink() and not path.exists()):
                raise BrokenImageError(path, "a folder" if path.is_dir() else "a link to nothing") from error
            raise DataError(f"{path} cannot be read ({error.strerror})") from error
        unknown = type(error).__name__ == "UnidentifiedImageError"  # its message repeats the path
        said = "not an image, or of an unknown format" if unknown else " ".join(str(error).split())
        raise BrokenImageError(path, said or type(error).__name__) from error


def _rgb(path: Path, picture: Any) -> Any:
    """Convert to RGB. Pillow's own conversion would clip more than 8 bits."""
    from PIL import Image

    mode, grey = picture.mode, None
    if mode.startswith("I;16") or (mode == "I" and picture.format != "TIFF"):  # up to 65535 in PNG and PPM
        grey = (np.asarray(picture).astype(np.int64) + 128) // 257
    elif mode == "I":
        raise BrokenImageError(path, "32-bit or signed integers, whose range is unknown; expected 8 or 16 bits")
    elif mode == "F":
        pixels = np.asarray(picture)
        low, high = pixels.min(), pixels.max()
        if not (low >= 0 and high <= 1):
            raise BrokenImageError(path, f"floating-point pixels from {low:g} to {high:g}; expected 0 to 1")
        grey = (255 * pixels).round()
    if grey is not None:
        picture = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    elif "transparency" in picture.info and mode == "P":
        picture = picture.convert("RGBA")  # Pillow warns otherwise
    return picture.convert("RGB")


def _turned(picture: Any, opened: Any) -> Any:
    """Turn a picture as the EXIF orientation of its file says. Damaged EXIF data says nothing."""
    from PIL.ExifTags import Base
    from PIL.Image import Transpose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            orientation = opened.getexif().get(Base.Orientation, 1)
        except Exception:  # Pillow has no common class for what damaged data may raise
            return picture
    turns = (
        *(Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE),
        *(Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90),
    )
    return picture.transpose(turns[orientation - 2]) if orientation in range(2, 9) else picture


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
    """Images in class folders, each with the index of a network's output as its label.

    Published layouts, which have `classes` folders, count them in alphabetical order. Elsewhere `indices`, a JSON file
    {"folder": index}, says which folder is which, or the file `classes.json` in the root, or the folders' names if
    they are numbers; else the order counts as well.

    `unread` counts the other files there by their suffix: formats that are not supported, such as GIF.
    """

    def __init__(
        self,
        root: Path | str,
        preprocess: Preprocess | None = None,
        *,
        what: str = "image folder",
        classes: int | None = None,
        each: int | None = None,
        indices: Path | str | None = None,
        upright: bool = True,
    ) -> None:
        self.root, self.preprocess, self.upright = Path(root), preprocess or Preprocess(), upright
        folders = _class_folders(self.root, what, classes)
        self.classes = [path.name for path in folders]
        given = None if indices is None else Path(indices)
        self.folders = class_folders(self.classes, self.root, given) if classes is None else None
        labels = range(len(folders)) if self.folders is None else self.folders.indices
        self.paths: list[Path] = []
        self.labels: list[int] = []
        self.unread: Counter[str] = Counter()
        for label, path in zip(labels, folders, strict=True):
            visible = [p for p in path.iterdir() if p.name[0] != "."]
            images = sorted(p for p in visible if p.suffix.lower() in SUFFIXES)
            others = Counter(p.suffix.lower() or "without suffix" for p in visible if p.suffix.lower() not in SUFFIXES)
            if not images:
                hint = f"only {_counts(others)}, which are not read" if others else "only partly unpacked?"
                raise DataError(f"{what}: {path} has no image: {hint}")
            self.unread += others
            if each is not None and len(images) != each:
                raise DataError(f"{what}: {path} has {len(images)} images, expected {each}: only partly unpacked?")
            self.paths += images
            self.labels += [label] * len(images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.paths[index], self.preprocess, upright=self.upright), self.labels[index]

    def __len__(self) -> int:
        return len(self.paths)

    def keep(self, indices: Sequence[int]) -> ImageFolder:
        """Keep only these images, and return self."""
        self.paths, self.labels = [self.paths[i] for i in indices], [self.labels[i] for i in indices]
        return self


def unread_files(sets: Iterable[ImageSet]) -> str | None:
    """Return one line on the files in class folders that are not read, or None."""
    found = {images.root: images.unread for images in sets if isinstance(images, ImageFolder)}
    total = sum(found.values(), Counter[str]())
    if not total:
        return None
    return f"not read in class folders: {_counts(total)}; images end with {', '.join(sorted(SUFFIXES))}"


def _counts(files: Counter[str]) -> str:
    return ", ".join(f"{count} {suffix}" for suffix, count in files.most_common())


class Tensors:
    """Images and labels in memory."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels.tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.x)
