"""The record of a step: what it kept, the terms of its loss, and its passes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..engine import Pass
from ..functional import entropy
from ..parts.world import ALONE, Share, World

__all__ = ["Passes", "Step", "Uncertainty"]


class Uncertainty(NamedTuple):
    """How uncertain a network is of each sample, measured by a sub-network's second prediction.

    >>> Uncertainty(model=torch.tensor([0.1]), data=torch.tensor([True])).data
    tensor([True])
    """

    model: Tensor
    """The divergence L_c of Eq. (10), which further learning could reduce."""
    data: Tensor
    """Whether the two predict different classes (C(x) = −1, Eq. 13): the sample is near a decision boundary."""


@dataclass
class Step:
    """The record of one batch, `adapter.last`. Tensors stay on their device; only reading one waits for it.

    >>> step = Step(size=2, logits=torch.zeros(2, 4))
    >>> step.entropy
    tensor([1.3863, 1.3863])
    """

    size: int
    """The number of samples, of this rank's part if several ranks share the batch."""
    logits: Tensor | None = None
    kept: Tensor | None = None
    """S(x) > 0 per sample or pixel; None if the method learns from everything or from nothing."""
    forwards: int | Tensor = 0
    backwards: int | Tensor = 0
    """Samples that received a gradient in their logits: the paper's count for EATA, EATA-C and SAR."""
    in_graph: int | Tensor = 0
    """Samples in the graph of a backward pass: the paper's count for ROID."""
    taken: bool | Tensor = False
    """Whether an update was made; a tensor if the value is only on the device."""
    dropped: int | Tensor = 0
    """Steps that were not made because their gradient was not finite."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The terms of the loss, whether or not an update was made."""
    opinions: Uncertainty | None = None
    """Uncertainty of each sample that a sub-network has predicted."""
    counts: Tensor | None = None
    """Which of them were kept; None means all."""
    graph: tuple[Pass, int] | None = None
    """The last pass with a graph, and its batch size. A backward runs in the contexts of this pass, because networks
    may recompute activations."""
    share: Share | None = None
    """The part of the batch that this rank has; None is all of it."""
    engine: Literal["eager", "compiled", "recorded"] = "eager"
    """How the passes ran. A pass that could not be compiled runs eagerly in a compiled step."""

    @property
    def total(self) -> int:
        """The number of samples on all ranks."""
        return self.size if self.share is None else self.share.total

    def overall(self, rows: int) -> int:
        """Return the number of samples on all ranks, if these rows are the whole part of this one."""
        return self.total if rows == self.size else rows

    def count(self, forwards: int | Tensor = 0, backwards: int | Tensor = 0, in_graph: int | Tensor = 0) -> None:
        """Add numbers of passes, counted per sample."""
        self.forwards, self.backwards = self.forwards + forwards, self.backwards + backwards
        self.in_graph = self.in_graph + in_graph

    def add(self, other: Step) -> None:
        """Add the passes of another record."""
        self.count(other.forwards, other.backwards, other.in_graph)
        self.dropped = self.dropped + other.dropped
        self.taken = other.taken | self.taken

    def copy(self) -> Step:
        """Return a copy with tensors of its own."""
        return replace(self, **{f.name: _copy(getattr(self, f.name)) for f in fields(self)})

    def reject(self, sound: Tensor) -> None:
        """Count no forward pass if the batch was rejected on the device."""
        self.forwards = self.forwards * sound.all()

    def assess(self, opinions: Uncertainty, counts: Tensor | None) -> None:
        """Store the uncertainty of each sample that a sub-network has predicted; `counts` marks the kept ones."""
        self.opinions, self.counts = opinions, counts

    def finish(self, logits: Tensor) -> None:
        """Close the record: backward passes count only if an update was made."""
        self.backwards, self.in_graph = self.backwards * self.taken, self.in_graph * self.taken
        self.logits, self.graph = logits.detach(), None

    @property
    def entropy(self) -> Tensor | None:
        """H of each prediction, computed when read."""
        return None if self.logits is None else entropy(self.logits)

    @property
    def updated(self) -> bool:
        """Whether the batch changed the network."""
        return bool(self.taken)

    @property
    def terms(self) -> dict[str, Tensor]:
        """The terms of the loss by name; empty if no update was made."""
        return self.losses if self.updated else {}

    @property
    def loss(self) -> Tensor | None:
        """The sum of the terms; None if no update was made."""
        return torch.stack([*self.losses.values()]).sum() if self.losses and self.updated else None

    @property
    def uncertainty(self) -> Uncertainty | None:
        """Uncertainty of each kept sample, for methods that measure it; None if no update was made."""
        if self.opinions is None or not self.updated:
            return None
        return self.opinions if self.counts is None else Uncertainty(*(o[self.counts] for o in self.opinions))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Uncertainty):
        return Uncertainty(*map(_copy, value))
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    return value


class Passes(nn.Module):
    """Counts since the last reset: passes per sample, backwards in both ways (see `Step`), and dropped steps."""

    forwards: Tensor
    backwards: Tensor
    in_graph: Tensor
    dropped: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("forwards", "backwards", "in_graph", "dropped"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self._report: Tensor | None = None
        """`dropped` on the host, copied without waiting."""

    def add(self, step: Step, world: World = ALONE) -> None:
        """Count a step of all ranks."""
        forwards, backwards, in_graph = world.counts(step.forwards, step.backwards, step.in_graph)
        self.forwards += forwards
        self.backwards += backwards
        self.in_graph += in_graph
        self.dropped += step.dropped

    def known_drops(self) -> int:
        """Return how many steps were dropped, as far as the host knows without waiting for the device."""
        if not self.dropped.is_cuda:
            return int(self.dropped)
        if self._report is None:
            self._report = torch.zeros((), dtype=torch.int64, pin_memory=True)
        known = int(self._report)
        self._report.copy_(self.dropped, non_blocking=True)
        return known

    def extra_repr(self) -> str:
        """Show the counts."""
        return ", ".join(f"{name}={int(count)}" for name, count in self.named_buffers())
