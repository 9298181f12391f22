"""Data: corruptions, digits, ImageNet and its shifted versions, CIFAR-C, any folder; each by one name.

suite = open_suite("imagenet-c:/data/ImageNet-C")
suite = open_suite("digits")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .folders import ImageFolder, Preprocess, Tensors
from .types import DataError

if TYPE_CHECKING:
    from .types import Suite

__all__ = ["SUITES", "DataError", "open_suite"]


def _digits(path: str, preprocess: Preprocess | None) -> Suite:  # noqa: ARG001
    from .digits import load_digits
    from .on_the_fly import Corrupted

    _, test = load_digits()
    return Corrupted("digits", Tensors(test.x, test.y))


def _imagenet(path: str, preprocess: Preprocess | None) -> Suite:
    from .imagenet import ImageNet
    from .on_the_fly import Corrupted

    return Corrupted("imagenet", ImageNet(path, preprocess).clean().images)


def _imagenet_c(path: str, preprocess: Preprocess | None, each: int | None = None) -> Suite:
    from .imagenet import ImageNetC

    root, _, clean = path.partition(",")
    return ImageNetC(root, preprocess, clean=clean or None, each=each)


def _imagenet_c_5k(path: str, preprocess: Preprocess | None) -> Suite:
    return _imagenet_c(path, preprocess, each=5)


def _imagenet_r(path: str, preprocess: Preprocess | None) -> Suite:
    from .imagenet import ImageNetR

    return ImageNetR(path, preprocess)


def _cifar10(path: str, preprocess: Preprocess | None) -> Suite:  # noqa: ARG001
    from .cifar import CIFARC, clean_images
    from .on_the_fly import Corrupted

    made = Path(path) / "corrupted"  # python -m training.cifar10 corrupt
    return CIFARC(made, "cifar10") if made.is_dir() else Corrupted("cifar10", clean_images(path), like="cifar-c")


def _cifar10_c(path: str, preprocess: Preprocess | None) -> Suite:  # noqa: ARG001
    from .cifar import CIFARC

    return CIFARC(path)


def _cifar100_c(path: str, preprocess: Preprocess | None) -> Suite:  # noqa: ARG001
    from .cifar import CIFARC

    return CIFARC(path, "cifar100-c")


def _cityscapes(path: str, preprocess: Preprocess | None) -> Suite:
    from .scenes import Cityscapes

    return Cityscapes(path, preprocess)


def _acdc(path: str, preprocess: Preprocess | None) -> Suite:
    from .scenes import ACDC

    root, _, clean = path.partition(",")
    return ACDC(root, preprocess, clean=clean or None)


def _scenes(path: str, preprocess: Preprocess | None) -> Suite:
    from .scenes import SceneFolder

    return SceneFolder(path, preprocess)


def _folder(path: str, preprocess: Preprocess | None) -> Suite:
    from .on_the_fly import Corrupted

    return Corrupted("folder", ImageFolder(path, preprocess))


def _corrupted(path: str, preprocess: Preprocess | None) -> Suite:
    """Another suite's clean images, or its only ones where it has none, corrupted on the fly."""
    from .on_the_fly import Corrupted
    from .scenes import Scenes, Weathered

    suite = open_suite(path, preprocess)
    try:
        images = suite.clean().images
    except DataError:
        if len(suite.shifts) > 1:
            raise
        images = suite.part(suite.shifts[0], 1).images
    if isinstance(images, Scenes):
        return Weathered(f"corrupted {suite.name}", images)
    small = path.startswith("cifar")  # which has severities of its own
    return Corrupted(f"corrupted {suite.name}", images, suite.classes, like="cifar-c" if small else "imagenet-c")


SUITES: dict[str, tuple[Callable[[str, Preprocess | None], Suite], str]] = {
    "digits": (_digits, "2,000 real handwritten digits, corrupted on the fly; no path"),
    "imagenet": (_imagenet, "imagenet:FOLDER, ImageNet's validation images, corrupted on the fly"),
    "imagenet-c": (_imagenet_c, "imagenet-c:FOLDER[,CLEAN], the published files; CLEAN is the validation folder"),
    "imagenet-c-5k": (_imagenet_c_5k, "the same, five fixed images of each class"),
    "imagenet-r": (_imagenet_r, "imagenet-r:FOLDER, renditions of 200 classes"),
    "cifar10": (_cifar10, "cifar10:FOLDER with clean.npy and labels.npy, corrupted on the fly or beforehand"),
    "cifar10-c": (_cifar10_c, "cifar10-c:FOLDER of .npy files"),
    "cifar100-c": (_cifar100_c, "cifar100-c:FOLDER of .npy files"),
    "corrupted": (_corrupted, "corrupted:NAME:FOLDER, any of these, its clean images corrupted on the fly"),
    "folder": (_folder, "folder:FOLDER with a folder for each class, corrupted on the fly"),
    "acdc": (_acdc, "acdc:FOLDER[,CITYSCAPES], street scenes in fog, at night, in rain and snow, for segmenters"),
    "cityscapes": (_cityscapes, "cityscapes:FOLDER, its validation scenes under weather made on the fly"),
    "scenes": (_scenes, "scenes:FOLDER with images/ and labels/ of the same names, under weather made on the fly"),
}
"""Every data set by its name on the command line, and what to write."""


def open_suite(spec: str, preprocess: Preprocess | None = None, cache: Path | str | None = None) -> Suite:
    """A suite by NAME or NAME:PATH, its images prepared as a network expects them, and kept decoded in a `cache`."""
    name, _, path = spec.partition(":")
    if name not in SUITES:
        raise DataError(f"no data set {name!r}: expected one of {', '.join(SUITES)}")
    if name != "digits" and not path:
        raise DataError(f"{name} needs a folder: {SUITES[name][1]}")
    suite = SUITES[name][0](path, preprocess)
    if not cache:
        return suite
    from .decoded import DecodedSuite

    return DecodedSuite(suite, Path(cache))
