"""Who carries out the jobs of a sweep: this process, processes of this machine, or a Ray cluster (`on_ray`).

    results = carry_out(Processes(4), work, {"first": …, "second": …}, on_event)

A job that fails does not stop the others. A worker that is lost, killed or out of memory for example, is replaced, and
its job starts again, which means that it resumes from its files.
"""

from __future__ import annotations

import pickle
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

import torch

from ..parts.world import ALONE, World

__all__ = [
    *("ATTEMPTS", "Event", "Here", "LostError", "OnEvent", "Outcome", "Report", "SweepError", "Workers", "carry_out"),
    *("carried_out", "lost", "packed", "unpacked"),
]

J = TypeVar("J")
R = TypeVar("R")

ATTEMPTS = 4
"""How often a job starts, if its workers are lost."""

Report: TypeAlias = Callable[[int, str], None]
"""What a job calls to report the batches done so far, and a note."""


class LostError(RuntimeError):
    """The workers of a job were lost, again and again."""


class SweepError(RuntimeError):
    """Some jobs of a sweep failed."""


@dataclass(frozen=True)
class Event:
    """What happens to a job: it starts, advances, loses its worker, ends; or it waits for a machine that can run it."""

    kind: Literal["started", "progress", "lost", "done", "failed", "waiting"]
    index: int
    note: str = ""
    done: int = 0
    """The batches so far."""
    value: Any = None


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What became of a job: its value, or the error that it raised."""

    index: int
    value: R | None = None
    error: BaseException | None = None


OnEvent: TypeAlias = Callable[[Event], None]


class Workers(ABC):
    """Carries out jobs."""

    here = True
    """Whether jobs run on this machine, with its devices."""
    parallel = True
    """Whether several jobs run at the same time."""

    @abstractmethod
    def map(
        self, work: Callable[[J, Report], R], jobs: Sequence[J], on_event: OnEvent
    ) -> Generator[Outcome[R], None, None]:
        """Yield the outcome of `work(job, report)` for each job, in the order in which they end.

        Where they run elsewhere, `work`, jobs and values are pickled. When the iterator is closed, or by Ctrl-C, what
        runs is stopped.
        """


class Here(Workers):
    """Jobs run in this process, one after another.

    Several ranks carry out the same jobs. An error that not all of them have raised ends the sweep: a rank that went on
    to the next job would talk to ranks that are still in the last one.
    """

    parallel = False

    def __init__(self, world: World = ALONE) -> None:
        self.world = world

    def map(
        self, work: Callable[[J, Report], R], jobs: Sequence[J], on_event: OnEvent
    ) -> Generator[Outcome[R], None, None]:
        """Yield the outcome of each job, in their order."""
        for index, job in enumerate(jobs):
            on_event(Event("started", index))

            def report(done: int, note: str, index: int = index) -> None:
                on_event(Event("progress", index, note, done))

            try:
                outcome = Outcome(index, work(job, report))
            except Exception as error:
                if not self.world.agreed(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they may hold memory of a GPU
                outcome = Outcome(index, error=_plain(error))
            yield outcome


def carry_out(
    workers: Workers,
    work: Callable[[J, Report], R],
    jobs: Mapping[str, J],
    on_event: OnEvent = lambda _: None,
    check: Callable[[J], object] = lambda _: None,
) -> dict[str, R]:
    """Carry out all jobs; return their values by name. If some fail, raise an error that names them, at the end.

    `check` is called with each job that is done, at once, so that a cluster does not work in vain where it raises.
    """
    names = [*jobs]
    values: dict[str, R] = {}
    failed: dict[str, BaseException] = {}
    with closing(workers.map(work, [*jobs.values()], on_event)) as outcomes:
        for outcome in outcomes:
            name = names[outcome.index]
            if outcome.error is not None:
                failed[name] = outcome.error
                on_event(Event("failed", outcome.index, str(outcome.error)))
            else:
                values[name] = outcome.value  # type: ignore[assignment]
                check(jobs[name])
                on_event(Event("done", outcome.index, value=outcome.value))
    if failed:
        _raise(failed, len(jobs))
    return {name: values[name] for name in names}


def _raise(failed: Mapping[str, BaseException], total: int) -> NoReturn:
    """Raise the error of the only job, or one that names all failed jobs."""
    first = next(iter(failed.values()))
    if total == 1:
        raise first
    reasons = "; ".join(f"{name}: {str(error) or repr(error)}" for name, error in failed.items())
    raise SweepError(f"{len(failed)} of {total} runs failed, the others are done. {reasons}") from first


# What workers elsewhere have in common ----------------------------------------------------------------------------


def packed(work: Callable[[J, Report], R], job: J) -> bytes:
    """Return a job as bytes."""
    return pickle.dumps((work, job))


def carried_out(content: bytes, report: Report) -> bytes:
    """Carry out a packed job in a worker; return its value or error as bytes."""
    try:
        work, job = pickle.loads(content)  # noqa: S301 - from our own driver
        return pickle.dumps((work(job, _throttled(report)), None, ""))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            plain = pickle.dumps((None, _plain(error), trace))
            pickle.loads(plain)  # noqa: S301 - some errors cannot be read back
        except Exception:
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
        return plain


def _plain(error: Exception) -> Exception:
    """Say what to do where a GPU is full; torch's own message is about its allocator."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    return MemoryError(
        "the GPU is out of memory: let fewer runs share it (--processes), or use a smaller --batch-size; the same "
        "command resumes"
    )


def unpacked(index: int, content: bytes) -> Outcome[Any]:
    """Return the outcome that `carried_out` has packed."""
    value, error, trace = pickle.loads(content)  # noqa: S301 - from our own worker
    if error is not None:
        error.__cause__ = RuntimeError(f"in the worker:\n{trace}")
    return Outcome(index, value, error)


def lost(index: int, attempt: int, reason: str, on_event: OnEvent) -> Outcome[Any] | None:
    """Report that a worker was lost; return the job's outcome if that was its last attempt."""
    if attempt < ATTEMPTS:
        on_event(
            Event("lost", index, f"its worker was lost ({reason}); attempt {attempt + 1} of {ATTEMPTS} resumes it")
        )
        return None
    return Outcome(
        index,
        error=LostError(
            f"its worker was lost {attempt} times (the last time: {reason}). If it was out of memory, let fewer jobs "
            "run at a time; the same command resumes it"
        ),
    )


def _throttled(report: Report, seconds: float = 0.5) -> Report:
    """Return the same function, called at most twice a second."""
    last = 0.0

    def throttled(done: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            report(done, note)

    return throttled
