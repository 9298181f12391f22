"""Where runs are carried out: the options of `run` and `paper run`, and their progress."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import TaskID

from ..bench.plan import PlanError
from ..bench.processes import Processes
from ..bench.result import Result
from ..bench.workers import Event, Here, OnEvent, Workers
from ..files import AnyPath, RemotePath
from .terminal import progress_bars, say

On = Annotated[
    str | None,
    typer.Option(
        help="Where runs are carried out: here, one after another; processes of this machine; ray, a cluster that runs "
        "or is started here; or ray://HOST:PORT.",
        show_default="here",
    ),
]
ProcessCount = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Runs at the same time, --on processes; times are then not comparable.",
        show_default="the cores",
    ),
]
CpusPerRun = Annotated[float | None, typer.Option(min=0, help="CPUs of a run, --on ray.", show_default="1")]
GpusPerRun = Annotated[
    float | None,
    typer.Option(
        min=0, help="GPUs of a run, --on ray; 0.25 lets four runs share one.", show_default="1 with --device cuda"
    ),
]

_MOST_BARS = 16


def choose_workers(
    on: str | None, processes: int | None, cpus: float | None, gpus: float | None, device: str
) -> Workers:
    """Return the workers that the options name."""
    kind = on or ("processes" if processes is not None and processes > 1 else "here")
    ray = kind == "ray" or kind.startswith("ray://")
    if not ray and kind not in ("here", "processes"):
        raise PlanError(f"--on {on}: expected here, processes, ray or ray://HOST:PORT")
    if not ray and (cpus is not None or gpus is not None):
        raise PlanError("--cpus-per-run and --gpus-per-run are for --on ray")
    if kind != "processes" and processes is not None and processes > 1:
        raise PlanError(f"--processes is for --on processes, not for --on {on}")
    if kind == "processes":
        return Processes(processes or os.cpu_count() or 1)
    if not ray:
        return Here()
    from ..bench.on_ray import OnRay

    if device.startswith("cuda:"):
        raise PlanError(f"--device {device}: Ray chooses the GPU of a run, so that it is --device cuda")
    usual = 1 if device == "cuda" else 0
    return OnRay(None if kind == "ray" else kind, 1 if cpus is None else cpus, usual if gpus is None else gpus)


def say_without_locks(out: AnyPath) -> None:
    """Say that nobody keeps a second command from a folder in storage."""
    if isinstance(out, RemotePath):
        say(f"{escape(str(out))} has no locks: start one command on it at a time")


@dataclass(frozen=True)
class Bar:
    """A job's name, its number of batches, and a note before the first one."""

    name: str
    total: int | None = None
    note: str = ""


@contextmanager
def job_bars(bars: Sequence[Bar]) -> Iterator[OnEvent]:
    """Show one progress bar per job; of many jobs only those that run, and one for all."""
    many, shown = len(bars) > _MOST_BARS, dict[int, TaskID]()
    with progress_bars() as progress:
        whole = progress.add_task("all", total=len(bars), note="", visible=many)

        def show(event: Event) -> None:
            bar = bars[event.index]
            if event.kind in ("lost", "waiting", "failed"):
                name = f"{escape(bar.name)}: " if event.kind != "waiting" else ""
                say(f"[yellow]{name}{escape(event.note)}[/]")
            if event.kind == "waiting":
                return
            if event.index not in shown:
                shown[event.index] = progress.add_task(bar.name[:28], total=bar.total, note=bar.note)
            task = shown[event.index]
            if event.kind == "progress":
                progress.update(task, completed=event.done, note=event.note)
            if event.kind in ("done", "failed"):
                progress.advance(whole)
                progress.update(task, note=_end(event), visible=not many)
                if event.kind == "done" and bar.total is not None:
                    progress.update(task, completed=bar.total)

        yield show


def _end(event: Event) -> str:
    result = event.value
    if isinstance(result, Result) and result.domains:
        return f"{result.score_name} {100 * result.score:.1f} %"
    return event.kind
