"""How a step runs: live, or while it is being recorded as a CUDA graph (see `recorder`).

An adapter calls these few methods and need not know which of the two applies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from ..checks import refuse_non_finite
from ..parts.subnetwork import Sample, SubNetworks
from ..parts.world import Share

__all__ = ["Execution", "Gathered", "Live", "Rehearsal", "own_gradients", "rows_first"]

Value = TypeVar("Value")


class Gathered(NamedTuple):
    """The rows of kept samples."""

    places: Tensor
    padded: bool
    """Whether rows that are not kept follow the kept ones, as padding."""
    samples: int | None
    """How many are kept, if the host knows it and some rows are padding."""


class Execution(ABC):
    """What a step needs from the way it runs."""

    def chosen(self, keep: Tensor) -> Tensor:
        """Return which samples or pixels to learn from, of those that the method keeps."""
        return keep

    @abstractmethod
    def prediction(self, make: Callable[[], Value]) -> Value:
        """Return a value that a step computes before samples are counted."""

    @abstractmethod
    def check(self, x: Tensor, logits: Tensor, *, unit_range: bool) -> bool:
        """Reject a batch with NaN or infinity; return whether the host has checked it."""

    @abstractmethod
    def count(self, samples: Tensor) -> None:
        """Prepare for a backward pass on the rows of these samples."""

    @abstractmethod
    def gather(self, samples: Tensor, *, at_least: int = 1, exact: bool = False) -> Gathered:
        """Return the rows of these samples; `exact` allows no padding."""

    @abstractmethod
    def sample(self, subnetworks: SubNetworks, x: Tensor, generator: Generator, share: Share | None) -> Sample:
        """Sample sub-networks for a batch; rows that are not in its share are padding."""

    @abstractmethod
    def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:
        """Return the condition of an update; with `can_wait` it may stay on the device."""

    @abstractmethod
    def gradients(
        self, loss: Tensor, parameters: Sequence[Parameter], within: AbstractContextManager[object], *, retain: bool
    ) -> list[Tensor]:
        """Return the gradients of the loss; zero for a parameter that is not used."""


class Live(Execution):
    """Run a step directly; the host may read from the device."""

    def prediction(self, make: Callable[[], Value]) -> Value:
        """Compute it."""
        return make()

    def check(self, x: Tensor, logits: Tensor, *, unit_range: bool) -> bool:
        """Raise at once."""
        refuse_non_finite(x, logits, unit_range=unit_range)
        return True

    def count(self, samples: Tensor) -> None:
        """Do nothing: the backward pass counts its rows itself."""

    def gather(self, samples: Tensor, *, at_least: int = 1, exact: bool = False) -> Gathered:
        """Read which samples are kept."""
        places = samples.nonzero().squeeze(1)
        if 0 < len(places) < min(at_least, len(samples)) and not exact:
            return Gathered(rows_first(samples, at_least), padded=True, samples=len(places))
        return Gathered(places, padded=False, samples=None)

    def sample(self, subnetworks: SubNetworks, x: Tensor, generator: Generator, share: Share | None) -> Sample:
        """Sample."""
        return subnetworks.sample(x, generator, share)

    def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:
        """Read the condition if that needs no synchronisation, or if it cannot stay on the device."""
        if isinstance(when, Tensor) and (when.device.type == "cpu" or not can_wait):
            return bool(when)
        return when

    def gradients(
        self, loss: Tensor, parameters: Sequence[Parameter], within: AbstractContextManager[object], *, retain: bool
    ) -> list[Tensor]:
        """Run `backward`, which activation checkpoints of either kind support."""
        if not loss.requires_grad:
            raise RuntimeError(
                "the logits carry no gradient: does the model's forward use torch.no_grad() or detach()?"
            )
        with own_gradients(parameters):
            with within:
                loss.backward(retain_graph=retain)  # type: ignore[no-untyped-call]
            # a branch that was dropped has no gradient: momentum continues as if it were zero
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


class Rehearsal(Live):
    """Run a step directly, and learn from every second sample, so that no pass of the step is left out."""

    def chosen(self, keep: Tensor) -> Tensor:
        """Choose every second sample."""
        even = torch.arange(len(keep), device=keep.device) % 2 == 0
        return even.view(-1, *[1] * (keep.dim() - 1)).expand_as(keep)


@contextmanager
def own_gradients(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Clear `.grad` of the parameters inside the block, and restore the user's values at the end."""
    found = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        yield
    finally:
        for p, grad in zip(parameters, found, strict=True):
            p.grad = grad


def rows_first(mask: Tensor, count: int) -> Tensor:
    """Return the indices of `count` rows: first those in the mask, in order, then others."""
    return torch.argsort(mask.logical_not().to(torch.uint8), stable=True)[:count]
