"""Run an adapter through a scenario and measure it. Labels go around the adapter, never through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.adapter import Adapter
from ..core.step import Step
from ..data.types import IGNORE
from ..online.guard import Guard
from ..parts.normalised import Normalised
from ..parts.world import World
from .metrics import Scores
from .provenance import origin, process_memory
from .result import DomainResult, Result
from .stream import SampledDomain, Scenario, Stream
from .torchrun import divided, scores_of_all

__all__ = ["BatchResult", "accuracy_of", "check_labels", "evaluate", "run", "start_result"]


@dataclass(frozen=True)
class BatchResult:
    """One batch of a run."""

    domain: str
    logits: Tensor
    targets: Tensor
    step: Step
    last: bool
    """Whether this is the last batch of its domain."""
    probe: bool
    """Whether it belongs to the clean set between two domains."""
    rejected: bool = False
    """Whether the adapter rejected it, so that the logits are a uniform prediction."""


def run(adapter: Adapter | Guard, scenario: Scenario, start: int = 0) -> Iterator[BatchResult]:
    """Predict and learn batch by batch, from domain `start` on; reset where the scenario says so.

    >>> import acclimate
    >>> from acclimate.bench.networks import load_network
    >>> from acclimate.bench.scenarios import lifelong
    >>> from acclimate.data import open_suite
    >>> fog = lifelong(open_suite("digits"), shifts=["fog"], images=128)
    >>> [tuple(batch.logits.shape) for batch in run(acclimate.BNAdapt(load_network("digits-resnet").model), fog)]
    [(64, 10), (64, 10)]
    """
    between = [] if scenario.clean_between is None else [(scenario.clean_between, True)]
    for domain in scenario.domains[start:]:
        if scenario.resets == "domain":
            adapter.reset()
        for part, probe in ((domain, False), *between):
            adapter.new_domain(round=part.round)
            batches = iter(divided(part, adapter.world).on(adapter.device))
            following = _read(batches, adapter.world)
            if following is None:
                raise ValueError(f"{part.name}: the domain has no batches")
            while following is not None:
                x, targets = following
                if scenario.resets == "batch":
                    adapter.reset()
                logits, step, rejected = _answer(adapter, x, tolerant=scenario.tolerant)
                following = _read(batches, adapter.world)
                yield BatchResult(part.name, logits, targets, step, following is None, probe, rejected)


def _read(batches: Iterator[tuple[Tensor, Tensor]], world: World) -> tuple[Tensor, Tensor] | None:
    """Return the next batch, or None at the end; where one rank cannot read its part, all raise."""
    with world.together():
        return next(batches, None)


def _answer(adapter: Adapter | Guard, x: Tensor, *, tolerant: bool) -> tuple[Tensor, Step, bool]:
    """Return the logits, the record of the step, and whether the batch was rejected, which needs `tolerant`."""
    try:
        logits = adapter(x)
        if tolerant:
            adapter.settle()  # a recorded step would raise with a later batch
    except ValueError:
        if not tolerant:
            raise
        logits = torch.zeros_like(adapter.predict_source(torch.zeros_like(x)))  # the adapted network may return NaN
        return logits, Step(len(x), logits), True
    return logits, adapter.last, False


def evaluate(
    adapter: Adapter | Guard,
    scenario: Scenario,
    *,
    clean: Stream | None = None,
    on_batch: Callable[[BatchResult, float], None] | None = None,
    on_domain: Callable[[Result], None] | None = None,
    result: Result | None = None,
) -> Result:
    """Measure what `run` yields, domain by domain.

    With `clean`, a probe from a snapshot before the stream and after each domain shows forgetting and leaves the
    stream unchanged. `on_batch` receives each batch of the stream and the domain's score so far, `on_domain` the result
    so far. A stopped run resumes from its `result`, with the adapter in the state of that time.

    >>> import acclimate
    >>> from acclimate.bench.networks import load_network
    >>> from acclimate.bench.scenarios import lifelong
    >>> from acclimate.data import open_suite
    >>> fog = lifelong(open_suite("digits"), shifts=["fog"], images=128)
    >>> result = evaluate(acclimate.BNAdapt(load_network("digits-resnet").model), fog)
    >>> [domain.name for domain in result.domains]
    ['fog']
    """
    resets: Literal["never", "batch"] = "batch" if scenario.resets == "batch" else "never"

    def probe(images: Stream | None) -> float | None:
        return None if images is None else accuracy_of(adapter, images, resets, tolerant=scenario.tolerant)

    result = result or start_result(adapter, scenario)
    if not result.domains:
        result.clean_before = probe(clean or scenario.clean_between)
    meter = _DomainMeter(adapter, tolerant=scenario.tolerant)
    for batch in run(adapter, scenario, len(result.domains)):
        meter.update(batch)
        if not batch.probe and (scenario.tolerant or isinstance(adapter, Guard)):
            result.along = result.along or []
            result.along.append(_score(batch, adapter.world))
        if on_batch is not None and not batch.probe:
            meter.report(batch, on_batch)
        if not batch.last:
            continue
        if batch.probe:
            result.domains[-1].clean_accuracy = scores_of_all(meter.scores, adapter.world).score
        else:
            result.domains.append(meter.finish(batch.domain, scenario.domains[len(result.domains)]))
            meter.add_bins(result.bins)
            if scenario.clean_between is None:
                result.domains[-1].clean_accuracy = result.clean_before if adapter.episodic else probe(clean)
        if batch.probe or scenario.clean_between is None:
            result.done = len(result.domains) == len(scenario.domains)
            result.health = adapter.health.as_dict() if isinstance(adapter, Guard) else None
            if on_domain is not None:
                on_domain(result)
        meter = _DomainMeter(adapter, tolerant=scenario.tolerant)
    return result


def _score(batch: BatchResult, world: World) -> float:
    scores = Scores()
    scores.update(batch.logits, batch.targets)
    return scores_of_all(scores, world).score


def start_result(adapter: Adapter | Guard, scenario: Scenario, **fields: Any) -> Result:
    """Return a result without numbers; `fields` are those that the adapter and the scenario do not know."""
    model = adapter.model.model if isinstance(adapter.model, Normalised) else adapter.model
    return Result(
        method=type(adapter.adapter if isinstance(adapter, Guard) else adapter).__name__,
        network=type(model).__name__,
        call=repr(adapter),
        scenario=scenario.name,
        seed=adapter.seed,
        weights=adapter.fingerprint(),
        origin=origin(adapter.device, adapter.world.size),
        **fields,
    )


def accuracy_of(
    adapter: Adapter | Guard, domain: Stream, resets: Literal["never", "batch"] = "never", *, tolerant: bool = False
) -> float:
    """Score on a domain, with adaptation to it; the adapter's state is restored afterwards."""
    snapshot, scores = adapter.snapshot(), Scores()
    try:
        for batch in run(adapter, Scenario(domain.name, [domain], resets, tolerant=tolerant)):
            scores.update(batch.logits, batch.targets)
        return scores_of_all(scores, adapter.world).score
    finally:
        adapter.restore(snapshot)


