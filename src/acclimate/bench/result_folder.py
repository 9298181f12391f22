"""A folder of results: one file per method and seed, written after each domain, with the state to resume from.

On this machine a job has one writer, who holds a lock. An object store has no locks, so two writers of one job are
possible there. They write the same numbers; the last file counts; and a finished result stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile
from typing import Any

from ..core.adapter import Adapter
from ..files import AnyPath, RemotePath, is_file, matching, read_text, remove, write_text
from ..online.guard import Guard
from ..parts.world import World
from .locks import locked
from .plan import Job, Plan, PlanError
from .result import Result

__all__ = ["ResultFolder", "read_plan", "read_results"]


def read_results(folders: Sequence[AnyPath]) -> list[Result]:
    """Read every finished result in these folders; each appears once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         read_results([Path(folder)])
    ...     except FileNotFoundError:
    ...         print("no result is finished")
    no result is finished
    """
    found = []
    for folder in folders:
        if isinstance(folder, Path) and not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} with results")
        found += [_read(path) for path in matching(folder, "*-seed*.json")]
    finished = {(result.setting, result.seed): result for result in found if result.done and result.domains}
    if not finished:
        raise FileNotFoundError(f"no finished result in {', '.join(map(str, folders))}: `acclimate run` writes them")
    return list(finished.values())


def read_plan(folder: AnyPath) -> Plan | None:
    """Read the plan of a folder's results; None if there is none."""
    file = folder / "plan.json"
    try:
        return Plan.from_dict(json.loads(read_text(file))) if is_file(file) else None
    except ValueError as error:
        raise PlanError(f"{file} is damaged ({error}): remove it, or choose another --out") from error


def _read(path: AnyPath) -> Result:
    content: Any = None
    try:
        content = json.loads(read_text(path))
        return Result.from_dict(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(content, dict) and "fingerprint" in content:
            raise PlanError(
                f"{path} was written by an earlier version, which can still read it: use that one, or another folder"
            ) from error
        raise PlanError(f"{path} is damaged, or not a result ({error}): remove it to run it again") from error


class ResultFolder:
    """The folder of a plan's results. It holds one protocol on one network."""

    def __init__(self, path: AnyPath, plan: Plan) -> None:
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
        try:
            if isinstance(self.path, RemotePath):
                probe = self.path / f".writable-{token_hex(4)}"
                write_text(probe, "")
                remove(probe)
                return
            nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
            with TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            reason = error.strerror or error
            raise PlanError(f"{self.path} cannot be written ({reason}): choose another --out") from error

    @contextmanager
    def writing(self, job: Job, wait: float = 0) -> Iterator[None]:
        """Hold the lock of a job's files, so that no other process writes them; try for some seconds to get it."""
        with locked(self.path, job.name, wait):
            self._check_plan()  # another process may have written its own in the meantime
            yield

    def write(self, job: Job, adapter: Adapter | Guard, result: Result) -> None:
        """Write the adapter's state, then the result that belongs to it; then remove older states.

        All ranks of an adapter call this, and the first one writes. If it cannot, all raise.
        """
        world, locks = adapter.world, isinstance(self.path, Path)
        if not locks and not result.done and self._is_finished(job, world):
            return  # another writer was faster
        before: list[AnyPath] = []
        with world.together():
            if world.rank == 0:
                write_text(self.path / "plan.json", json.dumps(self.plan.as_dict(), indent=1) + "\n")
                before = self._states(job) if locks or result.done else []  # another writer may resume from them
        if not result.done:
            adapter.save(str(self._state(job, result)))
        with world.together():
            if world.rank == 0:
                result.source_accuracy = self._source_accuracy(job, result)
                write_text(self._file(job), json.dumps(result.as_dict(), indent=1) + "\n")
                for path in before:
                    remove(path)

    def _is_finished(self, job: Job, world: World) -> bool:
        """Return whether the result of a job is done. The first rank looks, and all return the same."""
        with world.together():
            stored = None if world.rank else self.read(job)
        (done,) = world.counts(int(stored is not None and stored.done))
        return bool(done)

    def read(self, job: Job) -> Result | None:
        """Return a job's result so far; another process may be writing it."""
        path = self._file(job)
        if not is_file(path):
            return None
        result = _read(path)
        if result.arguments != self.plan.arguments(job):
            raise PlanError(f"{path} was made with other settings ({result.arguments}): choose another --out")
        if result.done:
            for left in self._states(job):  # left by a run that was killed while it removed them
                remove(left)
        return result

    def seen(self, job: Job) -> Result:
        """Return the result of a job that a worker has done; raise if it is not here."""
        if (result := self.read(job)) is None:
            raise PlanError(
                f"{job.name} is done, but {self.path} of this machine does not have it: with --on ray, --out must be a "
                "folder that all machines share, or storage such as s3://BUCKET/FOLDER"
            )
        return result

    def complete(self, job: Job) -> Result:
        """Return a finished result, with the accuracy of the source network also if that was measured later."""
        result = self.seen(job)
        if result.source_accuracy != (known := self._source_accuracy(job, result)):
            result.source_accuracy = known
            write_text(self._file(job), json.dumps(result.as_dict(), indent=1) + "\n")
        return result

    def find(self, job: Job) -> tuple[Result | None, AnyPath | None]:
        """Return a job's result so far, and the state to resume from, which is None if the job is done.

        A job whose state another writer has removed, which locks prevent, starts again.
        """
        result = self.read(job)
        if result is None or result.done:
            return result, None
        state = self._state(job, result)
        if not is_file(state):
            if isinstance(state, RemotePath):
                return None, None
            raise PlanError(f"{self._file(job)} is not done, and {state.name} is missing: remove both to run it again")
        return result, state

    def _file(self, job: Job) -> AnyPath:
        return self.path / f"{job.name}.json"

    def _state(self, job: Job, result: Result) -> AnyPath:
        return self.path / f"{job.name}.after{len(result.domains)}.safetensors"

    def _states(self, job: Job) -> list[AnyPath]:
        return matching(self.path, f"{job.name}.after*.safetensors")

    def _source_accuracy(self, job: Job, result: Result) -> dict[str, float] | None:
        """Return the source network's accuracy per domain. It identifies the data, whatever the folders are called."""
        source = Job("source", job.seed)
        if job != source and not is_file(self._file(source)):
            return None
        domains = (result if job == source else _read(self._file(source))).domains
        return {domain.name: domain.accuracy for domain in domains}
