"""A guarded adapter: the same as without a guard while all is well, and safe when it is not."""

from __future__ import annotations

import copy
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import CASES
from networks import CLASSES, images, make
from torch import Tensor, nn

from acclimate import ETA, TEA, Adapter, BNAdapt, Guard, Policy, StateError, Tent
from acclimate.bench.networks import load_network
from acclimate.data.digits import load_digits
from acclimate.online.policy import POLICIES, Alarm, Health, Signals
from acclimate.online.signals import diversity, repeated

PROBE = images(64, seed=900)
WIDE = 48  # images of a batch that is judged on its own
TABLE = [(name, family) for name, case in CASES.items() for family in case.families if family != "gn"]


def adapter_of(name: str, family: str, lr: float = 1e-5) -> Adapter:
    return CASES[name].make(make(family), **({"lr": lr} if CASES[name].learns else {}))


def tent(lr: float = 1e-3, family: str = "ln") -> Tent:
    return Tent(make(family), lr=lr)


def batches(count: int, size: int = WIDE, seed: int = 0) -> list[Tensor]:
    return [images(size, seed + i) for i in range(count)]


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def same_state(a: Adapter | Guard, b: Adapter | Guard) -> bool:
    ours, theirs = a.snapshot(), b.snapshot()
    alike = ours.tensors.keys() == theirs.tensors.keys()
    return alike and all(torch.equal(ours.tensors[n], theirs.tensors[n]) for n in ours.tensors)


@torch.no_grad()
def spoil(guard: Guard) -> None:
    """Change the last norm so that one class is predicted for everything."""
    (norm,) = (p for name, p in zip(guard.names, guard.adapted, strict=True) if name == "norm.weight")
    (bias,) = (p for name, p in zip(guard.names, guard.adapted, strict=True) if name == "norm.bias")
    norm.zero_()
    bias.copy_(torch.linspace(-30, 30, len(bias)))


@torch.no_grad()
def poison(guard: Guard) -> None:
    guard.adapted[0].fill_(float("nan"))


@contextmanager
def alarms_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batch")
        yield


# All is well ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", [(), POLICIES], ids=["no policies", "default"])
@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_healthy_adapter_is_as_without_a_guard(name: str, family: str, policies: tuple[Policy, ...]) -> None:
    bare, inner = adapter_of(name, family), adapter_of(name, family)
    tolerated = 0.1  # the smallest change flips predictions of an untrained network
    # ROID's prior correction of an untrained network disagrees by chance; batch statistics never see familiar images
    familiar = 0.0 if name == "roid" or family in ("bn", "seg") else 4.0
    if name in ("cotta", "tea"):  # they must show a gain, which an untrained network has not
        policies = tuple(policy for policy in policies if policy.signal != "harm")
    guard = Guard(inner, probe=PROBE[:32], policies=policies, every=1, tolerated=tolerated, familiar=familiar)
    for x in batches(5, 16):
        assert torch.equal(guard(x), bare(x))
        assert equal(parameters_of(inner.model), parameters_of(bare.model))
    assert same_state(inner, bare)
    health = guard.health
    assert (health.batches, health.alarms, health.rollbacks, health.doing) == (5, [], 0, "learning")
    assert len(health.history) == (5 if family == "seg" else 1), "48 images or pixels are a judgement"
    assert health.signals.evidence is not None


def test_checks_become_rare() -> None:
    guard = Guard(tent(1e-5), every=8, policies=())
    for x in batches(40):
        guard(x)
    assert [signals.batch for signals in guard.health.history] == [*range(0, 24, 2), 24, 27, 30, 33, 37]


def test_it_has_what_the_adapter_has() -> None:
    guard = Guard(tent(), probe=PROBE)
    with pytest.raises(RuntimeError, match="batch"):
        _ = guard.last
    logits = guard(images(8))
    assert torch.equal(guard.last.logits, logits)
    assert int(guard.passes.forwards) == 8
    assert guard.device == torch.device("cpu")
    guard.new_domain()
    with pytest.raises(AttributeError):
        _ = guard.nonsense
    with pytest.raises(TypeError, match="save"):
        guard.load_state_dict({})
    assert "Tent" in repr(guard)


def test_a_prediction_changes_nothing() -> None:
    guard = Guard(tent(), probe=PROBE)
    guard(images(8))
    before = guard.snapshot()
    assert torch.equal(guard.predict_only(images(8, 3)), guard.adapter.predict_only(images(8, 3)))
    after = guard.snapshot()
    assert all(torch.equal(before.tensors[n], after.tensors[n]) for n in before.tensors)
    assert before.settings == after.settings


