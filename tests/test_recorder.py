"""The logic of recording, without a GPU: a stand-in capture runs operations at once, and replays nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from cases import A_TRAP
from networks import images, make, stream
from tape import OnDevice, Tape, Waits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acclimate import EATAC, ETA, ETAC, SAR, Adapter, Engine, Everything, NonRedundant, Reliable, Tent
from acclimate.engine.capture import CaptureCache, NotRecordableError
from acclimate.engine.recorder import CapturedFunction, RecordedStep

LR = 1e-2
pytestmark = A_TRAP
BLOCKS = {"blocks": "blocks.*"}


class StandIn:
    """In the place of a `Capture` and its graph."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.open, self.fails, self.replays, self.graph = False, fails, 0, self

    def begin(self) -> None:
        self.open = True

    def end(self) -> None:
        self.open = False
        if self.fails is not None:
            raise NotRecordableError(str(self.fails))

    def abort(self, error: BaseException) -> None:
        self.open = False
        if isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, torch.OutOfMemoryError):
            raise NotRecordableError(str(error)) from error
        raise error

    def replay(self) -> None:
        assert not self.open
        self.replays += 1


def recorded(adapter: Adapter, x: Tensor, capture: StandIn, adapt: Callable[..., Tensor] | None = None) -> RecordedStep:
    """A step that records into the stand-in, after two live batches."""
    for warm_up in stream(2, size=len(x)):
        adapter(warm_up.to(x.dtype))
    adapter.recorder.capture = lambda _: capture  # type: ignore[method-assign]
    adapter.recorder._rejected = torch.zeros(2, dtype=torch.int64)
    return RecordedStep(adapter.recorder, adapt or type(adapter).adapt.__wrapped__, x)


def call(adapter: Adapter, step: RecordedStep, x: Tensor) -> Tensor:
    with adapter._aside(len(x)), adapter.learning():
        logits = step(x)
        adapter.step.finish(logits)
        adapter.passes.add(adapter.step)
    return logits


def state(adapter: Adapter) -> dict[str, Tensor]:
    return dict(adapter.snapshot().tensors)


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("family", ["bn", "ln", "seg"])
@pytest.mark.parametrize(
    "build",
    [
        lambda net: ETA(net, lr=LR, strategy="replay"),
        lambda net: ETA(net, lr=LR, strategy="replay-subset"),
        lambda net: ETAC(net, lr=LR, drop=0.5, **BLOCKS),
        lambda net: ETAC(net, lr=LR, drop=0.5, strategy="replay", select=Reliable(0.7), **BLOCKS),
        lambda net: SAR(net, lr=LR, strategy="replay"),
        lambda net: SAR(net, lr=LR, strategy="replay-subset"),
    ],
)
def test_the_rest_of_a_step_runs_live_where_samples_are_counted(build: Callable[..., Adapter], family: str) -> None:
    """One call of `adapt`: captured up to the count, then live, with the kept samples padded to a number of rows."""
    x = images(8, 3).double()
    ours, theirs = build(make(family).double()), build(make(family).double())
    capture, calls = StandIn(), []

    def adapt(self: Any, x: Tensor) -> Tensor:
        calls.append(len(x))
        return type(self).adapt.__wrapped__(self, x)

    step = recorded(ours, x, capture, adapt)
    for warm_up in stream(2, size=8):
        theirs(warm_up.double())
    places = [getattr(module, key) for _, module, key in ours.state.slots()]
    logits = call(ours, step, x)
    assert all(a is getattr(m, key) for a, (_, m, key) in zip(places, ours.state.slots(), strict=True))
    torch.testing.assert_close(logits, theirs(x))
    assert calls == [8]
    assert (capture.open, capture.replays) == (False, 1)
    assert step.first.counts
    assert step.warm == {step.first.rows}
    assert {k: int(v) for k, v in ours.passes.state_dict().items()} == {
        k: int(v) for k, v in theirs.passes.state_dict().items()
    }
    mine, other = state(ours), state(theirs)
    for name in mine:
        torch.testing.assert_close(mine[name], other[name])


