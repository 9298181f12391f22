"""What a step did and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional import entropy

__all__ = ["Count", "Passes", "Step", "Uncertainty"]


class Uncertainty(NamedTuple):
    """How unsure a network is of each sample, by a sub-network's second opinion."""

    model: Tensor
    """The divergence L_c of Eq. (10): what more learning could reduce."""
    data: Tensor
    """Whether the two predict different classes (C(x) = −1, Eq. 13): the sample is near a decision boundary."""


@dataclass
class Step:
    """The record of one batch, `adapter.last`. Tensors stay on their device: only reading one waits for it."""

    size: int
    logits: Tensor | None = None
    kept: Tensor | None = None
    """S(x) > 0, a sample or a pixel; None where the method learns from everything or from nothing."""
    forwards: int | Tensor = 0
    backwards: int | Tensor = 0
    """Samples whose logits received a gradient: the paper's count for EATA, EATA-C and SAR."""
    in_graph: int | Tensor = 0
    """Samples that were in the graph of a backward pass: the paper's count for ROID."""
    taken: bool | Tensor = False
    """Whether a step was taken; a tensor where only the device knows."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The terms of the loss, whether or not a step was taken."""
    opinions: Uncertainty | None = None
    """Of each sample of a second pass."""
    counts: Tensor | None = None
    """Which of them were kept; None: all."""

    @property
    def entropy(self) -> Tensor | None:
        """H of each prediction, computed when asked for."""
        return None if self.logits is None else entropy(self.logits)

    @property
    def updated(self) -> bool:
        """Whether the batch changed the network."""
        return bool(self.taken)

    @property
    def terms(self) -> dict[str, Tensor]:
        """The loss, term by term; empty where no step was taken."""
        return self.losses if self.updated else {}

    @property
    def loss(self) -> Tensor | None:
        """The sum of the terms; None where no step was taken."""
        return torch.stack([*self.losses.values()]).sum() if self.updated else None

    @property
    def uncertainty(self) -> Uncertainty | None:
        """Of each kept sample, from methods that measure it; None where no step was taken."""
        if self.opinions is None or not self.updated:
            return None
        return self.opinions if self.counts is None else Uncertainty(*(o[self.counts] for o in self.opinions))


class Count(nn.Module):
    """A count that is part of an adapter's state but stays on the host, where reading it waits for no device."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))

    def add(self, number: int) -> None:
        """Count on, in place: a recorded step knows state by its address."""
        self.value += number

    def __int__(self) -> int:
        return int(self.value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: ARG002
        return self


class Passes(nn.Module):
    """Per-sample counts since the last reset: forwards, and backwards counted both ways (see `Step`)."""

    forwards: Tensor
    backwards: Tensor
    in_graph: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("forwards", "backwards", "in_graph"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def add(self, step: Step) -> None:
        """Count a step."""
        self.forwards += step.forwards
        self.backwards += step.backwards
        self.in_graph += step.in_graph

    def extra_repr(self) -> str:
        """The three counts."""
        return f"forwards={int(self.forwards)}, backwards={int(self.backwards)}, in_graph={int(self.in_graph)}"