class _DomainMeter:
    """The measurements of one domain. Counts stay on the device until the domain is over."""

    def __init__(self, adapter: Adapter | Guard, *, tolerant: bool) -> None:
        self.adapter, self.scores, self.images = adapter, Scores(), 0
        self._checked = False
        self.rejected = 0 if tolerant else None
        self.memory = _PeakMemory(adapter.device)
        self.forwards, self.backwards, self.in_graph = torch.zeros(3, dtype=torch.int64, device=adapter.device).unbind()
        self.kept = torch.zeros((), dtype=torch.float64, device=adapter.device)
        self.seconds, self._since = 0.0, time.perf_counter()
        self._shown, self._read = 0.0, 0.0

    def update(self, batch: BatchResult) -> None:
        """Add a batch."""
        step = batch.step
        if not self._checked:
            with self.adapter.world.together():
                check_labels(batch.targets, batch.logits)
            self._checked = True
        with self.memory.paused() if self.scores.due(batch.logits) else nullcontext():
            self.scores.update(batch.logits, batch.targets)
        self.images += step.size
        if self.rejected is not None:
            self.rejected += batch.rejected
        self.forwards += step.forwards
        self.in_graph += step.in_graph
        self.backwards += step.backwards
        if step.size:
            self.kept += step.size * step.kept.float().mean() if step.kept is not None else step.size * step.taken

    def report(self, batch: BatchResult, on_batch: Callable[[BatchResult, float], None]) -> None:
        """Call back with the score, which is read twice a second at most: reading it synchronises the device."""
        if time.perf_counter() - self._read > 0.5:
            with self.memory.paused():
                self._shown, self._read = self.scores.score, time.perf_counter()
        self.seconds += time.perf_counter() - self._since
        on_batch(batch, self._shown)
        self._since = time.perf_counter()

    def finish(self, name: str, domain: Stream) -> DomainResult:
        """Return the domain's numbers."""
        device = self.adapter.device
        self.adapter.settle()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.memory.read()
        self.seconds += time.perf_counter() - self._since
        self._add_other_ranks()
        if not self.scores.meter.total:
            raise ValueError(f"{name}: no pixel has a label that counts, so there is no score")
        return DomainResult(
            name=name,
            **self.scores.as_dict(),
            images=self.images,
            forwards=int(self.forwards),
            backwards=int(self.backwards),
            in_graph=int(self.in_graph),
            kept=float(self.kept) / max(self.images, 1),
            seconds=self.seconds,
            gpu_memory=self.memory.peak,
            process_memory=process_memory(),
            skipped=domain.left_out(self.images) if isinstance(domain, SampledDomain) else None,
            rejected=self.rejected,
        )

    def _add_other_ranks(self) -> None:
        """Add what the other ranks have measured on their parts of the batches."""
        world = self.adapter.world
        self.scores, self.kept = scores_of_all(self.scores, world), world.sum(self.kept)
        numbers = world.counts(self.images, self.forwards, self.backwards, self.in_graph)
        self.images, (self.forwards, self.backwards, self.in_graph) = int(numbers[0]), map(torch.as_tensor, numbers[1:])

    def add_bins(self, bins: dict[str, list[float]]) -> None:
        """Add the domain's reliability bins to the stream's."""
        for name, values in zip(bins, self.scores.meter.bins.tolist(), strict=True):
            bins[name] = [total + value for total, value in zip(bins[name], values, strict=True)]


class _PeakMemory:
    """Peak GPU memory in MB of the adapter, without the scores."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: float | None = None
        self._start()

    def _start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> None:
        """Update the peak."""
        if self.device.type == "cuda":
            self.peak = max(self.peak or 0.0, torch.cuda.max_memory_allocated(self.device) / 2**20)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is allocated inside."""
        self.read()
        yield
        self._start()


def check_labels(y: Tensor, logits: Tensor) -> None:
    """Raise if labels are not classes of the network with these logits."""
    classes = logits.shape[1]
    if y.dim() != logits.dim() - 1:
        raise ValueError(f"labels of shape {tuple(y.shape)} for logits of {tuple(logits.shape)}: another task?")
    counted = y[y != IGNORE] if y.dim() > 1 else y
    highest = int(counted.max()) if counted.numel() else 0
    if highest >= classes:
        raise ValueError(f"labels go up to {highest}, and the network has {classes} classes: is it for other data?")
