"""Steps recorded as CUDA graphs: one launch, or two, in the place of a thousand.

A step without a branch on data is recorded whole: forward, loss, backward, optimizer. Where the kept samples are run
again, or the backward runs on them alone, a step has two parts: the first predicts and counts what is kept; the host
reads that one number, and replays the second part that was recorded for so many rows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..checks import DivergenceError, refuse_non_finite
from ..core.record import Step, Uncertainty
from ..parts.selection import Scaled, Selector

if TYPE_CHECKING:
    from ..core.adapter import Adapter
    from ..core.prediction import Prediction
    from ..parts.subnetwork import Draw

__all__ = ["Graphs", "NotRecordableError", "Part", "recordable"]

Adapt: TypeAlias = Callable[[Any, Tensor], Tensor]

_WARM_UP = 2  # steps that run as they are, so that everything is compiled and every buffer is there
_BUCKETS = 16  # sizes of a second part
_MOST = 8  # shapes of batches


class NotRecordableError(RuntimeError):
    """A step that asks the host something."""


def recordable(adapt: Adapt) -> Adapt:
    """Marks an `adapt` that asks the host nothing and takes no branch on data: the engine may record it."""

    @wraps(adapt)
    def run(self: Adapter, x: Tensor) -> Tensor:
        recording = self.part is not None  # by the adapt of a class below
        return self.graphs(adapt, x) if self.engine.graphs and x.is_cuda and not recording else adapt(self, x)

    return run


class _Counted(Exception):  # noqa: N818
    """The first part of a step is over: it is known which samples are kept."""


class Part:
    """A step, or a part of one, as a CUDA graph; and what the adapter asks while it is being recorded.

    A first part ends where samples are counted. A second one is for a number of `rows` and starts from the first's
    prediction. A step that never counts has one part.
    """

    def __init__(self, adapter: Adapter, rows: int | None = None, first: Part | None = None) -> None:
        self.adapter, self.rows, self.first = adapter, rows, first
        self.graph = torch.cuda.CUDAGraph()
        self.step = Step(0)
        self.logits = torch.empty(0)
        self.prediction: Prediction | None = None
        self.sound: Tensor | None = None
        """Whether images and logits are finite, a flag each."""
        self.report: Tensor | None = None
        """Those flags, and how many samples are kept."""
        self.draws: list[tuple[Draw, Tensor]] = []
        self.drawn = 0
        self.space: Tensor = first.space if first is not None else torch.empty(0)
        """For draws: memory that no recorded operation writes to."""

    def rehearse(self, adapt: Adapt, x: Tensor) -> None:
        """Run `adapt` for nothing: what is compiled for this number of rows is so before it is recorded."""
        self.sound = torch.zeros(1, dtype=torch.bool, device=x.device)  # so that nothing is learned
        try:
            with self._in_place_of(x):
                adapt(self.adapter, x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise NotRecordableError(str(error)) from error
        self.sound, self.drawn = None, 0
        self.draws.clear()

    def record(self, adapt: Adapt, x: Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        """Run `adapt` for the record: nothing is executed, and no state changes."""
        with self._recording(x, pool, stream) as found:
            try:
                self.logits = adapt(self.adapter, x)
            except _Counted:
                return
            self._write_state(found)
            self.prediction = None  # no second part needs it

    @contextmanager
    def _recording(self, x: Tensor, pool: Any, stream: torch.cuda.Stream) -> Iterator[dict[str, Tensor | None]]:
        try:
            with (
                self._in_place_of(x) as found,
                _uncollected(),
                torch.compiler.set_stance("fail_on_recompile"),
                torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                yield found
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise NotRecordableError(str(error)) from error

    @contextmanager
    def _in_place_of(self, x: Tensor) -> Iterator[dict[str, Tensor | None]]:
        """The adapter's step is this part's inside, and its state the same after."""
        adapter, live = self.adapter, self.adapter.step
        found = {name: getattr(module, key) for name, module, key in adapter.slots()}
        adapter.part, adapter.step = self, Step(len(x))
        try:
            yield found
        finally:
            self.step, adapter.step, adapter.part = adapter.step, live, None
            for name, module, key in adapter.slots():
                setattr(module, key, found[name])

    # What the adapter asks -----------------------------------------------------------------------------------------

    def predicted(self) -> Prediction | None:
        """The prediction that a second part starts from."""
        if self.first is None:
            return None
        self.adapter.step.forwards = self.first.step.forwards
        return self.first.prediction

    def count(self, samples: Tensor) -> int:
        """How many rows there are to be: ends a first part."""
        if self.rows is not None:
            return self.rows
        assert self.sound is not None  # noqa: S101
        self.report = torch.cat([self.sound.long(), samples.sum().view(1)])
        raise _Counted

    def holds(self, when: bool | Tensor) -> bool | Tensor:
        """A condition, and that the batch was sound, where the host has not seen to it."""
        if self.sound is None:
            return when
        return self.sound.all() if when is True else self.sound.all() & when

    def scales_for(self, draw: Draw, x: Tensor) -> Tensor:
        """Where a sub-network's draw is written before each replay."""
        if self.rows is None or draw.per == "batch":
            raise NotRecordableError('a sub-network is drawn per="batch", or of the whole batch')
        start, self.drawn = self.drawn, self.drawn + len(x) * len(draw.rates)
        if self.drawn > len(self.space):
            raise NotRecordableError("a step has more than one sub-network")
        scales = self.space[start : self.drawn].view(len(x), len(draw.rates))
        self.draws.append((draw, scales))
        return scales

    # -----------------------------------------------------------------------------------------------------------------

    def replay(self, count: int = 0) -> None:
        """Launch it, with new draws for as many samples as count."""
        for draw, scales in self.draws:
            drawn = draw.scales_of(count).to(scales.dtype)
            scales[:count].copy_(drawn if drawn.is_cuda else drawn.pin_memory(), non_blocking=True)
        self.graph.replay()

    def _write_state(self, found: dict[str, Tensor | None]) -> None:
        """State is written where it was found, which is where the next replay reads it."""
        for name, module, key in self.adapter.slots():
            old, new = found[name], getattr(module, key)
            if new is old:
                continue
            if old is None or new is None or old.shape != new.shape:
                raise NotRecordableError(f"its {name} comes and goes")
            old.copy_(new if self.sound is None else torch.where(self.sound.all(), new, old))
        if self.sound is not None:
            self.adapter.graphs.refuse(self.sound)


