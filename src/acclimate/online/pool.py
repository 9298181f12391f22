"""Shared learning: cameras in similar weather add up what they learn.

θ = θ° + g · Σ w_i Δ_i,   w_i = exp(−d(s, s_i)/T),   g = min(1, G/N),   N = Σ w_i n_i / max_i w_i n_i

Δ_i is what camera i has learned itself, n_i the number of samples that taught it, s_i the signature of its domain and d
the distance of two signatures. N is how many cameras' worth of learning there is: G = 1 averages it, a large G adds it
up, as if one camera had seen all images. CoLA (Chen et al., NeurIPS 2024: https://openreview.net/forum?id=YyMiO0DWmI)
has the idea to share changes of normalisation layers, weighted by the similarity of domains.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core.adapter import Adapter
from ..core.snapshot import StateError
from ..parts.parameters import is_norm

__all__ = ["Lesson", "Merging", "Pool", "RayPool", "describe", "distance"]


@dataclass(frozen=True)
class Lesson:
    """What a camera has learned itself during one visit to a domain."""

    kind: str
    """The method, and the fingerprint of its source network: only lessons of one kind are merged."""
    signature: Tensor
    """The domain, as `describe` returns it."""
    change: Mapping[str, Tensor]
    """The sum of its own steps by name, in double precision, so that θ° + change is θ bit for bit if it is alone."""
    samples: int
    """How many samples taught it."""


def describe(adapter: Adapter, x: Tensor, *, layers: int = 2) -> Tensor:
    """Return the signature of a batch's domain: mean and deviation of each channel before the first norm layers (2, n).

    The source network measures them, so that signatures of all cameras are comparable. This costs one forward pass.
    """
    found: list[Tensor] = []

    def measure(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(found) < layers:
            values = inputs[0].detach().float()
            last = (
                not isinstance(module, (_NormBase, nn.GroupNorm))
                and cast("Tensor", module.weight).numel() == values.shape[-1]
            )
            channels = values.movedim(-1 if last else 1, 0).flatten(1)
            found.append(torch.stack([channels.mean(1), channels.std(1, correction=0)]))

    with adapter.sharing:
        hooks = [m.register_forward_pre_hook(measure) for m in adapter.model.modules() if is_norm(m)]
        try:
            adapter.eagerly(lambda: adapter.predict_source(x))
        finally:
            for hook in hooks:
                hook.remove()
    if not found:
        raise ValueError("the network has no normalisation layer, so that domains cannot be compared")
    return torch.cat(found, 1).cpu()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the symmetric KL divergence of two signatures, as normal distributions: the mean over channels.

    >>> distance(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [1.0]]))
    4.0
    """
    (mean_a, variance_a), (mean_b, variance_b) = ((m, s.square().clamp(min=1e-12)) for m, s in (a.double(), b.double()))
    apart = (mean_a - mean_b).square()
    both = (variance_a + apart) / variance_b + (variance_b + apart) / variance_a
    return float((both / 2 - 1).mean())


