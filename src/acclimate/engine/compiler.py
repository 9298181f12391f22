"""The compiled passes of one adapter: found again, checked as they start, given up where they do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .call import Call, Pass

if TYPE_CHECKING:
    from ..core.adapter import Adapter
    from .selective import SelectiveBackward
    from .tracing import CompiledPass

__all__ = ["Compiler"]

_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}
"""Of what is compiled against what is eager, logits and a selective backward's gradients, as a share of the norm."""
_FEW = 8


class Compiler:
    """Compiles each kind of pass once."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.was_selective = False
        """Whether the backward of the last pass runs on some rows."""
        self._compiled: dict[Hashable, CompiledPass | None] = {}  # None: it runs eagerly
        self._sizes: dict[Hashable, int] = {}  # of the first batch, which most will have
        self._by_size: set[Hashable] = set()  # passes that are compiled for each batch size
        self._told = False

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
        return len(self.backends())

    def backends(self) -> list[SelectiveBackward]:
        """Of those."""
        return [p.backend for p in self._compiled.values() if p is not None and p.backend is not None]

    def __call__(self, call: Call) -> Sequence[Tensor]:
        """Run it compiled, or eagerly where that was not possible."""
        key = call.key()
        if not call.dynamic and len(call.x) != self._sizes.setdefault(key, len(call.x)):
            key, call = (key, _scale(len(call.x))), replace(call, fresh=True)
        if self.adapter.by_size or key in self._by_size:
            key = key, len(call.x)
        if key not in self._compiled:
            with torch.no_grad():
                expected = replace(call, x=call.x.detach()).run(self.adapter.model)[0]
            if not bool(expected.isfinite().all()):
                return call.run(self.adapter.model)  # nothing to compare with: the next batch will do
            self._compiled[key] = self._compile(call, expected)
        compiled = self._compiled[key]
        if compiled is None:
            return call.run(self.adapter.model)
        if compiled.size not in (None, len(call.x)):
            self._by_size.add(key)
            return self(call)
        self.was_selective = compiled.backend is not None
        try:
            return compiled(call.x, call.given, self._tensors(call))
        except torch._dynamo.exc.TorchDynamoException as error:  # at another batch size, compiled anew
            self._tell(error)
            self._compiled[key] = None
            return call.run(self.adapter.model)

    def _compile(self, call: Call, expected: Tensor) -> CompiledPass | None:
        """Compile a pass and see that it does what the eager one does; None, with a warning, where that fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of its parts
                from .selective import repeatable
                from .tracing import CompiledPass  # it takes a second to import

                module = Pass(self.adapter.model, call.body)
                compiled = CompiledPass(
                    module,
                    call.x,
                    call.given,
                    self._tensors(call),
                    batched=call.batched,
                    selective=call.selective,
                    lean=self.adapter.engine.lean,
                    dynamic=call.dynamic,
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
        """The logits against the eager ones; gradients of some rows against those of an eager backward."""
        logits = compiled(call.x, call.given, self._tensors(call))[0]
        self._agree(logits.detach(), expected, "logits")
        if compiled.backend is None:
            return
        weights = torch.linspace(0.5, 1.5, logits.numel(), device=logits.device, dtype=logits.dtype).view_as(logits)
        weights[torch.arange(len(logits), device=logits.device) % 3 != 1] = 0
        del logits  # one graph at a time
        self._probe(compiled, call)
        found = self._gradients(compiled(call.x, call.given, self._tensors(call))[0], weights)
        few = len(call.x) if self.adapter.coupled else _FEW  # at a time: eager passes need more memory
        parts = [
            self._gradients(replace(call, x=x).run(self.adapter.model)[0], of_them)
            for x, of_them in zip(torch.split(call.x, few), torch.split(weights, few), strict=True)
        ]
        self._agree(found, torch.stack(parts).sum(0), "gradients of a selective backward")

    def _gradients(self, logits: Tensor, weights: Tensor) -> Tensor:
        parts = torch.autograd.grad(logits, self.adapter.adapted, weights, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in parts])

    def _probe(self, compiled: CompiledPass, call: Call) -> None:
        """Two backwards of batches that differ in one image: they show where rows lie."""
        assert compiled.backend is not None  # noqa: S101
        compiled.backend.probing = row = 1
        try:
            for sign in (1, -1):
                x = call.x.clone()
                x[row] = sign * (x[row] + 1)
                logits = compiled(x, call.given, self._tensors(call))[0]
                torch.autograd.grad(logits.sum(), self.adapter.adapted, allow_unused=True)
        finally:
            compiled.backend.probing = None

    def _agree(self, ours: Tensor, expected: Tensor, what: str) -> None:
        off = float((ours - expected).norm() / expected.norm().clamp(min=1e-12))
        if not off <= _TOLERANCE[self.adapter.engine.precision]:
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

    def _tensors(self, call: Call) -> dict[str, Tensor]:
        """All tensors of the network by name, with those that the call has in their place."""
        return {**self._own, **call.tensors}

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        model = self.adapter.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _scale(size: int) -> int:
    """Sizes within a factor of four share code: what is fast for 256 images is not for four."""
    return size.bit_length() // 2
