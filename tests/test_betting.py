"""Tests by betting: numbers worked by hand, and the guarantees in thousands of simulated lives."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Generator, Tensor

from acclimate.online.betting import ProbeTest, ShiftGauge

SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)


def wealths(draws: Tensor, tolerated: float) -> tuple[Tensor, Tensor]:
    """K and M after each draw of many lives (lives, draws), from the formulas and not from the class."""
    lives = len(draws)
    kept, restarted = torch.ones(lives, 7, dtype=torch.float64), torch.zeros(lives, 7, dtype=torch.float64)
    bets = torch.tensor(SHARES, dtype=torch.float64) / tolerated
    all_kept, all_restarted = [], []
    for x in draws.double().T:
        factor = 1 + bets * (x[:, None] - tolerated)
        kept, restarted = kept * factor, (1 + restarted) * factor
        all_kept.append(kept.mean(1))
        all_restarted.append(restarted.mean(1))
    return torch.stack(all_kept, 1), torch.stack(all_restarted, 1)


def generator(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def honest(kind: str, lives: int, draws: int, mean: float) -> Tensor:
    """Draws in [0, 1] with exactly this mean."""
    uniform = torch.rand(lives, draws, generator=generator(), dtype=torch.float64)
    if kind == "bernoulli":
        return (uniform < mean).double()
    if kind == "uniform":
        return 2 * mean * uniform
    adaptive, wealth = torch.empty_like(uniform), torch.ones(lives, dtype=torch.float64)
    for i in range(draws):  # once the wealth has risen, it plays the largest variance that the mean allows
        rough = (uniform[:, i] < mean).double()
        adaptive[:, i] = torch.where(wealth > 1, rough, 2 * mean * uniform[:, i])
        wealth = wealth * (1 + 0.6 / mean * (adaptive[:, i] - mean))
    return adaptive


def three_errors(share: float, lives: int) -> float:
    return share + 3 * math.sqrt(share * (1 - share) / lives)


# By hand --------------------------------------------------------------------------------------------------------------


def test_wealth_after_two_draws() -> None:
    test = ProbeTest(tolerated=0.1)
    test.update([1.0, 0.0])  # a bet λ = s / 0.1 gives (1 + 9 s)(1 − s)
    by_hand = [1.45 * 0.95, 1.9 * 0.9, 2.8 * 0.8, 4.6 * 0.6, 6.4 * 0.4, 8.2 * 0.2, 9.55 * 0.05]
    assert sum(by_hand) == pytest.approx(12.765)
    assert test.wealth == pytest.approx(12.765 / 7)


def test_a_new_player_starts_with_each_draw() -> None:
    test = ProbeTest(tolerated=0.5)
    test.update([1.0])  # M = (1 + 0)(1 + s)
    assert test.log_restarted.exp().tolist() == pytest.approx([1.05, 1.1, 1.2, 1.4, 1.6, 1.8, 1.95])
    test.update([0.0])  # M = (2 + s)(1 − s)
    by_hand = [2.05 * 0.95, 2.1 * 0.9, 2.2 * 0.8, 2.4 * 0.6, 2.6 * 0.4, 2.8 * 0.2, 2.95 * 0.05]
    assert test.log_restarted.exp().tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize(("risk", "gap"), [(0.01, 10_000), (0.5, 1e9), (1e-9, 2.0)])
def test_evidence_is_the_larger_of_two_ratios(risk: float, gap: float) -> None:
    test = ProbeTest(tolerated=0.5, risk=risk, gap=gap)
    test.update([1.0, 1.0, 0.25, 1.0])
    kept, restarted = (float(w[0, -1]) for w in wealths(torch.tensor([[1.0, 1.0, 0.25, 1.0]]), 0.5))
    expected = math.log(kept) / math.log(1 / risk), math.log(restarted) / math.log(gap)
    assert test.evidence == pytest.approx(max(expected))
    assert min(expected) < max(expected)


def test_evidence_is_never_negative() -> None:
    test = ProbeTest(tolerated=0.5)
    assert test.evidence == 0
    test.update([0.0])
    assert test.wealth < 1
    assert test.evidence == 0


def test_a_long_life_has_finite_evidence() -> None:
    test = ProbeTest(tolerated=0.1)
    test.update([1.0] * 2000)
    assert 100 < test.evidence < math.inf
    test.update([0.0] * 2000)
    assert math.isfinite(test.evidence)


def test_restart_forgets() -> None:
    test, fresh = ProbeTest(tolerated=0.1), ProbeTest(tolerated=0.1)
    test.update([1.0] * 30)
    test.restart()
    assert (test.wealth, test.evidence) == (1, 0)
    for each in (test, fresh):
        each.update([1.0, 0.0, 0.5])
    assert test.state() == fresh.state()


@pytest.mark.parametrize("kind", ["bernoulli", "uniform", "adaptive"])
def test_the_simulation_plays_the_same_game(kind: str) -> None:
    draws = honest(kind, 5, 200, 0.15)
    kept, restarted = wealths(draws, 0.15)
    for life in range(5):
        test = ProbeTest(tolerated=0.15)
        for i, draw in enumerate(draws[life].tolist()):
            test.update([draw])
            assert test.wealth == pytest.approx(float(kept[life, i]))
            assert float(test.log_restarted.exp().mean()) == pytest.approx(float(restarted[life, i]))


# Guarantees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.1, 0.4])
@pytest.mark.parametrize("kind", ["bernoulli", "uniform", "adaptive"])
def test_false_alarms_are_as_rare_as_promised(kind: str, mean: float) -> None:
    lives, risk = 4000, 0.05
    kept, _ = wealths(honest(kind, lives, 600, mean), mean)
    assert float((kept.amax(1) >= 1 / risk).double().mean()) <= three_errors(risk, lives)


def test_the_simulation_would_notice_a_broken_promise() -> None:
    kept, _ = wealths(honest("bernoulli", 4000, 600, 0.13), 0.1)
    assert float((kept.amax(1) >= 20).double().mean()) > 2 * three_errors(0.05, 4000)


@pytest.mark.parametrize("kind", ["bernoulli", "uniform", "adaptive"])
def test_false_alarms_of_the_restarted_players_are_far_apart(kind: str) -> None:
    gap, draws = 50.0, 1500
    _, restarted = wealths(honest(kind, 2000, draws, 0.2), 0.2)
    alarm = restarted >= gap
    first = torch.where(alarm.any(1), alarm.double().argmax(1) + 1.0, float(draws))  # cut off: an underestimate
    assert float(first.mean()) >= gap


def test_damage_is_found_within_two_checks() -> None:
    damaged = honest("bernoulli", 2000, 64, 0.4)
    kept, restarted = wealths(damaged, 0.1)
    found = (kept.amax(1) >= 100) | (restarted.amax(1) >= 10_000)
    assert float(found.double().mean()) >= 0.99


def test_damage_after_a_long_honest_life_is_found() -> None:
    lives = 200
    draws = torch.cat([honest("bernoulli", lives, 2000, 0.1), honest("bernoulli", lives, 60, 0.6)], 1)
    kept, restarted = wealths(draws, 0.1)
    healthy = (kept[:, :2000].amax(1) < 100) & (restarted[:, :2000].amax(1) < 10_000)
    found = restarted[:, 2000:].amax(1) >= 10_000
    assert healthy.double().mean() > 0.8
    assert float(found[healthy].double().mean()) >= 0.97
    assert float((kept[:, 2000:].amax(1) >= 100).double().mean()) < 0.5, "this is why players are started anew"


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], [1.0, 0.0, 0.3]])
def test_a_probe_test_continues_from_its_state(before: list[float]) -> None:
    test, other = ProbeTest(tolerated=0.1), ProbeTest(tolerated=0.1)
    test.update(before)
    other.update([1.0] * 5)
    other.load(json.loads(json.dumps(test.state(), allow_nan=False)))
    assert other.evidence == test.evidence
    for each in (test, other):
        each.update([0.2, 1.0, 1.0])
    assert (other.state(), other.evidence, other.wealth) == (test.state(), test.evidence, test.wealth)


@pytest.mark.parametrize(
    "wrong",
    [{"tolerated": 0.0}, {"tolerated": 1.0}, {"tolerated": math.nan}, {"risk": 0.0}, {"risk": 1.0}, {"gap": 1.0}],
)
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("d")):
        ProbeTest(**{"tolerated": 0.1, **wrong})


# The gauge ------------------------------------------------------------------------------------------------------------


def highest(gauge: ShiftGauge, stream: Tensor, random: Generator) -> float:
    """The highest log-wealth on a stream; the bet stays within its limits."""
    most = 0.0
    for values in stream.split(1):
        gauge.update(values, random)
        assert abs(gauge.bet) < 2
        most = max(most, gauge.log_wealth)
    return most


def test_without_a_shift_the_gauge_stays_low() -> None:
    random, rich, lives = generator(), 0, 1000
    held_out = torch.rand(500, generator=random)
    for _ in range(lives):
        again = held_out[torch.randint(500, (100,), generator=random)]
        rich += highest(ShiftGauge(held_out), again, random) >= math.log(100)
    assert rich / lives <= three_errors(0.01, lives)


@pytest.mark.parametrize("shift", [-0.3, 0.3])
def test_a_shift_raises_the_gauge(shift: float) -> None:
    random = generator()
    gauge = ShiftGauge(torch.rand(500, generator=random))
    assert highest(gauge, torch.rand(300, generator=random) + shift, random) > math.log(100)
    assert gauge.bet * shift > 0


def test_entropies_that_are_all_equal_do_not_raise_the_gauge() -> None:
    random = generator()
    gauge = ShiftGauge(torch.full((500,), 0.7))
    assert highest(gauge, torch.full((1000,), 0.7), random) < math.log(100)


def test_the_first_bet_wins_nothing_and_the_second_as_by_hand() -> None:
    gauge = ShiftGauge(torch.arange(9.0))
    gauge.update(torch.tensor([20.0]), generator())  # u = (9 + tie) / 10, and nothing is bet yet
    u = (9 + float(torch.rand(1, generator=generator(), dtype=torch.float64))) / 10
    assert gauge.log_wealth == 0
    bet = min(1.8, (u - 0.5) / (1 + (u - 0.5) ** 2))
    assert gauge.bet == pytest.approx(bet)
    gauge.update(torch.tensor([20.0]), generator())
    assert gauge.log_wealth == pytest.approx(math.log(1 + bet * (u - 0.5)))


def test_a_gauge_continues_from_its_state() -> None:
    held_out = torch.rand(100, generator=generator())
    gauge, other = ShiftGauge(held_out), ShiftGauge(held_out)
    gauge.update(held_out[:20] + 0.2, generator())
    other.load(json.loads(json.dumps(gauge.state())))
    for each in (gauge, other):
        each.update(held_out[20:40] + 0.2, generator(1))
    assert other.state() == gauge.state()
