"""How an adapter's passes run: precision, layout, compilation; eagerly where nothing else fits."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..parameters import norm_parameters
from .choice import Engine
from .graphs import Part

if TYPE_CHECKING:
    from ..adapter import Adapter
    from ..subnetwork import Draw
    from .compiled import Body, CompiledPass
    from .selective import SelectiveBackward

__all__ = ["Runner"]

_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}
"""Of a compiled pass against the eager one, and of a selective backward against a dense one, as a share of the norm."""


class Pass(nn.Module):
    """A body as a module, so that `functional_call` can give its network other tensors."""

    def __init__(self, network: nn.Module, body: Body) -> None:
        super().__init__()
        self.network = network
        self.body = body

    def forward(self, x: Tensor, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The body."""
        return self.body(x, given)


@dataclass(frozen=True)
class Call:
    """One pass: what it runs on what."""

    kind: str
    body: Body
    x: Tensor
    tensors: Mapping[str, Tensor]
    """In the place of the network's own."""
    given: Sequence[Tensor]
    batched: int
    """How many of those given have the batch as their first dimension."""
    fresh: bool
    """The batch size is a new one at each call."""
    selective: bool

    def key(self) -> Hashable:
        """What a compiled pass is found by."""
        x, tensors = self.x, tuple((name, t.dtype, t.requires_grad) for name, t in self.tensors.items())
        kind = (self.kind, self.batched, self.selective, torch.is_grad_enabled())
        return kind, len(x) == 1, x.requires_grad, x.shape[1:], x.dtype, tensors


