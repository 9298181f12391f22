"""Published parameters of each corruption at severities 1 to 5: ImageNet-C, Tiny-ImageNet-C and CIFAR-10-C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..checks import no_such

__all__ = ["SEVERITIES", "Like", "check_severity", "parameters_of"]

Like: TypeAlias = Literal["imagenet-c", "tiny-imagenet-c", "cifar-c"]
"""The benchmark that the severities are taken from."""

_Levels: TypeAlias = Mapping[str, Sequence[tuple[Any, ...]]]


def _one(*values: float) -> list[tuple[float]]:
    """Levels of a corruption with one parameter."""
    return [(value,) for value in values]


IMAGENET_C: _Levels = {
    "gaussian_noise": _one(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _one(60, 25, 12, 5, 3),
    "impulse_noise": _one(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)],
    "brightness": _one(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _one(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": [(1.25 * c, 0.01, 0.0) for c in (0.05, 0.065, 0.085, 0.1, 0.12)],
    "pixelate": _one(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _one(25, 18, 15, 10, 7),
    "speckle_noise": _one(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _one(1, 2, 3, 4, 6),
    "spatter": [
        (0.65, 0.3, 4, 0.69, 0.6, "water"),
        (0.65, 0.3, 3, 0.68, 0.6, "water"),
        (0.65, 0.3, 2, 0.68, 0.5, "water"),
        (0.65, 0.3, 1, 0.65, 1.5, "mud"),
        (0.67, 0.4, 1, 0.65, 1.5, "mud"),
    ],
    "saturate": [(0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)],
}

TINY_IMAGENET_C: _Levels = {
    "gaussian_noise": _one(0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": _one(250, 100, 50, 30, 15),
    "impulse_noise": _one(0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": [(0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)],
    "glass_blur": [(0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)],
    "motion_blur": [(10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)],
    "zoom_blur": [(furthest, 0.01) for furthest in (1.06, 1.11, 1.16, 1.21, 1.26)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ],
    "frost": [(1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)],
    "fog": [(0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)],
    "brightness": _one(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _one(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": [(0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)],
    "pixelate": _one(0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": _one(65, 58, 50, 40, 25),
    "speckle_noise": _one(0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": _one(0.5, 0.75, 1, 1.25, 1.5),
    "spatter": [
        (0.62, 0.1, 0.7, 0.7, 0.6, "water"),
        (0.65, 0.1, 0.8, 0.7, 0.6, "water"),
        (0.65, 0.3, 1, 0.69, 0.6, "water"),
        (0.65, 0.1, 0.7, 0.68, 0.6, "mud"),
        (0.65, 0.1, 0.5, 0.67, 0.6, "mud"),
    ],
    "saturate": [(0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (30.0, 0.2)],
}

CIFAR_C: _Levels = {
    "gaussian_noise": _one(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _one(500, 250, 100, 75, 50),
    "impulse_noise": _one(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "glass_blur": [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [(furthest, 0.01) for furthest in (1.06, 1.11, 1.16, 1.21, 1.26)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": _one(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": _one(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": [(0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)],
    "pixelate": _one(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _one(80, 65, 58, 50, 40),
    "speckle_noise": _one(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _one(0.4, 0.6, 0.7, 0.8, 1),
    "spatter": [
        (0.62, 0.1, 0.7, 0.7, 0.5, "water"),
        (0.65, 0.1, 0.8, 0.7, 0.5, "water"),
        (0.65, 0.3, 1, 0.69, 0.5, "water"),
        (0.65, 0.1, 0.7, 0.69, 0.6, "mud"),
        (0.65, 0.1, 0.5, 0.68, 0.6, "mud"),
    ],
    "saturate": [(0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)],
}

SEVERITIES: dict[Like, _Levels] = {"imagenet-c": IMAGENET_C, "tiny-imagenet-c": TINY_IMAGENET_C, "cifar-c": CIFAR_C}
"""For each corruption, one tuple of arguments per severity, in the order of the function's parameters."""


def check_severity(severity: int) -> None:
    """Raise unless the severity is an integer from 1 to 5."""
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity={severity}: expected 1 to 5")


def parameters_of(name: str, severity: int, like: Like) -> tuple[Any, ...]:
    """Return the arguments of a corruption at a severity."""
    if name not in IMAGENET_C:
        raise ValueError(no_such("corruption", name, IMAGENET_C))
    check_severity(severity)
    if like not in SEVERITIES:
        raise ValueError(f"like={like!r}: expected one of {', '.join(SEVERITIES)}")
    return SEVERITIES[like][name][severity - 1]