class Merging(Protocol):
    """What cameras need of a pool, here or in another process."""

    def give(self, name: str, visit: int, lesson: Lesson) -> None:
        """Put the lesson of a camera's visit to a domain in place of an earlier one of the same visit."""
        ...

    def take(self, kind: str, signature: Tensor) -> dict[str, Tensor] | None:
        """Return the merged change for a domain; None if no lesson is of a similar one."""
        ...

    def similar(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two signatures count as one domain."""
        ...

    def forget(self, name: str) -> None:
        """Drop the lessons of a camera."""
        ...


class Pool:
    """The lessons of all cameras, of one method and one network. Threads may share a pool.

    What is taken depends on the lessons alone and not on the order in which they came.

    Args:
        temperature: T, the distance at which a lesson counts 1/e of one from the same domain. Infinity merges blindly.
        gain: G, how many times faster than one camera all of them learn at most. 1 averages.
        least: lessons with a smaller exp(−d/T) are of another domain.
        visits: how many lessons of each camera are remembered.
    """

    def __init__(self, temperature: float = 0.1, *, gain: float = 2.0, least: float = 0.1, visits: int = 8) -> None:
        if not temperature > 0 or not gain >= 1:
            raise ValueError(f"Pool: temperature={temperature} must be above 0, and gain={gain} at least 1")
        if not 0 < least <= 1 or visits < 1:
            raise ValueError(f"Pool: least={least} must be in (0, 1], and visits={visits} at least 1")
        self.temperature, self.gain, self.least, self.visits = temperature, gain, least, visits
        self._lessons: dict[tuple[str, int], Lesson] = {}
        self._lock = threading.Lock()

    def give(self, name: str, visit: int, lesson: Lesson) -> None:
        """Keep a lesson, in place of an earlier one of the same visit; raise if it is not finite or does not fit."""
        if not all(bool(t.isfinite().all()) for t in (lesson.signature, *lesson.change.values())):
            raise StateError(f"the lesson of {name!r} has NaN or infinity: the pool is as it was. Reset this camera")
        if lesson.samples < 0:
            raise StateError(f"the lesson of {name!r} has {lesson.samples} samples; expected 0 or more")
        with self._lock:
            for known in [*self._lessons.values()][:1]:
                _check_fit(known, lesson.kind, lesson.signature)
                if _shapes(lesson) != _shapes(known):
                    raise StateError(f"the lesson of {name!r} is of other parameters than those in this pool")
            self._lessons[name, visit] = lesson
            self._lessons.pop((name, visit - self.visits), None)

    def take(self, kind: str, signature: Tensor) -> dict[str, Tensor] | None:
        """Return g · Σ w_i Δ_i for a domain; None if no lesson is of a similar one."""
        with self._lock:
            lessons = [lesson for _, lesson in sorted(self._lessons.items())]
        for lesson in lessons[:1]:
            _check_fit(lesson, kind, signature)
        weighted = [(self._similarity(signature, each.signature), each) for each in lessons if each.samples]
        counted = [(w, each) for w, each in weighted if w >= self.least]
        if not counted:
            return None
        taught = [w * each.samples for w, each in counted]
        gain = min(1.0, self.gain * max(taught) / sum(taught))
        changes = [(gain * w, each.change) for w, each in counted]
        return {name: torch.stack([w * change[name] for w, change in changes]).sum(0) for name in changes[0][1]}

    def similar(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two signatures count as one domain."""
        return self._similarity(a, b) >= self.least

    def forget(self, name: str) -> None:
        """Drop the lessons of a camera."""
        with self._lock:
            self._lessons = {key: lesson for key, lesson in self._lessons.items() if key[0] != name}

    def __len__(self) -> int:
        return len(self._lessons)

    def _similarity(self, a: Tensor, b: Tensor) -> float:
        return math.exp(-distance(a, b) / self.temperature)


def _shapes(lesson: Lesson) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in lesson.change.items()}


def _check_fit(known: Lesson, kind: str, signature: Tensor) -> None:
    if kind != known.kind or signature.shape != known.signature.shape:
        raise StateError(
            f"this pool has lessons of {known.kind}, with signatures {tuple(known.signature.shape)}; got {kind}, "
            f"{tuple(signature.shape)}. Give each method and network a pool of its own"
        )


class RayPool:
    """A pool in a Ray actor, for cameras in several processes: `RayPool(ray.remote(Pool).remote())`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def give(self, name: str, visit: int, lesson: Lesson) -> None:
        """Put the lesson of a camera's visit to a domain in place of an earlier one of the same visit."""
        self._wait(self.actor.give.remote(name, visit, lesson))

    def take(self, kind: str, signature: Tensor) -> dict[str, Tensor] | None:
        """Return the merged change for a domain; None if no lesson is of a similar one."""
        merged: dict[str, Tensor] | None = self._wait(self.actor.take.remote(kind, signature))
        return merged

    def similar(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two signatures count as one domain."""
        return bool(self._wait(self.actor.similar.remote(a, b)))

    def forget(self, name: str) -> None:
        """Drop the lessons of a camera."""
        self._wait(self.actor.forget.remote(name))

    def _wait(self, promise: Any) -> Any:
        import ray

        return ray.get(promise)
