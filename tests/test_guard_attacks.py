"""Attacks on a guard: what a hostile or careless user did to it, and what must hold."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks import CLASSES, images, make
from test_guard import PROBE, adapter_of, alarms_expected, batches, parameters_of, same_state, spoil
from test_guard import tent as fast_tent
from torch import Tensor, nn

from acclimate import POLICIES, Guard, Policy, StateError, Tent
from acclimate.checks import DivergenceError
from acclimate.online.cameras import Streams
from acclimate.online.novelty import Novelty
from acclimate.online.one_by_one import Stream
from acclimate.online.policy import Alarm


def tent(family: str = "ln") -> Tent:
    """A slow one: of an untrained network, the smallest change flips predictions."""
    return fast_tent(1e-6, family)


def with_nan(x: Tensor, row: int = 3) -> Tensor:
    x = x.clone()
    x[row] = math.nan
    return x


def stuck(size: int = 16) -> Tensor:
    return images(1, seed=7).expand(size, -1, -1, -1).clone()


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_bad_frame_does_not_stay_in_the_statistics_of_a_stream(value: float) -> None:
    stream = Stream(Guard(tent("bn"), probe=PROBE), size=16)
    stream(images(16, seed=1))
    bad = images(16, seed=2)
    bad[3] = value
    with alarms_expected():
        try:
            stream(bad)
        except DivergenceError:
            assert value == 1e30
    logits = stream(images(4, seed=3))
    assert logits.isfinite().all()
    assert len(logits.argmax(1).unique()) > 1 or logits.std(0).max() > 1e-3, "images still differ"


@pytest.mark.parametrize("frozen", [False, True])
def test_images_on_which_the_source_diverges_change_nothing(frozen: bool) -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    for x in batches(3):
        guard(x)
    guard.frozen = frozen
    before = guard.snapshot()
    huge = images(48, seed=9)
    huge[3] = 3e38
    for _ in range(2):
        with pytest.raises(DivergenceError):
            guard(huge)
    after = guard.snapshot()
    assert before.settings == after.settings
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


def test_only_the_user_lifts_what_the_user_has_frozen(tmp_path: Path) -> None:
    guard = Guard(tent(), probe=PROBE)
    cameras = Streams(guard)
    for key in ("a", "b"):
        cameras(key, images(48, seed=1))
    guard.save(tmp_path / "state")
    guard.frozen = True
    before = parameters_of(guard.model)
    cameras("a", images(48, seed=2))
    guard.load(tmp_path / "state")
    cameras("b", images(48, seed=3))
    assert guard.frozen
    assert guard.health.doing == "frozen"
    guard.reset()
    guard.load(tmp_path / "state")
    assert all(map(torch.equal, before, parameters_of(guard.model))), "nothing was learned"
    guard.frozen = False
    assert guard.health.doing == "learning"


def test_a_policy_freezes_one_camera_alone(tmp_path: Path) -> None:
    cameras = Streams(Guard(tent(), policies=[Policy("entropy", "freeze", above=0.0)], every=1))
    with alarms_expected():
        cameras("a", images(48, seed=1))
    assert cameras.adapter.frozen
    with cameras.using("b"):
        assert not cameras.adapter.frozen
    with cameras.using("a"):
        assert cameras.adapter.frozen


def test_warnings_as_errors_do_not_stop_an_action() -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    for x in batches(3):
        guard(x)
    spoil(guard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="batch"):
            guard(images(48, seed=9))
    assert guard.health.alarm_count == 1
    assert guard.health.rollbacks == 1


def test_an_interrupt_while_predictions_are_collected_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    guard(images(16, seed=1))
    real, calls = torch.cat, 0

    def interrupted(tensors: object, *arguments: object, **keywords: object) -> Tensor:
        nonlocal calls
        found = real(tensors, *arguments, **keywords)
        if guard._judge.window and any(each is tensor for each in tensors for tensor in guard._judge.window.values()):
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guard(images(16, seed=2))
    assert len({len(each) for each in guard._judge.window.values()}) == 1
    for x in batches(3):
        guard(x)


def test_a_move_keeps_what_was_collected() -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    guard(images(16, seed=1))
    guard.to("cpu")
    assert {len(each) for each in guard._judge.window.values()} == {16}


def test_what_lasts_ends_with_its_policy() -> None:
    guard = Guard(tent(), probe=PROBE)
    with alarms_expected():
        guard(stuck())
    assert guard.health.doing == "source"
    guard.policies = POLICIES
    assert guard.health.doing == "source"
    guard.policies = ()
    assert guard.health.doing == "learning"


def test_a_state_is_for_a_guard_with_the_same_policies() -> None:
    guard, other = (Guard(tent(), policies=[Policy("distance", "reset", above=above)]) for above in (5.0, 6.0))
    with pytest.raises(StateError, match="same policies"):
        other.restore(guard.snapshot())


def test_a_share_of_kept_samples_is_unknown_while_nothing_can_be_kept() -> None:
    """Otherwise skipping for it would never end."""
    guard = Guard(adapter_of("eta", "ln"), policies=[Policy("kept", "skip", below=2.0)], every=1)
    with alarms_expected():
        guard(images(48))
    assert guard.health.doing == "skip"
    guard(images(48))
    assert guard.health.signals.kept is None
    with alarms_expected():
        guard(images(48))
    assert guard.health.doing == "learning"


def test_predictions_of_an_undone_network_do_not_ring() -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    for x in batches(3):
        guard(x)
    spoil(guard)
    guard(images(40, seed=9))
    guard.rollback()
    for x in batches(4, 16):
        guard(x)
    assert guard.health.alarms == []
    assert guard.health.rollbacks == 1


def test_a_rollback_by_hand_does_not_end_what_lasts() -> None:
    guard = Guard(tent(), probe=PROBE)
    with alarms_expected():
        guard(stuck())
    guard.rollback()
    assert guard.health.doing == "source"


def test_a_rollback_keeps_a_lower_learning_rate() -> None:
    guard = Guard(tent(), probe=PROBE)
    guard(images(16, seed=1))
    guard.optimizer.param_groups[0]["lr"] = 1e-9
    guard.rollback()
    assert guard.optimizer.param_groups[0]["lr"] == 1e-9


@pytest.mark.parametrize("name", ["tolerated", "risk", "ring", "pause"])
def test_options_without_effect_later_are_refused_later(name: str) -> None:
    guard = Guard(tent(), probe=PROBE)
    with pytest.raises(AttributeError, match=name):
        setattr(guard, name, 0.5)


@pytest.mark.filterwarnings("ignore:.*batch")
def test_a_batch_that_is_refused_changes_nothing() -> None:
    guard = Guard(adapter_of("roid", "bn"), probe=PROBE, every=1)
    guard(images(48, seed=1).clamp(0, 1))
    before = guard.snapshot()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            guard(300 * stuck(48))
    after = guard.snapshot()
    assert before.settings == after.settings
    assert torch.equal(before.tensors["guard/generator"], after.tensors["guard/generator"])


def test_a_batch_with_a_broken_frame_counts_once() -> None:
    guard = Guard(tent(), policies=[Policy("repeated", "source", above=0.5, times=2)])
    guard(with_nan(stuck()))
    assert guard.health.doing == "learning"
    with alarms_expected():
        guard(with_nan(stuck()))
    assert guard.health.doing == "source"
    guard(with_nan(images(16)))
    assert guard.health.doing == "source"
    guard(images(16))
    assert guard.health.doing == "learning"


def test_the_record_of_a_batch_with_a_broken_frame_is_of_all_its_images() -> None:
    guard = Guard(tent(), probe=PROBE)
    logits = guard(with_nan(images(16)))
    step = guard.last
    assert (step.size, len(step.kept), int(step.kept.sum())) == (16, 16, 15)
    assert not step.kept[3]
    assert torch.equal(step.logits, logits)


def test_small_batches_of_another_size_are_gathered_anew() -> None:
    guard = Guard(tent(), policies=())
    guard(images(3, seed=1))
    guard(images(3, seed=1)[:, :, :6, :6])
    assert len(guard._gathered) == 3
    assert guard._gathered.shape[2:] == (6, 6)


def test_images_of_a_size_that_cannot_be_compared_are_not_familiar() -> None:
    torch.manual_seed(0)
    novelty = Novelty(torch.rand(64, 3, 16, 16))
    assert novelty(torch.rand(32, 3, 4, 4)).isnan()
    assert Novelty(torch.rand(32, 3, 8, 8, 8))(torch.rand(32, 3, 8, 8, 8)) < 4, "video"
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, CLASSES))
    guard = Guard(Tent(flat), probe=torch.rand(64, 3, 16, 16), every=1)
    guard(torch.rand(48, 3, 4, 4))
    assert guard.health.signals.novelty is None


def test_a_guard_can_be_built_in_inference_mode() -> None:
    adapter = tent()
    with torch.inference_mode():
        guard = Guard(adapter, probe=images(64, seed=900))
        guard(images(16))
    assert guard(images(16)).isfinite().all()


def test_held_out_images_may_have_a_graph() -> None:
    guard = Guard(tent(), probe=(2 * images(64).requires_grad_()))
    copy.deepcopy(guard)(images(16))


def test_a_first_small_batch_of_a_segmenter_is_learned_from() -> None:
    guard = Guard(adapter_of("tent", "seg"), probe=PROBE[:32], familiar=0.0)
    guard(images(2))
    assert guard.last.updated


def test_one_small_batch_does_not_put_off_checks() -> None:
    guard = Guard(tent(), policies=())
    for x in batches(30):
        guard(x)
    guard._next = guard._clock
    guard(images(8, seed=50))
    guard(images(40, seed=51))
    checked = len(guard.health.history)
    for x in batches(5, seed=60):
        guard(x)
    assert len(guard.health.history) > checked


@torch.no_grad()
def test_a_partial_reset_moves_a_teacher_too() -> None:
    guard = Guard(adapter_of("cotta", "ln"), probe=PROBE)
    guard(images(16))
    for average in guard.adapter.teacher.buffers():
        average.add_(1.0)
    guard._actions.ring.halve()
    source = guard.adapter.state.source_parameters()
    for name, average in guard.adapter.teacher.of(source).items():
        assert float((average - source[name]).abs().max()) < 0.51


@pytest.mark.parametrize("broken", [False, True])
def test_a_preview_is_what_a_call_returns(broken: bool) -> None:
    guard = Guard(tent("bn"), probe=PROBE, every=1000)
    for x in batches(5):
        guard(x)
    guard._next = guard._clock + 100
    x = with_nan(PROBE[:48]) if broken else PROBE[:48]
    expected = guard.preview(x)
    assert torch.equal(guard(x), expected)


def test_copies_are_of_one_moment_and_go_their_own_way() -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    guard(images(48))
    other = copy.deepcopy(guard)
    assert same_state(guard, other)
    assert torch.equal(guard(images(48, seed=2)), other(images(48, seed=2)))
    assert same_state(guard, other)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tolerated": math.nan}, ValueError),
        ({"tolerated": 5.0}, ValueError),
        ({"risk": 0.0}, ValueError),
        ({"familiar": math.nan}, ValueError),
        ({"every": math.nan}, ValueError),
        ({"pause": 1.5}, ValueError),
        ({"policies": [1]}, TypeError),
        ({"policies": None}, TypeError),
        ({"probe": []}, ValueError),
        ({"probe": [torch.rand(32, 3, 8, 8), torch.rand(32, 3, 9, 9)]}, ValueError),
    ],
)
def test_options_are_checked(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"{next(iter(options))}="):
        Guard(tent(), **options)


def test_alarms_name_what_rang() -> None:
    guard = Guard(tent(), probe=PROBE)
    with alarms_expected():
        guard(stuck())
    assert guard.health.alarms == [Alarm(0, "repeated", 1.0, "source")]
    assert guard.health.as_dict()["alarms"] == [{"batch": 0, "signal": "repeated", "value": 1.0, "action": "source"}]


def test_every_family_of_small_networks_takes_one_image() -> None:
    for family in ("bn", "ln", "gn"):
        assert Guard(Tent(make(family)))(images(1)).shape == (1, CLASSES)


def test_what_is_normal_is_that_of_the_source() -> None:
    learned, fresh = fast_tent(3.0, "bn"), fast_tent(3.0, "bn")
    for x in batches(4):
        learned(x)
    before = learned.snapshot()
    guard = Guard(learned, probe=PROBE)
    assert guard.probe.test.tolerated == Guard(fresh, probe=PROBE).probe.test.tolerated
    after = learned.snapshot()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_a_state_does_not_grow_with_the_history(tmp_path: Path) -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    guard(images(48))
    health = guard._judge.health
    health.history = [replace(health.signals, batch=batch) for batch in range(512)]
    guard.save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").stat().st_size < 40_000
    guard.load(tmp_path / "state.safetensors")
    assert [signals.batch for signals in guard.health.history] == [*range(496, 512)]


@pytest.mark.parametrize("policies", [("x",), (policy for policy in POLICIES), None])
def test_wrong_policies_leave_those_that_were_set(policies: object) -> None:
    guard = Guard(tent(), probe=PROBE)
    with pytest.raises(TypeError, match="policies"):
        guard.policies = policies
    assert guard.policies == POLICIES


@pytest.mark.parametrize(("name", "value"), [("every", 0), ("every", "a"), ("familiar", math.nan), ("familiar", None)])
def test_wrong_options_are_refused_later_too(name: str, value: object) -> None:
    guard = Guard(tent(), probe=PROBE)
    before = getattr(guard, name)
    with pytest.raises(ValueError, match=name):
        setattr(guard, name, value)
    assert getattr(guard, name) == before


@pytest.mark.parametrize("other", [{"probe": PROBE.flip(1)}, {"tolerated": 0.3}, {"risk": 0.2}])
def test_evidence_about_other_held_out_images_is_dropped(other: dict, tmp_path: Path) -> None:
    guard = Guard(tent(), probe=PROBE, every=1)
    spoil(guard)
    guard.policies = ()
    guard(images(48))
    assert guard.probe.test.evidence > 1
    guard.policies = POLICIES
    guard.save(tmp_path / "state.safetensors")
    another = Guard(tent(), **{"probe": PROBE, "every": 1, **other})
    with pytest.warns(UserWarning, match="anew"):
        another.load(tmp_path / "state.safetensors")
    assert another.probe.test.evidence == 0
    same = Guard(tent(), probe=PROBE, every=1)
    same.load(tmp_path / "state.safetensors")
    assert same.probe.test.evidence == guard.probe.test.evidence


@pytest.mark.parametrize("background", [False, True])
def test_a_call_that_a_close_overtakes_learns_nothing(background: bool) -> None:
    stream = Stream(tent(), size=4, wait=60, background=background)
    predicted, closed = threading.Event(), threading.Event()
    predict = stream.predict_only

    def slowly(x: Tensor) -> Tensor:
        logits = predict(x)
        predicted.set()
        assert closed.wait(60)
        return logits

    stream.predict_only = slowly
    caller = threading.Thread(target=lambda: stream(images(5)))
    caller.start()
    assert predicted.wait(60)
    stream.close()
    before = parameters_of(stream.adapter)
    closed.set()
    caller.join()
    assert (stream.learned, stream.skipped, stream.waiting) == (0, 5, 0)
    assert all(map(torch.equal, before, parameters_of(stream.adapter)))


def test_a_broken_image_in_a_guarded_stream_is_answered_with_zeros() -> None:
    guard = Guard(tent(), probe=PROBE)
    stream = Stream(guard, size=8)
    broken = with_nan(images(2), row=1)
    logits = stream(broken)
    assert logits[1].eq(0).all()
    assert logits[0].ne(0).any()
    stream(images(6))
    assert guard.health.rejected == 1
    assert torch.equal(guard.predict_only(broken)[1], torch.zeros(CLASSES))


def test_a_guarded_stream_knows_what_was_learned() -> None:
    stream = Stream(Guard(tent()), wait=0.0)
    for seed in range(20):
        stream(images(1, seed=seed))
    assert stream.learned == 16
    assert stream.waiting == 4


@pytest.mark.parametrize("action", ["partial reset", "roll back"])
def test_an_interrupt_in_an_action_leaves_a_pause(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(tent(), probe=PROBE, every=1, policies=[Policy("evidence", action, above=1.0)])
    guard(images(48))
    spoil(guard)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(guard._judge, "unhealthy", interrupted)
    with pytest.raises(KeyboardInterrupt), alarms_expected():
        guard(images(48))
    assert guard.health.doing == "paused"
    assert guard.health.until == 1 + 4
    assert guard.probe.test.evidence == 0


def test_health_says_that_there_are_no_held_out_images() -> None:
    assert "held-out" in str(Guard(tent()).health)
    assert "held-out" not in str(Guard(tent(), probe=PROBE).health)
