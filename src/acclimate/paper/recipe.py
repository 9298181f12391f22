"""What a recipe is, and how it is carried out.

A recipe names cases: plans, each with its place in a table or a figure. Their results are written as they come, in a
folder a case, so that a stopped recipe goes on; then they are shown in the paper's form.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..bench.plan import Job, Plan, PlanError
from ..bench.provenance import origin
from ..bench.result import Result
from ..bench.run import Run
from ..data.corruptions import BENCHMARK
from ..files import write_text
from ..methods import METHODS, Source
from .found import Case, Found, Measure, Shown, Tick
from .numbers import write
from .scales import Scale

__all__ = ["Case", "Found", "Measure", "Recipe", "Shown", "Tick", "reproduce", "side_by_side"]


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
    found = [each for each in found if each.results or each.measured]
    if not found:
        asked = ", ".join([*scale.only, *scale.within])
        raise PlanError(f"{recipe.name} has nothing to show: it does not run {asked}")
    return write(recipe, found, out, scale=scale.name, command=command)


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
    pool = ProcessPoolExecutor(processes, spawn, _begin, (threads,))
    try:
        waiting = [pool.submit(_one, recipe, scale, out, name, job) for (_, job), (_, recipe, name) in longest_first]
        for done in as_completed(waiting):
            done.result()
            on_job(len(waiting))
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """A process beside others: no more threads than its share, and no compilers beside it."""
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _one(recipe: str, scale: Scale, out: Path, name: str, job: Job) -> None:
    """In a process of its own."""
    from .recipes import RECIPES

    (case,) = (case for case in RECIPES[recipe].plans(scale) if case.name == name)
    alone = replace(case, plan=replace(case.plan, methods=(job.method,), seeds=(job.seed,)))
    _carry_out(alone, Run(case.plan, case.folder(out, recipe)), [job], None)


def _find_result(_: Case, run: Run, job: Job) -> Result | None:
    result, _state = run.folder.find(job)
    return result if result is not None and result.done else None


def _do_result(_: Case, run: Run, job: Job, tick: Tick) -> Result:
    return run.do(job, on_batch=lambda batch, score: tick(f"{batch.domain}: {100 * score:.0f} %"))


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
    return {**asdict(job), **content}


def _do_measured(case: Case, run: Run, job: Job, tick: Tick) -> dict[str, Any]:
    assert case.measure is not None  # noqa: S101
    content = {
        **asdict(job),
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
