"""A backward pass on those rows of a batch alone whose output gradient is not zero.

A `torch.compile` backend around Inductor. The network is compiled with a symbolic batch size, so the compiled backward
takes any number of rows: out of each saved activation the rows with a gradient are gathered, and it runs on those.
Where rows do not depend on each other (LayerNorm, GroupNorm, fixed BatchNorm statistics) this is the dense gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._functorch import config as autograd_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule, Node

from ..prediction import rows_first

__all__ = ["SelectiveBackward", "UnfitError", "inductor", "repeatable"]

Compiled: TypeAlias = Callable[[list[Any]], Any]


class UnfitError(RuntimeError):
    """A network whose backward cannot be restricted to some rows."""


@contextmanager
def repeatable() -> Iterator[None]:
    """A backward that is compiled inside leaves the saved activations whole, and may run inside again."""
    with autograd_config.patch(donated_buffer=False):
        yield


def inductor(graph: GraphModule, inputs: Sequence[Any], inner: Any = None, *, lean: bool = False) -> Callable[..., Any]:
    """Inductor. `lean`: what norm layers and activations gave is not saved but computed again in the backward."""
    with autograd_config.patch(aggressive_recomputation=lean):
        compiled: Any = compile_fx(graph, list(inputs), inner_compile=inner or compile_fx_inner)
        return compiled  # type: ignore[no-any-return]


class SelectiveBackward:
    """The backend. `rows` says on how many rows the backward runs: a number not smaller than those with a gradient,
    or None, which counts them (and so waits for the device)."""

    def __init__(self, *, lean: bool = False) -> None:
        self.lean = lean
        self.rows: int | None = None
        self.probing: int | None = None
        """A row of the batch that differs between this backward and the one before; None while nobody asks."""
        self.ran_on = 0
        """How many rows the last backward ran on."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile calls with the traced network."""
        with autograd_config.patch(enable_autograd_cache=False), repeatable():  # the cache knows nothing of rows
            return inductor(graph, inputs, self._compile, lean=self.lean)

    def _compile(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled = compile_fx_inner(graph, inputs, **options)
        if not options.get("is_backward"):
            return compiled
        rows = _Rows(graph, compiled, self)

        def backward(arguments: list[Any]) -> Any:
            return rows(arguments)

        backward._boxed_call = True  # type: ignore[attr-defined]  # it takes one list, and may empty it
        return backward


@dataclass(frozen=True)
class _Batched:
    """A tensor whose dimension `dim` holds `times` entries a row of the batch."""

    dim: int
    times: int
    strides: Callable[[int], tuple[int, ...]]
    """By the number of rows, as the compiled code expects them."""
    fast: bool = False
    """The batch runs fast: entries of one row lie B apart."""


class _Rows:
    """The compiled backward, called with gathered rows."""

    def __init__(self, graph: GraphModule, compiled: Any, backend: SelectiveBackward) -> None:
        self.compiled, self.backend = compiled, backend
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get("val") for node in nodes]
        symbols = set().union(*(_symbols(size) for value in values for size in _sizes(value)))
        if len(symbols) != 1:
            raise UnfitError(f"its backward has {len(symbols)} symbolic sizes where only the batch's was expected")
        (batch,) = symbols
        self.layout = [_layout(value, batch) for value in values]
        self.tangent = _tangent(nodes, self.layout)
        self.folded = [i for i, layout in enumerate(self.layout) if isinstance(layout, _Batched) and layout.times > 1]
        self.unknown = bool(self.folded)
        self.before: list[Tensor] | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        gradient = arguments[self.tangent]
        size, mask = len(gradient), (gradient != 0).flatten(1).any(1)
        if self.backend.probing is not None:
            self._probe([arguments[i] for i in self.folded], size, self.backend.probing)
        count = size if self.unknown else self.backend.rows or max(int(mask.sum()), 2)  # compiled for more than one
        self.backend.ran_on = count
        if count < size:
            self._gather(arguments, rows_first(mask, count), size)
        return self.compiled(arguments)

    def _probe(self, tensors: list[Tensor], size: int, row: int) -> None:
        """A dimension of times·B may count the batch slowly or fast: what changes with one row of the batch tells."""
        sums = [_sums(tensor, self.layout[i]) for i, tensor in zip(self.folded, tensors, strict=True)]
        if self.before is None:
            self.before = sums
            return
        for i, now, then in zip(self.folded, sums, self.before, strict=True):
            layout = self.layout[i]
            assert isinstance(layout, _Batched)  # noqa: S101
            changed = (now != then).nonzero().flatten().tolist()
            slowly = all(place // layout.times == row for place in changed)
            fast = all(place % size == row for place in changed)
            if not (slowly or fast):
                raise UnfitError("rows of its batch cannot be told apart in a saved tensor")
            self.layout[i] = replace(layout, fast=not slowly)
        self.before, self.unknown = None, False

    def _gather(self, arguments: list[Any], rows: Tensor, size: int) -> None:
        """In place, so that nothing else keeps the full tensors. Views of one storage share one gather."""
        gathered: dict[tuple[Any, ...], Tensor] = {}
        for i, layout in enumerate(self.layout):
            if callable(layout):
                arguments[i] = layout(len(rows))
            elif layout is not None:
                arguments[i] = _gather(arguments[i], layout, rows, size, gathered)


def _gather(
    tensor: Tensor, layout: _Batched, rows: Tensor, size: int, gathered: dict[tuple[Any, ...], Tensor]
) -> Tensor:
    """Rows of the storage where they lie one after the other there, as in a packed q, k, v; else of the tensor."""
    dim, times, strides = layout.dim, layout.times, tensor.stride()
    shape = [*tensor.shape]
    shape[dim] = times * len(rows)
    length = times * strides[dim]
    span = sum((n - 1) * stride for i, (n, stride) in enumerate(zip(tensor.shape, strides, strict=True)) if i != dim)
    within = tensor.storage_offset() % length if length else 0
    if not layout.fast and within + span + (times - 1) * strides[dim] < length:
        start = tensor.storage_offset() - within
        key = (tensor.untyped_storage().data_ptr(), start, length, tensor.dtype)
        if key not in gathered:
            gathered[key] = tensor.as_strided((size, length), (length, 1), start).index_select(0, rows)
        return gathered[key].as_strided(shape, strides, within)
    entries = torch.arange(times, device=rows.device)
    places = (entries[:, None] * size + rows if layout.fast else rows[:, None] * times + entries).flatten()
    chosen = tensor.new_empty_strided(shape, layout.strides(len(rows)))
    return chosen.copy_(tensor.index_select(dim, places))


def _sums(tensor: Tensor, layout: Any) -> Tensor:
    """A number for each entry of the dimension that holds the batch: enough to see which entries change."""
    return tensor.movedim(layout.dim, 0).flatten(1).double().sum(1)


def _sizes(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.SymInt) else tuple(getattr(value, "shape", ()))


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _layout(value: Any, batch: Any) -> Callable[[int], int] | _Batched | None:
    """How an argument depends on the batch size: a number made of it, a tensor with rows, or not at all."""
    if isinstance(value, torch.SymInt):
        return lambda rows: int(value.node.expr.subs(batch, rows))
    for dim, size in enumerate(_sizes(value)):
        if _symbols(size):
            times = size.node.expr / batch
            if times.free_symbols or not times.is_Integer:
                raise UnfitError(f"a saved tensor has a dimension of {size}, which is no multiple of the batch")
            return _Batched(dim, int(times), _strides(value, batch))
    return None


def _strides(value: Tensor, batch: Any) -> Callable[[int], tuple[int, ...]]:
    strides: tuple[Any, ...] = value.stride()
    return lambda rows: tuple(int(s.node.expr.subs(batch, rows)) if isinstance(s, torch.SymInt) else s for s in strides)


def _tangent(nodes: list[Node], layout: list[Any]) -> int:
    """The gradient of the logits: among the gradients that come in, the one with rows."""
    found = [i for i, node in enumerate(nodes) if node.name.startswith("tangents") and isinstance(layout[i], _Batched)]
    if len(found) != 1:
        raise UnfitError(f"its backward starts from {len(found)} gradients where one was expected")
    return found[0]
