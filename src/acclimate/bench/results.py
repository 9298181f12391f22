"""The files of a comparison: a result for each method and seed, written after each domain, and its state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core.adapter import Adapter
from ..files import write_text
from .evaluate import Result
from .plan import SHARED, Job, Plan, PlanError

__all__ = ["ResultFolder", "Stored", "read_results"]


@dataclass(frozen=True)
class Stored:
    """A result from a file, and what it may be compared by."""

    result: Result
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Stored:
        """A file of `ResultFolder`, or an error that names it."""
        try:
            content = json.loads(path.read_text())
            told = {key: content[key] for key in ("done", "job", "arguments", "protocol", "model", "fingerprint")}
            return cls(Result.from_dict(content), told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is damaged, or no result ({error}): remove it, and the job runs anew") from error

    @property
    def done(self) -> bool:
        """Whether all domains are there."""
        return bool(self.content["done"])

    @property
    def label(self) -> str:
        """The method, with what was set otherwise."""
        told = [f"{k}={v}" for k, v in self.content["arguments"].items() if k not in SHARED]
        return self.result.method + (f" ({', '.join(told)})" if told else "")

    @property
    def setting(self) -> str:
        """All that must be equal for two results to be seeds of one."""
        weights, sizes = (self.content["fingerprint"][key] for key in ("weights", "preprocess"))
        told = (self.content[key] for key in ("model", "protocol", "arguments"))
        return json.dumps([self.result.method, weights, sizes, *told])


def read_results(folders: Sequence[Path]) -> list[Stored]:
    """Everything that is done in these folders, each once."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} with results")
        found += [Stored.read(path) for path in sorted(folder.glob("*-seed*.json"))]
    finished = {(stored.setting, stored.result.seed): stored for stored in found if stored.done}
    if not finished:
        raise FileNotFoundError(f"no finished result in {', '.join(map(str, folders))}: `acclimate run` makes them")
    return list(finished.values())


class ResultFolder:
    """Where a plan's results are written and found again. One folder takes one protocol on one network."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        told = path / "plan.json"
        if not told.is_file():
            return
        try:
            found = Plan.from_dict(json.loads(told.read_text())).as_dict()
        except ValueError as error:
            raise PlanError(f"{told} is damaged ({error}): remove it, or choose another --out") from error
        mine = plan.as_dict()
        if differs := [key for key in ("model", "preset", *plan.protocol) if found[key] != mine[key]]:
            raise PlanError(
                f"{path} holds results of another plan ({differs[0]} was {found[differs[0]]!r}, and is "
                f"{mine[differs[0]]!r} now): choose another --out"
            )

    def keep(self, job: Job, adapter: Adapter, result: Result, *, done: bool, preprocess: Any) -> None:
        """A finished domain: first the adapter's state, then the result that goes with it; older states go then."""
        write_text(self.path / "plan.json", json.dumps(self.plan.as_dict(), indent=1) + "\n")
        before = self._states(job)
        if not done:
            adapter.save(self._state(job, result))
        content = {
            **result.as_dict(),
            "done": done,
            "job": asdict(job),
            "arguments": self.plan.arguments(job),
            "protocol": self.plan.protocol,
            "model": self.plan.model,
            "fingerprint": self._fingerprint(job, result, preprocess),
            "acclimate": __version__,
        }
        write_text(self.path / f"{job.name}.json", json.dumps(content, indent=1) + "\n")
        for path in before:
            path.unlink(missing_ok=True)

    def find(self, job: Job) -> tuple[Result | None, Path | None]:
        """What is there of a job, and the state to go on from; without a state it is done."""
        path = self.path / f"{job.name}.json"
        if not path.is_file():
            return None, None
        stored = Stored.read(path)
        if stored.content["arguments"] != self.plan.arguments(job):
            given = stored.content["arguments"]
            raise PlanError(f"{path} was made with other settings ({given}): choose another --out")
        if stored.done:
            for left in self._states(job):  # of a run that was killed while it tidied up
                left.unlink(missing_ok=True)
            return stored.result, None
        state = self._state(job, stored.result)
        if not state.is_file():
            raise PlanError(f"{path} is not done, and {state.name} is gone: remove both, and the job runs anew")
        return stored.result, state

    def _state(self, job: Job, result: Result) -> Path:
        return self.path / f"{job.name}.after{len(result.domains)}.safetensors"

    def _states(self, job: Job) -> list[Path]:
        return list(self.path.glob(f"{job.name}.after*.safetensors"))

    def _fingerprint(self, job: Job, result: Result, preprocess: Any) -> dict[str, Any]:
        """What tells a network and its data apart: weights, preprocessing, and the source accuracy of each domain.

        The last is there where `source` ran before, on the same seed.
        """
        path = self.path / f"source-seed{job.seed}.json"
        source = result if job.method == "source" else Stored.read(path).result if path.is_file() else None
        accuracy = None if source is None else {domain.name: domain.accuracy for domain in source.domains}
        sizes = None if preprocess is None else asdict(preprocess)
        return {"weights": result.origin.get("model"), "preprocess": sizes, "source_accuracy": accuracy}
