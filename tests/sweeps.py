"""Jobs for the tests of workers, which workers import: they die, hang or fail where a test wants."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from acclimate.bench.plan import Job, Plan
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.bench.workers import Report
from acclimate.files import AnyPath, matching, read_text

SHIFTS = ("contrast", "fog", "shot_noise")
PLAN = Plan(methods=("source", "tent", "eata"), images=32, batch_size=16, shifts=SHIFTS, source_images=32, probe="none")
OPTIONS = ["--images", "32", "--batch-size", "16", "--source-images", "32", "--probe", "none"]
OPTIONS += [word for shift in SHIFTS for word in ("--shift", shift)]
OPTIONS += [word for method in PLAN.methods for word in ("--method", method)]
VOLATILE = {"seconds", "process_memory", "images_per_second", "origin"}


def stable(content: Any) -> Any:
    """A result without what differs from run to run."""
    if isinstance(content, dict):
        return {key: stable(value) for key, value in content.items() if key not in VOLATILE}
    return [stable(value) for value in content] if isinstance(content, list) else content


def numbers_in(out: AnyPath) -> dict[str, Any]:
    return {path.name: stable(json.loads(read_text(path))) for path in matching(out, "*-seed*.json")}


def once(run: Run, job: Job, act: Callable[[Path], None], marker: Path, report: Report) -> Result:
    """Carry out a job; act in the middle of the second domain, the first time."""
    batches = count(1)

    def on_batch(batch: object, score: float) -> None:
        done = next(batches)
        report(done, "on its way")
        if done == 4 and not marker.exists():
            act(marker)

    return run.do(job, on_batch)


def die(marker: Path) -> None:
    marker.write_text("died")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(marker: Path) -> None:
    """Say on which node of a Ray cluster, then wait to be killed."""
    import ray

    marker.write_text(ray.get_runtime_context().get_node_id())
    time.sleep(600)


def disturbed(task: tuple[Run, Job, str, Path], report: Report) -> Result:
    """Do what the task says in the middle of its job."""
    run, job, act, marker = task
    return once(run, job, {"die": die, "hang": hang}[act], marker, report) if act else run.do(job)


def odd(number: int, report: Report) -> int:
    """Return a number; 1 fails, 2 fails in a way that cannot be pickled, 3 dies again and again, 5 fills the GPU."""
    if number == 1:
        raise ValueError("one is not welcome")
    if number == 2:
        raise Unpicklable("a", "b")
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of …")
    report(1, f"number {number}")
    return 10 * number


def beat(marker: Path, report: Report) -> None:
    """Write again and again, and report, until the report raises."""
    for number in range(1200):
        marker.write_text(str(number))
        report(number, "still here")
        time.sleep(0.05)


class Unpicklable(RuntimeError):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def resources(_: str, report: Report) -> tuple[dict[str, float], str | None]:
    """Return what Ray has assigned to the job, and the GPUs that it sees."""
    import ray

    return ray.get_runtime_context().get_assigned_resources(), os.environ.get("CUDA_VISIBLE_DEVICES")
