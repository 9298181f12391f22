"""ImageNet's validation set, ImageNet-C and ImageNet-R in their published layouts.

Images are not turned by their EXIF orientation: the published accuracies are from readers that do not.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

from .corruptions import BENCHMARK, CORRUPTIONS
from .folders import ImageFolder, Preprocess, existing_folder
from .types import DataError, Part, Suite

__all__ = ["RENDITIONS", "ImageNet", "ImageNetC", "ImageNetR"]

_RENDITIONS = """
1 2 4 6 8 9 11 13 22 23 26 29 31 39 47 63 71 76 79 84 90 94 96 97 99 100 105 107 113 122 125 130 132 144 145 147 148
150 151 155 160 161 162 163 171 172 178 187 195 199 203 207 208 219 231 232 234 235 242 245 247 250 251 254 259 260
263 265 267 269 276 277 281 288 289 291 292 293 296 299 301 308 309 310 311 314 315 319 323 327 330 334 335 337 338
340 341 344 347 353 355 361 362 365 366 367 368 372 388 390 393 397 401 407 413 414 425 428 430 435 437 441 447 448
457 462 463 469 470 471 472 476 483 487 515 546 555 558 570 579 583 587 593 594 596 609 613 617 621 629 637 657 658
701 717 724 763 768 774 776 779 780 787 805 812 815 820 824 833 847 852 866 875 883 889 895 907 928 931 932 933 934
936 937 943 945 947 948 949 951 953 954 957 963 965 967 980 981 983 988
"""
RENDITIONS = tuple(map(int, _RENDITIONS.split()))
"""The 200 of ImageNet's 1,000 classes that occur in ImageNet-R, in the order of its folders."""


class ImageNet(Suite):
    """The validation set in class folders, root/n01440764/….JPEG. Its only version is `"clean"`."""

    name = "imagenet"
    outputs = 1000
    graded = False
    shifts = ("clean",)

    def __init__(self, root: Path | str, preprocess: Preprocess | None = None, *, whole: bool = True) -> None:
        self.root, self.preprocess, self.whole = Path(root), preprocess or Preprocess(256, 224), whole

    def clean(self) -> Part:
        """Return all images."""
        classes = 1000 if self.whole else None
        return Part(ImageFolder(self.root, self.preprocess, what="ImageNet", classes=classes, upright=False))

    def part(self, shift: str, severity: int) -> Part:  # noqa: ARG002
        """Return all images: there is no shifted version."""
        if shift not in self.shifts:
            raise DataError(f"ImageNet's validation set has no {shift!r}: imagenet:FOLDER corrupts it on the fly")
        return self.clean()


class ImageNetC(Suite):
    """The published files, root/gaussian_noise/5/n01440764/….JPEG.

    Args:
        root: the folder of corruptions.
        preprocess: resize and crop of the clean images; the corrupted ones are resized already and only cropped.
        clean: ImageNet's validation folder.
        each: use this many images per class, the same for every corruption: five make a fixed list of 5,000 images.
        whole: require 1,000 classes of 50 images and all fifteen corruptions.
    """

    name = "imagenet-c"
    outputs = 1000

    def __init__(
        self,
        root: Path | str,
        preprocess: Preprocess | None = None,
        *,
        clean: Path | str | None = None,
        each: int | None = None,
        whole: bool = True,
    ) -> None:
        self.root, self.preprocess = Path(root), preprocess or Preprocess(256, 224)
        self.clean_root, self.each, self.whole = clean, each, whole
        self._parts: dict[tuple[str, int], Part] = {}
        found = {path.name for path in existing_folder(self.root, "ImageNet-C").iterdir() if path.is_dir()}
        self.shifts = tuple(name for name in BENCHMARK if name in found)
        self.extra = tuple(name for name in CORRUPTIONS if name in found and name not in BENCHMARK)
        if not self.shifts:
            packed = sorted(path.name for path in self.root.glob("*.tar"))
            hint = f"unpack {', '.join(packed)}" if packed else "expected folders gaussian_noise, shot_noise, …"
            raise DataError(f"ImageNet-C: {self.root} has no corruption: {hint}")
        if whole and len(self.shifts) < len(BENCHMARK):
            missing = [name for name in BENCHMARK if name not in found]
            raise DataError(f"ImageNet-C: {self.root} lacks {', '.join(missing)}: unpack the other archives")

    def part(self, shift: str, severity: int) -> Part:
        """Return the images with one corruption at one severity."""
        if (shift, severity) not in self._parts:
            self._parts[shift, severity] = self._read(shift, severity)
        return self._parts[shift, severity]

    def _read(self, shift: str, severity: int) -> Part:
        root = self.root / shift / str(severity)
        classes, each = (1000, 50) if self.whole else (None, None)
        crop_only = replace(self.preprocess, resize=None)
        images = ImageFolder(root, crop_only, what="ImageNet-C", classes=classes, each=each, upright=False)
        return Part(_fixed_subset(images, self.each))

    def clean(self) -> Part:
        """Return the validation images."""
        if self.clean_root is None:
            raise DataError(
                "ImageNet-C has no clean images: name ImageNet's validation folder, imagenet-c:FOLDER,CLEAN or clean="
            )
        part = ImageNet(self.clean_root, self.preprocess, whole=self.whole).clean()
        assert isinstance(part.images, ImageFolder)  # noqa: S101
        return Part(_fixed_subset(part.images, self.each))


def _fixed_subset(images: ImageFolder, each: int | None) -> ImageFolder:
    """Keep `each` images per class, selected by a hash of the file name."""
    if each is None:
        return images
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(images.labels):
        by_class.setdefault(label, []).append(index)

    def name_hash(index: int) -> int:
        return zlib.crc32(images.paths[index].stem.encode())

    return images.keep([index for own in by_class.values() for index in sorted(sorted(own, key=name_hash)[:each])])


class ImageNetR(Suite):
    """30,000 renditions of 200 classes, root/n01443537/….jpg.

    `classes` are the indices of the 200 classes among ImageNet's 1,000. Labels are indices into these 200.
    """

    name = "imagenet-r"
    graded = False
    shifts = ("renditions",)
    outputs = 1000
    classes = RENDITIONS

    def __init__(self, root: Path | str, preprocess: Preprocess | None = None, *, whole: bool = True) -> None:
        self.root, self.preprocess, self.whole = Path(root), preprocess or Preprocess(256, 224), whole

    def part(self, shift: str, severity: int) -> Part:  # noqa: ARG002
        """Return all images."""
        if shift not in self.shifts:
            raise DataError(f"ImageNet-R has no {shift!r}, only {self.shifts[0]!r}")
        classes = 200 if self.whole else None
        return Part(ImageFolder(self.root, self.preprocess, what="ImageNet-R", classes=classes, upright=False))

    def clean(self) -> Part:
        """Raise: there are no clean images."""
        raise DataError("ImageNet-R has no clean version of its images")