@pytest.mark.parametrize("method", [ETA, partial(ETAC, drop=0.5, **BLOCKS)])
@pytest.mark.parametrize("seed", range(3))
def test_kept_samples_on_batch_statistics_are_padded_to_sixteenths(method: Callable[..., Adapter], seed: int) -> None:
    """The padding does not count: the step is the one that runs exactly the kept samples."""
    options = {"lr": LR, "strategy": "replay-subset", "select": Reliable(0.6)}
    ours, theirs = (method(make("bn").double(), **options) for _ in range(2))
    x = images(64, seed).double()
    step = recorded(ours, x, StandIn())
    ours.runner.engine = Engine(graphs=True)  # what a CPU refuses to be asked for
    for warm_up in stream(2, size=64):
        theirs(warm_up.double())
    torch.testing.assert_close(call(ours, step, x), theirs(x))
    assert step.first.kept == int(theirs.last.kept.sum())
    assert step.first.rows == -(-step.first.kept // 4) * 4
    for p, q in zip(ours.adapted, theirs.adapted, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_step_that_counts_nothing_is_one_capture_and_changes_nothing_while_it_is_recorded() -> None:
    x = stream(3)[2]
    adapter = ETA(make("bn"), lr=LR)
    capture = StandIn()
    step = recorded(adapter, x, capture)
    mean = adapter.select.second.mean
    call(adapter, step, x)
    assert adapter.select.second.mean is mean, "state stays where the next replay reads it"
    assert not step.first.counts
    assert capture.replays == 1


@pytest.mark.parametrize("strategy", ["masked", "replay"])
def test_a_capture_that_cannot_end_leaves_the_state_where_it_was(strategy: str) -> None:
    adapter = ETA(make("bn"), lr=LR, strategy=strategy)
    capture = StandIn(fails=RuntimeError("unjoined"))
    step = recorded(adapter, stream()[2], capture)
    before, mean = state(adapter), adapter.select.second.mean
    with pytest.raises(NotRecordableError, match="unjoined"):
        call(adapter, step, stream()[2])
    assert adapter.select.second.mean is mean
    if strategy == "replay":  # the other has made its update before the capture ends, since the stand-in executes
        assert unchanged(before, state(adapter))
    assert step.first.capture is None, "an incomplete capture must not be replayed"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt(), TypeError("odd")])
