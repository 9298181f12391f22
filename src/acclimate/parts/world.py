"""The ranks that share a batch: whatever is "over the batch" is over the parts of all of them.

One process is `ALONE`, which returns what it is given. `Ranks`, in `ranks.py`, are several.

Every rank computes the same loss, because sums and means are over all ranks, and gradients are averaged. A term without
samples, such as the Fisher regulariser, therefore needs no care. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

from torch import Tensor

__all__ = ["ALONE", "Share", "World"]

Item = TypeVar("Item")


class Share(NamedTuple):
    """The rows of a batch that belong to this rank.

    >>> Share(offset=2, size=3, total=8).of(torch.arange(8))
    tensor([2, 3, 4])
    """

    offset: int
    size: int
    total: int

    @classmethod
    def even(cls, total: int, rank: int, ranks: int) -> Share:
        """Return a rank's rows where a batch is divided as evenly as possible."""
        start, end = total * rank // ranks, total * (rank + 1) // ranks
        return cls(start, end - start, total)

    def of(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of values for the whole batch."""
        return rows if self.size == self.total else rows[self.offset : self.offset + self.size]

    def whole(self, rows: Tensor) -> Tensor:
        """Return a batch of the size of all ranks with this rank's rows in their places, and zeros elsewhere."""
        if self.size == self.total:
            return rows
        batch = rows.new_zeros(self.total, *rows.shape[1:])
        batch[self.offset : self.offset + self.size] = rows
        return batch


class World:
    """The ranks that share a batch; this class is one process, alone."""

    rank: int = 0
    size: int = 1

    def admit(self, check: Callable[[], Tensor]) -> tuple[Tensor, Share]:
        """Return the batch that `check` returns, and its share; where it raises on one rank, it raises on all."""
        x = check()
        return x, self.share(len(x))

    def share(self, size: int) -> Share:
        """Return the place of this many rows in those of all ranks."""
        return Share(0, size, size)

    def together(self) -> AbstractContextManager[None]:
        """Let an error inside on one rank be an error on all, so that none waits for another."""
        return nullcontext()

    def agreed(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return whether all ranks are known to have raised this error, so that they can go on together."""
        return True

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return value

    def ratio(self, total: Tensor, number: int | Tensor) -> Tensor:
        """Return Σ total / Σ number over ranks; zero where the number is zero."""
        return total / (number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1))

    def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
        """Return the mean over the values of all ranks, or over one dimension of them."""
        return values.mean() if dim is None else values.mean(dim)

    def mean_of(self, mean: Tensor, number: int) -> Tensor:  # noqa: ARG002
        """Return the mean over all ranks, from the `mean` of a number of values on this one."""
        return mean

    def any(self, flags: Tensor) -> bool | Tensor:
        """Return whether any flag is true; a bool if reading it needs no synchronisation."""
        return bool(flags.any()) if flags.device.type == "cpu" else flags.any()

    def all(self, flags: Tensor) -> Tensor:
        """Return whether all flags are true."""
        return flags.all()

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value."""
        return values.min(), values.max()

    def counts(self, *numbers: int | Tensor) -> Sequence[int | Tensor]:
        """Return the sum over ranks of each number."""
        return numbers

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in order, without a graph."""
        return rows

    def spread(self, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return what a function makes of rows that all ranks have, each of a part of them."""
        return predict(rows)

    def preceded(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank after the last one before them on other ranks, if there is one."""
        return rows

    def average(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the mean over ranks of each gradient, in one message."""
        return gradients

    def turns(self, items: Iterable[Item]) -> Iterable[Item]:
        """Return the items of this rank's turn, if ranks take turns."""
        return items

    def same(self, what: str, value: str) -> None:
        """Raise if the value is not the same on all ranks."""

    def wait(self) -> None:
        """Wait for all ranks."""


ALONE = World()
"""One process. It sends nothing and adds no operation."""
