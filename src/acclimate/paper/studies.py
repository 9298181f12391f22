"""Measurements of the paper other than accuracy along a stream.

Each takes an adapter and one domain and returns plain data; the caller resets the adapter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..bench.metrics import Scores
from ..bench.own_networks import DropPath
from ..bench.stream import SampledDomain
from ..core.adapter import Adapter
from ..functional import entropy
from ..methods import EATA, EATAC
from ..parts.fisher import Fisher
from ..parts.subnetwork import subnetwork
from .numbers import Tick

__all__ = [
    "boundary",
    "divergence",
    "entropy_share",
    "held_out",
    "indicator",
    "regulariser",
    "selected",
    "several_steps",
]


def several_steps(adapter: Adapter, domain: SampledDomain, tick: Tick, *, steps: int) -> dict[str, Any]:
    """Adapt to each batch several times and score the last prediction, as the released programs do."""
    scores = Scores()
    for x, y in domain.on(adapter.device):
        for _ in range(steps):
            logits = adapter(x)
        scores.update(logits, y)
        tick(f"{steps} steps")
    return _scored(scores)


def held_out(adapter: Adapter, domain: SampledDomain, tick: Tick) -> dict[str, Any]:
    """Adapt to 80 % of a domain and score the rest along the way, without learning from it."""
    cut = len(domain.picks) * 4 // 5
    stream = replace(domain, picks=domain.picks[:cut])
    rest = replace(domain, name=f"{domain.name}, held out", picks=domain.picks[cut:])  # with noise of its own
    every = max(1, round(len(stream) * 75 / 625))  # the paper's 75 of 625 batches
    looks = []
    for batch, (x, _) in enumerate(stream.on(adapter.device)):
        if batch % every == 0:
            looks.append({"batches": batch, **_scored(_score(adapter, rest))})
        adapter(x)
        tick("80 % of it")
    looks.append({"batches": len(stream), **_scored(_score(adapter, rest))})
    return {name: [look[name] for look in looks] for name in looks[0]}


def indicator(adapter: Adapter, domain: SampledDomain, tick: Tick) -> dict[str, Any]:
    """Count the samples on which network and sub-network disagree, and the share that the sub-network has wrong."""
    if not isinstance(adapter, EATAC):
        raise TypeError(f"the indicator needs EATA-C, and the method is {type(adapter).__name__}")
    every = max(1, round(len(domain) * 150 / 782))  # the paper's 150 of 782 batches
    looks: list[dict[str, float]] = []
    for batch, (x, _) in enumerate(domain.on(adapter.device)):
        if batch % every == 0 and len(looks) < 6:
            looks.append({"batches": batch, **_disagreement(adapter, domain)})
        adapter(x)
        tick("disagreement")
    return {name: [look[name] for look in looks] for name in looks[0]}


def _disagreement(adapter: EATAC, domain: SampledDomain) -> dict[str, float]:
    disagreed = wrong = correct = seen = 0
    snapshot = adapter.snapshot()
    for x, y in domain.on(adapter.device):
        full, sub = (logits.argmax(1) for logits in adapter.opinions(x))
        differs, missed = full != sub, sub != y.to(sub.device)
        disagreed, wrong = disagreed + int(differs.sum()), wrong + int((differs & missed).sum())
        correct, seen = correct + int((~missed).sum()), seen + len(y)
    adapter.restore(snapshot)
    return {"accuracy": correct / seen, "uncertain": disagreed, "right": wrong / max(disagreed, 1)}


def entropy_share(
    adapter: Adapter, domain: SampledDomain, tick: Tick, *, which: Literal["highest", "lowest"], percent: float
) -> dict[str, Any]:
    """Adapt to the share of samples with the highest or lowest entropy, then score all samples without learning."""
    entropies = torch.cat([entropy(adapter.predict_only(x)).cpu() for x, _ in domain.on(adapter.device)])
    order = entropies.argsort(descending=which == "highest")[: round(len(entropies) * percent / 100)]
    chosen = torch.zeros(len(entropies), dtype=torch.bool)
    chosen[order] = True
    for x in _chosen(domain, chosen, adapter.device):
        adapter(x)
        tick(f"{percent:g} % with the {which} entropy")
    return _scored(_score(adapter, domain))


def regulariser(adapter: Adapter, domain: SampledDomain, tick: Tick) -> dict[str, Any]:
    """Measure the MB that the Fisher regulariser adds: its tensors, and on a GPU its share of a step's peak."""
    if not isinstance(adapter, (EATA, EATAC)):
        raise TypeError(f"{type(adapter).__name__} has no Fisher regulariser")
    fisher, (x, _) = adapter.regulariser, next(iter(domain.on(adapter.device)))
    held = sum(tensor.numel() * tensor.element_size() for tensor in fisher.buffers())
    peaks = []
    for each in (fisher, Fisher()):
        adapter.reset()
        adapter.regulariser = each
        adapter(x)  # the optimizer allocates its state
        peaks.append(_peak(adapter, x))
        tick("memory")
    adapter.regulariser = fisher
    return {"memory": (held + peaks[0] - peaks[1]) / 2**20}


