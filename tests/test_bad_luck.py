"""Faults at any point of a call, and any order of calls, lose nothing; `benchmarks.bad_luck` is the longer version."""

from __future__ import annotations

import gc
import random
import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import GeneratorType

import pytest
import torch
from cases import CASES
from faults import ERRORS, PLACES, Subject, equal, fail, interrupt, quiet, struck
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from networks import images, make, stream
from torch import Tensor

import acclimate
from acclimate.core.snapshot import Snapshot

FOLDER = TemporaryDirectory()

subject = cache(lambda name: Subject(name, Path(FOLDER.name)))
count = cache(lambda name, which, place: subject(name).count(which, place))


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_an_error_or_interrupt_loses_nothing(name: str, data: st.DataObject) -> None:
    which = data.draw(st.sampled_from([*subject(name).operations]))
    place, error = data.draw(st.sampled_from([*PLACES])), data.draw(st.sampled_from([*ERRORS]))
    at = data.draw(st.integers(1, max(1, count(name, which, place))))
    assert subject(name).strike(which, place, at, error) == ""


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_pass_that_gives_nan_loses_nothing(name: str, which: str) -> None:
    for at in range(1, 6):
        assert subject(name).strike_nan(which, at) == ""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["tent", "eata-c"])
def test_a_kill_while_saving_loses_nothing(name: str, place: str) -> None:
    most = count(name, "save", place)
    for at in range(1, most, max(1, most // 5)):
        assert subject(name).strike_dead(place, at) == ""


@pytest.mark.parametrize("name", CASES)
def test_threads_lose_nothing(name: str) -> None:
    assert subject(name).hammer(24, seed=0) == ""


def test_faults_do_strike() -> None:
    """Otherwise the tests above would show nothing."""
    for name in ("tent", "eata"):
        for place in PLACES:
            for act, error in ((fail, Exception), (interrupt, KeyboardInterrupt)):
                with pytest.raises(error):
                    struck(subject(name).operations["forward"], place, count(name, "forward", place) // 2, act)


# Any order of calls ---------------------------------------------------------------------------------------------------

BATCHES = stream(3, 4)


def filled(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the tensors of a state without empty averages, which are zero or absent."""
    return {name: tensor for name, tensor in snapshot.tensors.items() if not name.endswith("mean") or tensor.any()}


class Orders(RuleBasedStateMachine):
    """Whatever happens in between, an adapter that has learned from the same batches is in the same state."""

    def __init__(self, name: str) -> None:
        super().__init__()
        family = "seg" if name == "dat" else "bn"
        self.adapter, self.twin = (CASES[name].make(make(family)) for _ in range(2))
        self.learned: tuple[int, ...] | None = ()
        """The batches since the source; None if an interrupted step has left that open."""
        self.states: dict[tuple[int, ...], Snapshot] = {(): self.twin.snapshot()}
        self.taken: list[tuple[tuple[int, ...], Snapshot]] = [((), self.adapter.snapshot())]
        self.path = Path(FOLDER.name) / f"{name} in any order"
        self.saved: tuple[int, ...] | None = None

    def expected(self, learned: tuple[int, ...]) -> Snapshot:
        if learned not in self.states:
            self.twin.restore(self.expected(learned[:-1]))
            self.twin(BATCHES[learned[-1]])
            self.states[learned] = self.twin.snapshot()
        return self.states[learned]

    @invariant()
    def same_state(self) -> None:
        if self.learned is not None:
            assert equal(*map(filled, (self.adapter.snapshot(), self.expected(self.learned))))

    @precondition(lambda self: self.learned is not None)
    @rule(batch=st.integers(0, len(BATCHES) - 1))
    def learn(self, batch: int) -> None:
        self.adapter(BATCHES[batch])
        self.learned = (*self.learned, batch)

    @rule(batch=st.integers(0, len(BATCHES) - 1))
    def only_predict(self, batch: int) -> None:
        expected = self.adapter.predict_only(BATCHES[batch])
        self.adapter.frozen = True
        assert torch.equal(self.adapter(BATCHES[batch]), expected)
        self.adapter.frozen = False

    @rule()
    def refuse(self) -> None:
        x = images(4)
        x[1, 0, 0, 0] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            self.adapter(x)

    @rule(at=st.integers(1, 400), place=st.sampled_from([*PLACES]), error=st.sampled_from([*ERRORS]))
    def strike(self, at: int, place: str, error: str) -> None:
        self.learned = None
        try:
            struck(lambda: self.adapter(BATCHES[0]), place, at, ERRORS[error])
        except (Exception, KeyboardInterrupt):
            return

    @precondition(lambda self: self.learned is not None)
    @rule()
    def take(self) -> None:
        self.taken.append((self.learned, self.adapter.snapshot()))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.learned, snapshot = data.draw(st.sampled_from(self.taken))
        self.adapter.restore(snapshot)

    @rule()
    def reset(self) -> None:
        self.adapter.reset()
        self.learned = ()

    @precondition(lambda self: self.learned is not None)
    @rule()
    def save(self) -> None:
        self.adapter.save(self.path)
        self.saved = self.learned

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        self.adapter.load(self.path)
        self.learned = self.saved


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_calls_gives_the_same_state(name: str) -> None:
    few = settings(
        max_examples=4,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(lambda: Orders(name), settings=few)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer here")
@pytest.mark.parametrize("name", CASES)
def test_a_signal_at_any_time_loses_nothing(name: str) -> None:
    chance = random.Random(7)
    for _ in range(12):
        which, seconds = chance.choice([*subject(name).operations]), 10 ** chance.uniform(-5, -2)
        assert subject(name).strike_soon(which, seconds) == "", (which, seconds)


def test_an_interrupt_leaves_no_context_open() -> None:
    """A context that ends when it is collected, in the middle of a later call, would undo that call's work."""
    gc.collect()
    gc.disable()
    try:
        before = open_contexts()
        for at in range(1, count("tent", "predict_only", "line") + 1, 3):
            assert subject("tent").strike("predict_only", "line", at, "interrupt") == ""
        left = [each.gi_code.co_name for each in open_contexts() if all(each is not other for other in before)]
    finally:
        gc.enable()
    assert left == []


def open_contexts() -> list[GeneratorType]:
    """Return the generators of the package that have not ended, also those of other tests."""
    package = str(Path(acclimate.__file__).parent)
    generators = [each for each in gc.get_objects() if isinstance(each, GeneratorType)]
    return [each for each in generators if each.gi_code.co_filename.startswith(package)]
