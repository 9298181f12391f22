"""A plan carried out: methods × seeds on one network, one stream. Results are written as they come.

    plan = Plan(methods=["source", "eata"], model="timm:resnet50", data="imagenet-c:/data/ImageNet-C")
    for job in plan.jobs():
        result = Run(plan, Path("out")).do(job)

A run that was killed goes on after its last finished domain, and ends with the same numbers bit for bit.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..core.adapter import Adapter
from ..data import open_suite
from ..data.types import Suite
from ..methods import METHODS
from ..methods.presets import FEW
from .evaluate import BatchResult, evaluate, start_result
from .networks import Loaded, load_network
from .plan import Job, Plan, PlanError
from .result import Result
from .results import ResultFolder
from .scenarios import SCENARIOS, drawn, with_clean
from .stream import Drawn, Scenario, Stream

__all__ = ["Run"]


class Run:
    """A plan and the folder of its results; perhaps `like` another, whose network and data it then shares."""

    def __init__(self, plan: Plan, out: Path, like: Run | None = None) -> None:
        self.plan, self.like = plan, like
        self._scenarios: dict[int, Scenario] = {}
        self.folder = ResultFolder(out, plan)

    @cached_property
    def network(self) -> Loaded:
        """Loaded once; each job gets its weights afresh."""
        like = self._like("model", "device")
        return load_network(self.plan.model, self.plan.device) if like is None else like.network

    @cached_property
    def suite(self) -> Suite:
        """The data, prepared for the network."""
        like = self._like("model", "data", "cache")
        return self._open(self.plan.data) if like is None else like.suite

    def _open(self, data: str) -> Suite:
        return open_suite(data, self.network.preprocess, self.plan.cache)

    def idle_cache(self) -> str:
        """That a cache was named, and there is no use for it; else nothing."""
        if not self.plan.cache or getattr(self.suite, "kept", False):
            return ""
        return "--cache makes no difference here: it is for image files that the network takes cut to one size"

    def _like(self, *fields: str) -> Run | None:
        same = self.like is not None and all(getattr(self.plan, f) == getattr(self.like.plan, f) for f in fields)
        return self.like if same else None

    def scenario(self, seed: int) -> Scenario:
        """What the adapter of a seed meets."""
        if seed not in self._scenarios:
            self._scenarios[seed] = self._scenario(seed)
        return self._scenarios[seed]

    def _scenario(self, seed: int) -> Scenario:
        plan = self.plan
        scenario = SCENARIOS[plan.scenario](
            self.suite,
            **({"times": plan.rounds} if plan.scenario == "rounds" else {}),
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
        arguments: dict[str, Any] = {"seed": job.seed, "classes": self.suite.classes} | self._running
        arguments |= plan.overrides.get(job.method, {})
        if self._needs_source(job.method):
            arguments["source"] = [x for x, _ in self._source(job.seed).on(plan.device)]
        return method.preset(self.family, self.network.model, **arguments)

    @property
    def title(self) -> str:
        """Data, scenario, and severity where the data has one."""
        graded = f", severity {self.plan.severity}" if getattr(self.suite, "graded", True) else ""
        return f"{self.plan.data}, {self.plan.scenario}{graded}"

    @property
    def task(self) -> str:
        """What the data is for."""
        return getattr(self.suite, "task", "classification")

    @property
    def family(self) -> str:
        """Whose hyper-parameters of the paper to start from."""
        return self.plan.preset or ("segformer-b5" if self.task == "segmentation" else self.network.family)

    def hint(self) -> str:
        """Another preset, where the network seems to have few classes and none was named; else nothing."""
        classes, other = self.network.outputs, FEW.get(self.family)
        if self.plan.preset or other is None or classes is None or classes >= 100:
            return ""
        return (
            f"{self.family}'s hyper-parameters are for 1,000 classes, and here are {classes}: try --preset {other}, too"
        )

    def unfit(self) -> dict[str, str]:
        """Methods of the plan that cannot be run here, and why."""
        told = {
            name: f"it is for {METHODS[name].task}, and the data for {self.task}"
            for name in self.plan.methods
            if METHODS[name].task not in ("any", self.task)
        }
        if "bn-adapt" in self.plan.methods and not self.network.has_batch_norm:
            told["bn-adapt"] = "it needs BatchNorm layers, and the network has none"
        return told

    def _needs_source(self, method: str) -> bool:
        takes = "source" in inspect.signature(METHODS[method]).parameters
        return takes and self.plan.overrides.get(method, {}).get("beta") != 0

    def _source(self, seed: int) -> Drawn:
        """From the far end of the clean images' order: where there are enough, none that the probe shows."""
        plan = self.plan
        suite = self.suite if plan.source is None else self._open(plan.source)
        shuffled = replace(suite.clean(), ordered=False)
        everything = drawn("source", shuffled, batch_size=plan.batch_size, seed=seed + 1, workers=plan.workers)
        return replace(everything, picks=everything.picks[-plan.source_images :])

    def check(self) -> None:
        """Raise for what would stop the plan later: shifts that are not there, source images that cannot be had."""
        self.scenario(self.plan.seeds[0])
        needing = [method for method in self.plan.methods if self._needs_source(method)]
        if needing and self.plan.source is None and not self._has_clean:
            raise PlanError(
                f"{needing[0]} needs clean images, and {self.plan.data.partition(':')[0]} has none: name them with "
                f"source=, such as {'scenes' if self.task == 'segmentation' else 'imagenet'}:FOLDER, or set "
                f"{needing[0]}.beta=0"
            )
        for method, why in self.unfit().items():
            raise PlanError(f"{method} does not fit: {why}. Leave it out")

    def start(self, job: Job, adapter: Adapter) -> Result:
        """Return a job's result without numbers."""
        preprocess = self.network.preprocess
        return start_result(
            adapter,
            self.scenario(job.seed),
            model=self.plan.model,
            protocol=self.plan.protocol,
            arguments=self.plan.arguments(job),
            preprocess=None if preprocess is None else asdict(preprocess),
        )

    def do(self, job: Job, on_batch: Callable[[BatchResult, float], None] | None = None) -> Result:
        """Carry out a job, or resume it; a finished one is read."""
        result, state = self.folder.find(job)
        if result is not None and result.done:
            return result
        adapter, scenario = self.adapter(job), self.scenario(job.seed)
        if state is not None:
            adapter.load(state)
        result = result or self.start(job, adapter)
        clean = self.clean(job.seed) if self.plan.probe == "snapshot" and self._has_clean else None

        def write(result: Result) -> None:
            self.folder.write(job, adapter, result)

        try:
            return evaluate(adapter, scenario, clean=clean, on_batch=on_batch, on_domain=write, result=result)
        finally:
            adapter.reset()  # the next job starts from the source network

    def estimate(self, batches: int = 2) -> dict[str, float]:
        """Seconds that each method may take for all seeds, from a few timed batches."""
        return self.seconds(self.speed(batches))

    def speed(self, batches: int = 2) -> tuple[float, float]:
        """Seconds of a sample's forward and backward pass, from a few timed batches."""
        scenario = self.scenario(self.plan.seeds[0])
        forward, step = (self._seconds(method, scenario, batches) for method in ("source", "tent"))
        return forward, max(step - forward, 0.0)

    def seconds(self, speed: tuple[float, float]) -> dict[str, float]:
        """That each method may take for all seeds at a speed."""
        costs = {method: METHODS[method].cost for method in self.plan.methods}
        images = self.images_met() * len(self.plan.seeds)
        return {method: images * (there * speed[0] + back * speed[1]) for method, (there, back) in costs.items()}

    def images_met(self) -> int:
        """Images that a method meets under one seed, probes counted."""
        scenario = self.scenario(self.plan.seeds[0])
        images = sum(min(len(domain) * self.plan.batch_size, _size(domain)) for domain in scenario.domains)
        return images + (len(scenario.domains) + 1) * self.plan.probe_images * (self.plan.probe != "none")

    def _seconds(self, method: str, scenario: Scenario, batches: int) -> float:
        """A sample's time."""
        adapter = METHODS[method].preset(self.family, self.network.model, precision=self.plan.precision)
        taken, seen = 0.0, 0
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

    @property
    def _running(self) -> dict[str, Any]:
        return {"engine": self.plan.engine, "precision": self.plan.precision}


def _size(domain: Stream) -> int:
    return len(domain.picks) if isinstance(domain, Drawn) else 1 << 62
