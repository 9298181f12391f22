"""A plan carried out: each method with each seed on one network and one stream.

    plan = Plan(methods=["source", "eata"], model="timm:resnet50", data="imagenet-c:/data/ImageNet-C")
    run = Run(plan, Path("out"))
    results = [run.do(job) for job in plan.jobs()]

Results are written after each domain. A run that was killed resumes after its last finished domain and ends with the
same numbers, bit for bit.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import read_logits
from ..core.adapter import Adapter
from ..data import open_suite
from ..data.types import Suite
from ..files import AnyPath
from ..methods import METHODS
from ..online.guard import Guard
from ..parts.world import ALONE, World
from .evaluate import BatchResult, check_labels, evaluate, start_result
from .networks import Loaded, load_network
from .plan import Job, Plan, PlanError
from .result import Result
from .result_folder import ResultFolder
from .scenarios import SCENARIOS, sample_domain, with_clean
from .stream import SampledDomain, Scenario
from .torchrun import on_first

__all__ = ["Run", "check_device"]

_HELD_OUT = 512  # clean images that a guard draws from


class Run:
    """A plan and the folder of its results. It shares network and data with the run `like`, if they are the same.

    >>> import tempfile
    >>> plan = Plan(methods=["bn-adapt"], images=64, shifts=["contrast"], probe="none")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = [Run(plan, Path(folder)).do(job) for job in plan.jobs()]
    >>> [(result.method, result.domains[0].images) for result in results]
    [('BNAdapt', 64)]
    """

    def __init__(self, plan: Plan, out: AnyPath, like: Run | None = None, world: World = ALONE) -> None:
        self.plan, self.like, self.world = plan, like, world
        self.folder = ResultFolder(out, plan)
        self._scenarios: dict[int, Scenario] = {}
        self.broken: dict[Path, str] = {}
        """Files that were left out so far, with the reason."""
        self.patience = 0.0
        """Seconds to wait for the lock of a job."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plan and folder; what is loaded stays here."""
        return _in_worker, (self.plan, self.folder.path)

    @cached_property
    def network(self) -> Loaded:
        """The source network, loaded once."""
        like = self._like("model", "device")
        check_device(self.plan.device)
        return load_network(self.plan.model, self.plan.device) if like is None else like.network

    @cached_property
    def suite(self) -> Suite:
        """The data, prepared for the network."""
        like = self._like("model", "data", "cache")
        return self._open(self.plan.data) if like is None else like.suite

    @cached_property
    def source_suite(self) -> Suite:
        """The data with clean images for the Fisher importance."""
        if self.plan.source is None:
            return self.suite
        like = self._like("model", "source", "cache")
        return self._open(self.plan.source) if like is None else like.source_suite

    def _open(self, data: str) -> Suite:
        return open_suite(data, self.network.preprocess, self.plan.cache)

    def _like(self, *fields: str) -> Run | None:
        same = self.like is not None and all(getattr(self.plan, f) == getattr(self.like.plan, f) for f in fields)
        return self.like if same else None

    def scenario(self, seed: int) -> Scenario:
        """Return the stream of a seed."""
        if seed not in self._scenarios:
            plan = self.plan
            scenario = SCENARIOS[plan.scenario](
                self.suite,
                **({"times": plan.rounds} if plan.scenario == "rounds" else {}),
                **({"network": self.network.model} if plan.scenario == "poisoned" else {}),
                severity=plan.severity,
                shifts=plan.shifts,
                images=plan.images,
                **self._loading(seed),
            )
            readapts = plan.probe == "readapt"
            self._scenarios[seed] = with_clean(scenario, self.clean(seed)) if readapts else scenario
        return self._scenarios[seed]

    def clean(self, seed: int) -> SampledDomain:
        """Return the clean images that forgetting is measured on."""
        return sample_domain("clean", self.suite.clean(), images=self.plan.probe_images, **self._loading(seed + 1))

    def _source(self, seed: int) -> SampledDomain:
        """Return the last images in the order of the probe: if there are enough, none of them is in the probe."""
        everything = self._all_clean(seed)
        return replace(everything, picks=everything.picks[-self.plan.source_images :])

    def _all_clean(self, seed: int) -> SampledDomain:
        part = self.source_suite.clean()
        if len(part.images) > self.plan.source_images:  # choose at random
            part = replace(part, ordered=False)
        return sample_domain("source", part, **self._loading(seed + 1))

    def _loading(self, seed: int) -> dict[str, Any]:
        broken = self.broken if self.plan.skip_broken else None
        return {"batch_size": self.plan.batch_size, "seed": seed, "workers": self.plan.workers, "broken": broken}

    def adapter(self, job: Job, *, source_images: int | None = None) -> Adapter | Guard:
        """Return a job's method around the source network, with a guard if the plan says so.

        `source_images` limits the images for the Fisher importance.
        """
        adapter = self._bare_adapter(job, source_images)
        if not self.plan.guards(job):
            return adapter
        known = source_images is None and (self.plan.source is not None or self.has_clean)
        with self.world.together():
            held_out = self._held_out(job.seed) if known else None
        return Guard(adapter, probe=held_out, seed=job.seed, **self.plan.overrides.get("guard", {}))

    def _held_out(self, seed: int) -> list[Tensor]:
        """Return clean images for the guard: those before the source images in the same order, if there are enough."""
        clean = self._all_clean(seed)
        before = clean.picks[: -self.plan.source_images][-_HELD_OUT:]
        picks = before if len(before) >= _HELD_OUT // 4 else clean.picks[-_HELD_OUT:]
        return [x for x, _ in replace(clean, picks=picks).on(self.plan.device)]

    def _bare_adapter(self, job: Job, source_images: int | None) -> Adapter:
        plan = self.plan
        arguments: dict[str, Any] = {"seed": job.seed, "classes": self.suite.classes}
        arguments |= {"engine": plan.engine, "precision": plan.precision, **plan.overrides.get(job.method, {})}
        if self.world.size > 1:
            arguments["ranks"] = self.world
        if self.needs_source(job.method):
            with self.world.together():
                source = self._source(job.seed)
                if source_images is None:
                    arguments["source"] = [x for x, _ in source.on(plan.device)]
                else:
                    arguments["source"] = [self.first_images(source, source_images)[0]]
        return METHODS[job.method].preset(self.family, self.network.model, **arguments)

    def start(self, job: Job, adapter: Adapter | Guard) -> Result:
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
        """Carry out a job, or resume it; a finished one is read. No other process can do the same job meanwhile."""
        with self.world.together():
            result = self.folder.read(job)
        done = result is not None and result.done
        self.world.same("folder of results", f"one where {job.name} is {'' if done else 'not '}done")
        if result is not None and done:
            return result
        self.free()  # of a run that failed: its error held it
        try:
            with on_first(self.world, self.folder.writing(job, self.patience)):
                return self._do(job, on_batch)
        finally:
            self.free()

    def free(self) -> None:
        """Free a GPU of adapters that are gone. Recorded steps refer to themselves, so that only the collector does."""
        if torch.device(self.plan.device).type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _do(self, job: Job, on_batch: Callable[[BatchResult, float], None] | None) -> Result:
        with self.world.together():
            result, state = self.folder.find(job)
        self.world.same("folder of results", f"one with {state.name if state is not None else 'no state'}")
        if result is not None and result.done:  # in the meantime, by another process
            return result
        adapter = self.adapter(job)
        with self.world.together():
            scenario = self.scenario(job.seed)
            if state is not None:
                adapter.load(str(state))
        result = result or self.start(job, adapter)
        clean = self.clean(job.seed) if self.plan.probe == "snapshot" and self.has_clean else None

        def write(result: Result) -> None:
            self.folder.write(job, adapter, result)

        try:
            result = evaluate(adapter, scenario, clean=clean, on_batch=on_batch, on_domain=write, result=result)
        except BaseException as error:
            if self.world.agreed(error):  # otherwise no other rank would answer a guard's messages
                adapter.reset()
            raise
        adapter.reset()  # the next job starts from the source network
        return result

    # Network and data -------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Data, scenario, and severity where the data has one."""
        graded = f", severity {self.plan.severity}" if self.suite.graded else ""
        return f"{self.plan.data}, {self.plan.scenario}{graded}"

    @property
    def task(self) -> str:
        """`"classification"` or `"segmentation"`."""
        return self.suite.task

    @property
    def family(self) -> str:
        """The preset that hyper-parameters come from."""
        return self.plan.preset or ("segformer-b5" if self.task == "segmentation" else self.network.family)

    @cached_property
    def outputs(self) -> int:
        """The number of the network's classes, seen on the first image of the stream."""
        like = self._like("model", "device", "data", "cache", "shifts", "severity")
        if like is not None:
            return like.outputs
        domain = next(d for d in self.scenario(self.plan.seeds[0]).domains if isinstance(d, SampledDomain))
        x, y = self.first_images(domain, 1)
        try:
            with torch.no_grad():
                logits = read_logits(self.network.model(x), x)
        except RuntimeError as error:
            shape = "×".join(map(str, x.shape[1:]))
            raise PlanError(f"{self.plan.model} does not take images of {shape} ({self.plan.data}): {error}") from error
        if self.suite.classes is None:
            check_labels(y, logits)
        return logits.shape[1]

    def first_images(self, domain: SampledDomain, count: int) -> tuple[Tensor, Tensor]:
        """Return the first images of a domain and their labels; the first that can be read, with `skip_broken`."""
        picks = domain.picks if self.plan.skip_broken else domain.picks[:count]
        x, y = next(iter(replace(domain, picks=picks, workers=0).on(self.plan.device)))
        return x[:count], y[:count]

    def needs_source(self, method: str) -> bool:
        """Return whether a method takes source images."""
        takes = "source" in inspect.signature(METHODS[method]).parameters
        return takes and self.plan.overrides.get(method, {}).get("beta") != 0

    @cached_property
    def has_clean(self) -> bool:
        """Whether the data has clean images."""
        try:
            self.suite.clean()
        except ValueError:
            return False
        return True


_first: Run | None = None
"""The first run of a worker's process; the others share its network and data, if they are the same."""


def _in_worker(plan: Plan, out: AnyPath) -> Run:
    """Return a run in a worker. It waits for the lock of a job that another worker held, which was lost."""
    global _first
    run = Run(plan, out, _first)
    if run._like("model", "device") is None:
        run.like, _first = None, run
    run.patience = 60.0
    return run


def check_device(name: str) -> None:
    """Raise for a device that does not exist here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlanError(f"--device {name}: expected cpu, cuda, cuda:1 or the like") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"--device {name}: torch {torch.__version__} finds no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlanError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0")
