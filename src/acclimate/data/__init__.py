"""Data sets, each opened by name, with their clean images and shifted versions.

suite = open_suite("digits")
suite = open_suite("imagenet-c:/data/ImageNet-C")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checks import no_such
from .cifar import CIFARC, clean_images
from .decoded import DecodedSuite
from .demo_digits import open_demo
from .digits import load_digits
from .folders import ImageFolder, Preprocess, Tensors
from .imagenet import ImageNet, ImageNetC, ImageNetR
from .on_the_fly import Corrupted
from .scenes import ACDC, Cityscapes, SceneFolder, Scenes, Weathered
from .severities import Like
from .types import DataError, Suite

__all__ = ["SUITES", "DataError", "load_digits", "open_suite"]


def open_suite(spec: str, preprocess: Preprocess | None = None, cache: Path | str | None = None) -> Suite:
    """Return the suite that `spec`, NAME or NAME:PATH, names.

    >>> suite = open_suite("digits")
    >>> suite.shifts[:3]
    ('gaussian_noise', 'shot_noise', 'impulse_noise')

    Args:
        spec: a name of `SUITES`, with the path that it needs.
        preprocess: the resize and crop that the network expects.
        cache: a folder for decoded images, so that each file is decoded only once.
    """
    name, _, path = spec.partition(":")
    if name not in SUITES:
        raise DataError(no_such("data set", name, SUITES))
    if name != "digits" and not path:
        raise DataError(f"{name} needs a folder: {SUITES[name].usage}")
    suite = SUITES[name].open(path, preprocess)
    return DecodedSuite(suite, Path(cache)) if cache else suite


def _digits(path: str, _: Preprocess | None) -> Suite:
    """Open the test digits. Every fifth of them is for choosing settings, the others are for judging."""
    test = load_digits()[1]
    x, y = test.x, test.y
    if path:
        if path not in ("tune", "judge"):
            raise DataError(f"digits:{path}: expected digits, digits:tune or digits:judge")
        chosen = (torch.arange(len(x)) % 5 == 0) == (path == "tune")
        x, y = x[chosen], y[chosen]
    return Corrupted("digits", Tensors(x, y), outputs=10)


def _imagenet_c(path: str, preprocess: Preprocess | None, each: int | None = None) -> Suite:
    root, _, clean = path.partition(",")
    return ImageNetC(root, preprocess, clean=clean or None, each=each)


def _cifar10(path: str, _: Preprocess | None) -> Suite:
    """Open the test images. Every fifth of them is for choosing settings, the others are for judging."""
    root, part = _part(path)
    stored = Path(root) / "corrupted"  # written by python -m training.cifar10 corrupt
    if stored.is_dir() and not part:
        return CIFARC(stored, "cifar10")
    return Corrupted("cifar10", clean_images(root, part=part), like="cifar-c", outputs=10)


def _imagenet_5k(path: str, preprocess: Preprocess | None) -> Suite:
    """Open five validation images per class. One of them is for choosing settings, four are for judging."""
    root, part = _part(path)
    below = Path(root) / "ILSVRC2012_img_val_subset"
    where = below if below.is_dir() else root
    images = ImageFolder(where, preprocess or Preprocess(256, 224), what="ImageNet-5k", each=5, upright=False)
    if {*images.classes} != {str(index) for index in range(1000)}:
        raise DataError(f"imagenet-5k: {where} has {len(images.classes)} class folders, expected 0 to 999")
    images.folders = None  # their names are the indices, by this data set's layout
    if part:
        images.keep([index for index in range(len(images)) if (index % 5 == 0) == (part == "tune")])
    return Corrupted("imagenet-5k", images, outputs=1000)


def _tiny_imagenet(path: str, _: Preprocess | None) -> Suite:
    """Open the validation images, which are for judging, or the training images that were held out."""
    root, part = _part(path)
    stems = ("tune", "tune_labels") if part == "tune" else ("clean", "labels")
    return Corrupted("tiny-imagenet", clean_images(root, "tiny-imagenet", stems), like="tiny-imagenet-c", outputs=200)


def _part(path: str) -> tuple[str, str]:
    """Split FOLDER,tune or FOLDER,judge."""
    root, _, part = path.rpartition(",")
    return (root, part) if part in ("tune", "judge") and root else (path, "")


def _folder(path: str, preprocess: Preprocess | None) -> Suite:
    root, _, indices = path.rpartition(",")
    given = indices.endswith(".json")
    return Corrupted("folder", ImageFolder(root if given else path, preprocess, indices=indices if given else None))


def _acdc(path: str, preprocess: Preprocess | None) -> Suite:
    root, _, clean = path.partition(",")
    return ACDC(root, preprocess, clean=clean or None)


def _corrupted(spec: str, preprocess: Preprocess | None) -> Suite:
    """Corrupt the clean images of another suite. A suite that has only one version counts as clean."""
    suite = open_suite(spec, preprocess)
    try:
        images = suite.clean().images
    except DataError:
        if len(suite.shifts) > 1:
            raise
        images = suite.part(suite.shifts[0], 1).images
    if isinstance(images, Scenes):
        return Weathered(f"corrupted {suite.name}", images)
    sizes: dict[str, Like] = {"cifar": "cifar-c", "tiny-imagenet": "tiny-imagenet-c"}
    like: Like = next((like for name, like in sizes.items() if spec.startswith(name)), "imagenet-c")
    return Corrupted(f"corrupted {suite.name}", images, suite.classes, like=like, outputs=suite.outputs)


class _Entry(NamedTuple):
    open: Callable[[str, Preprocess | None], Suite]
    usage: str


SUITES: dict[str, _Entry] = {
    "digits": _Entry(
        _digits,
        "2,000 real handwritten digits, corrupted on the fly; needs no path. digits:tune has every fifth of them, for "
        "choosing settings, digits:judge the others",
    ),
    "demo": _Entry(open_demo, "demo:IMAGES,SEED, the stream of `acclimate demo`; demo:training, its source images"),
    "imagenet": _Entry(
        lambda path, preprocess: Corrupted("imagenet", ImageNet(path, preprocess).clean().images, outputs=1000),
        "imagenet:FOLDER, ImageNet's validation images, corrupted on the fly",
    ),
    "imagenet-c": _Entry(
        _imagenet_c, "imagenet-c:FOLDER[,CLEAN], the published files; CLEAN is ImageNet's validation folder"
    ),
    "imagenet-c-5k": _Entry(
        partial(_imagenet_c, each=5), "imagenet-c-5k:FOLDER[,CLEAN], the same with five fixed images per class"
    ),
    "imagenet-5k": _Entry(
        _imagenet_5k,
        "imagenet-5k:FOLDER[,tune or ,judge] with folders 0 to 999 of five validation images each, corrupted on the "
        "fly; one of the five is for choosing settings, four are for judging",
    ),
    "tiny-imagenet": _Entry(
        _tiny_imagenet,
        "tiny-imagenet:FOLDER[,tune or ,judge], arrays of `python -m training.tiny_imagenet unpack`, corrupted on the "
        "fly; tune are 5,000 training images that trained no network",
    ),
    "imagenet-r": _Entry(ImageNetR, "imagenet-r:FOLDER, renditions of 200 classes"),
    "cifar10": _Entry(
        _cifar10,
        "cifar10:FOLDER[,tune or ,judge] with clean.npy and labels.npy, corrupted on the fly or in advance; every "
        "fifth image is for choosing settings",
    ),
    "cifar10-c": _Entry(lambda path, _: CIFARC(path), "cifar10-c:FOLDER of .npy files"),
    "cifar100-c": _Entry(lambda path, _: CIFARC(path, "cifar100-c"), "cifar100-c:FOLDER of .npy files"),
    "corrupted": _Entry(
        _corrupted, "corrupted:NAME:FOLDER, the clean images of another data set, corrupted on the fly"
    ),
    "folder": _Entry(
        _folder,
        "folder:FOLDER[,FILE.json] with one folder per class, corrupted on the fly; the file, or FOLDER/classes.json, "
        'says which class each is, {"folder": index}',
    ),
    "acdc": _Entry(
        _acdc, "acdc:FOLDER[,CITYSCAPES], street scenes in fog, at night, in rain and in snow, for segmentation"
    ),
    "cityscapes": _Entry(Cityscapes, "cityscapes:FOLDER, its validation scenes, with weather added on the fly"),
    "scenes": _Entry(
        SceneFolder, "scenes:FOLDER with images/ and labels/ of the same file names, with weather added on the fly"
    ),
}
"""Data sets by their name on the command line: how to open each, and what to write."""
