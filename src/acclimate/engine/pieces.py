"""Pieces of a step that leave everything as they find it, as CUDA graphs: Langevin dynamics, an episode, a view's pass.

    fake = self.piece(self._langevin, fake, generator=noise)

A method whose step asks the host something cannot be recorded whole; what it does between two questions can.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor

from .graphs import NotRecordableError, Part, own_stream

if TYPE_CHECKING:
    from ..core.adapter import Adapter

__all__ = ["Pieces", "Work"]

Work: TypeAlias = Callable[..., Any]
"""Tensors to a tensor or a tuple of them; the last argument may be a generator on their device."""

_WARM_UP = 2  # calls that run as they are
_MOST = 8  # shapes of inputs


class _Piece(Part):
    """A function of tensors of given shapes."""

    def __init__(self, adapter: Adapter, inputs: Sequence[Tensor], generator: Generator | None) -> None:
        super().__init__(adapter)
        self.inputs = [torch.empty_like(t) for t in inputs]
        self.noise = None if generator is None else Generator(inputs[0].device)
        self.outputs: Any = None

    def holds(self, when: bool | Tensor) -> bool | Tensor:
        """Whoever calls it sees to what it returns: nothing has changed."""
        return when

    def capture(self, work: Work, pool: Any, stream: torch.cuda.Stream) -> None:
        """Run it for the record."""
        if self.noise is not None:
            self.graph.register_generator_state(self.noise)
        with self._recording(self.inputs[0], pool, stream), _capturable(self.adapter.optimizer):
            self.outputs = work(*self.inputs) if self.noise is None else work(*self.inputs, self.noise)

    def __call__(self, inputs: Sequence[Tensor], generator: Generator | None) -> Any:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        if self.noise is not None and generator is not None:
            self.noise.manual_seed(generator.initial_seed())
        self.graph.replay()
        live = self.adapter.step
        live.forwards, live.backwards = live.forwards + self.step.forwards, live.backwards + self.step.backwards
        live.in_graph, live.taken = live.in_graph + self.step.in_graph, self.step.taken or live.taken
        return tuple(t.clone() for t in self.outputs) if isinstance(self.outputs, tuple) else self.outputs.clone()


class Pieces:
    """The recorded pieces of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.off = False
        self._seen: dict[Hashable, int] = {}
        self._pieces: dict[Hashable, _Piece] = {}
        self._places: tuple[Hashable, ...] = ()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self, work: Work, *inputs: Tensor, generator: Generator | None = None, reads: Iterable[Tensor] = ()
    ) -> Any:
        """Replayed; recorded first; or, while it warms up and where the engine does not record, as it is.

        `reads` are tensors besides parameters that it reads where they are.
        """
        engine = self.adapter.engine
        given = inputs if generator is None else (*inputs, generator)
        if self.off or not engine.graphs or self.adapter.part is not None or not inputs[0].is_cuda:
            return work(*given)
        key = (work.__name__, *((t.shape, t.dtype, t.stride()) for t in inputs))
        self._seen[key] = self._seen.get(key, 0) + 1
        crowded = key not in self._pieces and len(self._pieces) >= _MOST
        if crowded or self._seen[key] <= _WARM_UP:
            return work(*given)
        places = (*self.adapter.graphs.settings(), *(t.data_ptr() for t in reads))
        if self._places != places:
            self._pieces.clear()
            self._places, self._pool = places, None
        if key not in self._pieces:
            try:
                self._pieces[key] = self._recorded(work, inputs, generator)
            except NotRecordableError as error:
                self.off = True
                self._pieces.clear()
                warnings.warn(f"{work.__name__} is not recorded as a CUDA graph: {error}", stacklevel=4)
                return work(*given)
        return self._pieces[key](inputs, generator)

    def __len__(self) -> int:
        return len(self._pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieces:
        return Pieces(memo[id(self.adapter)])

    def __reduce__(self) -> tuple[type[Pieces], tuple[Adapter]]:
        return Pieces, (self.adapter,)

    def _recorded(self, work: Work, inputs: Sequence[Tensor], generator: Generator | None) -> _Piece:
        device = inputs[0].device
        with torch.cuda.device(device):
            self.adapter.runner.weights()  # copies are made anew here, not as part of the record
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = own_stream(device)
            piece = _Piece(self.adapter, inputs, generator)
            piece.capture(work, self._pool, self._stream)
        return piece


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Adam counts its steps on the device inside, as a record of them needs it."""
    groups = [] if optimizer is None else [group for group in optimizer.param_groups if "capturable" in group]
    asked = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, before in zip(groups, asked, strict=True):
            group["capturable"] = before
