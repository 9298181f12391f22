"""Steps recorded as CUDA graphs: one launch, or two, instead of a thousand.

A step that does not branch on data is recorded whole: forward, loss, backward, optimizer. Where the kept samples run
again, or the backward runs on their rows, a step has two captures: the first predicts and counts what is kept; the host
reads that number and replays the second, which was recorded for that number of rows. A method that must read something
back in between records functions instead, such as the Langevin dynamics of TEA.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor

from ..checks import DivergenceError, warn
from ..parts.copying import versions_kept
from ..parts.optimizers import can_wait, capturable
from .capture import Capture, CaptureCache, Host, NotRecordableError, read_state, write_back
from .execution import Execution
from .settings import settings
from .step_execution import FunctionExecution, StepExecution

__all__ = ["Recorder", "recordable"]

Adapt: TypeAlias = Callable[[Any, Tensor], Tensor]


def recordable(adapt: Adapt) -> Adapt:
    """Mark an `adapt` that the engine may record: it reads nothing back to the host and does not branch on data.

    >>> from acclimate import Adapter
    >>> class Mine(Adapter):
    ...     @recordable
    ...     def adapt(self, x):
    ...         batch = self.predict(x)
    ...         self.update(loss=batch.rows().logsumexp(1).mean())
    ...         return batch.logits
    >>> Mine(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)))(torch.rand(2, 4)).shape
    torch.Size([2, 3])
    """

    @wraps(adapt)
    def run(self: Any, x: Tensor) -> Tensor:
        recorder: Recorder = self.recorder
        return recorder.step(adapt, x)

    return run


class Recorder:
    """Records the steps and functions of one adapter, and replays them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.off: set[str] = set()
        """Steps, or functions by name, that cannot be recorded."""
        self.cache = CaptureCache()
        self._busy = False
        self._rejected: Tensor | None = None
        """The numbers of batches rejected for their images and for their logits, on the device."""
        self._report: Tensor | None = None
        """The same numbers on the host, copied without waiting."""
        self._raised = [0, 0]
        self._replayed = False
        self._learns_on: torch.cuda.Stream | None = None
        """The stream on which the last batch is still learned from, if that is not the current one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder(memo[id(self.host)])

    def __reduce__(self) -> tuple[type[Recorder], tuple[Host]]:
        return Recorder, (self.host,)

    @property
    def steps(self) -> int:
        """The number of batch shapes with a recorded step."""
        return self.cache.count("step")

    @property
    def functions(self) -> int:
        """The number of recorded functions."""
        return len(self.cache) - self.steps

    @property
    def ran(self) -> Literal["eager", "compiled", "recorded"]:
        """How the last step ran."""
        if self._replayed:
            return "recorded"
        return "compiled" if self.host.runner.compiler.compiled_passes else "eager"

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, adapt: Adapt, x: Tensor) -> Tensor:
        """Run a step: replay it, after recording it if needed, or run it live while it warms up."""
        self._replayed, self._learns_on = False, None
        if "step" in self.off or self._busy or not self.host.runner.engine.graphs or not x.is_cuda:
            return adapt(self.host, x)
        versions = (p._version for p in self.host.adapted)  # activations of a first capture are for these values
        self.cache.check("step", (*self._settings(), *versions), (*self._addresses(),))
        key = ("step", x.shape, x.dtype, x.stride())
        if not self.cache.is_warm(key):
            return self.live(adapt, x)
        try:
            with torch.cuda.device(x.device):
                step = self.cache.get(key) or self.cache.add(key, self._new_step(adapt, x))
                logits: Tensor = step(x)
        except NotRecordableError as error:
            self._give_up("step", f"steps are not recorded as CUDA graphs: {error}")
            return self.live(adapt, x)
        except BaseException:
            if (kept := self.cache.get(key)) is not None and kept.first.capture is None:  # it was not recorded
                self.cache.drop(key)
            raise
        self._replayed = True
        if step.unfit:
            self._give_up("step", f"steps are not recorded as CUDA graphs: {step.unfit}")
        if self._rejected is not None and self._report is not None:
            with self.after_learning():
                self._report.copy_(self._rejected, non_blocking=True)
        return logits

    def _new_step(self, adapt: Adapt, x: Tensor) -> RecordedStep:
        if not can_wait(self.host.optimizer) and self.host.optimizer is not None:
            name = type(self.host.optimizer).__name__
            raise NotRecordableError(f"{name} cannot skip a step on the device, as plain SGD can")
        if self._rejected is None:
            self._rejected = torch.zeros(2, dtype=torch.int64, device=x.device)
            self._report = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        return RecordedStep(self, adapt, x)

    def prepare(self) -> None:
        """Record what is left of the recorded steps: each number of rows that may come."""
        try:
            for step in self.cache.entries("step"):
                with torch.cuda.device(step.x.device) if step.x.is_cuda else nullcontext():
                    step.prepare()
        except NotRecordableError as error:
            self._give_up("step", f"steps are not recorded as CUDA graphs: {error}")

    def learn_aside(self) -> AbstractContextManager[object]:
        """Return a context for learning on a stream of its own, behind all that is enqueued so far."""
        self._learns_on = stream = self.cache.stream(self.host.device)
        stream.wait_stream(torch.cuda.current_stream(self.host.device))
        self.host.runner.sharing.learns_on(stream)
        return self.after_learning()

    def after_learning(self) -> AbstractContextManager[object]:
        """Return a context for work behind the learning of the last batch; reading its logits does not wait for it."""
        return torch.cuda.stream(self._learns_on) if self._learns_on is not None else nullcontext()

    def reject(self, sound: Tensor) -> None:
        """Count the batch as rejected unless it is sound, as part of a recorded step."""
        assert self._rejected is not None  # noqa: S101
        images, logits = sound.logical_not().unbind()
        self._rejected += torch.stack([images, logits & ~images])

    def settle(self, *, wait: bool = False, discard: bool = False) -> None:
        """Raise the deferred error of an earlier batch; `wait` synchronises first, `discard` drops it."""
        if self._report is None:
            return
        if wait:
            torch.cuda.synchronize(self.host.device)
        found, raised = self._report.tolist(), self._raised
        self._raised = found
        if discard:
            return
        if found[0] > raised[0]:
            raise ValueError(
                "NaN or infinity in the images of an earlier batch: that batch was rejected, and nothing was learned "
                "from it. This batch was not processed"
            )
        if found[1] > raised[1]:
            raise DivergenceError(
                "the model returned NaN or infinite logits for an earlier batch of finite images: that batch was "
                "rejected, and nothing was learned from it. reset() restores the source network"
            )

    # Functions --------------------------------------------------------------------------------------------------------

    def function(
        self,
        work: Callable[..., Any],
        *inputs: Tensor,
        generator: Generator | None = None,
        reads: Iterable[Tensor] = (),
    ) -> Any:
        """Run a function of tensors that leaves the adapter unchanged: replay it, record it first, or call it.

        `reads` are tensors other than parameters that the function reads in place.
        """
        given = inputs if generator is None else (*inputs, generator)
        name = work.__name__
        if name in self.off or self._busy or not self.host.runner.engine.graphs or not inputs[0].is_cuda:
            return work(*given)
        self.cache.check(name, (*self._settings(),), tuple(t.data_ptr() for t in reads))
        key = (name, *((t.shape, t.dtype, t.stride()) for t in inputs))
        if not self.cache.is_warm(key):
            return work(*given)
        function = self.cache.get(key)
        if function is None:
            try:
                with torch.cuda.device(inputs[0].device):
                    function = self.cache.add(key, CapturedFunction(self, work, inputs, generator))
            except NotRecordableError as error:
                self._give_up(name, f"{name} is not recorded as a CUDA graph: {error}")
                return work(*given)
        return function(inputs, generator)

    # Both -------------------------------------------------------------------------------------------------------------

    def _give_up(self, kind: str, message: str) -> None:
        """Run steps, or a function, live from now on."""
        self.off.add(kind)
        self.cache.check(kind, (), ())
        warn(message)

    @contextmanager
    def running(self, execution: Execution | None = None) -> Iterator[None]:
        """Run a step inside the block, perhaps with another execution, so that recorded steps stay valid."""
        live = self.host.execution
        try:
            self._busy = execution is not None
            self.host.execution = live if execution is None else execution
            with versions_kept(self.host.adapted):
                yield
        finally:
            self.host.execution, self._busy = live, False

    def live(self, adapt: Adapt, x: Tensor, execution: Execution | None = None) -> Tensor:
        """Run a step live, and keep its state where recorded steps read it."""
        found = read_state(self.host)
        with self.running(execution):
            logits = adapt(self.host, x)
        write_back(self.host, found)
        return logits

    def capture(self, device: torch.device) -> Capture:
        """Return a new capture."""
        self.host.runner.weights()  # renew the copies now, so that copying is not recorded
        return Capture(self.cache.pool, self.cache.stream(device))

    def _addresses(self) -> Iterator[Hashable]:
        for _, module, key in self.host.state.slots():
            value = getattr(module, key)
            yield None if value is None else value.data_ptr()

    def _settings(self) -> Iterator[Hashable]:
        """Yield what a recorded step reads by address or value, except state; a change causes a new recording."""
        host = self.host
        yield host.runner.engine
        yield from ((p.data_ptr(), p._version) for p in host.runner.frozen.values())
        yield from (p.data_ptr() for p in host.adapted)
        yield from settings(host.state.modules())
        if host.optimizer is not None:
            for group in host.optimizer.param_groups:
                yield tuple((k, v) for k, v in group.items() if k != "params")
            for p in (host.adapted[0], host.adapted[-1]):
                yield from (v.data_ptr() for v in host.optimizer.state[p].values() if isinstance(v, Tensor))


class RecordedStep:
    """A recorded step for one shape of batch: a first capture, and one per number of kept rows.

    For each number of rows, the first step runs live, so that everything is compiled; the second is recorded. Without
    a count there is at most one second capture, for `None`.
    """

    def __init__(self, recorder: Recorder, adapt: Adapt, x: Tensor) -> None:
        self.recorder, self.adapt = recorder, adapt
        self.x = torch.empty_like(x)
        self.first = StepExecution(recorder.host, recorder.reject, self.x)
        self.warm: set[int | None] = set()
        self.seconds: dict[int | None, StepExecution] = {}
        self.unfit = ""
        """Why the step cannot be recorded after all, as a live run of its rest has shown."""

    def __call__(self, x: Tensor) -> Tensor:
        with versions_kept([self.x]):  # the first capture may have saved it
            self.x.copy_(x)
        if self.first.capture is None:
            self._record(self.first)
            if self.first.rows is not None or self.first.ended_early:  # the rest of the step has run live
                self.warm.add(self.first.rows)
                self.unfit = self.first.unfit
                return self._own(self.first.step, self.first.logits)
            self.first.replay()
            return self._own(self.first.step, self.first.logits, self.first.sound)
        self.first.replay()
        if not self.first.counts and not self.first.ended_early:
            return self._own(self.first.step, self.first.logits, self.first.sound)
        overlaps = self.recorder.host.runner.engine.overlap
        answer: Tensor | None = self.first.predicted.logits.clone() if overlaps else None
        count, rows = self.first.read() if self.first.counts else (None, None)
        return self._learn(count, rows, answer)

    def prepare(self) -> None:
        """Record the rest of the step for every number of rows, as if so many samples were kept."""
        if self.first.counts and not self.first.exact:
            for rows in self.first.numbers_of_rows():
                while rows not in self.seconds and not self.unfit:
                    self._learn(rows, rows, None)

    def _learn(self, count: int | None, rows: int | None, answer: Tensor | None) -> Tensor:
        """Replay the rest of the step for a number of rows, after recording it if needed, or run it live first."""
        if rows not in self.seconds:
            second = StepExecution(self.recorder.host, self.recorder.reject, self.x, self.first, rows, count)
            if rows not in self.warm:
                second.read_soundness()
                logits = self.recorder.live(self.adapt, self.x, second)
                self.warm.add(rows)
                self.unfit = second.unfit
                return self._own(self.recorder.host.step, logits)
            self._record(second)
            self.seconds[rows] = second
        second = self.seconds[rows]
        if answer is None or not second.answers:
            second.replay(count or 0)
            return self._own(second.step, second.logits, second.sound)
        with self.recorder.learn_aside():
            second.replay(count or 0)
            self._own(second.step, second.logits, second.sound)
        return answer

    def _record(self, execution: StepExecution) -> None:
        host = self.recorder.host
        live, host.step = host.step, type(host.step)(host.step.size)
        try:
            with self.recorder.running(execution):
                execution.record(self.adapt, self.recorder.capture(self.x.device))
        finally:
            execution.step, host.step = host.step, live

    def _own(self, step: Any, logits: Tensor, sound: Tensor | None = None) -> Tensor:
        """Return the logits, and set the step's record, in memory that the next replay does not write to."""
        self.recorder.host.step = step.copy()
        if sound is not None:
            self.recorder.host.step.reject(sound)
        return logits.clone()


