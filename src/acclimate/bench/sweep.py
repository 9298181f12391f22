"""All jobs of some runs, carried out by workers: here, in processes, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from .plan import Job
from .result import Result
from .run import Run
from .workers import OnEvent, Report, Workers, carry_out

__all__ = ["do_job", "sweep"]


def sweep(runs: Sequence[Run], workers: Workers, on_event: OnEvent = lambda _: None) -> list[Result]:
    """Carry out all jobs of some runs, or resume them; return their results. A failed job does not stop the others."""
    tasks = {f"{job.name} in {run.folder.path}": (run, job) for run in runs for job in run.plan.jobs()}
    carry_out(workers, do_job, tasks, on_event, check=_check)
    return [_complete(*task) for task in tasks.values()]


def do_job(task: tuple[Run, Job], report: Report) -> Result:
    """Carry out a job of a run, or resume it, and report its progress."""
    (run, job), batches = task, count(1)
    return run.do(job, lambda batch, score: report(next(batches), f"{batch.domain}: {100 * score:.0f} %"))


def _check(task: tuple[Run, Job]) -> None:
    """Raise if the result of a job is not seen here."""
    run, job = task
    with run.world.together():
        run.folder.seen(job)


def _complete(run: Run, job: Job) -> Result:
    with run.world.together():
        return run.folder.complete(job)
