"""A run under torchrun: its processes share each batch, and the first one writes.

torchrun --nproc-per-node 4 -m acclimate run --device cuda …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor

from ..parts.ranks import world_of
from ..parts.world import ALONE, Share, World
from .metrics import Scores
from .stream import SampledDomain, Stream

__all__ = ["divided", "is_one_of_many", "joined", "on_first", "scores_of_all"]

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others: longer than it takes to read a batch, or to compile a kernel."""


def is_one_of_many() -> bool:
    """Return whether torchrun, or a scheduler that sets the same variables, has started this process among others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the processes that torchrun has started, and yield them; one process is alone. "cuda" is each rank's own."""
    if not is_one_of_many():
        yield ALONE
        return
    import torch.distributed as dist

    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and torch.device(device).index is not None:
        raise ValueError(f"--device {device} would put all ranks on one GPU: --device cuda gives each its own")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
    try:
        yield world_of("all")
        dist.barrier()
    finally:
        if not on_gpu or sys.exc_info()[0] is None:  # NCCL would wait for a rank that is lost
            dist.destroy_process_group()


@contextmanager
def on_first(world: World, context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter a context on the first rank only; where that fails, all ranks raise."""
    with ExitStack() as stack:
        with world.together():
            if world.rank == 0:
                stack.enter_context(context)
        yield


def divided(stream: Stream, world: World) -> Stream:
    """Return this rank's part of each batch of a stream."""
    if world.size == 1:
        return stream
    if isinstance(stream, SampledDomain):
        return replace(stream, part=(world.rank, world.size))
    return _Divided(stream, world.rank, world.size)


@dataclass(frozen=True)
class _Divided:
    """A stream that exists already, of which a rank takes its rows."""

    stream: Stream
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def round(self) -> int:
        return self.stream.round

    def on(self, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.stream.on(device):
            share = Share.even(len(x), self.rank, self.ranks)
            yield share.of(x), share.of(y)

    def __len__(self) -> int:
        return len(self.stream)


def scores_of_all(scores: Scores, world: World) -> Scores:
    """Return the scores of the predictions of all ranks."""
    return scores if world.size == 1 else scores.merged(world.sum)
