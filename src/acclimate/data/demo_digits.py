"""The stream of `acclimate demo`: the same test digits under twelve corruptions, in a fixed order."""

from __future__ import annotations

from functools import cache

import torch

from .corruptions import corrupt
from .digits import load_digits
from .folders import Preprocess, Tensors
from .types import DataError, Part, Suite

__all__ = ["DemoDigits", "open_demo"]

_BATCH = 64
_PROBE = 128  # clean digits at the end of the test set


class DemoDigits(Suite):
    """Test digits under corruptions made in advance. One random generator runs through all of them in order."""

    name = "demo"
    outputs = 10
    shifts = (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "motion_blur",
        "zoom_blur",
        "fog",
        "brightness",
        "contrast",
        "pixelate",
        "speckle_noise",
        "gaussian_blur",
    )

    def __init__(self, images: int, seed: int) -> None:
        most = len(load_digits()[1]) - _PROBE
        if not 1 <= images <= most:
            raise DataError(f"demo:{images},{seed}: expected 1 to {most} digits; the last {_PROBE} are for the probe")
        self.images, self.seed = images, seed

    def part(self, shift: str, severity: int) -> Part:
        """Return the digits with one corruption."""
        return _corrupted(self.shifts, severity, self.images, self.seed)[shift]

    def clean(self) -> Part:
        """Return clean digits from the end of the test set, which the stream does not reach."""
        test = load_digits()[1]
        return Part(Tensors(test.x[-_PROBE:], test.y[-_PROBE:]), ordered=True)


@cache
def _corrupted(shifts: tuple[str, ...], severity: int, images: int, seed: int) -> dict[str, Part]:
    test = load_digits()[1]
    generator = torch.Generator().manual_seed(seed)
    clean, labels = torch.split(test.x[:images], _BATCH), test.y[:images]
    return {
        shift: Part(
            Tensors(torch.cat([corrupt(x, shift, severity, generator) for x in clean]), labels),
            ordered=True,
        )
        for shift in shifts
    }


class _TrainingDigits(Suite):
    """Digits that the demo's networks were trained on, for the Fisher importance."""

    name = "demo:training"
    shifts = ()

    def part(self, shift: str, severity: int) -> Part:  # noqa: ARG002
        """Raise: there are only clean digits."""
        raise DataError(f"{self.name} has no {shift!r}: it has only clean images")

    def clean(self) -> Part:
        """Return the first thousand."""
        training = load_digits()[0]
        return Part(Tensors(training.x[:1000], training.y[:1000]), ordered=True)


def open_demo(path: str, _: Preprocess | None) -> Suite:
    """Return the suite that `demo:IMAGES,SEED` or `demo:training` names."""
    if path == "training":
        return _TrainingDigits()
    try:
        images, seed = map(int, path.split(","))
    except ValueError as error:
        raise DataError(f"demo:{path}: expected demo:IMAGES,SEED, such as demo:384,0, or demo:training") from error
    return DemoDigits(images, seed)
