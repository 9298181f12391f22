"""The compiled passes of one network: each is compiled once, verified, and replaced by eager code where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..checks import warn
from ..parts.batchnorm import Normalisation
from .choice import TESTED_TORCH, Engine
from .host_compiler import MissingCompilerError, require_compiler, settle_compiler
from .passes import Body
from .progress import say_compiling
from .tf32 import convolves_in_tf32

if TYPE_CHECKING:
    from .selective import SelectiveBackward
    from .tracing import CompiledPass

__all__ = ["Compiler"]

_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}
"""Largest relative difference between compiled and eager logits, and gradients of a selective backward."""
_FEW = 8


@dataclass(frozen=True)
class _Call:
    """One call of a pass."""

    body: Body
    x: Tensor
    tensors: Mapping[str, Tensor]
    """Used instead of the network's own."""
    engine: Engine
    varying: bool
    """The batch size changes from call to call."""
    sparse: bool
    coupled: bool

    @property
    def dynamic(self) -> bool:
        """Whether it is compiled for any batch size."""
        return self.varying or self.sparse

    def key(self) -> Hashable:
        """Return the key of its compiled code."""
        x, pass_ = self.x, self.body.pass_
        size = len(x) if isinstance(pass_.statistics, float) else len(x) == 1  # a blend depends on the batch size
        kind = (pass_, pass_.batched, pass_.count is not None, self.sparse, torch.is_grad_enabled())
        return kind, size, x.requires_grad, x.shape[1:], x.dtype, len(self.tensors)

    def run(self) -> Sequence[Tensor]:
        """Run eagerly."""
        return self.body.run(self.x, self.tensors)

    def __str__(self) -> str:
        """Describe the pass for people."""
        kind = "forward and backward" if torch.is_grad_enabled() else "forward"
        return f"{kind}, {'any number of' if self.dynamic else len(self.x)} images"


