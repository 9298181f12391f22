"""A comparison as one plan: methods × seeds on one network, one stream. Results are written as they come.

    plan = Plan(methods=["source", "eata"], model="timm:resnet50", data="imagenet-c:/data/ImageNet-C")
    for job in plan.jobs():
        result = Run(plan, Path("out")).do(job)

A run that was killed goes on after its last finished domain, and ends with the same numbers bit for bit.
"""

from __future__ import annotations

import ast
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ._version import __version__
from .adapter import Adapter
from .data import open_suite
from .evaluate import Moment, Result, evaluate
from .files import write_text
from .methods import METHODS
from .scenarios import SCENARIOS, Suite, drawn, with_clean
from .stream import Drawn, Scenario, Stream
from .zoo import Loaded, load_network

__all__ = ["COSTS", "Job", "Plan", "PlanError", "Run", "read_overrides"]

COSTS = {
    "source": (1, 0),
    "bn-adapt": (1, 0),
    "tent": (1, 1),
    "memo": (65, 64),
    "cotta": (3, 1),
    "sar": (2, 2),
    "roid": (2, 2),
    "rdumb": (1, 1),
    "tea": (23, 22),
    "eta": (1, 1),
    "eata": (1, 1),
    "eta-c": (2, 1),
    "eata-c": (2, 1),
}
"""Forward and backward passes a sample, at most; CoTTA's 35 in unsure batches not counted."""

PRECISIONS = ("fp32", "tf32", "bf16")
PROBES = ("snapshot", "readapt", "none")


class PlanError(ValueError):
    """A plan that cannot be carried out, with the reason."""


@dataclass(frozen=True)
class Job:
    """One run of a plan."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.method}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is compared, and under what protocol."""

    methods: Sequence[str] = tuple(METHODS)
    model: str = "digits-resnet"
    data: str = "digits"
    scenario: str = "lifelong"
    severity: int = 5
    shifts: Sequence[str] | None = None
    seeds: Sequence[int] = (0,)
    batch_size: int = 64
    images: int | None = None
    """Of each domain; None takes all."""
    source: str | None = None
    """Where clean images for the Fisher importance of EATA and EATA-C come from; None: the data's own clean part."""
    source_images: int = 2000
    probe: str = "snapshot"
    """How forgetting is measured: from a `snapshot` that leaves the stream untouched, by the paper's `readapt`ation to
    clean images between the domains, or not at all (`none`)."""
    probe_images: int = 1000
    preset: str | None = None
    """Whose hyper-parameters of the paper to start from; None goes by whether the network has BatchNorm."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments by method, `{"eata": {"beta": 500}}`."""
    device: str = "cpu"
    precision: str = "fp32"
    workers: int = 0

    def __post_init__(self) -> None:
        checked: list[tuple[str, Iterable[str], str]] = [
            *((method, METHODS, "method") for method in (*self.methods, *self.overrides)),
            (self.scenario, SCENARIOS, "scenario"),
            (self.precision, PRECISIONS, "precision"),
            (self.probe, PROBES, "probe"),
        ]
        for value, known, what in checked:
            if value not in [*known]:
                raise PlanError(f"no {what} {value!r}: choose from {', '.join(known)}")
        if not self.methods or not self.seeds:
            raise PlanError("a plan needs at least one method and one seed")
        for name in ("severity", "batch_size", "images", "source_images", "probe_images"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name}={value!r}: expected a number of at least 1")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The reverse of `as_dict`; also what a configuration file holds."""
        if unknown := content.keys() - {f.name for f in fields(cls)}:
            raise PlanError(
                f"a plan has no {', '.join(sorted(unknown))}: it has {', '.join(f.name for f in fields(cls))}"
            )
        for name in ("methods", "seeds", "shifts"):
            if not isinstance(content.get(name, []), (list, tuple, type(None))):
                raise PlanError(f"{name}={content[name]!r}: expected a list")
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        return cls(**arguments)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    def jobs(self) -> Iterator[Job]:
        """Seed by seed, method by method."""
        for seed in self.seeds:
            for method in self.methods:
                yield Job(method, seed)

    @property
    def protocol(self) -> dict[str, Any]:
        """What must be equal for results to be compared."""
        names = ("data", "scenario", "severity", "shifts", "batch_size", "images", "probe", "precision")
        whole = self.as_dict()
        return {name: whole[name] for name in names}