@pytest.mark.parametrize("wrong", [{"every": 0}, {"ring": 0}, {"pause": 0}, {"probe": PROBE[:8]}, {"tolerated": -2.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="."):
        Guard(tent(), **{"probe": PROBE, **wrong})


@pytest.mark.parametrize("thing", ["network", "guard"])
def test_only_an_adapter_is_guarded(thing: str) -> None:
    with pytest.raises(TypeError, match="adapter"):
        Guard(make("ln") if thing == "network" else Guard(tent()))


# Snapshots and files --------------------------------------------------------------------------------------------------


def replays(guard: Guard, other: Guard, path: Path, later: list[Tensor]) -> None:
    """Run later batches three times: now, from a snapshot, and from a file in another guard."""
    snapshot, health = guard.snapshot(), guard.health
    guard.save(path)
    first = [guard(x) for x in later]
    end = guard.snapshot()

    def again(one: Guard) -> None:
        assert one.health == health
        assert all(torch.equal(a, one(x)) for a, x in zip(first, later, strict=True))
        found = one.snapshot()
        assert found.settings == end.settings
        assert found.tensors.keys() == end.tensors.keys()
        assert all(torch.equal(found.tensors[n], end.tensors[n]) for n in end.tensors)

    guard.restore(snapshot)
    again(guard)
    other.load(path)
    again(other)


@pytest.mark.parametrize(
    ("name", "family"),
    [row for row in TABLE if row[0] in ("tent", "eata", "tea", "cotta")],
)
def test_it_replays_bitwise(name: str, family: str, tmp_path: Path) -> None:
    with alarms_expected():
        guard, other = (Guard(adapter_of(name, family), probe=PROBE[:32], every=2) for _ in range(2))
        for x in batches(3):
            guard(x)
        replays(guard, other, tmp_path / "state", batches(3, seed=50))


def test_it_replays_from_the_middle_of_a_pause(tmp_path: Path) -> None:
    guard, other = (Guard(tent(0.1), probe=PROBE, pause=3, every=1) for _ in range(2))
    with alarms_expected():
        while guard.health.doing != "paused":
            guard(images(WIDE, guard.health.batches))
        guard(images(WIDE, 70))
        assert guard.health.doing == "paused"
        assert guard.health.alarms
        replays(guard, other, tmp_path / "state", batches(8, seed=80))
        assert guard.health.batches > guard.health.alarms[0].batch + 3


@pytest.mark.parametrize(
    ("family", "size", "where"), [("bn", 5, "window/ours"), ("ln", 5, "gathered"), ("ln", 10, "window/ours")]
)
def test_it_replays_from_the_middle_of_a_window(family: str, size: int, where: str, tmp_path: Path) -> None:
    guard, other = (Guard(tent(1e-6, family), probe=PROBE, every=1) for _ in range(2))
    for x in batches(20 // size, size):
        guard(x)
    assert len(guard.snapshot().tensors[f"guard/{where}"]) == 20
    assert not guard.health.history
    replays(guard, other, tmp_path / "state", batches(40 // size, size, seed=50))
    assert len(guard.health.history) == 1


def test_it_replays_from_the_middle_of_a_streak(tmp_path: Path) -> None:
    policies = [Policy("entropy", "skip", above=0.0, times=3)]
    guard, other = (Guard(tent(1e-4), every=1, policies=policies) for _ in range(2))
    for x in batches(2):
        guard(x)
    with alarms_expected():
        replays(guard, other, tmp_path / "state", batches(2, seed=50))
    assert [alarm.batch for alarm in guard.health.alarms] == [2]


def test_guard_and_adapter_refuse_each_others_files(tmp_path: Path) -> None:
    guard, bare = Guard(tent(0.01), policies=()), tent(0.01)
    for each in (guard, bare):
        each(images(8))
        each.save(tmp_path / type(each).__name__)
        each(images(8, 1))
    for each, file in ((guard, "Tent"), (bare, "Guard")):
        before = each.snapshot()
        with pytest.raises(StateError):
            each.load(tmp_path / file)
        after = each.snapshot()
        assert after.settings == before.settings
        assert all(torch.equal(before.tensors[n], after.tensors[n]) for n in before.tensors)
    for other in (Guard(tent(0.01)), Guard(tent(0.01), policies=(), probe=PROBE)):
        with pytest.raises(StateError):
            other.load(tmp_path / "Guard")


# Collapse and damage --------------------------------------------------------------------------------------------------


def test_a_collapse_is_noticed_and_undone() -> None:
    bare, guard = tent(0.1), Guard(tent(0.1), pause=32)
    source = parameters_of(guard.adapter.model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for x in batches(20):
            bare(x)
            guard(x)
    assert len(warned) == 1
    assert len(bare(images(64, 30)).argmax(1).unique()) == 1
    health = guard.health
    assert health.rollbacks >= 1
    assert {alarm.signal for alarm in health.alarms} == {"collapse"}
    assert (health.doing, health.signals.collapse) == ("paused", pytest.approx(0, abs=1e-5))
    assert equal(parameters_of(guard.adapter.model), source)


def test_a_rollback_restores_the_last_healthy_snapshot() -> None:
    guard = Guard(tent(1e-4), every=1)
    for x in batches(3):
        healthy = guard.adapter.snapshot()  # that has made the last healthy prediction
        guard(x)
    spoil(guard)
    with pytest.warns(UserWarning, match="collapse"):
        logits = guard(images(WIDE, 50))
    restored = guard.adapter.snapshot()
    learned = [name for name in healthy.tensors if name.startswith(("parameter/", "optimizer/"))]
    assert all(torch.equal(restored.tensors[name], healthy.tensors[name]) for name in learned)
    assert torch.equal(logits, guard.predict_only(images(WIDE, 50)))
    assert (guard.health.rollbacks, guard.health.doing) == (1, "paused")


def test_pauses_double() -> None:
    guard = Guard(tent(1e-4), pause=2, policies=[Policy("collapse", "roll back", above=0.1)])
    lengths = []
    guard(images(WIDE))
    with alarms_expected():
        for _ in range(4):
            while guard.health.doing == "paused":
                guard(images(WIDE))
            while guard.health.doing == "learning":
                spoil(guard)
                guard(images(WIDE))
            lengths.append(guard.health.until - guard.health.since)
    assert lengths == [2, 4, 8, 16]


@pytest.mark.parametrize("every", [1, 4])
def test_a_network_that_always_collapses_learns_less_and_less(every: int) -> None:
    guard, ends = Guard(tent(0.1), pause=2, every=every), []
    with alarms_expected():
        for i in range(250):
            doing = guard.health.doing
            guard(images(WIDE, i % 10))
            if (doing, guard.health.doing) == ("learning", "paused"):
                ends.append(guard.health.since)
    gaps = [b - a for a, b in pairwise(ends)]
    assert gaps[-1] > 20


def test_damage_to_held_out_images_is_noticed() -> None:
    guard = Guard(tent(1e-5), probe=PROBE, every=1, policies=[Policy("evidence", "roll back", above=1.0)])
    for x in batches(2):
        guard(x)
    assert guard.health.signals.evidence < 1
    spoil(guard)
    with pytest.warns(UserWarning, match="evidence"):
        guard(images(WIDE, 50))
    health = guard.health
    assert health.signals.probe > 0.5
    assert [alarm.signal for alarm in health.alarms] == ["evidence"]
    assert (guard.predict_only(PROBE).argmax(1) == guard.predict_source(PROBE).argmax(1)).double().mean() > 0.9
    assert guard.probe.test.evidence == 0, "the test begins anew"


def test_a_network_that_returns_nan_is_rolled_back() -> None:
    guard = Guard(tent(1e-5), policies=())
    for x in batches(2):
        guard(x)
    poison(guard)
    with pytest.warns(UserWarning, match="roll"):
        logits = guard(images(WIDE, 50))
    assert logits.isfinite().all()
    assert (guard.health.doing, guard.health.rollbacks) == ("paused", 1)
    assert all(p.isfinite().all() for p in guard.adapted)


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_diverges_is_rolled_back(count: int) -> None:
    guard = Guard(tent(1e-5), every=1)
    for x in batches(count - 1):
        guard(x)
    guard.adapter.optimizer.param_groups[0]["lr"] = 1e30
    with alarms_expected():
        for x in batches(3, seed=50):
            assert guard(x).isfinite().all()
    assert guard.health.doing == "paused"


def test_nan_images_at_a_network_that_returns_nan() -> None:
    guard = Guard(tent(1e-5))
    guard(images(8))
    poison(guard)
    x = images(8)
    x[3] = float("nan")
    with alarms_expected():
        assert guard(x).isfinite().all()


def test_one_check_acts_once() -> None:
    guard = Guard(tent(1e-5), probe=PROBE, every=1, pause=8)
    for x in batches(3):
        guard(x)
    spoil(guard)
    with alarms_expected():
        guard(images(WIDE, 50))
    assert guard.health.rollbacks == 1
    assert guard.health.until == 3 + 8


def test_diversity_is_a_share() -> None:
    assert float(diversity(torch.full((64, 1000), 1e-3))) <= 1
    assert float(diversity(torch.eye(1000)[:64])) == pytest.approx(1)


# Correlated labels ----------------------------------------------------------------------------------------------------


def test_batches_of_one_class_are_answered_by_the_source() -> None:
    train, test = load_digits()
    guard = Guard(Tent(load_network("digits-resnet", "cpu").model, lr=1e-3), probe=train.x[:64], familiar=0)
    source = parameters_of(guard.adapter.model)
    for digit in range(6):
        x = test.x[test.y == digit][:32]
        with alarms_expected():
            assert torch.equal(guard(x), guard.predict_source(x))
        assert torch.equal(guard.predict_only(x), guard.predict_source(x))
        assert guard.health.doing == "source"
    assert guard.health.since == 0
    assert equal(parameters_of(guard.adapter.model), source)
    assert [alarm.signal for alarm in guard.health.alarms] == ["skew"]
    for x in test.x[:256].split(32):
        guard(x)
    assert guard.health.doing == "learning"
    assert not equal(parameters_of(guard.adapter.model), source)


# Images that are not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bn", "ln", "seg"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_answered_with_zeros(family: str, bad: float) -> None:
    guard, other = (Guard(tent(1e-3, family), policies=()) for _ in range(2))
    for x in batches(3, 16):
        spoiled = x.clone()
        spoiled[[2, 7], 0, 3, 3] = bad
        fine = torch.ones(16, dtype=torch.bool)
        fine[[2, 7]] = False
        logits = guard(spoiled)
        assert (logits[~fine] == 0).all()
        assert torch.equal(logits[fine], other(x[fine]))
    assert guard.health.rejected == 6
    assert same_state(guard.adapter, other.adapter)
    assert guard.health.batches == 3


@pytest.mark.parametrize("family", ["bn", "ln", "seg"])
def test_a_batch_of_nan_changes_nothing(family: str) -> None:
    guard = Guard(tent(1e-3, family), probe=PROBE)
    first = guard(images(16))
    before = guard.adapter.snapshot()
    logits = guard(torch.full((16, 3, 16, 16), float("nan")))
    after = guard.adapter.snapshot()
    assert logits.shape == first.shape
    assert (logits == 0).all()
    assert all(torch.equal(before.tensors[n], after.tensors[n]) for n in before.tensors)
    assert guard.health.rejected == 16
    assert guard(images(16, 1)).isfinite().all()


@pytest.mark.parametrize("wrong", [torch.rand(3), torch.rand(0, 3, 16, 16)])
def test_other_wrong_inputs_raise(wrong: Tensor) -> None:
    guard = Guard(tent())
    with pytest.raises(ValueError, match="batch"):
        guard(wrong)
    with pytest.raises(TypeError):
        guard([wrong])
    assert guard.health.batches == 0


# Actions --------------------------------------------------------------------------------------------------------------


def acted(action: str, family: str = "ln", lr: float = 1e-2, **keywords: object) -> Guard:
    """A guard that has learned from two batches, and then acts."""
    guard = Guard(tent(lr, family), every=1, policies=[Policy("entropy", action, above=0.0)], **keywords)
    guard.policies = ()
    guard(images(WIDE))
    guard(images(WIDE, 1))
    guard.policies = (Policy("entropy", action, above=0.0),)
    with alarms_expected():
        guard(images(WIDE, 2))
    return guard


@pytest.mark.parametrize("action", ["source", "blend", "skip"])
@pytest.mark.parametrize("family", ["bn", "ln"])
def test_lasting_actions(action: str, family: str) -> None:
    guard, x = acted(action, family), images(WIDE, 9)
    learned = parameters_of(guard.adapter.model)
    assert guard.health.doing == action
    logits = guard(x)
    expected = {
        "source": guard.adapter.predict_source(x),
        "blend": guard.adapter.predict_only(x, statistics=0.5),
        "skip": guard.adapter.predict_only(x),
    }
    assert torch.equal(logits, expected[action])
    assert torch.equal(guard.predict_only(x), logits)
    assert torch.equal(guard.last.logits, logits)
    assert len({float(z.sum()) for z in expected.values()}) == (3 if family == "bn" else 2)
    assert equal(parameters_of(guard.adapter.model), learned)
    assert guard.health.rollbacks == 0
    assert [alarm.action for alarm in guard.health.alarms] == [action], "one alarm for as long as it lasts"


@pytest.mark.parametrize(
    "action",
    [
        "source",
        "blend",
        "skip",
    ],
)
def test_a_lasting_action_ends_after_two_quiet_checks(action: str) -> None:
    guard = acted(action)
    guard.policies = (Policy("entropy", action, above=99.0),)
    found = []
    for x in batches(4):
        found.append(guard.health.doing)
        guard(x)
    assert found[:2] == [action, action]
    assert guard.health.doing == "learning"
    assert found[2] == "learning"


@pytest.mark.parametrize("action", ["roll back", "reset", "freeze", "partial reset"])
def test_actions_that_change_the_parameters(action: str) -> None:
    guard = Guard(tent(1e-2), every=1, policies=[Policy("distance", action, above=1e-9, times=3)], pause=2)
    states = [parameters_of(guard.adapter.model)]
    for x in batches(2):
        guard(x)
        states.append(parameters_of(guard.adapter.model))
    bare = tent(1e-2)
    for x in batches(3):
        bare(x)
    with pytest.warns(UserWarning, match="distance"):
        guard(batches(3)[2])
    now = parameters_of(guard.adapter.model)
    half = [(a + b) / 2 for a, b in zip(states[0], parameters_of(bare.model), strict=True)]
    expected = {"roll back": states[1], "freeze": states[1], "reset": states[0], "partial reset": half}[action]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(now, expected, strict=True))
    assert action == "partial reset" or equal(now, expected)
    assert [(alarm.batch, alarm.action) for alarm in guard.health.alarms] == [(2, action)]
    assert guard.frozen == (action == "freeze")
    assert guard.health.doing == ("frozen" if action == "freeze" else "paused")
    guard.policies = ()
    guard(images(WIDE))
    assert equal(parameters_of(guard.adapter.model), now)
    guard(images(WIDE, 60))
    assert equal(parameters_of(guard.adapter.model), now) == (action == "freeze")
    guard.frozen = False
    guard(images(WIDE, 61))
    assert not equal(parameters_of(guard.adapter.model), now)


def test_a_partial_reset_stops_the_momentum() -> None:
    guard = acted("partial reset")
    momentum = [t for name, t in guard.adapter.snapshot().tensors.items() if name.startswith("optimizer/")]
    assert momentum
    assert all((t == 0).all() for t in momentum)


def test_three_checks_in_a_row() -> None:
    guard = Guard(tent(1e-5), policies=[Policy("entropy", "skip", above=0.5, times=3)])
    judge, rung = guard._judge, []
    for entropy in (1, 1, 0, 1, 1, 1, 1):
        judge.health.signals = Signals(entropy=entropy)
        rung += [rings for _, rings in judge.rulings(["entropy"])]
    assert rung == [False] * 5 + [True] * 2


def test_policies_can_be_added_later() -> None:
    guard = Guard(tent(1e-5), every=1)
    (x, *_) = batches(1)
    guard(x)
    guard.policies = (*guard.policies, Policy("entropy", "skip", above=0.0))
    with alarms_expected():
        guard(x)
        guard(x)
    assert guard.health.doing == "skip"


def test_a_rollback_by_hand() -> None:
    guard = Guard(tent(1e-2), every=1, policies=(), pause=2)
    states = [parameters_of(guard.adapter.model)]
    for x in batches(3):
        guard(x)
        states.append(parameters_of(guard.adapter.model))
    for expected in (states[2], states[1], states[0], states[0]):
        guard.rollback()
        assert equal(parameters_of(guard.adapter.model), expected)
        assert guard.health.doing == "paused"
    assert guard.health.rollbacks == 4


def test_reset_of_an_adapter_that_had_learned_before() -> None:
    adapter = tent(1e-2)
    source = parameters_of(adapter.model)
    adapter(images(WIDE))
    guard = Guard(adapter, policies=[Policy("entropy", "reset", above=0.0)])
    with alarms_expected():
        guard(images(WIDE))
    assert equal(parameters_of(adapter.model), source)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("colapse", "reset", 0.1), "collapse"),
        (("batch", "reset", 0.1), "signal"),
        (("collapse", "rollback", 0.1), "back"),
        (("collapse", "reset"), "above"),
        (("collapse", "reset", 0.1, 0.2), "both"),
        (("collapse", "reset", 0.1, None, 0), "times"),
    ],
)
def test_a_policy_refuses_what_it_does_not_know(arguments: tuple[object, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Policy(*arguments)


def test_thresholds() -> None:
    above, below = Policy("kept", "skip", above=0.5), Policy("kept", "skip", below=0.0)
    assert [above.concerns(Signals(kept=v)) for v in (0.4, 0.5, 0.6, None, float("nan"))] == [False, False, True] + [
        False
    ] * 2
    assert [below.concerns(Signals(kept=v)) for v in (-0.1, 0.0, None, float("nan"))] == [True, False, False, False]


# By hand --------------------------------------------------------------------------------------------------------------


def test_frozen() -> None:
    guard, adapter = Guard(tent(1e-2), policies=()), tent(1e-2)
    guard(images(WIDE))
    learned = parameters_of(guard.adapter.model)
    guard.frozen = True
    adapter(images(WIDE))
    adapter.frozen = True
    assert torch.equal(guard(images(WIDE, 1)), adapter(images(WIDE, 1)))
    assert (guard.adapter.frozen, guard.health.doing, guard.health.since) == (True, "frozen", 1)
    assert equal(parameters_of(guard.adapter.model), learned)
    guard.frozen = False
    guard(images(WIDE))
    assert guard.health.doing == "learning"
    assert not equal(parameters_of(guard.adapter.model), learned)


def test_an_adapter_that_was_frozen_before() -> None:
    adapter = tent()
    adapter.frozen = True
    assert Guard(adapter)(images(8)).shape == (8, CLASSES)


@pytest.mark.parametrize("call", ["reset", "rollback"])
def test_health_says_so_while_frozen(call: str) -> None:
    guard = Guard(tent(), pause=1)
    guard(images(8))
    guard.frozen = True
    getattr(guard, call)()
    for x in batches(3, 8):
        guard(x)
    assert (guard.health.doing == "frozen") == guard.frozen


def test_reset_gives_the_source_and_forgets() -> None:
    guard = acted("roll back")
    source = Guard(tent(1e-2))
    assert guard.health.alarms
    guard.reset()
    assert same_state(guard.adapter, source.adapter)
    assert guard.health == Health(probed=False)
    assert len(guard._actions.ring) == 1
    assert guard(images(8)).shape == (8, CLASSES)
    assert guard.last.updated


def test_after_a_reset_the_same_batches_give_the_same_health() -> None:
    guard = Guard(tent(1e-4), probe=PROBE, every=1)
    lives = []
    for _ in range(2):
        for x in batches(3):
            guard(x)
        lives.append(guard.health)
        guard.reset()
    assert lives[0] == lives[1]


def test_a_copy_goes_its_own_way() -> None:
    guard = Guard(tent(1e-4), probe=PROBE)
    guard(images(WIDE))
    copied, before = copy.deepcopy(guard), guard.snapshot()
    again = [copied(x) for x in batches(3, seed=20)]
    assert guard.health.batches == 1
    after = guard.snapshot()
    assert all(torch.equal(before.tensors[n], after.tensors[n]) for n in before.tensors)
    assert all(torch.equal(guard(x), z) for x, z in zip(batches(3, seed=20), again, strict=True))
    assert guard.health == copied.health


@pytest.mark.parametrize("family", ["bn", "ln"])
def test_double_precision(family: str) -> None:
    guard = Guard(tent(1e-4, family), probe=PROBE, every=1)
    guard(images(WIDE))
    guard.to(torch.float64)
    assert guard(images(WIDE, 1).double()).dtype == torch.float64
    guard.rollback()
    assert guard(images(WIDE, 2).double()).isfinite().all()
    assert {p.dtype for p in guard.parameters()} == {torch.float64}


def test_a_rollback_after_a_cast() -> None:
    guard = Guard(ETA(make("ln"), lr=1e-4), every=1, policies=())
    guard(images(WIDE))
    guard.to(torch.float64)
    guard(images(WIDE, 1).double())
    guard.rollback()
    guard.rollback()
    assert guard.adapter.select.second.mean.dtype == torch.float64


def test_inference_mode() -> None:
    guard, other = (Guard(tent(1e-4), probe=PROBE, every=1) for _ in range(2))
    with torch.inference_mode():
        inside = [guard(x) for x in batches(3)]
    assert all(torch.equal(other(x), z) for x, z in zip(batches(3), inside, strict=True))
    guard.rollback()
    assert guard(images(WIDE)).isfinite().all()


@pytest.mark.parametrize("call", ["reset", "restore"])
def test_reset_and_restore_in_inference_mode(call: str) -> None:
    guard = Guard(tent())
    guard(images(8))
    snapshot = guard.snapshot()
    with torch.inference_mode():
        guard.reset() if call == "reset" else guard.restore(snapshot)
    guard(images(8))


def test_threads_take_turns() -> None:
    guard, errors = Guard(tent(1e-5), probe=PROBE, every=2), []

    def work(seed: int) -> None:
        try:
            for x in batches(10, 16, seed=100 * seed):
                guard(x)
                _ = guard.health, guard.last
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert guard.health.batches == 40
    assert int(guard.passes.forwards) == 40 * 16


# The ring -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [1, 3])
def test_the_ring_is_bounded(ring: int) -> None:
    guard, sizes = Guard(tent(1e-4), every=1, ring=ring, policies=()), []
    source = parameters_of(guard.adapter.model)
    for x in batches(6):
        guard(x)
        sizes.append(len(guard._actions.ring))
    assert sizes == [min(i + 2, ring + 1) for i in range(6)]
    for _ in range(ring + 1):
        guard.rollback()
    assert equal(parameters_of(guard.adapter.model), source), "the source is never dropped"


@pytest.mark.parametrize("sick", [0, 1, 2, 3, 9])
def test_a_rollback_goes_to_the_newest_snapshot_that_is_healthy(sick: int) -> None:
    guard, states = Guard(tent(1e-2), every=1, policies=()), []
    for x in batches(3):
        states.append(parameters_of(guard.adapter.model))  # as it is kept; the first one is the source
        guard(x)
    answers = iter([True] * sick + [False] * 9)
    guard._actions.back(lambda: next(answers))
    assert equal(parameters_of(guard.adapter.model), states[max(0, 2 - sick)])
    assert guard.health.rollbacks == 1


@pytest.mark.parametrize("sick", [0, 2, 99])
def test_a_partial_reset_goes_on_until_it_is_healthy(sick: int) -> None:
    guard = Guard(tent(1e-1), policies=())
    source = torch.cat([p.detach().flatten() for p in guard.adapted])
    for x in batches(3):
        guard(x)
    before = torch.cat([p.detach().flatten() for p in guard.adapted])
    answers = iter([True] * sick + [False] * 9)
    guard._actions.nearer(lambda: next(answers))
    now, share = torch.cat([p.detach().flatten() for p in guard.adapted]), 0.0 if sick == 99 else 0.5 ** (sick + 1)
    torch.testing.assert_close(now, source + share * (before - source))


@pytest.mark.parametrize(("name", "family"), [row for row in TABLE if row[0] != "tea"])
def test_the_ring_has_all_of_a_method(name: str, family: str) -> None:
    guard = Guard(adapter_of(name, family), every=1, policies=())
    guard(images(WIDE))
    now = guard.adapter.snapshot()
    guard(images(WIDE, 1))
    guard._actions.back()
    again = guard.adapter.snapshot()
    assert again.tensors.keys() == now.tensors.keys()
    assert all(torch.equal(again.tensors[n], t) for n, t in now.tensors.items() if not n.startswith("state/passes"))


def test_images_of_tea_are_not_copied() -> None:
    guard = Guard(TEA(make("bn"), steps=2, buffer=100, lr=1e-5), every=1, policies=())
    for x in batches(3):
        guard(x)
    large = [name for name in guard.adapter.snapshot().tensors if name.startswith("state/replay.from")]
    assert large
    assert all(name not in each.tensors for each in guard._actions.ring.snapshots[1:] for name in large)
    guard.rollback()
    assert guard(images(WIDE)).isfinite().all()


# Health ---------------------------------------------------------------------------------------------------------------


def test_health_as_text_and_as_plain_data() -> None:
    guard = Guard(tent(1e-2), probe=PROBE, every=1, pause=1, policies=[Policy("entropy", "roll back", above=0.0)])
    with alarms_expected():
        for x in batches(3):
            guard(x)
    health = guard.health
    assert len(health.alarms) == 3
    lines = str(health).splitlines()
    assert all(any(f"batch {a.batch}:" in line and a.signal in line for line in lines) for a in health.alarms)
    known = sum(value is not None for name, value in vars(health.signals).items() if name != "batch")
    assert len(lines) == 1 + known + 3
    assert Health.from_dict(json.loads(json.dumps(health.as_dict(), allow_nan=False))) == health


def test_health_is_a_copy() -> None:
    guard = Guard(tent())
    guard.health.alarms.append(Alarm(0, "skew", 1.0, "source"))
    assert guard.health == Health(probed=False)


def test_the_history_is_bounded() -> None:
    health = Health()
    for batch in range(600):
        health.signals = Signals(batch=batch)
        health.note()
    assert [signals.batch for signals in health.history] == [*range(88, 600)]


def test_alarms_are_bounded_and_counted() -> None:
    health = Health()
    for batch in range(600):
        before = copy.deepcopy(health)
        health.ring(Alarm(batch, "skew", 1.0, "source"))
        assert [alarm.batch for alarm in health.alarms_since(before)] == [batch]
    assert [alarm.batch for alarm in health.alarms] == [*range(88, 600)]
    assert health.alarm_count == 600
    assert health.alarms_since(health) == []
    assert health.alarms_since(None) == health.alarms


def test_its_call_shows_what_differs_from_the_defaults() -> None:
    assert repr(Guard(tent())) == f"Guard({tent()!r})"
    shown = repr(Guard(tent(), probe=PROBE, every=3, tolerated=0.2, policies=()))
    assert all(word in shown for word in ("every=3", "tolerated=0.2", "policies=()", "64 images"))
    assert "pause" not in shown


def test_the_statistics_of_bn_adapt_are_looked_at() -> None:
    guard = Guard(BNAdapt(make("bn")), probe=PROBE, familiar=0)
    guard(images(WIDE))
    assert guard.health.signals.skew is not None


# Small batches --------------------------------------------------------------------------------------------------------


def test_gathered_images_follow_the_network() -> None:
    guard = Guard(tent(), policies=())
    guard(images(1))
    guard.double()
    assert guard(images(1).double()).dtype == torch.float64


def test_single_images_are_gathered_and_learned_from_together() -> None:
    guard, bare = Guard(tent(1e-2), policies=()), tent(1e-2)
    source = parameters_of(guard.adapter.model)
    for number, x in enumerate(images(48).split(1)):
        assert equal(parameters_of(guard.adapter.model), source)
        logits = guard(x)
        assert torch.equal(logits, bare.predict_only(x)), "predicted at once, by what was learned before"
        assert guard.last.size == 1
        assert guard.health.batches == number + 1
    bare(images(48))
    assert equal(parameters_of(guard.adapter.model), parameters_of(bare.model))
    assert int(guard.passes.forwards) == 2 * 48


def test_pauses_and_gaps_are_counted_in_images() -> None:
    guard = Guard(tent(1e-6), pause=4, every=2, policies=[Policy("entropy", "roll back", above=0.0, times=2)])
    with alarms_expected():
        for x in images(144).split(1):
            guard(x)
    health = guard.health
    assert [signals.batch for signals in health.history] == [47, 143]
    assert (health.doing, health.since, health.until) == ("paused", 143, 143 + 4 * 48)


@pytest.mark.parametrize(("name", "family"), [("tent", "bn"), ("tent", "seg"), ("memo", "ln")])
def test_who_does_not_gather(name: str, family: str) -> None:
    guard = Guard(adapter_of(name, family), policies=())
    for x in batches(2, 2):
        guard(x)
    assert guard._gathered is None
    assert guard.last.updated == (family != "bn"), "BatchNorm does not learn from two images, but from many pixels"


# A stuck camera -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bn", "ln"])
def test_the_source_answers_a_stuck_camera(family: str) -> None:
    guard = Guard(tent(1e-3, family), policies=POLICIES[:1], every=64)
    for x in batches(3):
        guard(x)
    learned, stuck = parameters_of(guard.adapter.model), images(1, 9).expand(WIDE, -1, -1, -1)
    with pytest.warns(UserWarning, match="repeated"):
        logits = guard(stuck)
    assert torch.equal(logits, guard.adapter.predict_source(stuck)), "from the first batch, between two checks"
    guard(stuck)
    assert equal(parameters_of(guard.adapter.model), learned)
    assert [guard(x) is None or guard.health.doing for x in batches(3, seed=60)] == ["source", "learning", "learning"]
    assert not equal(parameters_of(guard.adapter.model), learned)


def test_half_of_the_images_may_repeat() -> None:
    x = images(9)
    assert float(repeated(x)) == 0
    assert float(repeated(x[[0, 0, 1, 1, 2, 2, 3, 3, 4]])) == 0.5
    assert float(repeated(x[:1])) == 0


def test_a_stuck_camera_that_is_gone_does_not_make_checks_frequent() -> None:
    guard = Guard(tent(1e-6), every=64, policies=POLICIES[:1])
    with alarms_expected():
        for number in range(120):
            x = images(WIDE, number)
            guard(x[:1].expand_as(x) if number in (20, 21) else x)
    late = [signals.batch for signals in guard.health.history if signals.batch > 60]
    assert min(b - a for a, b in pairwise(late)) > 2


def test_one_signal_does_not_end_what_another_has_begun() -> None:
    policies = (POLICIES[0], Policy("entropy", "source", above=0.0))
    guard = Guard(tent(1e-5), policies=policies, every=64)
    with alarms_expected():
        for x in batches(6):
            guard(x)
    assert (guard.health.doing, [alarm.signal for alarm in guard.health.alarms]) == ("source", ["entropy"])


# Back-off -------------------------------------------------------------------------------------------------------------


def test_the_second_alarm_restores_the_source() -> None:
    guard, states = Guard(tent(1e-4), every=1, pause=1), []
    source = parameters_of(guard.adapter.model)
    with alarms_expected():
        for turn in range(2):
            for x in batches(4, seed=10 * turn):
                guard(x)
            spoil(guard)
            guard(images(WIDE, 50 + turn))
            states.append(parameters_of(guard.adapter.model))
    assert not equal(states[0], source)
    assert equal(states[1], source)


def test_after_a_long_healthy_stretch_an_alarm_is_a_first_one() -> None:
    guard = Guard(tent(1e-5), every=4, pause=1)
    with alarms_expected():
        guard(images(WIDE))
        spoil(guard)
        guard.rollback()
        assert guard._actions.again
        for x in batches(16):
            guard(x)
    assert not guard._actions.again


def test_a_suspicious_draw_is_looked_at_closer() -> None:
    guard = Guard(tent(1e-5), probe=PROBE, every=1, policies=())
    guard(images(WIDE))
    tried = 2 * 64  # by adapted and source network, in a round of a trial
    assert guard.health.passes == WIDE + 32 + tried
    spoil(guard)
    guard(images(WIDE, 1))
    assert guard.health.passes == 2 * WIDE + 32 + 8 * 32 + tried + 4 * tried
    assert int(guard.passes.forwards) == 2 * WIDE, "passes of checks are counted apart from the method's"
