"""A pool: the equation by hand, refusals, threads, and cameras that learn from each other."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from networks import CLASSES, ConvNet, TinyViT
from torch import Tensor, nn

from acclimate import ETA, Guard, StateError, Stream, Streams, Tent
from acclimate.online.pool import Lesson, Pool, RayPool, describe, distance
from acclimate.online.shared import Shared

DARK, BRIGHT = 0.0, 3.0


def signature(mean: float, deviation: float = 1.0) -> Tensor:
    return torch.tensor([[mean, 0.0], [deviation, 1.0]])


def lesson(mean: float, value: float, samples: int = 10, kind: str = "Tent abc") -> Lesson:
    return Lesson(kind, signature(mean), {"w": torch.tensor([value, 1.0], dtype=torch.float64)}, samples)


def images(brightness: float, seed: int, size: int = 8) -> Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) + brightness


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ConvNet(nn.BatchNorm2d).eval()


def cameras(seed: int = 0) -> Streams:
    return Streams(Tent(network(seed), lr=0.01))


# The equation


def test_distance_by_hand() -> None:
    # channel 1: ½(σ²ₐ/σ²ᵦ + σ²ᵦ/σ²ₐ) + ½(1² / 4 + 1² / 1) − 1 = ½(1/4 + 4) + 0.625 − 1; channel 2: 0
    assert distance(signature(0.0), signature(1.0, 2.0)) == pytest.approx((2.125 + 0.625 - 1) / 2)
    assert distance(signature(0.0), signature(1.0, 2.0)) == distance(signature(1.0, 2.0), signature(0.0))
    assert distance(signature(5.0), signature(5.0)) == 0
    assert math.isfinite(distance(signature(0.0, 0.0), signature(1.0)))


def test_lessons_are_weighted_by_similarity() -> None:
    pool = Pool(temperature=1.0, gain=8)
    pool.give("a", 0, lesson(0.0, 1.0))
    pool.give("b", 0, lesson(1.0, 10.0))  # d = ½ · 1 · 2 / 2 channels
    taken = pool.take("Tent abc", signature(0.0))
    assert taken is not None
    w = math.exp(-0.5)
    assert taken["w"].tolist() == pytest.approx([1 + 10 * w, 1 + w])


def test_gain_limits_the_speed() -> None:
    """With w n = 10 and 5, there is 1.5 cameras' worth of learning."""
    blind = Pool(temperature=math.inf, gain=1)
    blind.give("a", 0, lesson(0.0, 3.0, samples=10))
    blind.give("b", 0, lesson(50.0, 6.0, samples=5))
    taken = blind.take("Tent abc", signature(7.0))
    assert taken is not None
    assert taken["w"].tolist() == pytest.approx([9 / 1.5, 2 / 1.5])


def test_other_domains_are_left_out() -> None:
    pool = Pool(temperature=1.0)
    assert pool.take("Tent abc", signature(0.0)) is None
    pool.give("a", 0, lesson(10.0, 1.0))
    pool.give("b", 0, lesson(0.0, 5.0, samples=0))
    assert pool.take("Tent abc", signature(0.0)) is None
    assert pool.take("Tent abc", signature(10.0)) is not None


def test_order_does_not_matter() -> None:
    """Not even in the last bit, though these sums depend on it."""
    given = {"a": lesson(0.0, 1.0), "b": lesson(0.0, 1e16), "c": lesson(0.0, -1e16), "d": lesson(0.3, 0.7, 3)}
    found = []
    for order in itertools.permutations(given):
        pool = Pool(temperature=1.0, gain=8)
        for name in order:
            pool.give(name, 0, given[name])
        taken = pool.take("Tent abc", signature(0.1))
        assert taken is not None
        found.append(taken["w"].tolist())
    assert all(each == found[0] for each in found)


def test_a_visit_is_replaced_and_old_visits_leave() -> None:
    pool = Pool(visits=2)
    for visit, value in ((0, 1.0), (0, 2.0), (1, 3.0), (2, 4.0)):
        pool.give("a", visit, lesson(0.0, value))
    assert len(pool) == 2
    taken = pool.take("Tent abc", signature(0.0))
    assert taken is not None
    assert taken["w"][0] == 7
    pool.forget("a")
    assert len(pool) == 0


# Refusals