class Runner:
    """Runs the passes of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.was_selective = False
        """Whether the backward of the last pass runs on some rows."""
        self._plain = False
        self._compiled: dict[Hashable, CompiledPass | None] = {}  # None: it runs eagerly
        self._by_size: set[Hashable] = set()  # passes that are compiled for each batch size
        self._held: dict[str, Tensor] = {}
        self._versions: tuple[tuple[int, int], ...] = ()
        self._told = False

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
        self.was_selective = False
        tensors = {**self.weights(), **(parameters or {})}
        with self._autocast(x.device):
            if draw is not None and (adapter.part is not None or draw.per == "sample"):
                scales = draw.scales_for(x) if adapter.part is None else adapter.part.scales_for(draw, x)
                body, given = _drawn(draw, body), (scales, *given)
            if not self.engine.compiled or (draw is not None and draw.per == "batch"):
                return self._eagerly(Call(kind, body, x, tensors, given, 0, fresh=fresh, selective=False))
            apart = not adapter.coupled or adapter.detach_statistics
            selective = adapter.strategy == "sparse" and apart and draw is None and len(x) > 3
            selective = selective and torch.is_grad_enabled() and not x.requires_grad
            kind = f"{kind} {adapter.statistics} {adapter.detach_statistics}"
            return self._compiledly(
                Call(kind, body, x, tensors, given, int(draw is not None), fresh=fresh, selective=selective)
            )

    @property
    def compiled_passes(self) -> int:
        """Kinds of passes that are compiled."""
        return sum(p is not None for p in self._compiled.values())

    @property
    def eager_passes(self) -> int:
        """Kinds of passes that could not be."""
        return len(self._compiled) - self.compiled_passes

    @property
    def selective_passes(self) -> int:
        """Kinds of passes whose backward runs on some rows."""
        return len(self._backends())

    def _backends(self) -> list[SelectiveBackward]:
        return [p.backend for p in self._compiled.values() if p is not None and p.backend is not None]

    def gradients(self, loss: Tensor, part: Part) -> list[Tensor]:
        """∂loss/∂θ of the adapted parameters, as part of a recorded step; a selective backward on its rows alone."""
        backends = self._backends()
        again = (
            part.first is not None and self.adapter.strategy == "sparse"
        )  # the first part's activations serve every second one
        for backend in backends:
            backend.rows = part.rows
        try:
            with self.adapter.normalising(self.adapter.step.size), _repeatable() if again else nullcontext():
                return [
                    *torch.autograd.grad(
                        loss, self.adapter.adapted, retain_graph=again, allow_unused=True, materialize_grads=True
                    )
                ]
        finally:
            for backend in backends:
                backend.rows = None

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

    # Inside -------------------------------------------------------------------------------------------------------

    def _eagerly(self, call: Call) -> Sequence[Tensor]:
        if not call.tensors:
            return call.body(call.x, call.given)
        named = {f"network.{name}": tensor for name, tensor in call.tensors.items()}
        answer: Sequence[Tensor] = functional_call(Pass(self.adapter.model, call.body), named, (call.x, call.given))
        return answer

    def _compiledly(self, call: Call) -> Sequence[Tensor]:
        key = call.key()
        if self.adapter.by_size or key in self._by_size:
            key = key, len(call.x)
        if key not in self._compiled:
            with torch.no_grad():
                expected = self._eagerly(replace(call, x=call.x.detach()))[0]
            if not bool(expected.isfinite().all()):
                return self._eagerly(call)  # nothing to compare with: the next batch will do
            self._compiled[key] = self._compile(call, expected)
        compiled = self._compiled[key]
        if compiled is None:
            return self._eagerly(call)
        if compiled.size not in (None, len(call.x)):
            self._by_size.add(key)
            return self._compiledly(call)
        self.was_selective = compiled.backend is not None
        try:
            return compiled(call.x, call.given, self._every(call))
        except torch._dynamo.exc.TorchDynamoException as error:  # at another batch size, compiled anew
            self._tell(error)
            self._compiled[key] = None
            return self._eagerly(call)

    def _compile(self, call: Call, expected: Tensor) -> CompiledPass | None:
        """Compile a pass and see that it does what the eager one does; None, with a warning, where that fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of its parts
                from .compiled import CompiledPass  # it takes a second to import
                from .selective import repeatable

                module = Pass(self.adapter.model, call.body)
                compiled = CompiledPass(
                    module,
                    call.x,
                    call.given,
                    self._every(call),
                    batched=call.batched,
                    selective=call.selective,
                    lean=self.engine.lean,
                    dynamic=call.fresh or call.selective,
                )
                with repeatable():
                    self._verify(compiled, call, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._tell(error, selective=call.selective)
            return self._compile(replace(call, selective=False), expected) if call.selective else None
        return compiled

    def _verify(self, compiled: CompiledPass, call: Call, expected: Tensor) -> None:
        """The logits against the eager ones; gradients of some rows against those of a backward of all."""
        logits = compiled(call.x, call.given, self._every(call))[0]
        self._agree(logits.detach(), expected, "logits")
        if compiled.backend is None:
            return
        del logits  # one graph at a time
        self._probe(compiled, call)
        logits = compiled(call.x, call.given, self._every(call))[0]
        weights = torch.linspace(0.5, 1.5, logits.numel(), device=logits.device, dtype=logits.dtype).view_as(logits)
        some = torch.arange(len(logits), device=logits.device) % 3 == 1
        weights = weights * some.view(-1, *[1] * (logits.dim() - 1))
        answers = []
        for rows in (None, len(logits)):
            compiled.backend.rows = rows
            parts = torch.autograd.grad(
                logits, self.adapter.adapted, weights, retain_graph=rows is None, allow_unused=True
            )
            answers.append(torch.cat([g.flatten() for g in parts if g is not None]))
        compiled.backend.rows = None
        self._agree(answers[0], answers[1], "gradients of a selective backward")

    def _probe(self, compiled: CompiledPass, call: Call) -> None:
        """Two backwards of batches that differ in one image: they show where rows lie."""
        assert compiled.backend is not None  # noqa: S101
        compiled.backend.probing = row = 1
        try:
            for sign in (1, -1):
                x = call.x.clone()
                x[row] = sign * (x[row] + 1)
                logits = compiled(x, call.given, self._every(call))[0]
                torch.autograd.grad(logits.sum(), self.adapter.adapted, allow_unused=True)
        finally:
            compiled.backend.probing = None

    def _agree(self, ours: Tensor, expected: Tensor, what: str) -> None:
        off = float((ours - expected).norm() / expected.norm().clamp(min=1e-12))
        if not off <= _TOLERANCE[self.engine.precision]:
            raise ArithmeticError(f"its {what} differ by {off:.2g} of their norm")

    def _tell(self, error: Exception, *, selective: bool = False) -> None:
        """One warning an adapter."""
        if self._told:
            return
        self._told = True
        network, why = type(self.adapter.model).__name__, next(iter(str(error).strip().splitlines()), "")
        what = (
            f"a backward of some rows does not fit {network}, whose backward runs on all of them"
            if selective
            else f"the engine cannot compile {network}, which runs eagerly instead"
        )
        warnings.warn(f"{what}, and more slowly: {type(error).__name__}: {why}", stacklevel=2)

    def _every(self, call: Call) -> dict[str, Tensor]:
        """All tensors of the network by name, with those that the call has in their place."""
        model = self.adapter.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers()), **call.tensors}

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


def _repeatable() -> AbstractContextManager[None]:
    from .selective import repeatable

    return repeatable()


def _drawn(draw: Draw, body: Body) -> Body:
    """A body that takes a sub-network's draw as the first of its tensors."""

    def drawn(x: Tensor, given: Sequence[Tensor]) -> Sequence[Tensor]:
        with draw.using(given[0]):
            return body(x, given[1:])

    return drawn
