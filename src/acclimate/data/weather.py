"""Weather added to clean street scenes: the corruptions fog and snow, and night and rain.

dark = weather(x, "night", severity=5, generator=g)      # x: (B, 3, H, W) in [0, 1]
"""

from __future__ import annotations

from torch import Generator, Tensor

from .corruptions import corrupt
from .filters import streak
from .severities import check_severity
from .textures import grey, noise_like, tint

__all__ = ["WEATHER", "weather"]

WEATHER = ("fog", "night", "rain", "snow")
"""The four conditions of ACDC, in its order."""


def weather(x: Tensor, name: str, severity: int, generator: Generator) -> Tensor:
    """Return a batch under one of the four conditions, or under any other corruption."""
    added = {"night": _night, "rain": _rain}
    if name not in added:
        return corrupt(x, name, severity, generator)
    check_severity(severity)
    return added[name](x, severity - 1, generator).clamp(0, 1)


def _night(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Darken, shift towards blue, and add sensor noise."""
    gamma = (1.2, 1.4, 1.6, 1.9, 2.2)[level]
    light = (0.7, 0.55, 0.42, 0.32, 0.25)[level]
    noise = (0.01, 0.015, 0.02, 0.03, 0.04)[level]
    return light * tint(x, (200, 215, 255)) * x**gamma + noise * noise_like(x, generator)


def _rain(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Make the scene greyer and darker, and add bright streaks."""
    drops = (2.6, 2.4, 2.2, 2.05, 1.9)[level]  # threshold in standard deviations: lower means more drops
    length = (8, 10, 12, 14, 16)[level]
    haze = (0.1, 0.2, 0.3, 0.4, 0.5)[level]
    falling = (noise_like(x[:, :1], generator) > drops).to(x.dtype)
    streaks = streak(falling, length, length / 2, (-105, -75), generator)
    dull = (1 - haze) * x + haze * (0.5 * grey(x) + 0.2)
    return (1 - 0.08 * (level + 1)) * dull + 2.5 * streaks