def _peak(adapter: Adapter, x: Tensor) -> int:
    """Return the peak memory of a step in bytes; zero without a GPU."""
    if adapter.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(adapter.device)
    adapter(x)
    return torch.cuda.max_memory_allocated(adapter.device)


def divergence(adapter: Adapter, domain: SampledDomain, tick: Tick, *, drop: float) -> dict[str, Any]:
    """Score a stream and average KL(ŷ ‖ ŷ_sub) over all samples, with the time and memory of the adaptation."""
    generator = Generator().manual_seed(adapter.seed)
    divergences: list[Tensor] = []
    scores, seconds = Scores(), 0.0
    cuda = adapter.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(adapter.device)
    for x, y in domain.on(adapter.device):
        full = adapter.predict_only(x)
        with subnetwork(adapter.model, drop=drop, generator=generator):
            sub = adapter.predict_only(x)
        log_p, log_q = full.log_softmax(1), sub.log_softmax(1)
        divergences.append(F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1))
        start = time.perf_counter()
        logits = adapter(x)
        if cuda:
            torch.cuda.synchronize(adapter.device)
        seconds += time.perf_counter() - start
        scores.update(logits, y)
        tick("divergence")
    peak = torch.cuda.max_memory_allocated(adapter.device) / 2**20 if cuda else None
    loss = float(torch.cat(divergences).mean())
    return {"loss": loss, **_scored(scores), "seconds": seconds, "gpu_memory": peak}


def selected(adapter: Adapter, domain: SampledDomain, tick: Tick, *, most: int = 8) -> dict[str, Any]:
    """Return images that the source network's selection keeps and images that it removes, with their confidences."""
    select = getattr(adapter, "select", None)
    if select is None:
        raise TypeError(f"{type(adapter).__name__} does not select samples")
    found: dict[str, dict[str, list[Any]]] = {
        name: {"confidence": [], "images": []} for name in ("selected", "removed")
    }
    for x, _ in domain.on(adapter.device):
        logits = adapter.predict_only(x)
        confidences = logits.softmax(1).amax(1).tolist()
        for image, confidence, keep in zip(x, confidences, select(logits) > 0, strict=True):
            few = found["selected" if keep else "removed"]
            if len(few["images"]) < most:
                few["confidence"].append(confidence)
                few["images"].append(_thumbnail(image))
        tick("selection")
        if all(len(few["images"]) == most for few in found.values()):
            break
    return found


def boundary(adapter: Adapter, domain: SampledDomain, tick: Tick) -> dict[str, Any]:  # noqa: ARG001
    """Train a small network on two moons and map where its sub-networks disagree with it."""
    generator = Generator().manual_seed(adapter.seed)
    angle = torch.pi * torch.rand(200, generator=generator)
    moons = torch.stack(
        [torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)]
    )
    points = (moons + 0.15 * torch.randn(moons.shape, generator=generator)).flatten(0, 1)
    classes = torch.arange(2).repeat_interleave(200)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapter.seed)
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
    """Residual blocks with stochastic depth, from points in the plane to two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 16), nn.Linear(16, 2)
        self.blocks = nn.Sequential(*(_Branch() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits


def _chosen(domain: SampledDomain, chosen: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Yield batches of the chosen samples, with the noise that they have in the domain."""
    waiting = torch.empty(0)
    for (x, _), rows in zip(domain.on(device), torch.split(chosen, domain.batch_size), strict=True):
        waiting = torch.cat([waiting.to(x), x[rows.to(device)]]) if waiting.numel() else x[rows.to(device)]
        while len(waiting) >= domain.batch_size:
            yield waiting[: domain.batch_size]
            waiting = waiting[domain.batch_size :]
    if len(waiting):
        yield waiting


def _score(adapter: Adapter, domain: SampledDomain) -> Scores:
    """Score a domain without learning from it."""
    scores = Scores()
    for x, y in domain.on(adapter.device):
        scores.update(adapter.predict_only(x), y)
    return scores


def _scored(scores: Scores) -> dict[str, float]:
    return {"accuracy": scores.score, "ece": scores.meter.ece}


def _thumbnail(image: Tensor, most: int = 64) -> list[Any]:
    """Return an image as bytes, at most `most` pixels wide and high."""
    if max(image.shape[-2:]) > most:
        image = F.interpolate(image[None], size=(most, most), mode="area")[0]
    pixels: list[Any] = (255 * image).round().clamp(0, 255).int().tolist()
    return pixels
