"""What arrives, in which order, and when to start over. A scenario is data: anyone can loop over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["Batches", "Domain", "Scenario"]


class Batches(Protocol):
    """(images, labels) batches that can be gone through again: a list, a DataLoader."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Domain:
    """A named part of a stream."""

    name: str
    batches: Batches

    @classmethod
    def of(cls, name: str, x: Tensor, y: Tensor, batch_size: int = 64) -> Domain:
        """A domain out of tensors."""
        starts = range(0, len(x), batch_size)
        return cls(name, [(x[i : i + batch_size], y[i : i + batch_size]) for i in starts])


@dataclass(frozen=True)
class Scenario:
    """Domains in order. With `resets` adapters start each from the source (single-domain), else never (lifelong)."""

    name: str
    domains: Sequence[Domain]
    resets: bool = False

    def __len__(self) -> int:
        return sum(len(domain.batches) for domain in self.domains)