class CapturedFunction:
    """A recorded function of tensors of given shapes."""

    def __init__(
        self, recorder: Recorder, work: Callable[..., Any], inputs: Sequence[Tensor], generator: Generator | None
    ) -> None:
        host = self.host = recorder.host
        self.inputs = [torch.empty_like(t) for t in inputs]
        self.noise = None if generator is None else Generator(inputs[0].device)
        self.capture = recorder.capture(inputs[0].device)
        if self.noise is not None:
            self.capture.graph.register_generator_state(self.noise)
        live, host.step = host.step, type(host.step)(len(inputs[0]))
        try:
            with recorder.running(FunctionExecution(host.runner)), capturable(host.optimizer):
                self.capture.begin()
                self.outputs: Any = work(*self.inputs) if self.noise is None else work(*self.inputs, self.noise)
                self.capture.end()
        except BaseException as error:
            self.capture.abort(error)
        finally:
            self.step, host.step = host.step, live

    def __call__(self, inputs: Sequence[Tensor], generator: Generator | None) -> Any:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        if self.noise is not None and generator is not None:
            self.noise.manual_seed(generator.initial_seed())
        self.capture.graph.replay()
        self.host.step.add(self.step)
        return tuple(t.clone() for t in self.outputs) if isinstance(self.outputs, tuple) else self.outputs.clone()
