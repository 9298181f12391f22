"""What a recipe is, and how it is carried out.

A recipe names cases: plans, each with its place in a table or a figure. Their results are written as they come, in a
folder a case, so that a stopped recipe goes on; then they are shown in the paper's form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ..evaluate import Moment, Result, origin
from ..experiment import Run
from ..files import write_text
from ..plan import Job, Plan
from ..results import Stored, read_results
from ..tables import FORMATS
from .scales import Scale

__all__ = ["Case", "Found", "Measure", "Recipe", "Shown", "Tick", "reproduce"]

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

    @property
    def name(self) -> str:
        """Of its folder."""
        parts = [self.row, self.column, "" if self.x is None else f"{self.x:g}"]
        return re.sub(r"[^\w.+-]+", "-", " ".join(part for part in parts if part)).strip("-").lower()


@dataclass(frozen=True)
class Found:
    """What a case showed: results along a scenario, or what it measured besides, one for each method and seed."""

    case: Case
    stored: Sequence[Stored] = ()
    measured: Sequence[dict[str, Any]] = ()

    @property
    def results(self) -> list[Result]:
        """Without what they were stored with."""
        return [stored.result for stored in self.stored]

    def of(self, method: str) -> list[Result]:
        """Those of a method, by its class's name."""
        return [result for result in self.results if result.method == method]


@dataclass
class Shown:
    """A recipe's form: tables as (header, rows), and figures."""

    tables: dict[str, tuple[list[str], list[list[str]]]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of the paper."""

    name: str
    title: str
    cases: Callable[[Scale], Iterable[Case]]
    show: Callable[[Sequence[Found]], Shown]
    note: str = ""
    """What to mind: where the paper is unclear, or ours differs."""

    def plans(self, scale: Scale) -> list[Case]:
        """Its cases at a scale, each with a name of its own."""
        cases = [*self.cases(scale)]
        if len({case.name for case in cases}) != len(cases):
            raise ValueError(f"{self.name}: two cases have one name")
        return cases


def reproduce(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    command: str = "",
    on_case: Callable[[Case, int, Run], Tick] | None = None,
) -> list[Path]:
    """Measure what is not there yet, and write tables, figures and one file of numbers; returns what was written."""
    folder = out / recipe.name
    first: dict[str, Run] = {}
    found = []
    for case in recipe.plans(scale):
        run = Run(case.plan, folder / case.name, first.get(case.plan.model))
        first.setdefault(case.plan.model, run)
        found.append(_carry_out(case, run, on_case))
    written = [*_written(recipe.show(found), out, recipe.name)]
    device = torch.device(found[0].case.plan.device)
    content = {
        "recipe": recipe.name,
        "title": recipe.title,
        "scale": scale.name,
        "command": command,
        "origin": origin(device),
        "cases": [_told(each) for each in found],
    }
    numbers = out / f"{recipe.name}.json"
    write_text(numbers, json.dumps(content, indent=1) + "\n")
    return [*written, numbers]


def _carry_out(case: Case, run: Run, on_case: Callable[[Case, int, Run], Tick] | None) -> Found:
    plan, folder = case.plan, run.folder.path
    finished = [job for job in plan.jobs() if _is_done(folder, job, case)]
    if len(finished) < len([*plan.jobs()]):
        tick = on_case(case, len(finished), run) if on_case is not None else lambda _: None
        for job in plan.jobs():
            if case.measure is None:
                run.do(job, on_batch=lambda moment, score: tick(_note(moment, score)))
            elif job not in finished:
                content = {"plan": plan.as_dict(), "measured": case.measure(run, job, tick)}
                write_text(folder / _measured(job), json.dumps(content, indent=1) + "\n")
    if case.measure is None:
        jobs = [*plan.jobs()]
        return Found(case, [stored for stored in read_results([folder]) if Job(**stored.content["job"]) in jobs])
    files = (folder / _measured(job) for job in plan.jobs())
    return Found(case, measured=[json.loads(file.read_text())["measured"] for file in files])


def _measured(job: Job) -> str:
    """The file of what was measured, which is no result of `acclimate run`."""
    return f"{job.method}.{job.seed}.json"


def _note(moment: Moment, score: float) -> str:
    return f"{moment.domain}: {100 * score:.0f} %"


def _is_done(folder: Path, job: Job, case: Case) -> bool:
    file = folder / (_measured(job) if case.measure else f"{job.name}.json")
    if not file.is_file():
        return False
    content = json.loads(file.read_text())
    if case.measure is None:
        return bool(content["done"])
    if content["plan"] != case.plan.as_dict():
        raise ValueError(f"{file} was measured under another plan: choose another --out")
    return True


def _written(shown: Shown, out: Path, name: str) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for part, (header, rows) in shown.tables.items():
        for suffix, layout in ((".md", "markdown"), (".csv", "csv"), (".tex", "latex")):
            file = out / f"{name}{part and '-' + part}{suffix}"
            write_text(file, FORMATS[layout](header, rows))
            yield file
    for part, figure in shown.figures.items():
        file = out / f"{name}{part and '-' + part}.svg"
        figure.savefig(file, metadata={"Date": None})
        yield file


_KEPT = ("name", "accuracy", "ece", "forwards", "backwards", "seconds", "clean_accuracy", "kept", "gpu_memory")


def _told(found: Found) -> dict[str, Any]:
    case = found.case
    told: dict[str, Any] = {"row": case.row, "column": case.column, "x": case.x, "plan": case.plan.as_dict()}
    if found.measured:
        return {**told, "measured": list(found.measured)}
    return {**told, "results": [_summary(result) for result in found.results]}


def _summary(result: Result) -> dict[str, Any]:
    """Without the bins of each domain; they are summed."""
    whole: Mapping[str, Any] = result.as_dict()
    domains = [{name: getattr(domain, name) for name in _KEPT} for domain in result.domains]
    bins = {
        name: [sum(values) for values in zip(*(getattr(d, name) for d in result.domains), strict=True)]
        for name in ("count", "confident", "correct")
    }
    return {**{k: v for k, v in whole.items() if k != "domains"}, "bins": bins, "domains": domains}
