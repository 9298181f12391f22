"""A backward pass on only those rows of a batch that have a nonzero output gradient.

This is a `torch.compile` backend around Inductor. The network is compiled with a symbolic batch size. Its backward
graph is traced again with a gather in front, which takes the rows with a gradient out of each saved activation, for any
number of rows. Inductor fuses the gather into the kernels that read the activation. Where rows do not depend on each
other (LayerNorm, GroupNorm, fixed BatchNorm statistics) the result is the dense gradient.
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

from .execution import rows_first

__all__ = ["SelectiveBackward", "UnfitError", "inductor", "repeatable"]

_LONG = 2**31 - 1  # the largest 32-bit index

Compiled: TypeAlias = Callable[[list[Any]], Any]


class UnfitError(RuntimeError):
    """The backward of a network cannot be restricted to some rows."""


@contextmanager
def repeatable() -> Iterator[None]:
    """Keep saved activations intact, so that a backward that is compiled inside may run again."""
    with autograd_config.patch(donated_buffer=False):
        yield


def inductor(graph: GraphModule, inputs: Sequence[Any], inner: Any = None, *, lean: bool = False) -> Callable[..., Any]:
    """Compile with Inductor. `lean` recomputes norm layers and activations in the backward instead of saving them."""
    with autograd_config.patch(aggressive_recomputation=lean):
        compiled: Any = compile_fx(graph, list(inputs), inner_compile=inner or compile_fx_inner)
        return compiled  # type: ignore[no-any-return]


class SelectiveBackward:
    """The backend. `rows` is the number of rows that the backward runs on, at least those with a gradient.

    None counts them, which waits for the device.
    """

    def __init__(self, *, lean: bool = False) -> None:
        self.lean = lean
        self.rows: int | None = None
        self.probing: int | None = None
        """The row that differs between this backward and the previous one, while layouts are probed; else None."""
        self.ran_on = 0
        """The number of rows of the last backward."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a traced network: the entry point of torch.compile."""
        with autograd_config.patch(enable_autograd_cache=False), repeatable():  # the cache does not know about rows
            return inductor(graph, inputs, self._compile, lean=self.lean)

    def _compile(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return compile_fx_inner(graph, inputs, **options)
        rows = _Rows(graph, inputs, options, self)

        def backward(arguments: list[Any]) -> Any:
            return rows(arguments)

        backward._boxed_call = True  # type: ignore[attr-defined]  # takes one list, and may empty it
        return backward


@dataclass(frozen=True)
class _Batched:
    """A tensor whose dimension `dim` holds `times` entries per row of the batch."""

    dim: int
    times: int
    fast: bool = False
    """The batch is the inner index: entries of one row lie B apart."""

    def gather(self, tensor: Tensor, rows: Tensor, order: Sequence[int]) -> Tensor:
        """Return some rows, with dimensions in the same order of strides."""
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
    """The backward graph, compiled with the gather in front on its first run."""

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
        count = size if self.unknown else self.backend.rows or max(int(mask.sum()), 2)  # compiled for two or more
        self.backend.ran_on = count
        rows = rows_first(mask, count) if count < size else torch.arange(size, device=mask.device)
        tensors = [a for a, layout in zip(arguments, self.layout, strict=True) if not callable(layout)]
        arguments.clear()
        if self.compiled is None:
            self.compiled = self._compile(tensors, rows)
        return self.compiled([*tensors, rows])

    def _compile(self, tensors: list[Any], rows: Tensor) -> Compiled:
        """Trace and compile for any number of rows out of any number."""
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
        with enable_python_dispatcher():  # some operations support symbolic sizes only there
            graph = make_fx(selected, tracing_mode="fake")(*values)
        places = [i for i, layout in enumerate(self.layout) if not callable(layout)]
        static = [places.index(i) for i in self.options.get("static_input_idxs", ()) if i in places]
        with tracing(TracingContext(mode)), repeatable():
            compiled: Any = compile_fx_inner(graph, values, **{**self.options, "static_input_idxs": static})
        _holds_for_any(symbol, mode.shape_env, range(2, size + 1))
        return compiled  # type: ignore[no-any-return]

    def _probe(self, tensors: list[Tensor], size: int, row: int) -> None:
        """Find whether the batch is the outer or the inner index of a dimension, by what changes with one row."""
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
                raise UnfitError("the rows of its batch cannot be located in a saved tensor")
            self.layout[i] = replace(layout, fast=not slowly)
        self.before, self.unknown = None, False


def _unlike(count: int, values: Sequence[Any]) -> int:
    """Return a number of rows to compile with that neither equals nor divides any other size.

    The compiler assumes that sizes which are equal in the example are always equal.
    """
    sizes = {_number(size) for value in values for size in _sizes(value)}
    return next(n for n in itertools.count(max(count, 11)) if not any(size % n == 0 for size in sizes))


def _number(size: Any) -> int:
    """Return a size as a number; a symbolic one as it was when traced."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def _holds_for_any(symbol: Any, environment: ShapeEnv, numbers: Iterable[int]) -> None:
    """Raise if the compiler assumed something that does not hold for every number of rows."""
    if environment.replace(symbol) != symbol:
        raise UnfitError(f"its backward was compiled for {environment.replace(symbol)} rows only")
    for guard in (g.expr for g in environment.guards if g.expr.free_symbols == {symbol}):
        of_size = isinstance(guard, (sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
        if of_size and all(abs(n) < _LONG for n in guard.atoms(sympy.Integer)):
            continue  # it chooses between two correct ways
        if not all(guard.xreplace({symbol: n}) for n in numbers):
            raise UnfitError(f"its backward was compiled for numbers of rows where {guard}")


def _order(tensor: Tensor) -> Sequence[int]:
    """Return the dimensions from the largest to the smallest stride."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _sums(tensor: Tensor, layout: Any) -> Tensor:
    """Return one number per entry of the batch dimension, which shows which entries change."""
    return tensor.movedim(layout.dim, 0).flatten(1).double().sum(1)


def _sizes(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.SymInt) else tuple(getattr(value, "shape", ()))


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _layout(value: Any, batch: Any) -> Callable[[Any], Any] | _Batched | None:
    """Return how an argument depends on the batch size: a multiple of it, a tensor with rows, or not at all."""
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
        raise UnfitError(f"its backward has a size of {size}, which is not a multiple of the batch")
    return int(times)


def _gradients(graph: GraphModule) -> list[Any]:
    """Return the outputs, the gradients of parameters, as fake tensors."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in output.args[0]]
    if any(_symbols(size) for value in values for size in _sizes(value)):
        raise UnfitError("its backward returns a gradient of the batch itself")
    return values


def _tangent(nodes: list[Node], layout: list[Any]) -> int:
    """Return the place of the gradient of the logits: the incoming gradient that has rows."""
    found = [i for i, node in enumerate(nodes) if node.name.startswith("tangents") and isinstance(layout[i], _Batched)]
    if len(found) != 1:
        raise UnfitError(f"its backward starts from {len(found)} gradients where one was expected")
    return found[0]
