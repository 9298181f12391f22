"""A backward pass on those rows of a batch alone whose output gradient is not zero.

A `torch.compile` backend around Inductor. The network is compiled with a symbolic batch size, and its backward graph is
traced anew with a gather in front of it: out of each saved activation it takes the rows with a gradient, of which there
may be any number. Inductor fuses that gather into whatever reads the activation. Where rows do not depend on each other
(LayerNorm, GroupNorm, fixed BatchNorm statistics) this is the dense gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]  # torch has it
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._functorch import config as autograd_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..core.prediction import rows_first

__all__ = ["SelectiveBackward", "UnfitError", "inductor", "repeatable"]

_LONG = 2**31 - 1  # what an index of 32 bits reaches

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
        """A row of the batch that differs between this backward and the one before, neither of which is to give
        gradients; None while nobody asks."""
        self.ran_on = 0
        """How many rows the last backward ran on."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile calls with the traced network."""
        with autograd_config.patch(enable_autograd_cache=False), repeatable():  # the cache knows nothing of rows
            return inductor(graph, inputs, self._compile, lean=self.lean)

    def _compile(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return compile_fx_inner(graph, inputs, **options)
        rows = _Rows(graph, inputs, options, self)

        def backward(arguments: list[Any]) -> Any:
            return rows(arguments)

        backward._boxed_call = True  # type: ignore[attr-defined]  # it takes one list, and may empty it
        return backward


@dataclass(frozen=True)
class _Batched:
    """A tensor whose dimension `dim` holds `times` entries a row of the batch."""

    dim: int
    times: int
    fast: bool = False
    """The batch runs fast: entries of one row lie B apart."""

    def gather(self, tensor: Tensor, rows: Tensor, order: Sequence[int]) -> Tensor:
        """Rows of it, with its dimensions in the same order of strides."""
        dim, places = self.dim, [*order]
        if self.times > 1:
            shape = (self.times, -1) if self.fast else (-1, self.times)
            tensor = torch.unflatten(tensor, dim, shape)
            at = places.index(dim)
            places = [place + (place > dim) for place in places]
            places[at : at + 1] = [dim, dim + 1]
        which = dim + (self.times > 1 and self.fast)
        back = sorted(range(len(places)), key=places.__getitem__)
        before: list[Any] = [slice(None)] * places.index(which)
        chosen = tensor.permute(places)[(*before, rows)].permute(back)
        return chosen.flatten(dim, dim + 1) if self.times > 1 else chosen


class _Rows:
    """The backward graph, compiled with the gather in front when it is first run."""

    def __init__(
        self, graph: GraphModule, values: Sequence[Any], options: dict[str, Any], backend: SelectiveBackward
    ) -> None:
        self.graph, self.values, self.options, self.backend = graph, values, options, backend
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        symbols = set().union(*(_symbols(size) for value in self.values for size in _sizes(value)))
        if len(symbols) != 1:
            raise UnfitError(f"its backward has {len(symbols)} symbolic sizes where only the batch's was expected")
        (batch,) = symbols
        self.layout = [_layout(value, batch) for value in self.values]
        self.gradients = _gradients(graph)
        self.tangent = _tangent(nodes, self.layout)
        self.folded = [i for i, layout in enumerate(self.layout) if isinstance(layout, _Batched) and layout.times > 1]
        self.unknown = bool(self.folded)
        self.before: list[Tensor] | None = None
        self.compiled: Compiled | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        gradient = arguments[self.tangent]
        size = len(gradient)
        if self.backend.probing is not None:
            self._probe([arguments[i] for i in self.folded], size, self.backend.probing)
            return [None if g is None else gradient.new_zeros(g.shape, dtype=g.dtype) for g in self.gradients]
        mask = (gradient != 0).flatten(1).any(1)
        count = size if self.unknown else self.backend.rows or max(int(mask.sum()), 2)  # compiled for more than one
        self.backend.ran_on = count
        rows = rows_first(mask, count) if count < size else torch.arange(size, device=mask.device)
        tensors = [a for a, layout in zip(arguments, self.layout, strict=True) if not callable(layout)]
        arguments.clear()
        if self.compiled is None:
            self.compiled = self._compile(tensors, rows)
        return self.compiled([*tensors, rows])

    def _compile(self, tensors: list[Any], rows: Tensor) -> Compiled:
        """Trace and compile it for any number of rows out of any number."""
        orders = [_order(t) if isinstance(t, Tensor) else () for t in tensors]

        def selected(*arguments: Any) -> Any:
            *given, rows = arguments
            pairs = iter(zip(given, orders, strict=True))
            gathered: list[Any] = []
            for layout in self.layout:
                if callable(layout):
                    gathered.append(layout(rows.shape[0]))
                    continue
                value, order = next(pairs)
                gathered.append(value if layout is None else layout.gather(value, rows, order))
            return Interpreter(self.graph).run(*gathered)

        values = [v for v, layout in zip(self.values, self.layout, strict=True) if not callable(layout)]
        mode: Any = detect_fake_mode(values)
        any_number: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        example = rows.new_zeros(_unlike(len(rows), values))
        values.append(mode.from_tensor(example, source=ConstantSource("rows"), symbolic_context=any_number))
        symbol, size = values[-1].shape[0].node.expr, _number(self.values[self.tangent].shape[0])
        with enable_python_dispatcher():  # some operations know symbolic sizes there only
            graph = make_fx(selected, tracing_mode="fake")(*values)
        places = [i for i, layout in enumerate(self.layout) if not callable(layout)]
        static = [places.index(i) for i in self.options.get("static_input_idxs", ()) if i in places]
        with tracing(TracingContext(mode)), repeatable():
            compiled: Any = compile_fx_inner(graph, values, **{**self.options, "static_input_idxs": static})
        _holds_for_any(symbol, mode.shape_env, range(2, size + 1))
        return compiled  # type: ignore[no-any-return]

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


def _unlike(count: int, values: Sequence[Any]) -> int:
    """A number of rows like `count` to compile with, which neither is nor divides any other size: the compiler takes
    what is equal by chance for equal always."""
    sizes = {_number(size) for value in values for size in _sizes(value)}
    return next(n for n in itertools.count(max(count, 11)) if not any(size % n == 0 for size in sizes))


def _number(size: Any) -> int:
    """That a size has, or had when it was traced."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def _holds_for_any(symbol: Any, environment: ShapeEnv, numbers: Iterable[int]) -> None:
    """Refuse code whose compiler took something for granted that is not so for some number of rows."""
    if environment.replace(symbol) != symbol:
        raise UnfitError(f"its backward was compiled for {environment.replace(symbol)} rows only")
    for guard in (g.expr for g in environment.guards if g.expr.free_symbols == {symbol}):
        of_size = isinstance(guard, (sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
        if of_size and all(abs(n) < _LONG for n in guard.atoms(sympy.Integer)):
            continue  # a choice of two ways that are both right
        if not all(guard.xreplace({symbol: n}) for n in numbers):
            raise UnfitError(f"its backward was compiled for numbers of rows where {guard}")


def _order(tensor: Tensor) -> Sequence[int]:
    """Dimensions from the slowest to the fastest."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _sums(tensor: Tensor, layout: Any) -> Tensor:
    """A number for each entry of the dimension that holds the batch: enough to see which entries change."""
    return tensor.movedim(layout.dim, 0).flatten(1).double().sum(1)


def _sizes(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.SymInt) else tuple(getattr(value, "shape", ()))


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _layout(value: Any, batch: Any) -> Callable[[Any], Any] | _Batched | None:
    """How an argument depends on the batch size: a number made of it, a tensor with rows, or not at all."""
    if isinstance(value, torch.SymInt):
        times = _times(value, batch)
        return lambda rows: rows * times
    dims = [dim for dim, size in enumerate(_sizes(value)) if _symbols(size)]
    if len(dims) > 1:
        raise UnfitError("a saved tensor has the batch in more than one dimension")
    return _Batched(dims[0], _times(value.shape[dims[0]], batch)) if dims else None


def _times(size: Any, batch: Any) -> int:
    times = size.node.expr / batch
    if times.free_symbols or not times.is_Integer:
        raise UnfitError(f"its backward has a size of {size}, which is no multiple of the batch")
    return int(times)


def _gradients(graph: GraphModule) -> list[Any]:
    """What it gives, as fake tensors: the gradients of parameters."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in output.args[0]]
    if any(_symbols(size) for value in values for size in _sizes(value)):
        raise UnfitError("its backward gives a gradient of the batch itself")
    return values


def _tangent(nodes: list[Node], layout: list[Any]) -> int:
    """The gradient of the logits: among the gradients that come in, the one with rows."""
    found = [i for i, node in enumerate(nodes) if node.name.startswith("tangents") and isinstance(layout[i], _Batched)]
    if len(found) != 1:
        raise UnfitError(f"its backward starts from {len(found)} gradients where one was expected")
    return found[0]
