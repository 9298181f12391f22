"""What a step may do while it is being recorded: the counterpart of `execution.Live`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from ..checks import refuse_non_finite, soundness
from ..parts.subnetwork import Sample, SubNetworks, scale_type
from ..parts.world import Share
from .capture import Capture, Host, NotRecordableError, Values, read_state, write_back
from .execution import Execution, Gathered, rows_first
from .runner import Runner

__all__ = ["FunctionExecution", "StepExecution"]

_BUCKETS = 16  # numbers of rows that steps are recorded for, per batch size

Value = TypeVar("Value")


class FunctionExecution(Execution):
    """Record a function. It changes no state, and its caller checks what it returns."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rows: int | None = None

    def prediction(self, make: Callable[[], Value]) -> Value:
        """Compute it."""
        return make()

    def check(self, x: Tensor, logits: Tensor, *, unit_range: bool) -> bool:  # noqa: ARG002
        """Check nothing: the caller of the function does."""
        return False

    def count(self, samples: Tensor) -> None:  # noqa: ARG002
        """Refuse."""
        raise NotRecordableError("it counts the kept samples")

    def gather(self, samples: Tensor, *, at_least: int = 1, exact: bool = False) -> Gathered:  # noqa: ARG002
        """Refuse."""
        raise NotRecordableError("it counts the kept samples")

    def sample(self, subnetworks: SubNetworks, x: Tensor, generator: Generator, share: Share | None) -> Sample:  # noqa: ARG002
        """Refuse."""
        raise NotRecordableError("it samples sub-networks")

    def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:  # noqa: ARG002
        """Leave it on the device."""
        return when

    def gradients(
        self,
        loss: Tensor,
        parameters: Sequence[Parameter],
        within: AbstractContextManager[object],
        *,
        retain: bool,
    ) -> list[Tensor]:
        """Differentiate; a selective backward runs on as many rows as were counted."""
        backends = self.runner.compiler.backends()
        for backend in backends:
            backend.rows = self.rows
        try:
            with within, self.runner.repeatable() if retain else nullcontext():
                return list(
                    torch.autograd.grad(
                        loss, parameters, retain_graph=retain, allow_unused=True, materialize_grads=True
                    )
                )
        finally:
            for backend in backends:
                backend.rows = None


