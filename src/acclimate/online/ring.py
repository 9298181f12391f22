"""A ring of healthy snapshots of an adapter; the source is always the first, as the last resort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.adapter import Adapter
from ..core.snapshot import Snapshot, optimizer_state

__all__ = ["Ring"]

_PARAMETER, _TEACHER = "parameter/", "state/teacher."


class Ring:
    """At most `most` snapshots besides the source's. They are as large as the adapted parameters, on their device."""

    def __init__(self, adapter: Adapter, most: int) -> None:
        self.adapter, self.most = adapter, most
        self.snapshots = [adapter.state.source()]

    def __len__(self) -> int:
        return len(self.snapshots)

    def keep(self, snapshot: Snapshot) -> None:
        """Add a snapshot; the oldest but the source leaves."""
        self.snapshots.append(snapshot)
        if len(self) > self.most + 1:
            del self.snapshots[1]

    def back(self) -> bool:
        """Restore the newest snapshot and drop it, so that the next time goes further back.

        Counts of passes stay, and so do the optimizer's settings: a user may have lowered the learning rate.

        Return whether that was not yet the source.
        """
        earlier = len(self) > 1
        snapshot = self.adapter.state.completed(self.snapshots.pop() if earlier else self.snapshots[0])
        counted = [count.clone() for count in self.adapter.passes.buffers()]
        _, now = optimizer_state(self.adapter.optimizer)
        settings = {name: now[name] if name == "groups" else value for name, value in snapshot.settings.items()}
        self.adapter.restore(Snapshot(snapshot.tensors, settings))
        for count, value in zip(self.adapter.passes.buffers(), counted, strict=True):
            count.copy_(value)
        return earlier

    def halve(self) -> None:
        """Move the parameters, and a teacher's, half of the way to the source, and clear the optimizer's state."""
        now, source = self.adapter.snapshot(), self.adapter.state.source().tensors
        half = {n: t.lerp(source[start], 0.5) for n, t in now.tensors.items() if (start := _start(n)) in source}
        calm = {n: torch.zeros_like(t) for n, t in now.tensors.items() if n.startswith("optimizer/")}
        self.adapter.restore(Snapshot({**now.tensors, **half, **calm}, now.settings))

    def forget(self) -> None:
        """Keep the source alone."""
        del self.snapshots[1:]

    def cast(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move or a cast, as to the adapter."""
        moved = [Snapshot({n: _cast(n, t, fn) for n, t in s.tensors.items()}, s.settings) for s in self.snapshots[1:]]
        self.snapshots = [self.adapter.state.source(), *moved]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all snapshots but the source's, by name."""
        return {f"{i}/{n}": t for i, each in enumerate(self.snapshots[1:]) for n, t in each.tensors.items()}

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of all snapshots but the source's."""
        return [dict(each.settings) for each in self.snapshots[1:]]

    def load(self, tensors: Mapping[str, Tensor], settings: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `tensors` and `settings` have returned."""
        own = [
            Snapshot({n.split("/", 1)[1]: t for n, t in tensors.items() if n.startswith(f"{i}/")}, each)
            for i, each in enumerate(settings)
        ]
        self.snapshots = [self.adapter.state.source(), *own]


def _start(name: str) -> str:
    """Return the name of the parameter that a tensor was equal to before anything was learned; none for others."""
    if name.startswith(_TEACHER):
        return _PARAMETER + name.removeprefix(_TEACHER).replace("/", ".")
    return name if name.startswith(_PARAMETER) else ""


def _cast(name: str, tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    return tensor if name.startswith("generator/") else fn(tensor)
