"""What the paper measures besides accuracy along a stream. Each is a `Measure`: of a run, a method and a seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..bench.metrics import Scores
from ..bench.own_networks import DropPath
from ..bench.plan import Job
from ..bench.run import Run
from ..bench.stream import SampledDomain
from ..core.adapter import Adapter
from ..core.record import Step
from ..functional import entropy
from ..methods import EATAC
from ..parts.subnetwork import subnetwork
from .recipe import Measure, Tick

__all__ = ["boundary", "entropy_share", "held_out", "indicator", "selected", "several_steps", "with_divergence"]


def several_steps(steps: int) -> Measure:
    """Each batch is adapted to several times, and the last prediction counts, as in the released programs."""

    def measure(run: Run, job: Job, tick: Tick) -> dict[str, Any]:
        with _adapter(run, job) as adapter:
            scores = Scores()
            for x, y in _only(run, job).on(adapter.device):
                for _ in range(steps):
                    logits = adapter(x)
                scores.update(logits, y)
                tick(f"{steps} steps")
            return {"accuracy": scores.score, "ece": scores.meter.ece}

    return measure


def held_out(run: Run, job: Job, tick: Tick) -> dict[str, Any]:
    """Adapts to 80 % of a domain and is looked at along the way on the rest, which it does not learn from."""
    domain = _only(run, job)
    cut = len(domain.picks) * 4 // 5
    stream = replace(domain, picks=domain.picks[:cut])
    rest = replace(domain, name=f"{domain.name}, held out", picks=domain.picks[cut:])  # under noise of its own
    every = max(1, round(len(stream) * 75 / 625))  # the paper's 75 of 625 batches
    found: dict[str, Any] = {"batches": [], "accuracy": [], "ece": []}

    def look(batches: int) -> None:
        scores = Scores()
        for x, y in rest.on(run.plan.device):
            scores.update(_predicted(adapter, x), y)
        for name, value in (("batches", batches), ("accuracy", scores.score), ("ece", scores.meter.ece)):
            found[name].append(value)

    with _adapter(run, job) as adapter:
        for batch, (x, _) in enumerate(stream.on(adapter.device)):
            if batch % every == 0:
                look(batch)
            adapter(x)
            tick("80 % of it")
        look(len(stream))
    return found


def indicator(run: Run, job: Job, tick: Tick) -> dict[str, Any]:
    """Whether samples on which network and sub-network disagree are those that the sub-network has wrong."""
    domain = _only(run, job)
    every = max(1, round(len(domain) * 150 / 782))  # the paper's 150 of 782 batches
    found: dict[str, Any] = {"batches": [], "accuracy": [], "uncertain": [], "right": []}

    def look(adapter: EATAC, batches: int) -> None:
        disagreed = wrong = correct = seen = 0
        snapshot = adapter.snapshot()
        for x, y in domain.on(adapter.device):
            full, sub = _opinions(adapter, x)
            differs, missed = full != sub, sub != y.to(sub.device)
            disagreed, wrong = disagreed + int(differs.sum()), wrong + int((differs & missed).sum())
            correct, seen = correct + int((~missed).sum()), seen + len(y)
        adapter.restore(snapshot)
        values = (batches, correct / seen, disagreed, wrong / max(disagreed, 1))
        for name, value in zip(found, values, strict=True):
            found[name].append(value)

    with _adapter(run, job) as adapter:
        if not isinstance(adapter, EATAC):
            raise TypeError("the indicator is EATA-C's")
        for batch, (x, _) in enumerate(domain.on(adapter.device)):
            if batch % every == 0 and len(found["batches"]) < 6:
                look(adapter, batch)
            adapter(x)
            tick("and looking")
    return found


def entropy_share(which: Literal["highest", "lowest"], percent: float) -> Measure:
    """Adapts to the share of samples with the highest or lowest entropy, then predicts all, without learning."""

    def measure(run: Run, job: Job, tick: Tick) -> dict[str, Any]:
        domain = _only(run, job)
        with _adapter(run, job) as adapter:
            unsure = torch.cat([entropy(_predicted(adapter, x)).cpu() for x, _ in domain.on(adapter.device)])
            order = unsure.argsort(descending=which == "highest")[: round(len(unsure) * percent / 100)]
            chosen = torch.zeros(len(unsure), dtype=torch.bool)
            chosen[order] = True
            for x in _chosen(domain, chosen, adapter.device):
                adapter(x)
                tick(f"{percent:g} % with the {which} entropy")
            scores = Scores()
            for x, y in domain.on(adapter.device):
                scores.update(_predicted(adapter, x), y)
        return {"accuracy": scores.score, "ece": scores.meter.ece}

    return measure


def with_divergence(drop: float = 0.2) -> Measure:
    """Accuracy along the stream, and the mean KL(ŷ ‖ ŷ_sub) of all samples between a network and its sub-networks."""

    def measure(run: Run, job: Job, tick: Tick) -> dict[str, Any]:
        generator = Generator().manual_seed(job.seed)
        divergences: list[Tensor] = []
        scores, spent = Scores(), 0.0
        with _adapter(run, job) as adapter:
            cuda = adapter.device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(adapter.device)
            for x, y in _only(run, job).on(adapter.device):
                full = _predicted(adapter, x)
                with subnetwork(adapter.model, drop=drop, generator=generator):
                    sub = _predicted(adapter, x)
                divergences.append(
                    F.kl_div(sub.log_softmax(1), full.log_softmax(1), log_target=True, reduction="none").sum(1)
                )
                start = time.perf_counter()
                logits = adapter(x)
                if cuda:
                    torch.cuda.synchronize(adapter.device)
                spent += time.perf_counter() - start
                scores.update(logits, y)
                tick("and its sub-networks")
            peak = torch.cuda.max_memory_allocated(adapter.device) / 2**20 if cuda else None
        told = {"accuracy": scores.score, "ece": scores.meter.ece, "seconds": spent, "gpu_memory": peak}
        return {"loss": float(torch.cat(divergences).mean()), **told}

    return measure


def selected(run: Run, job: Job, tick: Tick, most: int = 8) -> dict[str, Any]:
    """Images that the source network is sure of, and images that it is not, with their confidences."""
    kept: list[tuple[float, Tensor]] = []
    removed: list[tuple[float, Tensor]] = []
    with _adapter(run, job) as adapter:
        if adapter.select is None:
            raise TypeError(f"{type(adapter).__name__} selects nothing")
        for x, _ in _only(run, job).on(adapter.device):
            logits = _predicted(adapter, x)
            sure = logits.softmax(1).amax(1)
            for image, confidence, keep in zip(x, sure.tolist(), adapter.select(logits) > 0, strict=True):
                (kept if keep else removed).append((confidence, image))
            tick("looking")
            if min(len(kept), len(removed)) >= most:
                break
    return {
        name: {"confidence": [c for c, _ in few[:most]], "images": [_small(image) for _, image in few[:most]]}
        for name, few in (("selected", kept), ("removed", removed))
    }


def boundary(run: Run, job: Job, tick: Tick) -> dict[str, Any]:  # noqa: ARG001
    """Two classes of points in the plane: where a small network and its sub-networks disagree."""
    generator = Generator().manual_seed(job.seed)
    angle = torch.pi * torch.rand(200, generator=generator)
    moons = torch.stack(
        [torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)]
    )
    points = (moons + 0.15 * torch.randn(moons.shape, generator=generator)).flatten(0, 1)
    classes = torch.arange(2).repeat_interleave(200)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        net = _Plane()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(net(points), classes).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    net.eval()
    axes = (torch.linspace(-1.7, 2.7, 60), torch.linspace(-1.2, 1.7, 40))
    grid = torch.cartesian_prod(*axes)
    with torch.no_grad():
        full = net(grid).argmax(1)
        disagree = torch.zeros(len(grid))
        for _ in range(50):
            with subnetwork(net, drop=0.4, schedule="uniform", branches="blocks.*.branch", generator=generator):
                disagree += (net(grid).argmax(1) != full) / 50
    return {
        "points": points.tolist(),
        "classes": classes.tolist(),
        "axes": [axis.tolist() for axis in axes],
        "full": full.view(60, 40).tolist(),
        "disagreement": disagree.view(60, 40).tolist(),
    }


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.drop = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.branch(x))
        return y


class _Plane(nn.Module):
    """Points in the plane to two classes, through residual blocks with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 16), nn.Linear(16, 2)
        self.blocks = nn.Sequential(*(_Branch() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits


def _only(run: Run, job: Job) -> SampledDomain:
    (domain,) = (d for d in run.scenario(job.seed).domains if isinstance(d, SampledDomain))
    return domain


def _chosen(domain: SampledDomain, chosen: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Batches of the chosen samples: the very images, noise and all, that the domain has."""
    waiting = torch.empty(0)
    for (x, _), rows in zip(domain.on(device), torch.split(chosen, domain.batch_size), strict=True):
        waiting = torch.cat([waiting.to(x), x[rows.to(device)]]) if waiting.numel() else x[rows.to(device)]
        while len(waiting) >= domain.batch_size:
            yield waiting[: domain.batch_size]
            waiting = waiting[domain.batch_size :]
    if len(waiting):
        yield waiting


@contextmanager
def _adapter(run: Run, job: Job) -> Iterator[Adapter]:
    adapter = run.adapter(job)
    try:
        yield adapter
    finally:
        adapter.reset()


@torch.no_grad()
def _predicted(adapter: Adapter, x: Tensor) -> Tensor:
    """As the method would predict it now, without learning."""
    before, adapter.step = adapter.step, Step(len(x))
    try:
        return adapter.infer(x)
    finally:
        adapter.step = before


@torch.no_grad()
def _opinions(adapter: EATAC, x: Tensor) -> tuple[Tensor, Tensor]:
    """The classes that the network and a sub-network predict."""
    before, adapter.step = adapter.step, Step(len(x))
    try:
        batch = adapter.predict(x)
        with adapter.subnetwork():
            return batch.logits.argmax(1), batch.rows().argmax(1)
    finally:
        adapter.step = before


def _small(image: Tensor, most: int = 64) -> list[Any]:
    """Bytes, no larger than that."""
    if max(image.shape[-2:]) > most:
        image = F.interpolate(image[None], size=(most, most), mode="area")[0]
    told: list[Any] = (255 * image).round().clamp(0, 255).int().tolist()
    return told