def test_an_error_while_recording_is_raised_and_the_next_batch_records_again(error: BaseException) -> None:
    adapter = ETA(make("bn"), lr=LR, strategy="replay")
    errors = [error]

    def adapt(self: Any, x: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return ETA.adapt.__wrapped__(self, x)

    capture = StandIn()
    step = recorded(adapter, stream()[2], capture, adapt)
    before, live = state(adapter), adapter.execution
    with pytest.raises(type(error)):
        call(adapter, step, stream()[2])
    assert not capture.open
    assert adapter.execution is live
    assert unchanged(before, state(adapter))
    assert call(adapter, step, stream()[2]).isfinite().all()


def test_an_error_that_recording_causes_is_not_recordable() -> None:
    adapter = Tent(make("bn"), lr=LR)

    def adapt(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotRecordableError, match="not permitted"):
        call(adapter, recorded(adapter, stream()[2], StandIn(), adapt), stream()[2])


def test_a_bad_batch_is_rejected_where_it_is_counted_and_the_capture_stays() -> None:
    adapter = ETAC(make("ln"), lr=LR, **BLOCKS)
    bad = stream()[2].clone()
    bad[1, 0, 0, 0] = torch.nan
    step = recorded(adapter, bad, StandIn())
    before = state(adapter)
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 8 images"):
        call(adapter, step, bad)
    assert unchanged(before, state(adapter))
    assert step.first.capture is not None


def test_state_that_was_set_before_the_count_is_restored_when_the_batch_is_rejected() -> None:
    adapter = ETA(make("ln"), lr=LR, strategy="replay")

    def adapt(self: Any, x: Tensor) -> Tensor:
        batch = self.predict(x)
        self.select.second.mean = torch.full_like(self.select.second.mean, 0.5)
        batch.kept(batch.logits[:, 0] > 0)
        return batch.logits

    bad = torch.full_like(stream()[2], torch.nan)
    step = recorded(adapter, bad, StandIn(), adapt)
    mean = adapter.select.second.mean
    with pytest.raises(ValueError, match="NaN or infinity in 8 of 8 images"):
        call(adapter, step, bad)
    assert adapter.select.second.mean is mean


def test_what_runs_live_is_checked_live() -> None:
    adapter = ETA(make("ln"), lr=LR, strategy="replay")

    def adapt(self: Any, x: Tensor) -> Tensor:
        batch = self.predict(x)
        batch.kept(batch.logits[:, 0] > -100)
        return self.infer(x * torch.nan)

    with pytest.raises(ValueError, match="NaN or infinity in 8 of 8 images"):
        call(adapter, recorded(adapter, stream()[2], StandIn(), adapt), stream()[2])


def test_subnetworks_per_batch_are_not_recorded_and_the_batch_is_learned_from_once() -> None:
    x = stream()[2]
    ours, theirs = (ETAC(make("ln"), lr=LR, per="batch", select=Everything(), **BLOCKS) for _ in range(2))
    step = recorded(ours, x, StandIn())
    for warm_up in stream(2):
        theirs(warm_up)
    torch.testing.assert_close(call(ours, step, x), theirs(x))
    assert "per" in step.unfit
    for p, q in zip(ours.adapted, theirs.adapted, strict=True):
        torch.testing.assert_close(p, q)


def test_a_function_that_cannot_be_recorded_closes_its_capture() -> None:
    adapter, capture = ETA(make("ln"), strategy="replay"), StandIn()
    adapter.recorder.capture = lambda _: capture  # type: ignore[method-assign]

    def work(x: Tensor) -> Tensor:
        return adapter.predict(x).kept(torch.ones(len(x), dtype=torch.bool)).logits

    with adapter._aside(8), adapter.learning(), pytest.raises(NotRecordableError, match="counts"):
        CapturedFunction(adapter.recorder, work, [stream()[0]], None)
    assert not capture.open


# Replayed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counts_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of samples are tensors, as on a GPU."""
    monkeypatch.setattr("acclimate.core.prediction._count", lambda samples: samples.sum())


def taped(
    adapter: Adapter, batches: list[Tensor], adapt: Callable[..., Tensor] | None = None
) -> tuple[Any, list[Tape]]:
    """A step that records on tapes, after live batches, and the tapes."""
    for x in batches:
        adapter(x)
    tapes: list[Tape] = []

    def capture(_: torch.device) -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    adapter.runner.world = OnDevice()
    adapter.recorder.capture = capture  # type: ignore[assignment,method-assign]
    adapter.recorder._rejected = torch.zeros(2, dtype=torch.int64)
    return RecordedStep(adapter.recorder, adapt or type(adapter).adapt.__wrapped__, batches[0]), tapes


def same_state(ours: Adapter, theirs: Adapter) -> None:
    mine, other = state(ours), state(theirs)
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=1e-9, atol=1e-9)


RESETS = ["empty", "released"]
RESTLESS = {"lr": 5e-3, "margin": 0.3, "rho": 0.3, "floor": 0.5}
"""With these, in some batch of three images R is empty, in another R' is, and after many SAR starts over."""


