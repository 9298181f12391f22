"""Cameras that share what they learn through a pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.adapter import Adapter
from ..core.snapshot import Snapshot
from .cameras import Streams
from .guard import Guard
from .pool import Lesson, Merging, describe

__all__ = ["Shared"]


@dataclass
class _Visit:
    """A camera's stay in one domain."""

    number: int
    signature: Tensor
    change: dict[str, Tensor]
    """Δ, what the camera has learned itself, until the last exchange."""
    start: dict[str, Tensor]
    """θ after the last exchange."""
    backwards: int
    """The camera's count of backward passes when the visit began."""
    batches: int = 0
    """Batches since the last exchange."""


class Shared:
    """Cameras that add up what they learn in similar weather: `logits = shared("north gate", x)`.

    >>> import acclimate, torch
    >>> from acclimate.online.pool import Pool
    >>> net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> shared = Shared(acclimate.Streams(acclimate.Tent(net)), Pool())
    >>> shared("north gate", torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Before its first batch a camera takes what the pool knows of its weather, and from then on it gives and takes every
    `every` batches. When the weather has changed, its lesson stays in the pool, and it starts from what the pool knows
    of the new weather, or from the source. Adapted parameters are shared; the state of the optimizer and of the method
    stays the camera's own. A camera that is alone in its weather learns bit for bit as without a pool.

    Args:
        cameras: cameras over an adapter or a guard.
        pool: shared with cameras over other copies of the network, perhaps in other processes.
        every: batches between exchanges. Each costs one forward pass.
    """

    def __init__(self, cameras: Streams, pool: Merging, *, every: int = 5) -> None:
        adapter = cameras.adapter.adapter if isinstance(cameras.adapter, Guard) else cameras.adapter
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"Shared: expected cameras over an adapter or a guard, got {type(cameras.adapter).__name__}"
            )
        if every < 1:
            raise ValueError(f"Shared: every={every} must be at least 1")
        self.cameras, self.pool, self.every, self._adapter = cameras, pool, every, adapter
        self._kind = f"{adapter.state.method} {adapter.fingerprint()}"
        self._visits: dict[str, _Visit] = {}

    def __call__(self, key: str, x: Tensor) -> Tensor:
        """Exchange with the pool if it is time to; then predict with the state of this camera and learn from x."""
        with self._adapter.sharing:
            visit = self._visits.get(key)
            if visit is None or visit.batches >= self.every:
                signature = describe(self._adapter, x)  # refuses a batch that is not finite
                with self.cameras.using(key):
                    visit = self._exchange(key, visit, signature)
            logits = self.cameras(key, x)
            visit.batches += 1
            return logits

    def reset(self, key: str) -> None:
        """Forget what this camera has learned, also in the pool. Others keep it until they exchange."""
        with self._adapter.sharing:
            self.cameras.reset(key)
            self.pool.forget(key)
            self._visits.pop(key, None)

    def _exchange(self, key: str, visit: _Visit | None, signature: Tensor) -> _Visit:
        adapter, backwards = self._adapter, int(self._adapter.passes.backwards)
        snapshot = adapter.snapshot()
        source = _parameters(adapter.state.source())
        now = _parameters(snapshot)
        zero = {name: tensor.double().cpu() * 0 for name, tensor in source.items()}
        if visit is not None:
            visit.change = {n: d + (now[n].double() - visit.start[n].double()).cpu() for n, d in visit.change.items()}
            samples = max(0, backwards - visit.backwards)
            self.pool.give(key, visit.number, Lesson(self._kind, visit.signature, visit.change, samples))
        if visit is None or not self.pool.similar(visit.signature, signature):
            visit = _Visit(0 if visit is None else visit.number + 1, signature, zero, source, backwards)
        taken = self.pool.take(self._kind, visit.signature)
        if taken is None and key not in self._visits:  # it may have learned before it shared
            taken = visit.change = {n: now[n].double().cpu() - source[n].double().cpu() for n in now}
            visit.backwards = 0
        start = {
            n: (source[n].double() + d.to(source[n].device)).to(source[n].dtype) for n, d in (taken or zero).items()
        }
        merged = {f"parameter/{name}": tensor for name, tensor in start.items()}
        adapter.restore(Snapshot({**snapshot.tensors, **merged}, snapshot.settings))
        visit.start, visit.batches = start, 0
        self._visits[key] = visit
        return visit


def _parameters(snapshot: Snapshot) -> dict[str, Tensor]:
    return snapshot.parts()["parameter"]
