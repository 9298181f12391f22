"""Street scenes with one label per pixel: Cityscapes, ACDC, and any folder of images and labels.

Images may be resized. Labels keep their size, and predictions are resized to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from .corruptions import BENCHMARK, EXTRA
from .folders import SUFFIXES, Preprocess, existing_folder, naming_broken_files, read_image
from .types import IGNORE, DataError, Part, Suite
from .weather import WEATHER, weather

__all__ = ["ACDC", "CITYSCAPES", "Cityscapes", "SceneFolder", "Scenes", "Weathered"]

CITYSCAPES: dict[str, tuple[int, int, int]] = {
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "pole": (153, 153, 153),
    "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "rider": (255, 0, 0),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "train": (0, 80, 100),
    "motorcycle": (0, 0, 230),
    "bicycle": (119, 11, 32),
}
"""The nineteen classes in the order of their train ids, with the colours of their labels."""

_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of the classes in labelIds files
_TRAIN_IDS = torch.full((256,), IGNORE, dtype=torch.uint8)
_TRAIN_IDS[list(_IDS)] = torch.arange(len(_IDS), dtype=torch.uint8)


class Scenes:
    """Pairs of an image file and a file with one label per pixel."""

    def __init__(self, pairs: Sequence[tuple[Path, Path]], preprocess: Preprocess | None = None) -> None:
        self.pairs = list(pairs)
        self.preprocess = replace(preprocess or Preprocess(), crop=None)  # labels are not cropped

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, labels = self.pairs[index]
        return read_image(image, self.preprocess, upright=False), read_labels(labels)  # labels are not turned

    def __len__(self) -> int:
        return len(self.pairs)


def read_labels(path: Path) -> Tensor:
    """Return train ids (H, W) as uint8, 255 for pixels that are not scored. Ids of labelIds files are translated."""
    from PIL import Image

    with naming_broken_files(path), Image.open(path) as opened:
        if opened.mode not in ("L", "P", "1"):
            raise DataError(f"{path} has {opened.mode} pixels: expected a PNG with one class number per pixel")
        labels = torch.from_numpy(np.array(opened, dtype=np.uint8))
    return _TRAIN_IDS[labels.long()] if path.stem.endswith("_labelIds") else labels


class Weathered(Suite):
    """Clean scenes with weather added on the fly."""

    task = "segmentation"
    shifts = WEATHER
    extra = tuple(name for name in (*BENCHMARK, *EXTRA) if name not in WEATHER)

    def __init__(self, name: str, scenes: Scenes) -> None:
        self.name, self.scenes = name, scenes

    def part(self, shift: str, severity: int) -> Part:
        """Return the scenes under one condition or another corruption."""
        return Part(self.scenes, partial(_change, shift, severity), ordered=True)

    def clean(self) -> Part:
        """Return the scenes without change."""
        return Part(self.scenes, ordered=True)


def _change(shift: str, severity: int, x: Tensor, generator: Generator) -> Tensor:
    return weather(x, shift, severity, generator)


class SceneFolder(Weathered):
    """Scenes in root/images with labels of the same file names in root/labels."""

    def __init__(self, root: Path | str, preprocess: Preprocess | None = None) -> None:
        images, labels = (existing_folder(Path(root) / part, "scenes") for part in ("images", "labels"))
        pairs = _pairs(_images(images), lambda image: labels / f"{image.stem}.png", "scenes")
        super().__init__("scenes", Scenes(pairs, preprocess))


class Cityscapes(Weathered):
    """Cityscapes, at half its resolution unless `preprocess` says otherwise.

    Reads leftImg8bit/SPLIT/CITY/…_leftImg8bit.png with gtFine/SPLIT/CITY/…_gtFine_labelTrainIds.png or …_labelIds.png.
    """

    outputs = len(CITYSCAPES)

    def __init__(self, root: Path | str, preprocess: Preprocess | None = None, split: str = "val") -> None:
        images, labels = (
            existing_folder(_find(Path(root), part) / split, "Cityscapes") for part in ("leftImg8bit", "gtFine")
        )

        def label(image: Path) -> Path:
            stem = image.stem.removesuffix("_leftImg8bit")
            return _first(labels / image.parent.name / f"{stem}_gtFine_{kind}.png" for kind in _KINDS)

        found = [image for image in _images(images, deep=True) if image.stem.endswith("_leftImg8bit")]
        pairs = _pairs(found, label, "Cityscapes")
        super().__init__("cityscapes", Scenes(pairs, preprocess or Preprocess(resize=512)))


class ACDC(Suite):
    """ACDC, at half its resolution unless `preprocess` says otherwise.

    Reads rgb_anon/CONDITION/SPLIT/SEQUENCE/…_rgb_anon.png with gt/…/…_gt_labelTrainIds.png. The clean scenes are those
    of Cityscapes, in the folder `clean`.
    """

    name = "acdc"
    outputs = len(CITYSCAPES)
    graded = False
    task = "segmentation"
    shifts = WEATHER

    def __init__(
        self,
        root: Path | str,
        preprocess: Preprocess | None = None,
        *,
        split: str = "train",
        clean: Path | str | None = None,
    ) -> None:
        self.root, self.split = existing_folder(Path(root), "ACDC"), split
        self.preprocess = preprocess or Preprocess(resize=540)
        self.source = None if clean is None else Cityscapes(clean, preprocess)

    def part(self, shift: str, severity: int) -> Part:  # noqa: ARG002
        """Return one condition, in the order of its recordings. There are no severities."""
        images, labels = (
            existing_folder(_find(self.root, part) / shift / self.split, "ACDC") for part in ("rgb_anon", "gt")
        )

        def label(image: Path) -> Path:
            stem = image.stem.removesuffix("_rgb_anon")
            return _first(labels / image.parent.name / f"{stem}_gt_{kind}.png" for kind in _KINDS)

        found = [image for image in _images(images, deep=True) if image.stem.endswith("_rgb_anon")]
        return Part(Scenes(_pairs(found, label, f"ACDC, {shift}"), self.preprocess), ordered=True)

    def missing(self) -> list[str]:
        """Return one message per condition with fewer images than were published."""
        published = {"train": 400, "val": 100}.get(self.split, 0)  # 106 at night
        counts = {shift: len(self.part(shift, 5).images) for shift in self.shifts}
        return [
            f"ACDC, {shift}: {count} images, and {published} were published: only partly unpacked?"
            for shift, count in counts.items()
            if count < published
        ]

    def clean(self) -> Part:
        """Return the scenes of Cityscapes."""
        if self.source is None:
            raise DataError("ACDC has no clean scenes: name Cityscapes, acdc:FOLDER,CITYSCAPES or clean=")
        return self.source.clean()


_KINDS = ("labelTrainIds", "labelIds")


def _find(root: Path, part: str) -> Path:
    """Return the folder `part` in the root, or one level below, where its archive may have been unpacked."""
    candidates = [root / part, *sorted(root.glob(f"*/{part}"))]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def _images(root: Path, *, deep: bool = False) -> list[Path]:
    found = sorted(root.glob("*/*" if deep else "*"))
    return [path for path in found if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]


def _first(paths: Iterable[Path]) -> Path:
    """Return the first path that exists, else the first."""
    candidates = [*paths]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _pairs(images: Sequence[Path], label: Callable[[Path], Path], what: str) -> list[tuple[Path, Path]]:
    if not images:
        raise DataError(f"{what}: found no image: only partly unpacked?")
    pairs = [(image, label(image)) for image in images]
    if missing := [path for _, path in pairs if not path.is_file()]:
        raise DataError(f"{what}: {len(missing)} of {len(pairs)} images have no label, such as {missing[0]}")
    return pairs