@pytest.mark.usefixtures("counts_on_device")
@pytest.mark.parametrize("family", ["bn", "ln", "gn"])
@pytest.mark.parametrize("reset", RESETS)
def test_a_recorded_step_of_sar_is_the_live_one(family: str, reset: str) -> None:
    """With batch statistics one graph is the whole step; otherwise there is one more per number of kept samples."""
    first, second, *xs = [x.double() for x in stream(24, size=3)]
    ours, theirs = (SAR(make(family).double(), reset=reset, **RESTLESS) for _ in range(2))
    for x in (first, second):
        theirs(x)
    step, tapes = taped(ours, [first, second])
    found = set()
    for x in xs:
        torch.testing.assert_close(call(ours, step, x), theirs(x), rtol=1e-9, atol=1e-9)
        same_state(ours, theirs)
        kept, both = int(theirs.last.kept.sum()), int(theirs.last.backwards)
        found |= {"R is empty"} if not kept else {"R' is empty"} if both == kept else set()
        collapsed = at_source(theirs)
        assert at_source(ours) == collapsed, "bit for bit"
        found.add("starts over" if collapsed else "goes on")
    assert found >= {"R is empty", "R' is empty", "starts over"}
    assert ("goes on" in found) == (reset == "empty"), "the other starts over again and again"
    assert step.first.counts == (family != "bn")
    assert len(tapes) == 1 + len(step.seconds)
    assert tapes[0].replays == len(xs)


def at_source(adapter: Adapter) -> bool:
    before = adapter.state.before
    return all(torch.equal(p, before[name]) for name, p in adapter.state.parameters.items())


@pytest.mark.usefixtures("counts_on_device")
@pytest.mark.parametrize("strategy", ["masked", "replay"])
@pytest.mark.parametrize("family", ["bn", "ln"])
def test_a_live_step_of_sar_is_the_same_where_flags_stay_on_the_device(family: str, strategy: str) -> None:
    """As in eager mode on a GPU: where R is empty, what the step computes does not count."""
    ours, theirs = (SAR(make(family).double(), strategy=strategy, **RESTLESS) for _ in range(2))
    ours.runner.world, ours.execution = OnDevice(), Waits()
    for x in stream(24, size=3):
        torch.testing.assert_close(ours(x.double()), theirs(x.double()), rtol=1e-9, atol=1e-9)
        same_state(ours, theirs)
        assert ours.last.terms.keys() == theirs.last.terms.keys()


