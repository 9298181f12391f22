"""Runs the passes of one network: precision, memory format, compilation; eagerly where nothing else works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..checks import warn
from ..parts.batchnorm import Normalisation
from ..parts.intact import Intact
from ..parts.parameters import norm_parameters
from ..parts.pooled_batchnorm import PooledNormalisation
from ..parts.ranks import Ranks
from ..parts.sharing import Sharing
from ..parts.world import ALONE, World
from ..parts.wrappers import is_compiled, plain_names, uncompiled
from .background import Background
from .choice import Engine
from .compiler import Compiler
from .passes import Body, Pass
from .tf32 import tf32

__all__ = ["Output", "Runner"]


class Output(NamedTuple):
    """What a pass returns."""

    logits: Tensor
    statistics: Sequence[Tensor] = ()
    """BatchNorm's statistics, if the pass records them."""
    by_rows: bool = False
    """Whether the backward runs only on the rows that have a gradient."""


class Runner:
    """Runs passes of a network, of which some parameters adapt and the rest is frozen."""

    def __init__(
        self, model: nn.Module, adapted: Mapping[str, Parameter], engine: Engine, world: World = ALONE
    ) -> None:
        chosen = set(map(id, adapted.values()))
        self.model, self.adapted = model, adapted
        self.frozen = {name: p for name, p in model.named_parameters() if id(p) not in chosen}
        self.sharing, self.intact = Sharing(model), Intact(model)
        plain = plain_names(model)
        self.names = {plain(name): name for name, _ in model.named_parameters()}
        """The model's own names, which a wrapper may have changed, by plain name."""
        self.world = world
        """The ranks that share a batch."""
        self.normalisation = self._apart = Normalisation(model)
        if isinstance(world, Ranks) and world.sync_statistics:
            self.normalisation = PooledNormalisation(model, world)
        self._engine = engine
        self._eager = False
        self._compiled = [module for module in model.modules() if is_compiled(module)]
        self._start()

    def _start(self) -> None:
        self.waiting = self._engine.background and self._engine.compiled
        """Whether passes run eagerly until they are compiled in the background."""
        self._background: Background | None = None
        self.compiler = Compiler(self.model, self.normalisation, [*self.adapted.values()])
        self._copies: dict[str, Tensor] = {}
        self._versions: tuple[tuple[int, int], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        return Runner(deepcopy(self.model, memo), deepcopy(self.adapted, memo), self._engine, self.world)

    def __reduce__(self) -> tuple[type[Runner], tuple[Any, ...]]:
        return Runner, (self.model, self.adapted, self._engine, self.world)

    @property
    def engine(self) -> Engine:
        """How passes run now. A new engine takes effect with the next pass."""
        if self.waiting and not self._eager:
            return replace(self._engine, compiled=False, graphs=False)
        return Engine() if self._eager else self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        if engine != self._engine:
            self._engine = engine
            self._start()

    @property
    def asked(self) -> Engine:
        """How passes are to run, as soon as they are compiled."""
        return self._engine

    def change_over(self, copied: Callable[[], Callable[[], Compiler]]) -> None:
        """Start to compile in the background, or use what was compiled there; call this between two steps.

        `copied` copies the network, and returns a function that compiles the passes of the copy.
        """
        if not self.waiting:
            return
        if self._background is None:
            self._background = Background(copied())
        elif self._background.done:
            self.compile_at_once()

    def compile_at_once(self) -> None:
        """Use what is being compiled in the background as soon as it is there, and compile no more there."""
        found, self._background, self.waiting = self._background, None, False
        if found is None:
            return
        if (compiler := found.result()) is not None:
            self.compiler.adopt(compiler)
            return
        self._engine = replace(self._engine, compiled=False, graphs=False)
        warn(f"compiling in the background failed; running eagerly (slower): {found.error}")

    def __call__(self, pass_: Pass, x: Tensor, *, varying: bool = False, sparse: bool = False) -> Output:
        """Run one pass.

        `varying` says that the batch size changes from call to call, `sparse` asks for a backward on the rows that have
        a gradient.
        """
        engine = self.engine
        if engine.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        tensors = {**self.weights(), **{self.names[name]: value for name, value in pass_.parameters.items()}}
        body = Body(self.model, self.normalisation, pass_)
        self.normalisation.counted = pass_.counted
        # Each sub-network that skips branches would need a program of its own.
        skips = pass_.subnetworks is not None and pass_.subnetworks.per == "batch"
        with self._autocast(x.device):
            if not engine.compiled or skips:
                with uncompiled(self._compiled):
                    logits, *statistics = body.run(x, tensors)
                return Output(logits, statistics)
            coupled = pass_.couples and bool(self.normalisation.layers)
            sparse = sparse and not coupled and pass_.subnetworks is None and len(x) > 3
            sparse = sparse and torch.is_grad_enabled() and not x.requires_grad
            (logits, *statistics), by_rows = self.compiler(
                body, x, tensors, engine, varying=varying, sparse=sparse, coupled=coupled
            )
            return Output(logits, statistics, by_rows)

    def repeatable(self) -> AbstractContextManager[None]:
        """Let the backward of a pass that is compiled inside run more than once on the same activations."""
        if not self.engine.compiled:
            return nullcontext()
        from .selective import repeatable  # imports torch.compile

        return repeatable()

    def tf32(self) -> AbstractContextManager[None]:
        """Allow TF32 in matrix products of a whole step, if the engine uses it."""
        return tf32() if self.engine.precision == "tf32" else nullcontext()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run passes inside eagerly in the network's own precision, for values that are computed only once."""
        try:
            self._eager = True
            yield
        finally:
            self._eager = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let each rank run passes of its own inside."""
        found = self.world, self.normalisation
        try:
            self.world, self.normalisation = ALONE, self._apart
            yield
        finally:
            self.world, self.normalisation = found

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the frozen weights in the engine's precision and format, renewed when those change.

        Norm layers keep their own weights: torch expects them in the precision of the statistics.
        """
        bf16, last = self.engine.precision == "bf16", self.engine.channels_last
        if not (bf16 or last):
            return {}
        versions = tuple((p.data_ptr(), p._version) for p in self.frozen.values())
        if versions != self._versions:
            self._versions, norms = versions, {*map(id, norm_parameters(self.model).values())}
            self._copies = {
                name: p.detach().to(
                    dtype=torch.bfloat16 if bf16 and p.dtype == torch.float32 and id(p) not in norms else p.dtype,
                    memory_format=torch.channels_last if last and p.dim() == 4 else torch.preserve_format,
                )
                for name, p in self.frozen.items()
            }
        return self._copies

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.engine.precision == "bf16":
            return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        if torch.is_autocast_enabled(device.type):
            torch.clear_autocast_cache()  # it would keep the weights from before the update
        return nullcontext()