class Compiler:
    """Compiles each pass of a network once."""

    def __init__(self, model: nn.Module, normalisation: Normalisation, adapted: Sequence[Parameter]) -> None:
        self.model, self.normalisation, self.adapted = model, normalisation, adapted
        self._compiled: dict[Hashable, CompiledPass | None] = {}  # None: it runs eagerly
        self._sizes: dict[Hashable, int] = {}  # batch size of the first call
        self._by_size: set[Hashable] = set()  # passes that are compiled for each batch size
        self._warned = False

    @property
    def compiled_passes(self) -> int:
        """The number of compiled passes."""
        return sum(p is not None for p in self._compiled.values())

    @property
    def eager_passes(self) -> int:
        """The number of passes that could not be compiled."""
        return len(self._compiled) - self.compiled_passes

    @property
    def selective_passes(self) -> int:
        """The number of passes with a backward on some rows."""
        return len(self.backends())

    def adopt(self, other: Compiler) -> None:
        """Take over the passes that were compiled for a copy of this network: weights are inputs of their code."""
        self._compiled |= other._compiled
        self._sizes |= other._sizes
        self._by_size |= other._by_size
        self._warned |= other._warned

    def backends(self) -> list[SelectiveBackward]:
        """Return the backends of the selective passes."""
        return [p.backend for p in self._compiled.values() if p is not None and p.backend is not None]

    def __call__(
        self,
        body: Body,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        engine: Engine,
        *,
        varying: bool,
        sparse: bool,
        coupled: bool,
    ) -> tuple[Sequence[Tensor], bool]:
        """Run a pass; return what its body returns, and whether its backward runs on some rows."""
        return self._run(_Call(body, x, tensors, engine, varying, sparse, coupled))

    def _run(self, call: _Call) -> tuple[Sequence[Tensor], bool]:
        key = call.key()
        if not call.dynamic and len(call.x) != self._sizes.setdefault(key, len(call.x)):
            key, call = (key, _scale(len(call.x))), replace(call, varying=True)
        if key in self._by_size:
            key = key, len(call.x)
        if key not in self._compiled:
            with torch.no_grad():
                expected = replace(call, x=call.x.detach()).run()[0]
            if not bool(expected.isfinite().all()):
                return call.run(), False  # nothing to compare with: compile at the next batch
            say_compiling(f"{type(self.model).__name__}, {call}")
            self._compiled[key] = self._compile(call, expected)
        compiled = self._compiled[key]
        if compiled is None:
            return call.run(), False
        if compiled.size not in (None, len(call.x)):
            self._by_size.add(key)
            return self._run(call)
        try:
            return compiled(call.x, call.body.pass_.given, self._tensors(call)), compiled.backend is not None
        except torch._dynamo.exc.TorchDynamoException as error:  # another batch size is compiled on its first call
            self._warn(error)
            self._compiled[key] = None
            return call.run(), False

    def _compile(self, call: _Call, expected: Tensor) -> CompiledPass | None:
        """Compile a pass and verify it against the eager one; return None, with a warning, if that fails."""
        if call.x.device.type == "cpu":
            try:
                require_compiler()
            except MissingCompilerError as error:
                self._warn(error)
                return None
            settle_compiler()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside torch
                from .selective import repeatable
                from .tracing import CompiledPass  # takes a second to import

                compiled = CompiledPass(
                    call.body,
                    call.x,
                    call.body.pass_.given,
                    self._tensors(call),
                    batched=call.body.pass_.batched,
                    selective=call.sparse,
                    lean=call.engine.lean,
                    dynamic=call.dynamic,
                )
                with repeatable():
                    self._verify(compiled, call, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._warn(error, selective=call.sparse)
            return self._compile(replace(call, sparse=False), expected) if call.sparse else None
        return compiled

    def _verify(self, compiled: CompiledPass, call: _Call, expected: Tensor) -> None:
        """Compare logits with the eager ones, and gradients of some rows with those of an eager backward."""
        given, tensors = call.body.pass_.given, self._tensors(call)
        logits = compiled(call.x, given, tensors)[0]
        _agree(logits.detach(), expected, "logits", call.engine)
        if compiled.backend is None:
            return
        weights = torch.linspace(0.5, 1.5, logits.numel(), device=logits.device, dtype=logits.dtype).view_as(logits)
        weights[torch.arange(len(logits), device=logits.device) % 3 != 1] = 0
        del logits  # one graph at a time
        self._probe(compiled, call)
        found = self._gradients(compiled(call.x, given, tensors)[0], weights)
        few = len(call.x) if call.coupled else _FEW  # eager passes need more memory
        parts = [
            self._gradients(replace(call, x=x).run()[0], of_them)
            for x, of_them in zip(torch.split(call.x, few), torch.split(weights, few), strict=True)
        ]
        _agree(found, torch.stack(parts).sum(0), "gradients of a selective backward", call.engine)

    def _gradients(self, logits: Tensor, weights: Tensor) -> Tensor:
        parts = torch.autograd.grad(logits, self.adapted, weights, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in parts])

    def _probe(self, compiled: CompiledPass, call: _Call) -> None:
        """Run two backwards of batches that differ in one image: they show where its row lies in saved tensors."""
        assert compiled.backend is not None  # noqa: S101
        compiled.backend.probing = row = 1
        try:
            for sign in (1, -1):
                x = call.x.clone()
                x[row] = sign * (x[row] + 1)
                logits = compiled(x, call.body.pass_.given, self._tensors(call))[0]
                torch.autograd.grad(logits.sum(), self.adapted, allow_unused=True)
        finally:
            compiled.backend.probing = None

    def _warn(self, error: Exception, *, selective: bool = False) -> None:
        """Warn once per network."""
        if self._warned:
            return
        self._warned = True
        network, why = type(self.model).__name__, next(iter(str(error).strip().splitlines()), "")
        what = (
            f"selective backward is not supported for {network}; using the full backward (slower)"
            if selective
            else f"cannot compile {network}; running it eagerly (slower)"
        )
        version = torch.__version__
        untested = not version.startswith(tuple(f"{tested}." for tested in TESTED_TORCH))
        hint = f" The compiled engine is tested on torch {' and '.join(TESTED_TORCH)}; this is {version}." * untested
        warn(f"{what}: {type(error).__name__}: {why}.{hint}")

    def _tensors(self, call: _Call) -> dict[str, Tensor]:
        """Return all tensors of the network by name, replaced by those that the call has."""
        return {**self._own, **call.tensors}

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


def _agree(ours: Tensor, expected: Tensor, what: str, engine: Engine) -> None:
    off = float((ours - expected).norm() / expected.norm().clamp(min=1e-12))
    if not off <= tolerance(engine, ours.device):
        raise ArithmeticError(f"its {what} differ by {off:.2g} of their norm")


def tolerance(engine: Engine, device: torch.device) -> float:
    """Return the largest difference that rounding explains: with `"fp32"`, convolutions on a GPU may still use TF32."""
    coarse = engine.precision == "fp32" and convolves_in_tf32(device)
    return _TOLERANCE["tf32" if coarse else engine.precision]


def _scale(size: int) -> int:
    """Return the scale of a batch size: sizes within a factor of four share code."""
    return size.bit_length() // 2