class StepExecution(FunctionExecution):
    """Record a step or a part of one, or run the rest of a step live from the prediction of its first capture.

    A first capture ends where samples are counted: the host reads the count, and the rest of the step runs live. A
    second one is for a number of `rows` and starts from the first's prediction. A step that never counts has only
    the first; with `Engine(overlap=True)` it ends before the backward pass, and the second has the whole step's rows.
    """

    def __init__(
        self,
        host: Host,
        reject: Callable[[Tensor], None],
        x: Tensor,
        first: StepExecution | None = None,
        rows: int | None = None,
        count: int | None = None,
    ) -> None:
        super().__init__(host.runner)
        self.host, self.reject, self.x, self.first, self.rows, self.kept = host, reject, x, first, rows, count
        self.capture: Capture | None = None
        self.recording = False
        self.rejected = False
        """Whether the batch was rejected where samples were counted."""
        self.unfit = ""
        """Why the rest of the step cannot be recorded, as its live run has shown."""
        self.step: Any = None
        """The record of the step."""
        self.forwards: int | Tensor = 0
        """Passes up to the prediction."""
        self.graph: Any = None
        """The pass of the prediction, if it has a graph."""
        self.logits = torch.empty(0)
        self.predicted: Any = None
        self.sound: Tensor | None = None if first is None else first.checked
        """Whether images and logits are finite, one flag each, until the host has read them."""
        self.checked: Tensor | None = None
        """Those flags in the memory of a first capture that has ended early, for the second."""
        self.report: Tensor | None = None
        """Those flags, and how many samples are kept."""
        self.exact = False
        """Whether the number of rows is the number of kept samples."""
        self.ended_early = False
        """Whether this first capture ends before the backward pass, without a count."""
        self.shared: bool = first is not None and first.ended_early
        """Whether second captures need the activations of the first."""
        self.samples: list[tuple[SubNetworks, Tensor]] = []
        self.scales = torch.empty(0)
        """Memory for the scales of sampled sub-networks, which no recorded operation writes to."""

    @property
    def counts(self) -> bool:
        """Whether the step counts samples, so that it has a second capture per number of rows."""
        return self.report is not None

    @property
    def answers(self) -> bool:
        """Whether the step returns the prediction of the first capture, unchanged."""
        return self.first is not None and self.logits is self.first.predicted.logits

    # Recording --------------------------------------------------------------------------------------------------------

    def record(self, adapt: Callable[[Any, Tensor], Tensor], capture: Capture) -> None:
        """Run `adapt` under capture: nothing is executed and no state changes, up to where samples are counted."""
        found = read_state(self.host)
        self.capture, self.recording = capture, True
        try:
            capture.begin()
            self.logits = adapt(self.host, self.x)
            if self.recording:
                self._record_state(found)
                self._end()
                self.predicted = None  # no second capture needs it
                self._restore_state(found)
            else:
                write_back(self.host, found)
        except BaseException as error:
            if self.recording or self.rejected:
                self._restore_state(found)
            if not self.recording:
                raise
            self.capture, self.recording = None, False
            capture.abort(error)

    def _end(self) -> None:
        assert self.capture is not None  # noqa: S101
        self.capture.end()
        self.recording = False

    def _record_state(self, found: Values) -> None:
        """Record copies of new state into the memory where the next replay reads it."""
        for name, module, key in self.host.state.slots():
            old, new = found[name], getattr(module, key)
            if new is old:
                continue
            if old is None or new is None or old.shape != new.shape:
                raise NotRecordableError(f"its state {name} changes its shape")
            old.copy_(new if self.sound is None else torch.where(self.sound.all(), new, old))
        if self.sound is not None:
            self.reject(self.sound)

    def _restore_state(self, found: Values) -> None:
        for name, module, key in self.host.state.slots():
            setattr(module, key, found[name])

    def replay(self, count: int = 0) -> None:
        """Launch the graph, with newly sampled sub-networks for `count` samples."""
        assert self.capture is not None  # noqa: S101
        for subnetworks, scales in self.samples if count else ():
            self._fill(subnetworks, scales, count)
        self.capture.graph.replay()

    def read_soundness(self) -> None:
        """Let the host check the batch, before the rest of the step runs live."""
        if self.sound is not None and not bool(self.sound.all()):
            refuse_non_finite(self.x, (self.first or self).predicted.logits)
        self.sound = None

    def read(self) -> tuple[int, int]:
        """Return how many samples the first capture has kept, and the number of rows to use for them."""
        assert self.report is not None  # noqa: S101
        *sound, count = self.report.tolist()
        if not all(sound):
            refuse_non_finite(self.x, self.predicted.logits)
        return count, max(count, 1) if self.exact else self._rows_for(count)

    def numbers_of_rows(self) -> list[int]:
        """Return all numbers of rows that second captures may be for."""
        return sorted({self._rows_for(count) for count in range(len(self.x) + 1)})

    def _rows_for(self, count: int) -> int:
        step = max(1, len(self.x) // _BUCKETS)
        return min(len(self.x), max(2, -(-count // step) * step))  # compiled passes are for more than one row

    # What the step asks -----------------------------------------------------------------------------------------------

    def prediction(self, make: Callable[[], Value]) -> Value:
        """Compute the prediction in the first capture; later ones start from it."""
        if self.first is None:
            self.predicted = make()
            self.forwards, self.graph = self.host.step.forwards, self.host.step.graph
        else:
            self.predicted = self.first.predicted
            self.host.step.forwards, self.host.step.graph = self.first.forwards, self.first.graph
        predicted: Value = self.predicted
        return predicted

    def check(self, x: Tensor, logits: Tensor, *, unit_range: bool) -> bool:
        """Check on the device: a batch that is not sound changes nothing."""
        if not self.recording:
            refuse_non_finite(x, logits, unit_range=unit_range)
            return True
        sound = soundness(x, logits)
        self.sound = sound if self.sound is None else self.sound & sound
        return False

    def count(self, samples: Tensor) -> None:
        """End a first capture; the backward passes of all numbers of rows share its activations."""
        self.shared = True
        self._count(samples)

    def _count(self, samples: Tensor, *, exact: bool = False) -> None:
        if self.rows is not None:
            return
        if self.first is not None or self.ended_early:
            raise NotRecordableError("it counts samples after a backward pass")
        assert self.sound is not None  # noqa: S101
        self.exact = exact
        self.report = torch.cat([self.sound.long(), samples.sum().view(1)])
        self._run_first()
        self.kept, self.rows = self.read()
        self.rejected, self.sound = False, None

    def _run_first(self) -> None:
        """End the first capture and run it; the rest of the step runs live."""
        assert self.capture is not None  # noqa: S101
        self._end()
        self.capture.graph.replay()
        self.rejected = True  # unless reading says otherwise

    def _end_early(self) -> None:
        """End the first capture before the backward pass, so that logits can be read while that runs."""
        self.shared = self.ended_early = True
        self.checked = self.sound
        self._run_first()
        self.read_soundness()
        self.rejected = False

    def gather(self, samples: Tensor, *, at_least: int = 1, exact: bool = False) -> Gathered:  # noqa: ARG002
        """Pad the kept samples to the number of rows."""
        self._count(samples, exact=exact)
        assert self.rows is not None  # noqa: S101
        return Gathered(rows_first(samples, self.rows), padded=True, samples=None)

    def sample(self, subnetworks: SubNetworks, x: Tensor, generator: Generator, share: Share | None) -> Sample:
        """Return memory that is filled before each replay, or at once if the step runs live."""
        if self.samples or self.rows is None or subnetworks.per == "batch":
            self.unfit = 'it samples sub-networks per="batch", for the whole batch, or more than once'
            if self.recording:
                raise NotRecordableError(self.unfit)
            known = None if self.kept is None else Share(0, self.kept, self.kept)
            return subnetworks.sample(x, generator, share or known)
        memory, width = self.first or self, len(subnetworks.droppable)
        if not len(memory.scales):
            memory.scales = torch.zeros(len(self.x) * width, device=x.device, dtype=scale_type(x))
        scales = memory.scales[: len(x) * width].view(len(x), width)
        self.samples.append((subnetworks, scales))
        if not self.recording:
            self._fill(subnetworks, scales, self.kept or 0)
        return Sample(scales)

    def _fill(self, subnetworks: SubNetworks, scales: Tensor, count: int) -> None:
        sampled = subnetworks.scales(count, self.host.generator).to(scales.dtype)
        pinned = sampled.pin_memory() if scales.is_cuda and not sampled.is_cuda else sampled
        scales[:count].copy_(pinned, non_blocking=True)

    def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:
        """Leave it on the device, and require a sound batch if the host has not checked it."""
        if isinstance(when, Tensor) and not can_wait:
            if self.recording:
                raise NotRecordableError("the host must read a condition, such as whether to restore a learning rate")
            return bool(when)
        if self.sound is None:
            return when
        return self.sound.all() if when is True else self.sound.all() & when

    def gradients(
        self, loss: Tensor, parameters: Sequence[Parameter], within: AbstractContextManager[object], *, retain: bool
    ) -> list[Tensor]:
        """Differentiate, and keep activations that are shared."""
        answered = self.predicted is not None and self.sound is not None
        if self.recording and self.first is None and answered and self.runner.engine.overlap:
            self._end_early()
        return super().gradients(loss, parameters, within, retain=retain or self.shared)
