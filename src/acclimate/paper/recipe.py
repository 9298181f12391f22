"""What a recipe is, and how it is carried out.

A recipe names cases: plans, each with its place in a table or a figure. Their results are written as they come, in a
folder a case, so that a stopped recipe goes on; then they are shown in the paper's form.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ..data.corruptions import BENCHMARK
from ..evaluate import Result, origin
from ..experiment import Run
from ..files import write_text
from ..methods import METHODS, Source
from ..plan import Job, Plan, PlanError
from ..results import Stored
from ..tables import FORMATS
from .published import paper_notes, paper_table_of
from .scales import Scale

__all__ = ["Case", "Found", "Measure", "Recipe", "Shown", "Tick", "reproduce", "side_by_side"]

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
        return [job for job in self.plan.jobs() if not scale.only or job.method in scale.only]

    def folder(self, out: Path, recipe: str) -> Path:
        """Where its results go."""
        return out / (self.home or recipe) / self.name


@dataclass(frozen=True)
class Found:
    """What a case showed, for each method and seed: results along a scenario, or what it measured besides."""

    case: Case
    stored: Sequence[Stored] = ()
    measured: Sequence[dict[str, Any]] = ()
    """Each with the `origin` and the `weights` of the network that it was `measured` with."""

    @property
    def results(self) -> list[Result]:
        """Without what they were stored with."""
        return [stored.result for stored in self.stored]

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
        told = {str(stored.content["fingerprint"]["weights"]) for stored in self.stored}
        return told | {each["weights"] for each in self.measured}


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
    first: dict[str, Run] = {}
    found: list[Found] = []
    for case in recipe.plans(scale):
        run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
        first.setdefault(case.plan.model, run)
        found.append(_carry_out(case, run, case.due(scale), on_case))
    found = [each for each in found if each.stored or each.measured]
    if not found:
        raise PlanError(f"{recipe.name} has nothing to show: it does not run {', '.join(scale.only)}")
    for model in first:
        if len(set().union(*(each.weights for each in found if each.case.plan.model == model))) > 1:
            raise PlanError(f"{out} has results of two networks that are both called {model}: choose another --out")
    shown = recipe.show(found)
    if published := paper_table_of(recipe.name):
        shown.tables["paper"] = published
    written = [*_written(shown, out, recipe.name)]
    content = {
        "recipe": recipe.name,
        "title": recipe.title,
        "scale": scale.name,
        "command": command,
        "origins": _distinct(origin for each in found for origin in each.origins),
        "cases": [_told(each) for each in found],
    }
    numbers = out / f"{recipe.name}.json"
    write_text(numbers, json.dumps(content, indent=1) + "\n")
    return [*written, numbers]


def _carry_out(case: Case, run: Run, due: Sequence[Job], on_case: Callable[[Case, int, Run], Tick] | None) -> Found:
    jobs = [*case.plan.jobs()]
    find, do = (_find_result, _do_result) if case.measure is None else (_find_measured, _do_measured)
    there: dict[Job, Any] = {job: each for job in jobs if (each := find(case, run, job)) is not None}
    if missing := [job for job in due if job not in there]:
        run.check()
        tick = (lambda _: None) if on_case is None else on_case(case, len(missing), run)
        there |= {job: do(case, run, job, tick) for job in missing}
    found = [there[job] for job in jobs if job in there]
    return Found(case, found) if case.measure is None else Found(case, measured=found)


def side_by_side(
    recipes: Iterable[Recipe],
    scale: Scale,
    out: Path,
    processes: int,
    on_job: Callable[[int], None] = lambda _: None,
) -> None:
    """Measure what recipes need, each method and seed of each case in a process; those that take longest begin.

    `on_job` is told their number as each is done. Times are no measure of a method then.
    """
    jobs: dict[tuple[Path, Job], tuple[float, str, str]] = {}  # two recipes may share a case
    for recipe in recipes:
        for case in recipe.plans(scale):
            for job in case.due(scale):
                domains = len(case.plan.shifts or BENCHMARK)
                cost = case.times * domains * sum(METHODS[job.method].cost) * (case.plan.images or scale.clean)
                jobs.setdefault((case.folder(out, recipe.name), job), (cost, recipe.name, case.name))
    longest_first = sorted(jobs.items(), key=lambda each: each[1][0], reverse=True)
    threads = max(1, (os.cpu_count() or 1) // processes)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (threads,))
    try:
        waiting = [pool.submit(_one, recipe, scale, out, name, job) for (_, job), (_, recipe, name) in longest_first]
        for done in as_completed(waiting):
            done.result()
            on_job(len(waiting))
    finally:
        pool.shutdown(cancel_futures=True)


def _one(recipe: str, scale: Scale, out: Path, name: str, job: Job) -> None:
    """In a process of its own."""
    from .recipes import RECIPES

    (case,) = (case for case in RECIPES[recipe].plans(scale) if case.name == name)
    alone = replace(case, plan=replace(case.plan, methods=(job.method,), seeds=(job.seed,)))
    _carry_out(alone, Run(case.plan, case.folder(out, recipe)), [job], None)


def _find_result(_: Case, run: Run, job: Job) -> Stored | None:
    result, state = run.folder.find(job)
    return None if result is None or state is not None else Stored.read(run.folder.path / f"{job.name}.json")


def _do_result(case: Case, run: Run, job: Job, tick: Tick) -> Stored:
    run.do(job, on_batch=lambda moment, score: tick(f"{moment.domain}: {100 * score:.0f} %"))
    stored = _find_result(case, run, job)
    assert stored is not None  # noqa: S101
    return stored


def _find_measured(case: Case, run: Run, job: Job) -> dict[str, Any] | None:
    file = run.folder.path / _measured(job)
    if not file.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        same = content["settings"] == _settings(case.plan, job)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is damaged ({error}): remove it, and it is measured anew") from error
    if not same:
        raise PlanError(f"{file} was measured under another plan: choose another --out")
    return content


def _do_measured(case: Case, run: Run, job: Job, tick: Tick) -> dict[str, Any]:
    assert case.measure is not None  # noqa: S101
    content = {
        "settings": _settings(case.plan, job),
        "weights": Source(run.network.model).fingerprint(),
        "origin": origin(torch.device(case.plan.device)),
        "measured": case.measure(run, job, tick),
    }
    write_text(run.folder.path / _measured(job), json.dumps(content, indent=1) + "\n")
    return content


def _settings(plan: Plan, job: Job) -> dict[str, Any]:
    """What a number depends on besides the network's weights."""
    told = {"model": plan.model, **plan.protocol, **plan.arguments(job)}
    return dict(json.loads(json.dumps(told)))


