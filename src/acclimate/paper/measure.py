"""Measure the cases of recipes: the jobs that are missing, for workers to carry out.

Each case has a folder of results, so a stopped recipe resumes. A command holds the lock of its recipes' folders, and
each worker that of the job it measures: recipes and workers may share a case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ..bench.plan import Job, PlanError
from ..bench.result import Result
from ..bench.run import Run
from ..bench.stream import SampledDomain
from ..bench.sweep import do_job
from ..bench.workers import OnEvent, Report, Workers, carry_out
from ..data.corruptions import BENCHMARK
from ..files import AnyPath
from ..methods import METHODS
from ..online.guard import Guard
from .numbers import Case, Measure, Recipe, Tick
from .scales import Scale

__all__ = ["Task", "longest_first", "measure", "measure_all", "missing", "runs_of", "with_results"]


@dataclass(frozen=True)
class Task:
    """A job of a case."""

    study: Measure | None
    run: Run
    job: Job
    cost: float


def runs_of(recipes: Iterable[Recipe], scale: Scale, out: AnyPath) -> list[tuple[Case, Run]]:
    """Return all cases of some recipes, each with its run; runs of one network share it."""
    first: dict[str, Run] = {}
    runs = []
    for recipe in recipes:
        for case in recipe.plans(scale):
            run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
            first.setdefault(case.plan.model, run)
            runs.append((case, run))
    return runs


def missing(runs: Sequence[tuple[Case, Run]], scale: Scale) -> dict[str, Task]:
    """Return the jobs that are due and not done, by name; those of a case that recipes share come once."""
    due = [(case, run, job) for case, run in runs for job in case.due(scale)]
    return {
        f"{case.name} {job.name}, {run.folder.path}": Task(case.measure, run, job, _cost(case, job, scale))
        for case, run, job in due
        if (result := run.folder.read(job)) is None or not result.done
    }


def longest_first(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return the same tasks in the order in which workers that run at the same time are done early."""
    return dict(sorted(tasks.items(), key=lambda each: each[1].cost, reverse=True))


def _cost(case: Case, job: Job, scale: Scale) -> float:
    images = len(case.plan.shifts or BENCHMARK) * (case.plan.images or scale.clean)
    return case.times * images * sum(METHODS[job.method].cost)


def measure_all(tasks: Mapping[str, Task], workers: Workers, on_event: OnEvent = lambda _: None) -> None:
    """Carry out tasks. A failed one does not stop the others; the error at the end names all that failed."""
    carry_out(workers, measure, tasks, on_event, check=lambda task: task.run.folder.seen(task.job))


def measure(task: Task, report: Report) -> Result:
    """Carry out a job of a case, or resume it; return its result."""
    if task.study is None:
        return do_job((task.run, task.job), report)
    ticks = count(1)
    return _study(task.study, task.run, task.job, lambda note: report(next(ticks), note))


def with_results(case_and_run: tuple[Case, Run]) -> Case:
    """Return a case with the results that are done."""
    case, run = case_and_run
    found = [run.folder.read(job) for job in case.plan.jobs()]
    return replace(case, results=[result for result in found if result is not None and result.done])


def _study(study: Measure, run: Run, job: Job, tick: Tick) -> Result:
    (domain,) = (domain for domain in run.scenario(job.seed).domains if isinstance(domain, SampledDomain))
    with run.folder.writing(job, run.patience):
        adapter = run.adapter(job)
        if isinstance(adapter, Guard):
            raise PlanError("studies look inside a method: they run without a guard")
        result = run.start(job, adapter)
        try:
            result.measured, result.done = study(adapter, domain, tick), True
            run.folder.write(job, adapter, result)
        finally:
            adapter.reset()  # the next job starts from the source network
            del adapter
            run.free()
    return result
