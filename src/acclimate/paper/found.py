"""What a recipe asks, what was found, and the form that it is shown in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..bench.plan import Job, Plan
from ..bench.result import Result
from ..bench.run import Run
from .scales import Scale

__all__ = ["Case", "Found", "Measure", "Shown", "Tick"]

Tick = Callable[[str], None]
"""Told after each batch, with a note."""
Measure = Callable[[Run, Job, Tick], dict[str, Any]]
"""What a case measures for a method and a seed, where it is not accuracy along a scenario: plain data."""


@dataclass(frozen=True)
class Case:
    """A plan and its place: a row (a line of a figure), a column (a group of them), a number on an axis."""

    row: str
    plan: Plan
    column: str = ""
    x: float | None = None
    measure: Measure | None = None
    times: float = 1
    """About how often it goes through its images."""
    home: str = ""
    """Whose folder it is in, where several recipes have it; else its own recipe's."""

    @property
    def name(self) -> str:
        """Of its folder."""
        parts = [self.row, self.column, "" if self.x is None else f"{self.x:g}"]
        return re.sub(r"[^\w.+-]+", "-", " ".join(part for part in parts if part)).strip("-").lower()

    def due(self, scale: Scale) -> list[Job]:
        """What is to be measured of it, if it is not there."""
        if scale.within and self.plan.model not in [scale.networks[kind] for kind in scale.within]:
            return []
        return [job for job in self.plan.jobs() if not scale.only or job.method in scale.only]

    def folder(self, out: Path, recipe: str) -> Path:
        """Where its results go."""
        return out / (self.home or recipe) / self.name


@dataclass(frozen=True)
class Found:
    """What a case showed, for each method and seed: results along a scenario, or what it measured besides."""

    case: Case
    results: Sequence[Result] = ()
    measured: Sequence[dict[str, Any]] = ()
    """Each with its method, its seed, and the `origin` and the `weights` of the network it was `measured` with."""

    @property
    def values(self) -> list[dict[str, Any]]:
        """What was measured, alone."""
        return [each["measured"] for each in self.measured]

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Where, with which versions and at which commit it was measured."""
        return [*(result.origin for result in self.results), *(each["origin"] for each in self.measured)]

    @property
    def weights(self) -> set[str]:
        """Fingerprints of the networks that it ran on."""
        told = {str(result.weights) for result in self.results}
        return told | {each["weights"] for each in self.measured}


@dataclass
class Shown:
    """A recipe's form: tables as (header, rows), and figures."""

    tables: dict[str, tuple[list[str], list[list[str]]]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
