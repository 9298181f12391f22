"""Familiar images: recognised by simple statistics, and left to the source network once something is forgotten."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import images, make
from torch import Generator, Tensor

from acclimate import Guard, Tent
from acclimate.data.corruptions import BENCHMARK, corrupted
from acclimate.data.digits import load_digits
from acclimate.online.novelty import FEWEST, Novelty, describe
from acclimate.parts.world import Share, World

DIGITS = load_digits()[0].x
WIDE = 48


def test_descriptions_of_images_worked_out_by_hand() -> None:
    ramp = torch.arange(4.0).repeat(1, 1, 4, 1)  # grows by 1 from left to right
    tiny = 1e-4
    expected = [1.5, math.log(math.sqrt(1.25) + tiny), *[math.log(tiny)] * 2, math.log(1 + tiny), math.log(tiny)]
    assert describe(ramp)[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert describe(torch.ones(2, 3, 16, 16)).shape == (2, 3 + 1 + 8)
    assert describe(torch.ones(2, 3, 16)).shape == (2, 3 + 1 + 4)
    assert describe(torch.ones(2, 9)).shape == (2, 2)
    assert describe(torch.ones(2, 64, 1, 1)).shape == (2, 2)


def test_novelty_is_hotellings_statistic_per_dimension() -> None:
    held_out, x = images(100, 1), images(20, 2)
    f, own = describe(held_out).numpy(), describe(x).numpy()
    spread = np.cov(f.T)
    spread += np.diag(1e-3 * spread.diagonal() + 1e-8)
    away = own.mean(0) - f.mean(0)
    expected = away @ np.linalg.solve(spread, away) / (1 / 20 + 1 / 100) / len(away)
    assert float(Novelty(held_out)(x)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_images_of_the_same_kind_have_a_novelty_of_about_one(size: int) -> None:
    novelty, random = Novelty(DIGITS[:512]), Generator().manual_seed(0)
    found = [float(novelty(DIGITS[512 + torch.randint(2000, (size,), generator=random)])) for _ in range(200)]
    assert sum(found) / len(found) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("shift", BENCHMARK)
def test_every_corruption_is_new(shift: str) -> None:
    novelty, x = Novelty(DIGITS[:512]), DIGITS[1000:1064]
    assert float(novelty(x)) < 4
    assert float(novelty(corrupted(x, shift, 3, Generator().manual_seed(0), "imagenet-c"))) > 20


def test_ranks_describe_the_images_of_the_whole_batch() -> None:
    x, seen = images(70), list[Tensor]()

    class Listening(World):
        def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
            seen.append(values)
            return super().mean(values, dim)

    novelty = Novelty(images(64, 9))
    alone = novelty(x, world=Listening())
    (whole,), offset = [*seen], 0
    seen.clear()
    for size in (5, 40, 25):
        novelty(x[offset : offset + size], Share(offset, size, 70), Listening())
        offset += size
    assert torch.equal(torch.cat(seen), whole)
    assert len(whole) <= 32
    assert float(alone) > 0


def test_a_novelty_follows_to_another_precision_and_back() -> None:
    novelty, x = Novelty(images(64)), images(20, 3)
    before = novelty(x)
    assert torch.equal(novelty.half()(x), before)


# In a guard -----------------------------------------------------------------------------------------------------------


def new(seed: int, count: int = WIDE) -> Tensor:
    """Return images unlike the held-out ones."""
    return images(count, seed) * 0.3


def forgetful(**options: float) -> Guard:
    """Return a guard around a network that predicts other classes than it did, which checks have found."""
    guard = Guard(Tent(make("ln"), lr=1e-6), probe=images(64, 900), policies=(), every=1, **options)
    guard(new(0))
    with torch.no_grad():
        for parameter in guard.adapted:
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=Generator().manual_seed(1)))
    guard(new(1))
    return guard


def test_the_source_answers_familiar_images_once_some_are_forgotten() -> None:
    guard = forgetful()
    assert guard.health.signals.probe > 0
    x = images(WIDE, 5)
    assert torch.equal(guard.predict_only(x), guard.adapter.predict_source(x))
    assert torch.equal(guard(x), guard.adapter.predict_source(x))
    assert torch.equal(guard.last.logits, guard.adapter.predict_source(x))
    assert guard.health.familiar == WIDE
    assert guard.last.updated, "the adapted network learns as without a guard"
    assert not torch.equal(guard.predict_only(new(6)), guard.adapter.predict_source(new(6)))
    assert torch.equal(guard(new(6)), guard.last.logits)
    assert guard.last.updated


def test_familiar_images_are_learned_from_until_something_is_forgotten() -> None:
    guard = Guard(Tent(make("ln"), lr=1e-9), probe=images(64, 900), policies=(), every=1)
    for seed in range(3):
        guard(images(WIDE, seed))
        assert guard.last.updated
    assert (guard.health.familiar, guard.health.signals.probe) == (0, 0.0)


def test_with_batch_statistics_the_source_always_answers_familiar_images() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-3), probe=images(64, 900), policies=(), every=4)
    x = images(WIDE, 5)
    for seed in (1, 2, 3):
        familiar = images(WIDE, seed)
        assert torch.equal(guard(familiar), guard.adapter.predict_source(familiar))
        assert torch.equal(guard.last.logits, guard.adapter.predict_source(familiar))
        assert not guard.last.updated, "there is nothing to learn"
    assert guard.health.familiar == 3 * WIDE
    assert int(guard.passes.forwards) == 3 * WIDE
    assert guard.health.history == [], "nor to check"
    assert torch.equal(guard.predict_only(x), guard.adapter.predict_source(x))
    guard(new(4))
    assert guard.last.updated, "learning begins with the first batch that is not familiar"
    guard(new(5))
    assert guard.health.signals.probe is not None
    assert not torch.equal(guard.predict_only(new(6)), guard.adapter.predict_source(new(6)))


def test_a_return_to_familiar_images_is_noticed_at_the_next_check() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-6), probe=images(64, 900), policies=(), every=2)
    guard(new(0))
    learned = []
    for seed in range(1, 4):
        guard(images(WIDE, seed))
        learned.append(bool(guard.last.updated))
    assert learned == [True, False, False]


def test_one_image_with_nan_does_not_make_familiar_images_new() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-3), probe=images(64, 900), policies=(), every=64)
    for seed in range(6):
        x = images(WIDE, seed)
        if seed == 3:
            x[5, 0, 0, 0] = torch.nan
        guard(x)
        assert not guard.last.updated, seed
    assert (guard.health.familiar, guard.health.rejected) == (6 * WIDE - 1, 1)


def test_a_batch_that_looks_new_is_checked_at_once() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-6), probe=images(64, 900), policies=(), every=64)
    learned = []
    for x in (*(images(WIDE, i) for i in range(2)), new(2), *(images(WIDE, i) for i in range(3, 6))):
        guard(x)
        learned.append(bool(guard.last.updated))
    assert learned == [False, False, True, True, False, False], "and again after two batches"


def test_familiar_images_are_left_to_the_source_while_frozen() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-3), probe=images(64, 900), policies=())
    guard.frozen = True
    for x in (new(0), images(WIDE, 1), new(2), images(WIDE, 3)):
        assert torch.equal(guard(x), guard.predict_only(x))
    assert torch.equal(guard(images(WIDE, 4)), guard.adapter.predict_source(images(WIDE, 4)))


def test_a_familiar_stretch_needs_one_pass_per_image() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-3), probe=images(64, 900))
    guard(new(0, 32))  # too few for a judgement, so they wait for more
    guard(images(32, 1))
    guard(images(32, 2))
    before = guard.health.passes
    for seed in range(3, 9):
        guard(images(32, seed))
    assert guard.health.passes == before


def test_it_can_be_turned_off() -> None:
    guard = forgetful(familiar=0)
    guard(images(WIDE, 5))
    assert guard.health.familiar == 0
    assert guard.last.updated


def test_batches_too_small_to_judge_are_as_the_last_one() -> None:
    guard, x = forgetful(), images(FEWEST - 1, 5)
    assert not torch.equal(guard.predict_only(x), guard.adapter.predict_source(x))
    guard(images(WIDE, 5))
    assert torch.equal(guard.predict_only(x), guard.adapter.predict_source(x))


def test_what_is_known_is_part_of_the_state(tmp_path: Path) -> None:
    guard = forgetful()
    guard(images(WIDE, 5))
    guard.save(tmp_path / "state")
    other = Guard(Tent(make("ln"), lr=1e-6), probe=images(64, 900), policies=(), every=1)
    other.load(tmp_path / "state")
    for x in (images(3, 7), images(WIDE, 8), new(9), images(WIDE, 10)):
        assert torch.equal(guard(x), other(x))
    assert guard.health == other.health


def test_batch_statistics_see_familiar_images_if_it_is_turned_off() -> None:
    guard = Guard(Tent(make("bn"), lr=1e-3), probe=images(64, 900), policies=(), familiar=0)
    guard(images(WIDE, 5))
    assert guard.last.updated
    assert guard.health.familiar == 0


def test_an_undone_network_is_trusted_again() -> None:
    guard = forgetful()
    guard.reset()
    guard(images(WIDE, 5))
    assert guard.health.familiar == 0
    assert guard.last.updated