@pytest.mark.usefixtures("counts_on_device")
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("family", ["bn", "ln"])
def test_a_recorded_step_of_sar_on_a_bad_batch_changes_nothing(family: str, reset: str) -> None:
    """Not even where the network has collapsed and would start over."""
    xs = stream(8)
    adapter = SAR(make(family), lr=LR, reset=reset)
    step, _ = taped(adapter, xs[:2])
    for x in xs[2:6]:
        call(adapter, step, x)
    adapter.average.fill_(0.1)  # in place, where the graph reads it
    before, bad = state(adapter), xs[6].clone()
    bad[1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN") if family == "ln" else nullcontext():
        call(adapter, step, bad)
    assert unchanged(before, state(adapter))
    assert not at_source(adapter)
    assert adapter.recorder._rejected.tolist() == [int(family == "bn"), 0]
    call(adapter, step, xs[7])
    assert at_source(adapter)


@pytest.mark.usefixtures("counts_on_device")
def test_a_start_over_that_restores_a_learning_rate_is_not_recorded() -> None:
    """The host must know whether it did. A step that starts over without the optimizer is recorded."""
    xs = stream(3)
    for reset in RESETS:
        adapter = SAR(make("bn"), lr=LR, reset=reset)
        step, _ = taped(adapter, xs[:2])
        adapter.optimizer.param_groups[0]["lr"] = LR / 2
        before = state(adapter)
        with pytest.raises(NotRecordableError, match="learning rate") if reset == "empty" else nullcontext():
            call(adapter, step, xs[2])
        assert unchanged(before, state(adapter)) == (reset == "empty")


@pytest.mark.usefixtures("counts_on_device")
def test_samples_that_run_again_unannounced_are_not_recorded() -> None:
    """The host would learn their number when the parameters are no longer those of the batch."""

    def adapt(self: Any, x: Tensor) -> Tensor:
        batch = self.predict(x)
        kept = batch.kept(self.reliable(batch.logits) > 0)
        with torch.no_grad():
            self.adapted[0].mul_(2)
        batch.again(kept, where=self.reliable)
        return batch.logits

    adapter = SAR(make("ln"), lr=LR)
    step, _ = taped(adapter, stream(2), adapt)
    before = state(adapter)
    with pytest.raises(NotRecordableError, match="nonzero"):
        call(adapter, step, stream(3)[2])
    assert unchanged(before, state(adapter))


class Checkpointed(nn.Module):
    """It runs its forward again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make("bn").double().train()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.usefixtures("counts_on_device")
def test_a_recorded_backward_runs_in_the_contexts_of_a_forward_that_another_capture_has() -> None:
    xs = [x.double() for x in stream(8, size=4)]
    ours, theirs = (SAR(Checkpointed(), lr=LR, margin=0.5, statistics="source") for _ in range(2))
    for x in xs[:2]:
        theirs(x)
    step, _ = taped(ours, xs[:2])
    for x in xs[2:]:
        torch.testing.assert_close(call(ours, step, x), theirs(x), rtol=1e-9, atol=1e-9)
        same_state(ours, theirs)
    assert step.seconds


# The cache ------------------------------------------------------------------------------------------------------------


def test_calls_warm_up_twice_and_each_shape_by_itself() -> None:
    cache = CaptureCache()
    assert [cache.is_warm(("step", 8)) for _ in range(3)] == [False, False, True]
    assert [cache.is_warm(("step", 4)) for _ in range(3)] == [False, False, True]


def test_at_most_eight_shapes_of_a_kind_are_recorded() -> None:
    cache = CaptureCache()
    for shape in range(10):
        warm = [cache.is_warm(("step", shape)) for _ in range(3)][-1]
        assert warm == (shape < 8)
        if warm:
            cache.add(("step", shape), object())
    assert cache.count("step") == 8
    assert [cache.is_warm(("langevin", 1)) for _ in range(3)][-1], "another kind has a limit of its own"
    assert cache.is_warm(("step", 3)), "what is recorded stays so"


def test_other_settings_warm_up_again_and_other_addresses_only_record_again() -> None:
    cache = CaptureCache()
    key = ("step", 8)

    def record() -> None:
        cache.add(key, object())
        cache.add(("langevin", 8), object())

    cache.check("step", ("lr", 1), (100,))
    assert [cache.is_warm(key) for _ in range(3)][-1]
    record()
    cache.check("step", ("lr", 1), (100,))
    assert cache.get(key) is not None
    cache.check("step", ("lr", 1), (200,))
    assert cache.get(key) is None
    assert cache.is_warm(key)
    record()
    cache.check("step", ("lr", 2), (200,))
    assert cache.get(key) is None
    assert not cache.is_warm(key)
    assert cache.get(("langevin", 8)) is not None


# What a recorded step depends on --------------------------------------------------------------------------------------


class Own(Reliable):
    """A user's selector, with settings of every kind."""

    def __init__(self) -> None:
        super().__init__(0.4)
        self._scale = 1.0
        self.table = {"a": [1, 2]}
        self.register_buffer("constant", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda select: setattr(select, "_scale", 2.0),
        lambda select: select.table.update(a=[1, 3]),
        lambda select: select.table["a"].append(4),
        lambda select: setattr(select, "constant", torch.zeros(2)),
        lambda select: setattr(select, "weighted", False),
    ],
)
def test_settings_of_every_kind_are_noticed(change: Callable[[Own], None]) -> None:
    adapter = ETA(make("ln"), select=Own())
    before = [*adapter.recorder._settings()]
    adapter(stream()[0])
    assert [*adapter.recorder._settings()] == before
    change(adapter.select)
    assert [*adapter.recorder._settings()] != before


