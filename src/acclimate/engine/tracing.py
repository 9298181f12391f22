"""One compiled pass: traced with its hooks and contexts, and given to torch.compile.

The Python of a pass runs once on fake tensors, with its statistics and sub-networks in place. What is compiled is a
flat list of operations on explicit tensors, so it includes everything that a `with` block does to the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .selective import SelectiveBackward, inductor
from .two_stage_norm import in_stages

__all__ = ["CompiledPass"]

BACKEND: Callable[..., Any] = inductor


class CompiledPass:
    """A compiled pass for any batch size, or for one `size` where the Python code of the network fixes it."""

    def __init__(
        self,
        module: nn.Module,
        x: Tensor,
        given: Sequence[Tensor],
        tensors: Mapping[str, Tensor],
        *,
        batched: int = 0,
        selective: bool = False,
        lean: bool = False,
        dynamic: bool = False,
    ) -> None:
        self.names = tuple(tensors)
        self.batched = batched
        self.dynamic = dynamic and len(x) > 1
        self.backend = SelectiveBackward(lean=lean) if selective else None
        graph, self.size = _trace(module, x, given, tensors, batched)
        graph = in_stages(graph) if self.dynamic else graph
        self.run: Callable[..., Sequence[Tensor]] = torch.compile(
            graph, backend=self.backend or partial(BACKEND, lean=lean)
        )

    def __call__(self, x: Tensor, given: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Run the compiled code."""
        if self.dynamic and len(x) > 1:
            x = x.view_as(x)  # the mark stays on the tensor, and this one may be the user's
            for tensor in (x, *given[: self.batched]):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.run(x, *given, *(tensors[name] for name in self.names))


def _trace(
    module: nn.Module, x: Tensor, given: Sequence[Tensor], tensors: Mapping[str, Tensor], batched: int
) -> tuple[GraphModule, int | None]:
    """Return the pass as a flat graph of (x, *given, *tensors), and its batch size if it works for no other."""
    names = [f"network.{name}" for name in tensors]

    def flat(x: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        given_, tensors_ = rest[: len(given)], rest[len(given) :]
        return tuple(functional_call(module, dict(zip(names, tensors_, strict=True)), (x, given_)))

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def with_rows(tensor: Tensor, name: str) -> Tensor:
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if len(x) > 1:
            sizes[0] = DimDynamic.DUCK  # equal sizes share one symbol
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)

    inputs: list[Any] = [with_rows(t, f"batched{i}") for i, t in enumerate([x, *given[:batched]])]
    inputs += [mode.from_tensor(t, static_shapes=True) for t in [*given[batched:], *tensors.values()]]
    graph = make_fx(flat, tracing_mode="fake", pre_dispatch=True)(*inputs)
    size = inputs[0].shape[0]
    symbolic = isinstance(size, torch.SymInt) and not size.node.shape_env.replace(size.node.expr).is_number
    return graph, None if symbolic else len(x)