def _measured(job: Job) -> str:
    """The file of what was measured, which is no result of `acclimate run`."""
    return f"{job.method}.{job.seed}.json"


def _written(shown: Shown, out: Path, name: str) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for part, (header, rows) in shown.tables.items():
        for suffix, layout in ((".md", "markdown"), (".csv", "csv"), (".tex", "latex")):
            file = out / f"{name}{part and '-' + part}{suffix}"
            write_text(file, FORMATS[layout](header, rows) + (_legend(rows) if layout == "markdown" else ""))
            yield file
    for part, figure in shown.figures.items():
        file = out / f"{name}{part and '-' + part}.svg"
        figure.savefig(file, metadata={"Date": None})
        yield file


def _legend(rows: Sequence[Sequence[str]]) -> str:
    """What the marks of the paper's rows mean."""
    told = [f"{mark} {note}" for mark, note in paper_notes().items() if any(f"(paper{mark})" in row[0] for row in rows)]
    return f"\n{'; '.join(told)}.\n" if told else ""


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(told) for told in dict.fromkeys(json.dumps(value) for value in values)]


_KEPT = ("name", "accuracy", "ece", "forwards", "backwards", "seconds", "clean_accuracy", "kept", "gpu_memory")


def _told(found: Found) -> dict[str, Any]:
    case = found.case
    told: dict[str, Any] = {"row": case.row, "column": case.column, "x": case.x, "plan": case.plan.as_dict()}
    if found.measured:
        return {**told, "measured": [{k: v for k, v in each.items() if k != "settings"} for each in found.measured]}
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
