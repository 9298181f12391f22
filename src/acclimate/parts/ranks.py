"""The processes of torch.distributed as the ranks that share a batch.

world = Ranks()
world.mean(values)          # over the values of all ranks; the same number everywhere
world.average(gradients)    # one message
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..checks import DivergenceError
from .world import ALONE, Share, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

if torch.distributed.is_available():
    # Its functions keep the process group that exists when they are defined, and a group that is kept may abort the
    # process at its exit. Optimizers import them: this comes first.
    import torch.distributed.nn.functional

__all__ = ["RankError", "Ranks", "SharedBy", "world_of"]

Item = TypeVar("Item")


class RankError(RuntimeError):
    """Another rank has stopped, does not answer, or differs from this one.

    >>> issubclass(RankError, RuntimeError)
    True
    """


class Ranks(World):
    """The processes of torch.distributed, which torchrun starts: each has a part of the batch.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> Ranks(sync_statistics=False).size
    1
    >>> dist.destroy_process_group()

    Args:
        group: the process group; None is the default one.
        sync_statistics: let BatchNorm use the statistics of the whole batch, one message per layer and pass. False uses
            those of each rank's part: faster, but the result depends on how the batch is divided.
    """

    def __init__(self, group: ProcessGroup | None = None, *, sync_statistics: bool = True) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                'ranks="all" needs processes that know each other: start them with torchrun, and call '
                "torch.distributed.init_process_group() before the adapter is built"
            )
        self.group, self.sync_statistics = group, sync_statistics
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group of ranks= that it was given")
        self._dist = dist
        self._host = torch.device("cpu")
        if "cpu" not in dist.get_backend_config(group):  # NCCL alone: numbers of the host travel through the GPU
            self._host = torch.device("cuda", torch.cuda.current_device())
        self.sent = self.messages = 0
        """Bytes and messages that this rank has sent so far."""

    def __deepcopy__(self, _: object) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise TypeError("an adapter with a process group of its own cannot be pickled; save(path) writes its state")
        return _default_ranks, (self.sync_statistics,)

    def __repr__(self) -> str:
        return (
            "'all'"
            if self.group is None and self.sync_statistics
            else (f"Ranks({'' if self.group is None else '<group>, '}sync_statistics={self.sync_statistics})")
        )

    def admit(self, check: Callable[[], Tensor]) -> tuple[Tensor, Share]:
        """Exchange the sizes of the parts; a rank whose check raises sends −1."""
        error: Exception | None = None
        try:
            x = check()
        except Exception as raised:
            error = raised
        sizes = self._sizes(-1 if error is not None else len(x))
        if min(sizes) < 0:
            self._raise(error)
        if not sum(sizes):
            raise ValueError("the batch is empty on every rank")
        return x, self._share(sizes)

    def share(self, size: int) -> Share:
        """Exchange the numbers of rows."""
        return self._share(self._sizes(size))

    def _share(self, sizes: Sequence[int]) -> Share:
        return Share(sum(sizes[: self.rank]), sizes[self.rank], sum(sizes))

    def _sizes(self, size: int) -> list[int]:
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._host)
        sizes[self.rank] = size
        return [int(each) for each in self._reduce(sizes).tolist()]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Exchange whether there was an error."""
        error: Exception | None = None
        try:
            yield
        except RankError:
            raise
        except Exception as raised:
            error = raised
        if self._reduce(torch.tensor(error is not None, dtype=torch.int64, device=self._host)).item():
            self._raise(error)

    def _raise(self, error: Exception | None) -> None:
        """Raise the first rank's error on all ranks. An input that is wrong comes before a network that diverges."""
        errors = self._gather_objects(None if error is None else (_plain_type(error), str(error)))
        found = [(rank, *each) for rank, each in enumerate(errors) if each is not None]
        rank, kind, message = min(found, key=lambda each: (each[1] is DivergenceError, each[0]))
        shared = kind(f"rank {rank} of {self.size}: {message}")
        shared.of_all_ranks = True
        raise shared from error

    def agreed(self, error: BaseException) -> bool:
        """Return whether the ranks have exchanged it."""
        return getattr(error, "of_all_ranks", False)

    def sum(self, value: Tensor) -> Tensor:
        """Sum in double precision, and return the value's type. Its gradient assumes that all ranks use it alike."""
        if not value.is_floating_point():
            return self._reduce(value.detach().clone())
        total: Tensor = _Sum.apply(value.double(), self)  # type: ignore[no-untyped-call]
        return total.to(value.dtype)

    def ratio(self, total: Tensor, number: int | Tensor) -> Tensor:
        """Send both numbers together."""
        count = torch.as_tensor(number, dtype=torch.float64, device=total.device).view(1)
        both: Tensor = _Sum.apply(torch.cat([total.double().flatten(), count]), self)  # type: ignore[no-untyped-call]
        return (both[:-1] / both[-1].clamp(min=1)).view(total.shape).to(total.dtype)

    def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
        """Divide the sum over all ranks by the number of their values."""
        if dim is None:
            return self.ratio(values.sum(), values.numel())
        return self.ratio(values.sum(dim), values.shape[dim])

    def mean_of(self, mean: Tensor, number: int) -> Tensor:
        """Weight the means by their numbers; the mean of nothing is NaN and does not count."""
        something = torch.tensor(number > 0, device=mean.device)
        return self.ratio(torch.where(something, mean * number, 0.0), number)

    def any(self, flags: Tensor) -> bool | Tensor:
        """Count them."""
        found = self._reduce(flags.sum()) > 0
        return bool(found) if flags.device.type == "cpu" else found

    def all(self, flags: Tensor) -> Tensor:
        """Count those that are not."""
        return self._reduce(flags.logical_not().sum()) == 0

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Send −min and max together; an empty part has none."""
        none = values.new_full((2,), -torch.inf)
        both = torch.stack([-values.min(), values.max()]) if values.numel() else none
        low, high = self._reduce(both, "MAX")
        return -low, high

    def counts(self, *numbers: int | Tensor) -> Sequence[int | Tensor]:
        """Send them together, from the device that they are on."""
        there = next((number.device for number in numbers if isinstance(number, Tensor)), self._host)
        together = [torch.as_tensor(number, device=there, dtype=torch.int64) for number in numbers]
        return [*self._reduce(torch.stack(together))]

    def gather(self, rows: Tensor) -> Tensor:
        """Send rows, padded to the same number."""
        sizes = self._sizes(len(rows))
        mine = rows.detach().new_zeros(max(sizes), *rows.shape[1:])
        mine[: len(rows)] = rows.detach()
        parts = [torch.empty_like(mine) for _ in sizes]
        self._call("all_gather", mine, parts, mine)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def spread(self, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Divide the rows evenly, and gather the results."""
        return self.gather(predict(Share.even(len(rows), self.rank, self.size).of(rows)))

    def preceded(self, rows: Tensor) -> Tensor:
        """Send the last row of every rank that has one."""
        lasts, place = self.gather(rows[-1:]), self.share(min(len(rows), 1)).offset
        return torch.cat([lasts[place - 1 : place], rows]) if place else rows

    def average(self, gradients: list[Tensor]) -> list[Tensor]:
        """Flatten them into one vector per type, which is one in practice."""
        averaged = dict[int, Tensor]()
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            own = {place: g for place, g in enumerate(gradients) if g.dtype == dtype}
            flat = self._reduce(torch.cat([g.detach().flatten() for g in own.values()])) / self.size
            parts = torch.split(flat, [g.numel() for g in own.values()])
            averaged |= {place: part.view_as(g) for (place, g), part in zip(own.items(), parts, strict=True)}
        return [averaged[place] for place in range(len(gradients))]

    def turns(self, items: Iterable[Item]) -> Iterable[Item]:
        """Return every N-th item, from the rank's own on."""
        return islice(items, self.rank, None, self.size)

    def same(self, what: str, value: str) -> None:
        """Compare with the first rank."""
        first, *others = self._gather_objects(value)
        if differing := [rank for rank, other in enumerate(others, 1) if other != first]:
            raise RankError(
                f"rank {differing[0]} has another {what} than rank 0: {others[differing[0] - 1]}, not {first}"
            )

    def wait(self) -> None:
        """Exchange a number."""
        self._sizes(0)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _reduce(self, value: Tensor, how: Literal["SUM", "MAX"] = "SUM") -> Tensor:
        """Reduce a tensor in place, and return it."""
        self._call("all_reduce", value, value, op=getattr(self._dist.ReduceOp, how))
        return value

    def _gather_objects(self, value: object) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._host)
        sizes = self._sizes(len(data))
        whole, place = self.gather(data).cpu().numpy().tobytes(), 0
        found = []
        for size in sizes:
            found.append(pickle.loads(whole[place : place + size]))  # noqa: S301
            place += size
        return found

    def _call(self, name: str, sent: Tensor, *arguments: Any, **named: Any) -> None:
        self.messages, self.sent = self.messages + 1, self.sent + sent.nbytes
        try:
            getattr(self._dist, name)(*arguments, group=self.group, **named)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: another rank has stopped, or did not answer in time. Start all "
                f"ranks again, from the last state that was saved ({error})"
            ) from error


class _Sum(torch.autograd.Function):
    """The sum over ranks. All compute the same loss from it, so they have the same gradient: it needs no message."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks._reduce(value.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks.size, None


def _default_ranks(sync_statistics: bool) -> Ranks:
    return Ranks(sync_statistics=sync_statistics)


def _plain_type(error: Exception) -> type[Exception]:
    """Return the type that other ranks raise."""
    kinds = (DivergenceError, ValueError, TypeError, RuntimeError, OSError, Exception)
    return next(kind for kind in kinds if isinstance(error, kind))


SharedBy: TypeAlias = Ranks | Literal["all"] | None
"""Who shares a batch: None is one process, `"all"` are all processes of torch.distributed."""


def world_of(ranks: SharedBy) -> World:
    """Return the world of an adapter's `ranks=`."""
    if ranks is None:
        return ALONE
    if ranks != "all" and not isinstance(ranks, Ranks):
        raise ValueError(f'ranks={ranks!r}: expected None, "all" or an acclimate.Ranks')
    world = Ranks() if ranks == "all" else ranks
    return ALONE if world.size == 1 else world
