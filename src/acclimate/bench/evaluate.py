"""Run an adapter through a scenario and measure it. Labels go around the adapter, never through it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .._version import __version__
from ..core.adapter import Adapter
from ..core.record import Step
from ..data.types import IGNORE
from ..parts.normalised import Normalised
from .metrics import Scores
from .stream import Scenario, Stream

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["DomainResult", "Moment", "Result", "accuracy_of", "evaluate", "origin", "process_memory", "run"]


@dataclass(frozen=True)
class Moment:
    """One batch of a run."""

    domain: str
    logits: Tensor
    targets: Tensor
    step: Step


def run(adapter: Adapter, scenario: Scenario) -> Iterator[Moment]:
    """The whole loop: predict and learn, batch after batch; reset where the scenario says so."""
    for domain in scenario.domains:
        if scenario.resets == "domain":
            adapter.reset()
        parts = [domain] if scenario.clean_between is None else [domain, scenario.clean_between]
        for part in parts:
            adapter.new_domain(round=getattr(domain, "round", 1))
            for x, targets in part.on(adapter.device):
                if scenario.resets == "batch":
                    adapter.reset()
                logits = adapter(x)
                yield Moment(part.name, logits, targets, adapter.last)


@dataclass
class DomainResult:
    """What one domain showed. Rates are fractions; the reliability lists have an entry a bin."""

    name: str
    accuracy: float
    ece: float
    count: list[float]
    confident: list[float]
    correct: list[float]
    forwards: int
    backwards: int
    in_graph: int
    seconds: float
    clean_accuracy: float | None = None
    """After this domain, on the clean probe; of a segmenter its mIoU."""
    adaptive_ece: float | None = None
    nll: float | None = None
    brier: float | None = None
    aurc: float | None = None
    images: int | None = None
    kept: float | None = None
    """The share of samples learned from."""
    gpu_memory: float | None = None
    """The peak in this domain, in MB; None without a GPU."""
    process_memory: float | None = None
    """The peak of this process so far, in MB."""
    miou: float | None = None
    """Of a segmenter: the mean intersection over union of its classes; accuracy and ECE are then of pixels."""
    iou: list[float | None] | None = None
    """Of each class; None where it was neither there nor predicted."""

    @property
    def score(self) -> float:
        """What counts most: mIoU of a segmenter, accuracy of a classifier."""
        return self.accuracy if self.miou is None else self.miou


@dataclass
class Result:
    """A run's numbers and where they came from."""

    method: str
    network: str
    call: str
    scenario: str
    seed: int
    clean_before: float | None
    domains: list[DomainResult] = field(default_factory=list)
    origin: dict[str, str | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Mean over domains, as the paper's tables have it."""
        return sum(d.accuracy for d in self.domains) / len(self.domains)

    @property
    def ece(self) -> float:
        """Mean over domains of each domain's ECE."""
        return sum(d.ece for d in self.domains) / len(self.domains)

    @property
    def miou(self) -> float | None:
        """Mean over domains, of a segmenter."""
        return self._mean("miou")

    @property
    def score(self) -> float:
        """What counts most: mIoU of a segmenter, accuracy of a classifier."""
        return self.accuracy if self.miou is None else self.miou

    @property
    def score_name(self) -> str:
        """What it is called."""
        return "accuracy" if self.miou is None else "mIoU"

    @property
    def clean_after(self) -> float | None:
        """After the last domain."""
        return self.domains[-1].clean_accuracy

    @property
    def seconds(self) -> float:
        """Spent in the stream, probes not counted."""
        return sum(d.seconds for d in self.domains)

    @property
    def forwards(self) -> int:
        """Forward passes, a sample each."""
        return sum(d.forwards for d in self.domains)

    @property
    def backwards(self) -> int:
        """Samples that received a gradient."""
        return sum(d.backwards for d in self.domains)

    @property
    def images_per_second(self) -> float | None:
        """Throughput in the stream; None where images were not counted."""
        counted = [d.images for d in self.domains if d.images is not None]
        return sum(counted) / self.seconds if counted and self.seconds else None

    @property
    def kept(self) -> float | None:
        """The share of samples learned from, a mean over domains."""
        return self._mean("kept")

    @property
    def gpu_memory(self) -> float | None:
        """The peak over domains, in MB."""
        return max((d.gpu_memory for d in self.domains if d.gpu_memory is not None), default=None)

    def _mean(self, name: str) -> float | None:
        values = [getattr(d, name) for d in self.domains]
        return None if None in values else sum(values) / len(values)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Result:
        """The reverse of `as_dict`."""
        own = {f.name: content[f.name] for f in fields(cls)}
        return cls(**{**own, "domains": [DomainResult(**d) for d in content["domains"]]})

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the averages beside the details."""
        averages = {name: getattr(self, name) for name in ("accuracy", "ece", "clean_after", "seconds")}
        more = {name: self._mean(name) for name in ("adaptive_ece", "nll", "brier", "aurc", "kept", "miou")}
        cost = {name: getattr(self, name) for name in ("forwards", "backwards", "images_per_second", "gpu_memory")}
        return {**asdict(self), **averages, **more, **cost}


def accuracy_of(adapter: Adapter, domain: Stream, resets: Literal["never", "batch"] = "never") -> float:
    """Accuracy on a domain of an adapter that adapts to it, too; the adapter is then put back as it was."""
    snapshot = adapter.snapshot()
    try:
        return _accuracy(adapter, Scenario(domain.name, [domain], resets))
    finally:
        adapter.restore(snapshot)


def _accuracy(adapter: Adapter, scenario: Scenario) -> float:
    scores = Scores()
    for moment in run(adapter, scenario):
        scores.update(moment.logits, moment.targets)
    return scores.score


def evaluate(
    adapter: Adapter,
    scenario: Scenario,
    *,
    clean: Stream | None = None,
    on_batch: Callable[[Moment, float], None] | None = None,
    on_domain: Callable[[Result], None] | None = None,
    so_far: Result | None = None,
) -> Result:
    """Measure a run domain by domain.

    With `clean`, a probe from a snapshot before the stream and after each domain shows forgetting and leaves the
    stream untouched. `on_batch` gets each moment and the domain's accuracy, or mIoU, so far, `on_domain` the
    result up to then.
    A run that stopped goes on from what it had `so_far`, with the adapter as it was then.
    """

    resets: Literal["never", "batch"] = "batch" if scenario.resets == "batch" else "never"

    def probe() -> float | None:
        return None if clean is None else accuracy_of(adapter, clean, resets)

    before = so_far.clean_before if so_far else probe()

    result = so_far or Result(
        method=type(adapter).__name__,
        network=type(adapter.model.model if isinstance(adapter.model, Normalised) else adapter.model).__name__,
        call=repr(adapter),
        scenario=scenario.name,
        seed=adapter.seed,
        clean_before=before,
        origin={**origin(adapter.device), "model": adapter.fingerprint()},
    )
    for domain in scenario.domains[len(result.domains) :]:
        result.domains.append(_measure(adapter, Scenario(scenario.name, [domain], scenario.resets), on_batch))
        if scenario.clean_between is not None:  # adapts, and carries on
            between = Scenario("clean", [scenario.clean_between], resets)
            result.domains[-1].clean_accuracy = _accuracy(adapter, between)
        else:
            result.domains[-1].clean_accuracy = before if adapter.episodic else probe()
        if on_domain is not None:
            on_domain(result)
    return result


def _measure(adapter: Adapter, scenario: Scenario, on_batch: Callable[[Moment, float], None] | None) -> DomainResult:
    """One domain. Counts stay on the device until it is over."""
    device = adapter.device
    memory = _Memory(device)
    scores = Scores()
    images = 0
    forwards, backwards, in_graph = torch.zeros(3, dtype=torch.int64, device=device).unbind()
    kept = torch.zeros((), dtype=torch.float64, device=device)
    accuracy, read = 0.0, 0.0
    spent, since = 0.0, time.perf_counter()
    for moment in run(adapter, scenario):
        step = moment.step
        if not images:
            _check_labels(moment)
        with memory.not_counting() if scores.due(moment.logits) else nullcontext():
            scores.update(moment.logits, moment.targets)
        images += step.size
        forwards += step.forwards
        in_graph += step.in_graph
        backwards += step.backwards
        kept += step.size * step.kept.float().mean() if step.kept is not None else step.size * step.taken
        if on_batch is not None:
            if time.perf_counter() - read > 0.5:  # a look at the device, which waits for it
                with memory.not_counting():
                    accuracy, read = scores.score, time.perf_counter()
            spent += time.perf_counter() - since
            on_batch(moment, accuracy)
            since = time.perf_counter()
    adapter.settle()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    memory.look()
    spent += time.perf_counter() - since
    if not scores.meter.total:
        raise ValueError(f"{scenario.domains[0].name}: no pixel has a label that counts, so there is no score")
    return DomainResult(
        name=scenario.domains[0].name,
        **scores.as_dict(),
        images=images,
        forwards=int(forwards),
        backwards=int(backwards),
        in_graph=int(in_graph),
        kept=float(kept) / max(images, 1),
        seconds=spent,
        gpu_memory=memory.peak,
        process_memory=process_memory(),
    )


class _Memory:
    """The most memory on a GPU, in MB: the adapter's, not the scores'."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: float | None = None
        self._start()

    def _start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> None:
        """Take in what was used since."""
        if self.device.type == "cuda":
            self.peak = max(self.peak or 0.0, torch.cuda.max_memory_allocated(self.device) / 2**20)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Inside."""
        self.look()
        yield
        self._start()


def _check_labels(moment: Moment) -> None:
    y, classes = moment.targets, moment.logits.shape[1]
    if y.dim() != moment.logits.dim() - 1:
        raise ValueError(f"labels of shape {tuple(y.shape)} for logits of {tuple(moment.logits.shape)}: another task?")
    counted = y[y != IGNORE] if y.dim() > 1 else y
    highest = int(counted.max()) if counted.numel() else 0
    if highest >= classes:
        raise ValueError(f"labels go up to {highest}, and the network has {classes} classes: is it for other data?")


def process_memory() -> float | None:
    """The most memory that this process has had, in MB."""
    if resource is None:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def origin(device: torch.device) -> dict[str, str | None]:
    """What a number depends on besides its arguments: versions, device, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "acclimate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The checked-out commit that this file belongs to, with a mark where the tree differs; None when installed.

    A machine that has the files without their history is told by `ACCLIMATE_COMMIT`.
    """
    if told := os.environ.get("ACCLIMATE_COMMIT"):
        return told
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603
            ["git", *arguments],  # noqa: S607
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        tracked = git("ls-files", "__init__.py")
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "") if tracked else None
    except (OSError, subprocess.CalledProcessError):
        return None
