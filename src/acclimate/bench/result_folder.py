"""A folder of results: one file per method and seed, written after each domain, with the state to resume from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..core.adapter import Adapter
from ..files import write_text
from ..online.guard import Guard
from .locks import locked
from .plan import Job, Plan, PlanError
from .result import Result

__all__ = ["ResultFolder", "read_plan", "read_results"]


def read_results(folders: Sequence[Path]) -> list[Result]:
    """Read every finished result in these folders; each appears once."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} with results")
        found += [_read(path) for path in sorted(folder.glob("*-seed*.json"))]
    finished = {(result.setting, result.seed): result for result in found if result.done and result.domains}
    if not finished:
        raise FileNotFoundError(f"no finished result in {', '.join(map(str, folders))}: `acclimate run` writes them")
    return list(finished.values())


def read_plan(folder: Path) -> Plan | None:
    """Read the plan of a folder's results; None if there is none."""
    file = folder / "plan.json"
    try:
        return Plan.from_dict(json.loads(file.read_text())) if file.is_file() else None
    except ValueError as error:
        raise PlanError(f"{file} is damaged ({error}): remove it, or choose another --out") from error


def _read(path: Path) -> Result:
    content: Any = None
    try:
        content = json.loads(path.read_text())
        return Result.from_dict(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(content, dict) and "fingerprint" in content:
            raise PlanError(
                f"{path} was written by an earlier version, which can still read it: use that one, or another folder"
            ) from error
        raise PlanError(f"{path} is damaged, or not a result ({error}): remove it to run it again") from error


class ResultFolder:
    """The folder of a plan's results. It holds one protocol on one network."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self._check_plan()

    def _check_plan(self) -> None:
        before = read_plan(self.path)
        if before is None:
            return
        found, mine = before.as_dict(), self.plan.as_dict()
        keys = ("model", "preset", *before.protocol, *self.plan.protocol)
        if differs := [key for key in keys if found[key] != mine[key]]:
            raise PlanError(
                f"{self.path} holds results of another plan ({differs[0]} was {found[differs[0]]!r}, and is "
                f"{mine[differs[0]]!r} now): choose another --out"
            )

    def check_writable(self) -> None:
        """Raise if nothing can be written there; leave nothing behind."""
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        try:
            with TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise PlanError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error

    @contextmanager
    def writing(self, job: Job) -> Iterator[None]:
        """Hold the lock of a job's files, so that no other process writes them."""
        with locked(self.path, job.name):
            self._check_plan()  # another process may have written its own in the meantime
            yield

    def write(self, job: Job, adapter: Adapter | Guard, result: Result) -> None:
        """Write the adapter's state, then the result that belongs to it; then remove older states."""
        write_text(self.path / "plan.json", json.dumps(self.plan.as_dict(), indent=1) + "\n")
        before = self._states(job)
        if not result.done:
            adapter.save(self._state(job, result))
        result.source_accuracy = self._source_accuracy(job, result)
        write_text(self._file(job), json.dumps(result.as_dict(), indent=1) + "\n")
        for path in before:
            path.unlink(missing_ok=True)

    def read(self, job: Job) -> Result | None:
        """Return a job's result so far; another process may be writing it."""
        path = self._file(job)
        if not path.is_file():
            return None
        result = _read(path)
        if result.arguments != self.plan.arguments(job):
            raise PlanError(f"{path} was made with other settings ({result.arguments}): choose another --out")
        if result.done:
            for left in self._states(job):  # left by a run that was killed while it removed them
                left.unlink(missing_ok=True)
        return result

    def find(self, job: Job) -> tuple[Result | None, Path | None]:
        """Return a job's result so far, and the state to resume from, which is None if the job is done."""
        result = self.read(job)
        if result is None or result.done:
            return result, None
        state = self._state(job, result)
        if not state.is_file():
            raise PlanError(f"{self._file(job)} is not done, and {state.name} is missing: remove both to run it again")
        return result, state

    def _file(self, job: Job) -> Path:
        return self.path / f"{job.name}.json"

    def _state(self, job: Job, result: Result) -> Path:
        return self.path / f"{job.name}.after{len(result.domains)}.safetensors"

    def _states(self, job: Job) -> list[Path]:
        return list(self.path.glob(f"{job.name}.after*.safetensors"))

    def _source_accuracy(self, job: Job, result: Result) -> dict[str, float] | None:
        """Return the source network's accuracy per domain. It identifies the data, whatever the folders are called."""
        source = Job("source", job.seed)
        if job != source and not self._file(source).is_file():
            return None
        domains = (result if job == source else _read(self._file(source))).domains
        return {domain.name: domain.accuracy for domain in domains}