@pytest.mark.parametrize(
    "wrong",
    [
        lesson(0.0, math.nan),
        lesson(0.0, math.inf),
        lesson(math.nan, 0.0),
        lesson(0.0, 1.0, samples=-1),
        lesson(0.0, 1.0, kind="Tent other"),
        Lesson("Tent abc", signature(0.0), {"v": torch.ones(2)}, 1),
        Lesson("Tent abc", signature(0.0), {"w": torch.ones(3)}, 1),
        Lesson("Tent abc", torch.ones(2, 5), {"w": torch.ones(2)}, 1),
    ],
)
def test_foreign_and_broken_lessons_are_refused(wrong: Lesson) -> None:
    pool = Pool()
    pool.give("a", 0, lesson(0.0, 1.0))
    for name in ("a", "b"):
        with pytest.raises(StateError):
            pool.give(name, 0, wrong)
    taken = pool.take("Tent abc", signature(0.0))
    assert taken is not None
    assert taken["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "seen"), [("EATA abc", signature(0.0)), ("Tent abc", torch.ones(2, 5))])
def test_nothing_is_taken_by_others(kind: str, seen: Tensor) -> None:
    pool = Pool()
    pool.give("a", 0, lesson(0.0, 1.0))
    with pytest.raises(StateError):
        pool.take(kind, seen)


def test_other_networks_and_methods_are_refused() -> None:
    pool = Pool()
    first = Shared(cameras(), pool, every=1)
    for seed in range(2):
        first("a", images(DARK, seed))
    with pytest.raises(StateError, match="Tent"):
        Shared(cameras(seed=1), pool)("b", images(DARK, 0))
    with pytest.raises(StateError, match="ETA"):
        Shared(Streams(ETA(network())), pool)("b", images(DARK, 0))
    Shared(cameras(), pool)("b", images(DARK, 0))


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"gain": 0.5}, {"least": 0}, {"visits": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Pool(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        Shared(cameras(), Pool(), every=0)
    with pytest.raises(TypeError, match="Stream"):
        Shared(Streams(Stream(Tent(network()))), Pool())


# Signatures


@pytest.mark.parametrize("net", [ConvNet(nn.BatchNorm2d), TinyViT()], ids=["bn", "ln"])
def test_signatures_show_the_domain_and_leave_the_network(net: nn.Module) -> None:
    adapter = Tent(net.eval(), lr=0.1)
    before = describe(adapter, images(DARK, 0))
    assert not any(module._forward_pre_hooks for module in net.modules())
    near, far = describe(adapter, images(DARK, 1)), describe(adapter, images(BRIGHT, 2))
    assert 10 * distance(before, near) < distance(before, far)
    adapter(images(BRIGHT, 3))
    assert torch.equal(describe(adapter, images(DARK, 0)), before), "it is the source network's"
    with pytest.raises(ValueError, match="finite|NaN"):
        describe(adapter, images(math.nan, 0))
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_signature_of_the_first_layer_by_hand() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, CLASSES)).eval()
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert describe(Tent(net), x).tolist() == [[2.0, 2.0], [1.0, 0.0]]


# Cameras


def test_a_camera_alone_learns_as_without_a_pool() -> None:
    alone, shared = cameras(), Shared(cameras(), Pool(), every=2)
    for seed in range(7):
        for key, brightness in (("a", DARK), ("b", BRIGHT)):
            x = images(brightness, seed)
            assert torch.equal(alone(key, x), shared(key, x))


def test_similar_cameras_add_up_what_they_learn() -> None:
    """θ of a camera that takes is θ° + Δ_a + w Δ_b, and a newcomer starts from all of it."""
    own, pool = cameras(), Pool(temperature=math.inf, gain=8)
    shared = Shared(own, pool, every=3)
    adapter = own.adapter
    assert isinstance(adapter, Tent)
    source = adapter.state.source_parameters()
    for seed in range(3):
        shared("a", images(DARK, seed))
        shared("b", images(DARK, 10 + seed))
    learned = {}
    for key in ("a", "b"):
        with own.using(key):
            learned[key] = adapter.snapshot().parts()["parameter"]
    shared("a", images(DARK, 5))  # gives
    shared("b", images(DARK, 5))
    adapter.frozen = True
    shared("c", images(DARK, 6))
    with own.using("c"):
        found = adapter.snapshot().parts()["parameter"]
    for name, tensor in found.items():
        expected = learned["a"][name] + learned["b"][name] - source[name]
        torch.testing.assert_close(tensor, expected)
        assert not torch.equal(tensor, source[name])


