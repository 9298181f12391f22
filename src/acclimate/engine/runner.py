"""How an adapter's passes run: precision, layout, compilation; eagerly where nothing else fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..parts.parameters import norm_parameters
from .call import Call
from .choice import Engine
from .compiler import Compiler
from .graphs import Part

if TYPE_CHECKING:
    from ..core.adapter import Adapter
    from ..parts.subnetwork import Draw
    from .call import Body

__all__ = ["Runner"]


class Runner:
    """Runs the passes of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.compiler = Compiler(adapter)
        self._plain = False
        self._held: dict[str, Tensor] = {}
        self._versions: tuple[tuple[int, int], ...] = ()

    def __call__(
        self,
        kind: str,
        body: Body,
        x: Tensor,
        parameters: Mapping[str, Tensor] | None = None,
        given: Sequence[Tensor] = (),
        *,
        fresh: bool = False,
    ) -> Sequence[Tensor]:
        """One pass, perhaps with other parameters: what its body returns, the logits first.

        A compiled pass is found by its `kind`; `fresh` says that its batch size is a new one at each call.
        """
        if self.engine.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        adapter, draw = self.adapter, self.adapter.draw
        self.compiler.was_selective = False
        tensors = {**self.weights(), **(parameters or {})}
        with self._autocast(x.device):
            if draw is not None and (adapter.part is not None or draw.per == "sample"):
                scales = draw.scales_for(x) if adapter.part is None else adapter.part.scales_for(draw, x)
                body, given = _drawn(draw, body), (scales, *given)
            if not self.engine.compiled or (draw is not None and draw.per == "batch"):
                return Call(kind, body, x, tensors, given, 0, fresh=fresh, selective=False).run(adapter.model)
            apart = not adapter.coupled or adapter.detach_statistics
            selective = adapter.strategy == "sparse" and apart and draw is None and len(x) > 3
            selective = selective and torch.is_grad_enabled() and not x.requires_grad
            kind = f"{kind} {adapter.statistics} {adapter.detach_statistics}"
            return self.compiler(
                Call(kind, body, x, tensors, given, int(draw is not None), fresh=fresh, selective=selective)
            )

    def gradients(self, loss: Tensor, part: Part) -> list[Tensor]:
        """∂loss/∂θ of the adapted parameters, as part of a recorded step; a selective backward on its rows alone."""
        again = part.first is not None and self.adapter.strategy == "sparse"  # of activations that the first part saved
        backends, adapter = self.compiler.backends(), self.adapter
        for backend in backends:
            backend.rows = part.rows
        try:
            with adapter.normalising(adapter.step.size), self.repeatable() if again else nullcontext():
                found = torch.autograd.grad(
                    loss, adapter.adapted, retain_graph=again, allow_unused=True, materialize_grads=True
                )
        finally:
            for backend in backends:
                backend.rows = None
        return list(found)

    def repeatable(self) -> AbstractContextManager[None]:
        """The backward of a pass that is compiled inside may run more than once, on the same activations."""
        if not self.engine.compiled:
            return nullcontext()
        from .selective import repeatable  # which imports torch.compile's parts

        return repeatable()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        return Runner(memo[id(self.adapter)])

    @contextmanager
    def precise(self) -> Iterator[None]:
        """What a whole step needs, backward and all: TF32 in matrix products, where it was asked for."""
        if self.engine.precision != "tf32":
            yield
            return
        matmul: Any = torch.backends.cuda.matmul
        setting, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
        found = getattr(matmul, setting)
        setattr(matmul, setting, value)
        try:
            yield
        finally:
            setattr(matmul, setting, found)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Passes inside run eagerly in the network's own precision: for what is done once and should be exact."""
        self._plain = True
        try:
            yield
        finally:
            self._plain = False

    @property
    def engine(self) -> Engine:
        """The adapter's."""
        return Engine() if self._plain else self.adapter.engine

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights that do not adapt, in the engine's precision and layout, renewed when those change.

        Norm layers keep theirs: torch has them in the precision of their statistics.
        """
        bf16, last = self.engine.precision == "bf16", self.engine.channels_last
        if not (bf16 or last):
            return {}
        frozen = self.adapter.frozen
        versions = tuple((p.data_ptr(), p._version) for p in frozen.values())
        if versions != self._versions:
            self._versions, norms = versions, norm_parameters(self.adapter.model)
            self._held = {
                name: p.detach().to(
                    dtype=torch.bfloat16 if bf16 and p.dtype == torch.float32 and name not in norms else p.dtype,
                    memory_format=torch.channels_last if last and p.dim() == 4 else torch.preserve_format,
                )
                for name, p in frozen.items()
            }
        return self._held

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.engine.precision == "bf16":
            return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        if torch.is_autocast_enabled(device.type):
            torch.clear_autocast_cache()  # else an outer autocast block would hold on to weights of before the update
        return nullcontext()


def _drawn(draw: Draw, body: Body) -> Body:
    """A body that takes a sub-network's draw as the first of its tensors."""

    def drawn(x: Tensor, given: Sequence[Tensor]) -> Sequence[Tensor]:
        with draw.using(given[0]):
            return body(x, given[1:])

    return drawn
