"""A plan carried out: each method with each seed on one network and one stream.

    plan = Plan(methods=["source", "eata"], model="timm:resnet50", data="imagenet-c:/data/ImageNet-C")
    run = Run(plan, Path("out"))
    results = [run.do(job) for job in plan.jobs()]

Results are written after each domain. A run that was killed resumes after its last finished domain and ends with the
same numbers, bit for bit.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import read_logits
from ..core.adapter import Adapter
from ..core.options import FEW_CLASSES
from ..data import open_suite
from ..data.decoded import Decoded, DecodedSuite
from ..data.folders import unread_files
from ..data.types import ImageSet, Suite
from ..methods import METHODS
from ..online.guard import Guard
from ..parts.augment import require_kornia
from ..parts.parameters import norm_parameters
from .evaluate import BatchResult, check_labels, evaluate, start_result
from .networks import Loaded, load_network
from .plan import Job, Plan, PlanError
from .result import Result
from .result_folder import ResultFolder
from .scenarios import SCENARIOS, sample_domain, with_clean
from .stream import SampledDomain, Scenario

__all__ = ["Run"]

_HELD_OUT = 512  # clean images that a guard draws from


class Run:
    """A plan and the folder of its results. It shares network and data with the run `like`, if they are the same."""

    def __init__(self, plan: Plan, out: Path, like: Run | None = None) -> None:
        self.plan, self.like = plan, like
        self.folder = ResultFolder(out, plan)
        self._scenarios: dict[int, Scenario] = {}
        self.broken: dict[Path, str] = {}
        """Files that were left out so far, with the reason."""

    @cached_property
    def network(self) -> Loaded:
        """The source network, loaded once."""
        like = self._like("model", "device")
        _check_device(self.plan.device)
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
        known = source_images is None and (self.plan.source is not None or self._has_clean)
        held_out = self._held_out(job.seed) if known else None
        return Guard(adapter, probe=held_out, seed=job.seed)

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
        if self._needs_source(job.method):
            source = self._source(job.seed)
            if source_images is None:
                arguments["source"] = [x for x, _ in source.on(plan.device)]
            else:
                arguments["source"] = [self._first_images(source, source_images)[0]]
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
        result = self.folder.read(job)
        if result is not None and result.done:
            return result
        with self.folder.writing(job):
            return self._do(job, on_batch)

    def _do(self, job: Job, on_batch: Callable[[BatchResult, float], None] | None) -> Result:
        result, state = self.folder.find(job)
        if result is not None and result.done:  # in the meantime, by another process
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

    # What is known before it runs ---------------------------------------------------------------------------------

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

    def hints(self) -> list[str]:
        """Return which class each folder is, options that have no effect, and options to try."""
        found = [f"classes: {note}"] if (note := self.suite.class_note()) else []
        if self.plan.cache and not (isinstance(self.suite, DecodedSuite) and self.suite.kept):
            found.append("--cache makes no difference here: it is for image files and a network with a fixed crop")
        classes, other = self.outputs, FEW_CLASSES.get(self.family)
        if not self.plan.preset and other is not None and classes < 100:
            found.append(
                f"{self.family}'s hyper-parameters are for 1,000 classes, and the network has {classes}: also "
                f"try --preset {other}, or let `acclimate tune` choose"
            )
        elif not self.plan.preset and not _is_of_the_paper(self.plan.model):
            found.append(
                f"learning rates are those for {self.family}, which is another network: `acclimate tune` chooses some "
                "for yours"
            )
        if idle := [name for name in self.plan.overrides if name not in self.plan.methods]:
            found.append(f"--set of {', '.join(idle)} has no effect: that method does not run")
        if unread := unread_files(self._image_sets()):
            found.append(unread)
        return found

    def _image_sets(self) -> Iterator[ImageSet]:
        """Yield the images of the stream."""
        for domain in self.scenario(self.plan.seeds[0]).domains:
            for part in domain.parts if isinstance(domain, SampledDomain) else ():
                yield part.images.images if isinstance(part.images, Decoded) else part.images

    def unfit(self) -> dict[str, str]:
        """Return the methods of the plan that cannot run here, with the reason."""
        found = {
            name: f"it is for {METHODS[name].task}, and the data for {self.task}"
            for name in self.plan.methods
            if METHODS[name].task not in ("any", self.task)
        }
        if "bn-adapt" in self.plan.methods and not self.network.has_batch_norm:
            found["bn-adapt"] = "it needs BatchNorm layers, and the network has none"
        return found

    def fitting(self) -> Run:
        """Return the same run without the methods that do not fit."""
        methods = [name for name in self.plan.methods if name not in self.unfit()]
        return Run(replace(self.plan, methods=methods), self.folder.path, self)

    def check(self, jobs: Iterable[Job] | None = None) -> None:
        """Raise for all that would stop the run later or make it meaningless, as far as little work can tell.

        Shifts, source images, methods and their arguments, class counts, the first image, the folder and what is in it.
        `jobs` are those to check for, by default all; there is nothing to check for those that are done.
        """
        found = {job: self.folder.read(job) for job in (self.plan.jobs() if jobs is None else jobs)}
        due = {job.method: job for job, result in found.items() if result is None or not result.done}
        if not due:
            return
        self.scenario(self.plan.seeds[0])
        needing = [method for method in due if self._needs_source(method)]
        if needing and self.plan.source is None and not self._has_clean:
            raise PlanError(
                f"{needing[0]} needs clean images, and {self.plan.data.partition(':')[0]} has none: name them with "
                f"source=, such as {'scenes' if self.task == 'segmentation' else 'imagenet'}:FOLDER, or set "
                f"{needing[0]}.beta=0"
            )
        for method, why in self.unfit().items():
            if method in due:
                raise PlanError(f"{method} does not fit: {why}. Leave it out")
        self.folder.check_writable()
        self.suite.check_classes(self.outputs)
        for method, job in due.items():
            self._check_adapter(method, job)

    @cached_property
    def outputs(self) -> int:
        """The number of the network's classes, seen on the first image of the stream."""
        like = self._like("model", "device", "data", "cache", "shifts", "severity")
        if like is not None:
            return like.outputs
        domain = next(d for d in self.scenario(self.plan.seeds[0]).domains if isinstance(d, SampledDomain))
        x, y = self._first_images(domain, 1)
        try:
            with torch.no_grad():
                logits = read_logits(self.network.model(x), x)
        except RuntimeError as error:
            shape = "×".join(map(str, x.shape[1:]))
            raise PlanError(f"{self.plan.model} does not take images of {shape} ({self.plan.data}): {error}") from error
        if self.suite.classes is None:
            check_labels(y, logits)
        return logits.shape[1]

    def _first_images(self, domain: SampledDomain, count: int) -> tuple[Tensor, Tensor]:
        """Return the first images of a domain and their labels; the first that can be read, with `skip_broken`."""
        picks = domain.picks if self.plan.skip_broken else domain.picks[:count]
        x, y = next(iter(replace(domain, picks=picks, workers=0).on(self.plan.device)))
        return x[:count], y[:count]

    def _check_adapter(self, method: str, job: Job) -> None:
        """Raise if a method cannot be built; two images stand for those of the Fisher importance."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come when it is built to run
                adapter = self.adapter(job, source_images=2)
            require_kornia(getattr(adapter, "augment", None))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.plan.overrides.get(method, {}).items())
            raise PlanError(f"{method}{given and f' with {given}'} cannot be built: {error}") from error

    def _needs_source(self, method: str) -> bool:
        takes = "source" in inspect.signature(METHODS[method]).parameters
        return takes and self.plan.overrides.get(method, {}).get("beta") != 0

    @cached_property
    def _has_clean(self) -> bool:
        try:
            self.suite.clean()
        except ValueError:
            return False
        return True

    # What it may cost ---------------------------------------------------------------------------------------------

    def speed(self, batches: int = 2) -> tuple[float, float]:
        """Measure the seconds per sample of a forward and of a backward pass, on a few batches."""
        scenario = self.scenario(self.plan.seeds[0])
        forward, step = (self._seconds(method, scenario, batches) for method in ("source", "tent"))
        return forward, max(step - forward, 0.0)

    def seconds(self, speed: tuple[float, float]) -> dict[str, float]:
        """Estimate the seconds of each method for all seeds at a speed."""
        costs = {method: METHODS[method].cost for method in self.plan.methods}
        images = self.images_met() * len(self.plan.seeds)
        return {method: images * (there * speed[0] + back * speed[1]) for method, (there, back) in costs.items()}

    def images_met(self) -> int:
        """Count the images that a method predicts under one seed, including the probes."""
        scenario = self.scenario(self.plan.seeds[0])
        images = sum(len(domain.picks) for domain in scenario.domains if isinstance(domain, SampledDomain))
        return images + (len(scenario.domains) + 1) * self.plan.probe_images * (self.plan.probe != "none")

    def _seconds(self, method: str, scenario: Scenario, batches: int) -> float:
        """Return the seconds per sample."""
        model = self.network.model
        options: dict[str, Any] = {"precision": self.plan.precision}
        if method != "source" and not norm_parameters(model):
            options["parameters"] = "all"  # a backward pass is timed on any network
        adapter = METHODS[method].preset(self.family, model, **options)
        taken, seen = 0.0, 0
        for index, (x, _) in zip(range(batches + 1), scenario.domains[0].on(self.plan.device), strict=False):
            start = time.perf_counter()
            adapter(x)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            spent = time.perf_counter() - start
            if index <= 1:  # the first batch warms up, and counts only if there is no other
                taken, seen = 0.0, 0
            taken, seen = taken + spent, seen + len(x)
        adapter.reset()
        return taken / max(seen, 1)


def _is_of_the_paper(model: str) -> bool:
    """Return whether a network's name says that it is a ResNet-50, a ViT-Base or a SegFormer-B5."""
    return any(name in model.lower() for name in ("resnet50", "vit_b", "vit-b", "segformer-b5", "segformer_b5"))


def _check_device(name: str) -> None:
    """Raise for a device that does not exist here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlanError(f"--device {name}: expected cpu, cuda, cuda:1 or the like") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"--device {name}: torch {torch.__version__} finds no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlanError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0")