def test_other_weather_starts_from_the_source_and_old_weather_comes_back() -> None:
    own = cameras()
    shared = Shared(own, Pool(), every=1)
    adapter = own.adapter
    assert isinstance(adapter, Tent)
    for seed in range(4):
        shared("a", images(DARK, seed))
    adapter.frozen = True
    shared("a", images(DARK, 4))
    known = adapter.snapshot().parts()["parameter"]
    shared("a", images(BRIGHT, 5))
    for name, tensor in adapter.snapshot().parts()["parameter"].items():
        assert torch.equal(tensor, adapter.state.source_parameters()[name])
    shared("a", images(DARK, 4))
    for name, tensor in adapter.snapshot().parts()["parameter"].items():
        torch.testing.assert_close(tensor, known[name], atol=0.01, rtol=0.01)
        assert not torch.equal(tensor, adapter.state.source_parameters()[name])


def test_a_lesson_has_one_weather() -> None:
    own = cameras()
    shared = Shared(own, Pool(), every=1)
    for brightness, seed in ((DARK, 0), (DARK, 1), (BRIGHT, 2)):
        shared("a", images(brightness, seed))
    before = own.adapter.snapshot().parts()["parameter"]
    own.adapter.frozen = True  # type: ignore[attr-defined]
    shared("a", images(BRIGHT, 3))
    after = own.adapter.snapshot().parts()["parameter"]
    assert all(torch.equal(after[name], before[name]) for name in before), "dark images have no part in it"


def test_what_was_learned_before_is_kept() -> None:
    own = cameras()
    own("a", images(DARK, 0))
    before = own.adapter.snapshot().parts()["parameter"]
    shared = Shared(own, Pool(), every=1)
    own.adapter.frozen = True  # type: ignore[attr-defined]
    for seed in (1, 2):
        shared("a", images(DARK, seed))
        after = own.adapter.snapshot().parts()["parameter"]
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_optimizer_state_stays_the_cameras_own() -> None:
    own = cameras()
    shared = Shared(own, Pool(temperature=math.inf), every=2)
    for seed in range(2):
        shared("a", images(DARK, seed))
        shared("b", images(BRIGHT, seed))
    with own.using("a"):
        before = own.adapter.snapshot().parts()["optimizer"]
    own.adapter.frozen = True  # type: ignore[attr-defined]
    shared("a", images(DARK, 2))
    after = own.adapter.snapshot().parts()["optimizer"]
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_refused_batch_changes_nothing() -> None:
    own, pool = cameras(), Pool()
    shared = Shared(own, pool, every=1)
    shared("a", images(DARK, 0))
    before = own.adapter.snapshot().tensors
    for key in ("a", "new"):
        with pytest.raises(ValueError, match="finite|NaN"):
            shared(key, images(math.nan, 1))
    after = own.adapter.snapshot().tensors
    assert own.keys() == ["a"]
    assert len(pool) == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_reset_also_forgets_in_the_pool() -> None:
    pool = Pool()
    shared = Shared(cameras(), pool, every=1)
    for seed in range(2):
        shared("a", images(DARK, seed))
    assert len(pool) == 1
    shared.reset("a")
    assert len(pool) == 0
    assert "a" not in shared.cameras


def test_cameras_over_a_guard() -> None:
    guard = Guard(Tent(network(), lr=0.01))
    shared = Shared(Streams(guard), Pool(temperature=math.inf), every=1)
    for seed, key in itertools.product(range(3), ("a", "b")):
        assert shared(key, images(DARK, seed)).isfinite().all()


def test_threads_share_a_pool() -> None:
    """Each camera has a network of its own, as in several replicas; no lesson is lost or mixed."""
    pool, barrier = Pool(temperature=math.inf, gain=8), threading.Barrier(4)

    def learn(name: str) -> None:
        barrier.wait()
        for visit, turn in itertools.product(range(3), range(50)):
            pool.give(name, visit, lesson(0.0, turn / 49, samples=1))
            assert pool.take("Tent abc", signature(0.0)) is not None

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(learn, name) for name in "abcd"]:
            done.result()
    taken = pool.take("Tent abc", signature(0.0))
    assert len(pool) == 12
    assert taken is not None
    torch.testing.assert_close(taken["w"], torch.tensor([8.0, 8.0], dtype=torch.float64))  # 12 lessons, gain 8


class _Actor:
    """What a handle of a Ray actor looks like: every method has `remote`."""

    def __init__(self, pool: Pool) -> None:
        for name in ("give", "take", "similar", "forget"):
            call = type("Call", (), {"remote": staticmethod(getattr(pool, name))})
            setattr(self, name, call)


def test_a_pool_in_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", type("ray", (), {"get": staticmethod(lambda value: value)}))
    here, there = Shared(cameras(), Pool(), every=1), Shared(cameras(), RayPool(_Actor(Pool())), every=1)
    for seed, key in itertools.product(range(3), ("a", "b")):
        assert torch.equal(here(key, images(DARK, seed)), there(key, images(DARK, seed)))
    there.reset("a")