def test_a_selector_may_observe_as_it_likes() -> None:
    seen = []

    class Counts(NonRedundant):
        def observe(self, logits: Tensor, keep: Tensor) -> None:
            seen.append(int(keep.sum()))
            super().observe(logits, keep)

    for adapter in (ETA(make("ln"), select=Counts()), EATAC(make("bn"), beta=0, select=Counts(), **BLOCKS)):
        adapter(stream()[0])
        assert adapter.select.mean is not None
    assert len(seen) == 2
    adapter = ETA(make("ln"), select=Reliable(0.9) * Counts())
    adapter(stream()[0])
    assert len(seen) == 3, "a factor of a product observes, too"
    assert adapter.select.second.mean is not None


def test_modules_of_the_network_are_no_state_of_the_method() -> None:
    class Holds(Tent):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.first = model.stem

    adapter = Holds(make("bn"))
    assert [name for name, _, _ in adapter.state.slots()] == [name for name, _, _ in Tent(make("bn")).state.slots()]


# Learning on a stream of its own --------------------------------------------------------------------------------------


def overlapping(adapter: Adapter, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordedStep, list[str]]:
    """A step that records into the stand-in with `overlap`, and a log of what is enqueued."""
    log: list[str] = []

    class Logged(StandIn):
        def replay(self) -> None:
            super().replay()
            log.append("replay")

    @contextmanager
    def aside() -> Iterator[None]:
        log.append("learn aside")
        yield
        log.append("main stream")

    step = recorded(adapter, x, Logged())
    adapter.runner.engine = Engine(graphs=True, overlap=True)
    monkeypatch.setattr(adapter.recorder, "learn_aside", aside)
    return step, log


