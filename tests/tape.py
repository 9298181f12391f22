"""A CUDA graph on the CPU, to test what is recorded without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acclimate.engine import Live
from acclimate.engine.capture import NotRecordableError
from acclimate.parts.world import World

ASKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operations for which a host waits for the device."""


class OnDevice(World):
    """One process that does not read its flags, as on a GPU."""

    def any(self, flags: Tensor) -> Tensor:
        return flags.any()


class Waits(Live):
    """It reads no condition that may stay on the device, as on a GPU."""

    def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:
        return when if can_wait else bool(when)


class Tape(TorchDispatchMode):
    """In the place of a `Capture` and its graph: it notes operations, undoes them, and repeats them at each replay.

    Each replay writes to the memory of the recording. Values that the host has read do not change any more, and an
    operation that reads one raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = self
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.replays = 0

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        """Stop; memory is as it was."""
        self.__exit__(None, None, None)
        for storage, before in self.before.values():
            storage.copy_(before)

    def abort(self, error: BaseException) -> None:
        self.end()
        if isinstance(error, (RuntimeError, ValueError)):
            raise NotRecordableError(str(error)) from error
        raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS or (func is torch.ops.aten.index.Tensor and any(_is_mask(t) for t in args[1])):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, made))
        return made

    def replay(self) -> None:
        """Repeat the operations below autograd, as a graph does."""
        self.replays += 1
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            for func, args, kwargs, made in self.operations:
                infos = [returned.alias_info for returned in func._schema.returns]
                if any(info is not None and not info.is_write for info in infos):
                    continue  # a view
                again = func(*args, **kwargs)
                if all(info is None for info in infos):
                    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                        if isinstance(old, Tensor):
                            old.copy_(new)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