class _Recorded:
    """A step for one shape of batch."""

    def __init__(self, adapter: Adapter, adapt: Adapt, x: Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        self.adapter, self.adapt, self.pool, self.stream = adapter, adapt, pool, stream
        self.x = torch.empty_like(x)
        self.first = Part(adapter)
        if adapter.depth is not None:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            self.first.space = torch.zeros(len(x) * len(adapter.depth.branches), device=x.device, dtype=dtype)
        self.first.record(adapt, self.x, pool, stream)
        self.seconds: dict[int, Part] = {}

    def __call__(self, x: Tensor) -> Tensor:
        with _unsafe_preserve_version_counter(self.x):  # a first part may have saved it
            self.x.copy_(x)
        self.first.replay()
        if self.first.report is None:
            return self._told(self.first)
        *sound, count = self.first.report.tolist()
        assert self.first.prediction is not None  # noqa: S101
        if not all(sound):
            refuse_non_finite(x, self.first.prediction.logits)
        rows = self._rows(count)
        if rows not in self.seconds:
            part = Part(self.adapter, rows, self.first)
            part.rehearse(self.adapt, self.x)
            part.record(self.adapt, self.x, self.pool, self.stream)
            self.seconds[rows] = part
        self.seconds[rows].replay(count)
        return self._told(self.seconds[rows])

    def _rows(self, count: int) -> int:
        """The next size up; the very number where samples are normalised by each other."""
        adapter, size = self.adapter, len(self.x)
        if adapter.coupled and adapter.strategy == "replay-subset":
            return max(count, 1)
        step = max(1, size // _BUCKETS)
        return min(size, max(2, -(-count // step) * step))  # compiled passes are for more than one row

    def _told(self, part: Part) -> Tensor:
        """The record of the step, in memory of its own: the next replay writes over the part's."""
        live, recorded = self.adapter.step, part.step
        for name in ("forwards", "backwards", "in_graph", "taken", "kept", "counts"):
            setattr(live, name, _own(getattr(recorded, name)))
        if part.sound is not None:  # what was refused is not counted
            live.forwards = live.forwards * part.sound.all()
        live.losses = {name: term.clone() for name, term in recorded.losses.items()}
        if recorded.opinions is not None:
            live.opinions = Uncertainty(*(o.clone() for o in recorded.opinions))
        return part.logits.clone()


class Graphs:
    """The recorded steps of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.off = False
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._seen: dict[Hashable, int] = {}
        self._steps: dict[Hashable, _Recorded] = {}
        self._places: tuple[Hashable, ...] = ()
        self._slots: list[tuple[nn.Module, str]] = []
        self._selectors: list[Selector] = []
        self._refused: Tensor | None = None  # batches, for their images and for their logits
        self._report: Tensor | None = None  # the same in the host's memory, a little later
        self._told = [0, 0]

    def __call__(self, adapt: Adapt, x: Tensor) -> Tensor:
        """A step: replayed; recorded first; or, while it warms up, as it is."""
        key = (x.shape, x.dtype, x.stride())
        self._seen[key] = self._seen.get(key, 0) + 1
        crowded = key not in self._steps and len(self._steps) >= _MOST
        if self.off or crowded or self._seen[key] <= _WARM_UP:
            return self._plainly(adapt, x)
        if self._places != (places := (*self._addresses(),)):
            self._steps.clear()
            self._places, self._pool = places, None
        try:
            with torch.cuda.device(x.device):
                if key not in self._steps:
                    self._steps[key] = self._record(adapt, x)
                logits = self._steps[key](x)
        except NotRecordableError as error:
            self.off = True
            self._steps.clear()
            warnings.warn(f"steps are not recorded as CUDA graphs: {error}", stacklevel=4)
            return self._plainly(adapt, x)
        if self._refused is not None and self._report is not None:
            self._report.copy_(self._refused, non_blocking=True)
        kept, select = self.adapter.step.kept, self.adapter.select
        if kept is not None and select is not None:
            select.watch(kept)
        return logits

    @property
    def recorded(self) -> int:
        """Shapes of batches whose steps are recorded."""
        return len(self._steps)

    def refuse(self, sound: Tensor) -> None:
        """Part of a recorded step: count it where its batch is not sound. It has changed nothing then."""
        if self._refused is None or self._report is None:
            raise NotRecordableError("it is not being recorded here")
        images, logits = sound.logical_not().unbind()
        self._refused += torch.stack([images, logits & ~images])

    def settle(self, *, wait: bool = False, discard: bool = False) -> None:
        """Raise for an earlier batch that was refused, as soon as the host can know without waiting."""
        if self._report is None:
            return
        if wait:
            torch.cuda.synchronize(self.adapter.device)
        found, told = self._report.tolist(), self._told
        self._told = found
        if discard:
            return
        if found[0] > told[0]:
            raise ValueError(
                "NaN or infinity in the images of an earlier batch: that batch was refused, and nothing was learned "
                "from it. This one was not looked at yet"
            )
        if found[1] > told[1]:
            raise DivergenceError(
                "the model returned NaN or infinite logits for an earlier batch of finite images: it was refused, and "
                "nothing was learned from it. reset() goes back to the source network"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(memo[id(self.adapter)])

    def __reduce__(self) -> tuple[type[Graphs], tuple[Adapter]]:
        return Graphs, (self.adapter,)

    def _record(self, adapt: Adapt, x: Tensor) -> _Recorded:
        if not self.adapter.can_wait:
            name = type(self.adapter.optimizer).__name__
            raise NotRecordableError(f"{name} cannot leave a step out by itself, as plain SGD can")
        self.adapter.runner.weights()  # copies are made anew here, not as part of the record
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = own_stream(x.device)
            self._slots = [(module, key) for _, module, key in self.adapter.slots()]
            self._selectors = [m for m in self.adapter.modules() if isinstance(m, Selector)]
            self._refused = torch.zeros(2, dtype=torch.int64, device=x.device)
            self._report = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        return _Recorded(self.adapter, adapt, x, self._pool, self._stream)

    def _plainly(self, adapt: Adapt, x: Tensor) -> Tensor:
        """A step as it is; its state stays where it was, which is where recorded steps have it."""
        found = {name: getattr(module, key) for name, module, key in self.adapter.slots()}
        with _unsafe_preserve_version_counter(self.adapter.adapted):  # recorded steps live through it
            logits = adapt(self.adapter, x)
        for name, module, key in self.adapter.slots():
            old, new = found[name], getattr(module, key)
            if old is not None and new is not None and new is not old and old.shape == new.shape:
                setattr(module, key, old.copy_(new))
        return logits

    def _addresses(self) -> Iterator[Hashable]:
        """What a recorded step has by address or by value, and would not notice a change of."""
        for module, key in self._slots or [(module, key) for _, module, key in self.adapter.slots()]:
            value = getattr(module, key)
            yield None if value is None else value.data_ptr()
        yield from self.settings()

    def settings(self) -> Iterator[Hashable]:
        """The same, without the method's state."""
        adapter = self.adapter
        yield from ((p.data_ptr(), p._version) for p in adapter.frozen.values())
        yield from (p.data_ptr() for p in adapter.adapted)
        for holder in (adapter, *self._selectors):
            yield from ((k, v) for k, v in vars(holder).items() if isinstance(v, (int, float, str, Scaled)))
        if adapter.optimizer is not None:
            for group in adapter.optimizer.param_groups:
                yield tuple((k, v) for k, v in group.items() if k != "params")
            for p in (adapter.adapted[0], adapter.adapted[-1]):
                yield from (v.data_ptr() for v in adapter.optimizer.state[p].values() if isinstance(v, Tensor))


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """To record on."""
    if quieten := getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None):
        quieten(False)  # recorded graphs live on a stream of their own, on purpose
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection inside: the end of an older adapter's CUDA graph would spoil the one being recorded."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
