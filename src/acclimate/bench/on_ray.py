"""Workers of a Ray cluster: one that runs, or one that is started on this machine for the time of a sweep.

Each job is a task with resources of its own. Results and data must be where every machine finds them: a shared file
system, or storage such as `s3://`. acclimate must be installed on every machine, in the same version.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..extras import install_command
from .plan import PlanError
from .workers import Event, J, OnEvent, Outcome, R, Report, Workers, carried_out, lost, packed, unpacked

__all__ = ["OnRay"]


@dataclass(frozen=True)
class OnRay(Workers):
    """Jobs run on a Ray cluster, as many at a time as its resources allow.

    Args:
        address: a cluster's, `ray://HOST:PORT`; None for `RAY_ADDRESS`, one that runs here, or one that is started.
        cpus: CPUs of a job.
        gpus: GPUs of a job. A fraction lets several jobs share one.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    here = False

    def map(
        self, work: Callable[[J, Report], R], jobs: Sequence[J], on_event: OnEvent
    ) -> Generator[Outcome[R], None, None]:
        """Yield the outcomes as the jobs end."""
        with _connected(self.address) as ray:
            yield from _Sweep(ray, self, on_event).map([packed(work, job) for job in jobs])


class _Sweep:
    def __init__(self, ray: Any, workers: OnRay, on_event: OnEvent) -> None:
        self.ray, self.workers, self.on_event = ray, workers, on_event
        self._asked: Any = None  # an answer of the reports that is still to come
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )  # what other nodes report must not be lost with one of them
        self.reports = ray.remote(_Reports).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        self.task = ray.remote(_task).options(
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
            max_retries=0,  # retries are counted and reported here
        )

    def map(self, contents: Sequence[bytes]) -> Generator[Outcome[Any], None, None]:
        ray = self.ray
        self._check_resources(len(contents))
        running: dict[Any, tuple[int, int]] = {}
        try:
            for index, content in enumerate(contents):
                running[self._start(index, content)] = index, 1
            while running:
                ended, _ = ray.wait([*running], timeout=0.5)
                self._report({index for index, _ in running.values()})
                for reference in ended:
                    index, attempt = running.pop(reference)
                    outcome = self._outcome(reference, index, attempt)
                    if outcome is None:
                        running[self._start(index, contents[index])] = index, attempt + 1
                    else:
                        yield outcome
        finally:
            ray.kill(self.reports)  # a job that cannot report ends; `ray.cancel` aborts a driver whose job just ended

    def _start(self, index: int, content: bytes) -> Any:
        return self.task.remote(content, index, self.reports, str(Path.cwd()), __version__, self.workers.cpus)

    def _outcome(self, reference: Any, index: int, attempt: int) -> Outcome[Any] | None:
        """Return what became of a job; None if it must start again."""
        errors = self.ray.exceptions
        try:
            return unpacked(index, self.ray.get(reference))
        except errors.RayTaskError as error:  # outside of the job's own code: acclimate is missing, or another version
            return Outcome(index, error=error.cause if isinstance(error.cause, PlanError) else RuntimeError(str(error)))
        except errors.RayError as error:
            reason = type(error).__name__.removesuffix("Error")
            return lost(index, attempt, reason, self.on_event)

    def _report(self, running: set[int]) -> None:
        """Pass on what the jobs have reported. A late answer is waited for again: only it has what it took."""
        if self._asked is None:
            self._asked = self.reports.take.remote()
        try:
            reported = self.ray.get(self._asked, timeout=5)
        except self.ray.exceptions.GetTimeoutError:
            return
        except self.ray.exceptions.RayError:  # the reports are being restarted
            reported = []
        self._asked = None
        for index, done, note in reported:
            if index in running:
                self.on_event(Event("progress", index, note, done) if note else Event("started", index))

    def _check_resources(self, count: int) -> None:
        """Say that no machine of the cluster can carry out a job, for now."""
        needed = {"CPU": self.workers.cpus, "GPU": self.workers.gpus}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if count and not any(all(node.get(name, 0) >= most for name, most in needed.items()) for node in nodes):
            have = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes)
            self.on_event(
                Event(
                    "waiting",
                    0,
                    f"no machine of the Ray cluster has {needed['CPU']:g} CPUs and {needed['GPU']:g} GPUs for a run "
                    f"(they have {have}): waiting for one to join",
                )
            )


class _Reports:
    """What running jobs report, until the driver takes it."""

    def __init__(self) -> None:
        self.reported: deque[tuple[int, int, str]] = deque()

    def report(self, index: int, done: int, note: str) -> None:
        self.reported.append((index, done, note))

    def take(self) -> list[tuple[int, int, str]]:
        taken, self.reported = [*self.reported], deque()
        return taken


def _task(content: bytes, index: int, reports: Any, folder: str, version: str, cpus: float) -> bytes:
    """Carry out a packed job in a worker; relative paths mean what they mean to the driver."""
    if version != __version__:
        raise PlanError(f"a machine of the Ray cluster has acclimate {__version__}, and this one {version}")
    if Path(folder).is_dir():
        os.chdir(folder)
    torch.set_num_threads(max(1, int(cpus)))
    _report(reports, index, 0, "")
    return carried_out(content, lambda done, note: _report(reports, index, done, note))


def _report(reports: Any, index: int, done: int, note: str) -> None:
    """Report to the driver; raise if it no longer listens, which ends the job."""
    import ray

    with suppress(ray.exceptions.ActorUnavailableError):  # it is being restarted
        ray.get(reports.report.remote(index, done, note))


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Give Ray, connected to a cluster; leave a connection that was there before."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its future default, of which Ray warns
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            import ray.util.scheduling_strategies
    except ImportError as error:
        raise PlanError(f"--on ray needs Ray: {install_command('ray')}") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            remote = address is not None and address.startswith("ray://")
            local: dict[str, Any] = {} if remote else {"include_dashboard": False}
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise PlanError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