def read_overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["eata.beta=500"]` as `{"eata": {"beta": 500}}`."""
    read: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        method, dot, argument = name.partition(".")
        if not equals or not dot or method not in METHODS:
            raise PlanError(f"--set {setting}: expected METHOD.ARGUMENT=VALUE, such as eata.beta=500")
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        read.setdefault(method, {})[argument] = value
    return read


class Run:
    """A plan and the folder of its results."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out = plan, out
        self._scenarios: dict[int, Scenario] = {}
        told = out / "plan.json"
        if told.is_file():
            try:
                found = json.loads(told.read_text())
            except ValueError as error:
                raise PlanError(f"{told} is damaged ({error}): remove it, or choose another --out") from error
            mine = plan.as_dict()
            differs = [key for key in ("model", "preset", *plan.protocol) if found.get(key) != mine[key]]
            if differs:
                raise PlanError(
                    f"{out} holds results of another plan ({differs[0]} was {found.get(differs[0])!r}, and is "
                    f"{mine[differs[0]]!r} now): choose another --out"
                )

    @cached_property
    def network(self) -> Loaded:
        """Loaded once; each job gets its weights afresh."""
        return load_network(self.plan.model, self.plan.device)

    @cached_property
    def suite(self) -> Suite:
        """The data, prepared for the network."""
        suite: Suite = open_suite(self.plan.data, self.network.preprocess)
        return suite

    def scenario(self, seed: int) -> Scenario:
        """What the adapter of a seed meets."""
        if seed not in self._scenarios:
            self._scenarios[seed] = self._scenario(seed)
        return self._scenarios[seed]

    def _scenario(self, seed: int) -> Scenario:
        plan = self.plan
        scenario = SCENARIOS[plan.scenario](
            self.suite,
            severity=plan.severity,
            shifts=plan.shifts,
            batch_size=plan.batch_size,
            images=plan.images,
            seed=seed,
            workers=plan.workers,
        )
        return with_clean(scenario, self.clean(seed)) if plan.probe == "readapt" else scenario

    def clean(self, seed: int) -> Drawn:
        """Clean images to see what is forgotten."""
        plan = self.plan
        return drawn(
            "clean",
            self.suite.clean(),
            batch_size=plan.batch_size,
            images=plan.probe_images,
            seed=seed + 1,
            workers=plan.workers,
        )

    def adapter(self, job: Job) -> Adapter:
        """A method around the source network."""
        plan, method = self.plan, METHODS[job.method]
        arguments: dict[str, Any] = {"seed": job.seed, "classes": getattr(self.suite, "classes", None)}
        arguments |= plan.overrides.get(job.method, {})
        if self._needs_source(job.method):
            arguments["source"] = [x for x, _ in self._source(job.seed).on(plan.device)]
        preset = plan.preset or self.network.family
        return method.preset(preset, self.network.model, **arguments)

    def _needs_source(self, method: str) -> bool:
        return method in ("eata", "eata-c") and self.plan.overrides.get(method, {}).get("beta") != 0

    def _source(self, seed: int) -> Drawn:
        """From the far end of the clean images' order: where there are enough, none that the probe shows."""
        plan = self.plan
        suite: Suite = self.suite if plan.source is None else open_suite(plan.source, self.network.preprocess)
        everything = drawn("source", suite.clean(), batch_size=plan.batch_size, seed=seed + 1, workers=plan.workers)
        return replace(everything, picks=everything.picks[-plan.source_images :])

    def check(self) -> None:
        """Raise for what would stop the plan later: shifts that are not there, source images that cannot be had."""
        self.scenario(self.plan.seeds[0])
        needing = [method for method in self.plan.methods if self._needs_source(method)]
        if needing and self.plan.source is None and not self._has_clean:
            raise PlanError(
                f"{needing[0]} needs clean images, and {self.plan.data.partition(':')[0]} has none: name them with "
                f"source=, such as imagenet:FOLDER, or set {needing[0]}.beta=0"
            )
        no_batch_norm = self.network.family != "resnet50"
        if "bn-adapt" in self.plan.methods and no_batch_norm:
            raise PlanError("bn-adapt needs BatchNorm layers, and the network has none: leave it out")

    def do(self, job: Job, on_batch: Callable[[Moment, float], None] | None = None) -> Result:
        """Carry out a job, or what is left of it; done ones are read."""
        so_far, state = self._found(job)
        if so_far is not None and state is None:
            return so_far
        _set_tf32(self.plan.precision == "tf32")
        adapter = self.adapter(job)
        if so_far is not None and state is not None:
            adapter.load(state)
        scenario = self.scenario(job.seed)
        clean = self.clean(job.seed) if self.plan.probe == "snapshot" and self._has_clean else None
        try:
            with self._autocast():
                result = evaluate(
                    adapter,
                    scenario,
                    clean=clean,
                    on_batch=on_batch,
                    on_domain=lambda result: self._keep(job, adapter, result, len(scenario.domains)),
                    so_far=so_far,
                )
        finally:
            adapter.reset()  # the next job starts from the source network
        return result

    def estimate(self, batches: int = 2) -> dict[str, float]:
        """Seconds that each method may take for all seeds, from a few timed batches."""
        scenario = self.scenario(self.plan.seeds[0])
        images = sum(min(len(domain) * self.plan.batch_size, _size(domain)) for domain in scenario.domains)
        if self.plan.probe != "none":
            images += (len(scenario.domains) + 1) * self.plan.probe_images
        forward, step = (self._seconds(method, scenario, batches) for method in ("source", "tent"))
        backward = max(step - forward, 0.0)
        return {
            method: images * len(self.plan.seeds) * (COSTS[method][0] * forward + COSTS[method][1] * backward)
            for method in self.plan.methods
        }

    def _seconds(self, method: str, scenario: Scenario, batches: int) -> float:
        """A sample's time."""
        adapter = METHODS[method].preset(self.plan.preset or self.network.family, self.network.model)
        taken, seen = 0.0, 0
        with self._autocast():
            for index, (x, _) in zip(range(batches + 1), scenario.domains[0].on(self.plan.device), strict=False):
                start = time.perf_counter()
                adapter(x)
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                spent = time.perf_counter() - start
                if index <= 1:  # the first warms up, and counts only if it stays alone
                    taken, seen = 0.0, 0
                taken, seen = taken + spent, seen + len(x)
        adapter.reset()
        return taken / max(seen, 1)

    @cached_property
    def _has_clean(self) -> bool:
        try:
            self.suite.clean()
        except ValueError:
            return False
        return True

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        kind = torch.device(self.plan.device).type
        return torch.autocast(kind, torch.bfloat16) if self.plan.precision == "bf16" else contextlib.nullcontext()

    # Files --------------------------------------------------------------------------------------------------------

    def _keep(self, job: Job, adapter: Adapter, result: Result, total: int) -> None:
        """A finished domain: first the adapter's state, then the result that goes with it; older states go then."""
        done = len(result.domains) == total
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "plan.json", json.dumps(self.plan.as_dict(), indent=1) + "\n")
        before = self._states(job)
        if not done:
            adapter.save(self.out / f"{job.name}.after{len(result.domains)}.safetensors")
        content = {
            **result.as_dict(),
            "done": done,
            "job": asdict(job),
            "arguments": self._arguments(job),
            "protocol": self.plan.protocol,
            "model": self.plan.model,
            "preprocess": asdict(self.network.preprocess),
            "fingerprint": self._fingerprint(job, result),
            "acclimate": __version__,
        }
        write_text(self.out / f"{job.name}.json", json.dumps(content, indent=1) + "\n")
        for path in before:
            path.unlink(missing_ok=True)

    def _arguments(self, job: Job) -> dict[str, Any]:
        plan = self.plan.as_dict()
        settings = {name: plan[name] for name in ("source", "source_images", "probe_images", "preset")}
        return {**settings, **plan["overrides"].get(job.method, {})}

    def _fingerprint(self, job: Job, result: Result) -> dict[str, Any]:
        """What tells a network and its data apart: weights, preprocessing, and the source accuracy of each domain.

        The last is there where `source` ran before, on the same seed.
        """
        path = self.out / f"source-seed{job.seed}.json"
        accuracy = {d.name: d.accuracy for d in result.domains} if job.method == "source" else None
        if accuracy is None and path.is_file():
            accuracy = {d["name"]: d["accuracy"] for d in json.loads(path.read_text())["domains"]}
        return {
            "weights": result.origin.get("model"),
            "preprocess": asdict(self.network.preprocess),
            "source_accuracy": accuracy,
        }

    def _states(self, job: Job) -> list[Path]:
        return list(self.out.glob(f"{job.name}.after*.safetensors"))

    def _found(self, job: Job) -> tuple[Result | None, Path | None]:
        """What is there of a job, and the state to go on from; without a state it is done."""
        path = self.out / f"{job.name}.json"
        if not path.is_file():
            return None, None
        try:
            content = json.loads(path.read_text())
            result = Result.from_dict(content)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{path} is damaged ({error}): remove it, and the job runs anew") from error
        if content["arguments"] != self._arguments(job):
            raise PlanError(f"{path} was made with other settings ({content['arguments']}): choose another --out")
        if content["done"]:
            for left in self._states(job):  # a run that was killed while it tidied up
                left.unlink(missing_ok=True)
            return result, None
        state = self.out / f"{job.name}.after{len(result.domains)}.safetensors"
        if not state.is_file():
            raise PlanError(f"{path} is not done, and {state.name} is gone: remove both, and the job runs anew")
        return result, state


def _size(domain: Stream) -> int:
    return len(domain.picks) if isinstance(domain, Drawn) else 1 << 62


def _set_tf32(wanted: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = True  # torch's own default