@pytest.mark.parametrize("family", ["bn", "ln", "seg"])
@pytest.mark.parametrize("method", [Tent, ETA])
def test_a_first_capture_ends_before_the_backward_pass(
    method: Callable[..., Adapter], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest runs live, and the step is that of an eager adapter."""
    x = images(8, 3).double()
    ours, theirs = (method(make(family).double(), lr=LR) for _ in range(2))
    step, log = overlapping(ours, x, monkeypatch)
    for warm_up in stream(2, size=8):
        theirs(warm_up.double())
    torch.testing.assert_close(call(ours, step, x), theirs(x))
    assert step.first.ended_early
    assert log == ["replay"], "no gradient was recorded"
    mine, other = state(ours), state(theirs)
    for name in mine:
        torch.testing.assert_close(mine[name], other[name])
    assert {k: int(v) for k, v in ours.passes.state_dict().items()} == {
        k: int(v) for k, v in theirs.passes.state_dict().items()
    }


@pytest.mark.parametrize("method", [Tent, ETA, partial(ETAC, drop=0.5, **BLOCKS)])
def test_the_answer_comes_before_learning(method: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(8, 3).double()
    adapter = method(make("ln").double(), lr=LR)
    step, log = overlapping(adapter, x, monkeypatch)
    call(adapter, step, x)
    log.clear()
    logits = call(adapter, step, x)
    assert log == ["replay", "learn aside", "replay", "main stream"]
    assert torch.equal(logits, step.first.predicted.logits)
    assert logits is not step.first.predicted.logits, "the next batch writes there"
    (second,) = step.seconds.values()
    assert second.answers


def test_a_step_that_changes_its_prediction_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(8, 3)
    adapter = Tent(make("ln"), lr=LR)
    step, log = overlapping(adapter, x, monkeypatch)
    step.adapt = lambda self, x: 2 * Tent.adapt.__wrapped__(self, x)
    for _ in range(2):
        logits = call(adapter, step, x)
    assert "learn aside" not in log
    assert torch.equal(logits, 2 * step.first.predicted.logits)


def test_a_bad_batch_changes_nothing_where_learning_is_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ETA(make("ln"), lr=LR, margin=1.0)
    bad = stream()[2].clone()
    bad[1, 0, 0, 0] = torch.nan
    step, _ = overlapping(adapter, bad, monkeypatch)
    assert adapter.select.second.mean is not None
    before = state(adapter)
    for _ in range(2):  # where the rest runs live, the host checks
        with pytest.raises(ValueError, match="NaN or infinity in 1 of 8 images"):
            call(adapter, step, bad)
        assert unchanged(before, state(adapter))
    step.warm.add(None)
    call(adapter, step, bad)  # where it is recorded, the check stays on the device
    assert unchanged(before, state(adapter))
    assert adapter.recorder._rejected.tolist() == [1, 0]


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": True, "compiled": True}])
def test_overlap_is_for_recorded_steps(options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="graphs=True"):
        Engine(**options)


OVERLAPPING = {
    "tent": Tent,
    "eta": ETA,
    "eta-c": partial(ETAC, drop=0.5, **BLOCKS),
    "sar": partial(SAR, **{name: value for name, value in RESTLESS.items() if name != "lr"}),
}


@pytest.mark.usefixtures("counts_on_device")
@pytest.mark.parametrize("family", ["bn", "ln"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_step_that_learns_aside_is_the_live_one(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a batch with NaN, which changes nothing; the answer is enqueued before learning."""
    first, second, *xs = [x.double() for x in stream(12, size=6)]
    ours, theirs = (OVERLAPPING[name](make(family).double(), lr=5e-3) for _ in range(2))
    for x in (first, second):
        theirs(x)
    step, tapes = taped(ours, [first, second])
    ours.runner.engine = Engine(graphs=True, overlap=True)
    learned_aside: list[int] = []

    @contextmanager
    def aside() -> Iterator[None]:
        learned_aside.append(sum(tape.replays for tape in tapes))
        yield

    monkeypatch.setattr(ours.recorder, "learn_aside", aside)
    for number, x in enumerate(xs):
        if number == 6:
            before = state(ours)
            with suppress(ValueError):  # where the host counts, it raises at once
                call(ours, step, torch.full_like(x, torch.nan))
            assert unchanged(before, state(ours))
        torch.testing.assert_close(call(ours, step, x), theirs(x), rtol=1e-9, atol=1e-9)
        same_state(ours, theirs)
    assert step.first.ended_early != step.first.counts
    assert len(learned_aside) >= 2
    if step.first.ended_early:
        assert len(tapes) == 2, "predict, and learn"
        assert ours.recorder._rejected.tolist() == [1, 0]


@pytest.mark.usefixtures("counts_on_device")
@pytest.mark.parametrize("family", ["bn", "ln"])
@pytest.mark.parametrize("method", [partial(ETAC, drop=0.5, **BLOCKS), partial(ETA, strategy="replay-subset")])
def test_a_prepared_step_records_no_more(method: Callable[..., Adapter], family: str) -> None:
    """Whatever number of samples is kept later, the step is the live one."""
    first, second, *xs = [x.double() for x in stream(14, size=6)]
    options = {"lr": 5e-3, "select": Reliable({"bn": 0.4, "ln": 0.1}[family])}
    ours, theirs = (method(make(family).double(), **options) for _ in range(2))
    for x in (first, second):
        theirs(x)
    step, tapes = taped(ours, [first, second])
    ours.runner.engine = Engine(graphs=True)
    before = ours.state.copy()
    call(ours, step, xs[0])
    with ours._aside(6), ours.learning():
        step.prepare()
    ours.state.restore(before)
    assert step.seconds.keys() == {2, 3, 4, 5, 6}
    recorded, numbers = len(tapes), set()
    for x in xs:
        torch.testing.assert_close(call(ours, step, x), theirs(x), rtol=1e-9, atol=1e-9)
        same_state(ours, theirs)
        numbers.add(int(theirs.last.kept.sum()))
    assert len(tapes) == recorded
    assert len(numbers) > 1
