"""Equations against numbers worked by hand, and properties that must hold for any numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acclimate import Everything, NonRedundant, Reliable, functional

LN2, LN4 = math.log(2), math.log(4)


def logits_of(*rows: list[float]) -> Tensor:
    """Logits whose softmax is the given probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def random_logits(seed: int, batch: int = 6, classes: int = 5) -> Tensor:
    return 3 * torch.randn(batch, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seeds = st.integers(0, 10_000)


def test_entropy_by_hand() -> None:
    z = logits_of([0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125])
    # ½·ln2 + ¼·2ln2 + 2·⅛·3ln2 = 1.75 ln2
    torch.testing.assert_close(functional.entropy(z), torch.tensor([2 * LN2, 1.75 * LN2], dtype=torch.float64))


def test_entropy_of_a_certain_prediction_is_zero_and_its_gradient_finite() -> None:
    z = torch.tensor([[800.0, 0.0, 0.0]], requires_grad=True)
    h = functional.entropy(z)
    h.sum().backward()
    assert h.item() == 0
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_entropy_of_pixels_is_the_entropy_of_each() -> None:
    z = random_logits(0, 12)
    dense = z.view(2, 2, 3, 5).permute(0, 3, 1, 2)
    torch.testing.assert_close(functional.entropy(dense).flatten(), functional.entropy(z))


def test_reliability_by_hand() -> None:
    """Eq. (3) at four classes and margin 0.5: E0 = ½ ln4 = ln2."""
    e0 = functional.threshold(0.5, 4)
    assert e0 == pytest.approx(LN2)
    h = torch.tensor([0.0, LN2 / 2, LN2, 1.0], dtype=torch.float64)
    expected = torch.tensor([2.0, math.sqrt(2), 0.0, 0.0], dtype=torch.float64)  # strict: H = E0 is out
    torch.testing.assert_close(functional.reliability(h, e0), expected)
    torch.testing.assert_close(functional.reliability(h, e0, weighted=False), (expected > 0).double())


def test_moving_average_by_hand() -> None:
    """Eq. (4): the first kept mean, then 0.9/0.1, over the kept alone, and unchanged where none is kept."""
    z = logits_of([0.8, 0.2], [0.4, 0.6], [0.1, 0.9])
    empty = torch.zeros(2, dtype=torch.float64)
    nothing, two, last = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()
    assert torch.equal(functional.moving_average(empty, z, nothing), empty)
    first = functional.moving_average(empty, z, two)
    torch.testing.assert_close(first, torch.tensor([0.6, 0.4], dtype=torch.float64))
    assert torch.equal(functional.moving_average(first, z, nothing), first)
    second = functional.moving_average(first, z, last)
    torch.testing.assert_close(
        second, torch.tensor([0.9 * 0.6 + 0.1 * 0.1, 0.9 * 0.4 + 0.1 * 0.9], dtype=torch.float64)
    )


def test_similarity_by_hand() -> None:
    z = logits_of([0.8, 0.2], [0.5, 0.5])
    m = torch.tensor([0.6, 0.4], dtype=torch.float64)
    expected = [(0.48 + 0.08) / math.sqrt(0.68 * 0.52), 0.5 / math.sqrt(0.5 * 0.52)]
    torch.testing.assert_close(functional.similarity(z, m), torch.tensor(expected, dtype=torch.float64))


def test_selection_over_two_batches_by_hand() -> None:
    """Three classes, E0 = 0.9·ln3 ≈ 0.989 and ε = 0.8; p = (.7, .2, .1) has H ≈ 0.802, (.4, .3, .3) has 1.089."""
    select = Reliable(0.9) * NonRedundant(0.8)
    first = logits_of([0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [0.1, 0.1, 0.8])
    s = select(first)
    h = [-sum(p * math.log(p) for p in row) for row in ([0.7, 0.2, 0.1], [0.1, 0.1, 0.8])]
    e0 = 0.9 * math.log(3)
    torch.testing.assert_close(s, torch.tensor([math.exp(e0 - h[0]), 0, math.exp(e0 - h[1])], dtype=torch.float64))
    select.observe(first, s > 0)  # m = (.4, .15, .45)

    second = logits_of([0.1, 0.1, 0.8], [0.05, 0.9, 0.05], [0.34, 0.33, 0.33])
    # cosines with m: .415/(.6205·.8124) ≈ .823 is redundant; .1775/(.6205·.9028) ≈ .317 is not; the third is unreliable
    s = select(second)
    assert (s > 0).tolist() == [False, True, False]


@pytest.mark.parametrize(("classes", "epsilon"), [(1000, 0.05), (200, 0.112), (10, 0.5)])
def test_auto_epsilon_scales_with_the_classes(classes: int, epsilon: float) -> None:
    """A sample just inside the stated ε passes, one just outside does not."""
    select = NonRedundant("auto")
    mean = torch.zeros(classes, dtype=torch.float64)
    mean[0] = 1.0
    select.mean = mean

    def with_cosine(c: float) -> Tensor:  # p = (a, b) on classes 0 and 1 with a/√(a² + b²) = c
        odds = c / math.sqrt(1 - c * c)
        p = torch.full((1, classes), 1e-9, dtype=torch.float64)
        p[0, 0], p[0, 1] = odds / (1 + odds), 1 / (1 + odds)
        return p.log()

    assert select(with_cosine(epsilon * 0.99)).item() == 1
    assert select(with_cosine(epsilon * 1.01)).item() == 0


def test_everything_keeps_everything() -> None:
    assert torch.equal(Everything()(torch.zeros(3, 4)), torch.ones(3))
    assert torch.equal(Everything()(torch.zeros(3, 4, 2, 2)), torch.ones(3, 2, 2))


def test_kept_rows() -> None:
    z = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2)
    keep = torch.zeros(2, 2, 2, dtype=torch.bool)
    keep[1, 0, 1] = True
    assert torch.equal(functional.kept_rows(z, keep), z[1, :, 0, 1].unsqueeze(0))
    assert torch.equal(functional.kept_rows(z, torch.tensor([False, True])), z[1:])


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_permuting_a_batch_permutes_its_selection(seed: int) -> None:
    z = random_logits(seed)
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    select, other = (Reliable(0.6) * NonRedundant(0.7) for _ in range(2))
    for chosen, batch in ((select, z), (other, z[order])):
        chosen.observe(batch, chosen(batch) > 0)
    torch.testing.assert_close(select(z)[order], other(z[order]))


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_selection_ignores_a_shift_of_the_logits(seed: int) -> None:
    z = random_logits(seed)
    select = Reliable(0.6) * NonRedundant(0.7)
    select.observe(z, select(z) > 0)
    torch.testing.assert_close(select(z), select(z + 7.5))


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_a_wider_margin_keeps_no_less(seed: int) -> None:
    z = random_logits(seed)
    assert ((Reliable(0.3)(z) > 0) <= (Reliable(0.5)(z) > 0)).all()


def test_selectors_print_their_call() -> None:
    select = Reliable(0.4) * NonRedundant(0.05, momentum=0.5)
    assert eval(repr(select)).second.momentum == 0.5
    assert repr(NonRedundant(0.05)) == "NonRedundant(0.05)"


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_the_mean_stays_a_distribution(seed: int) -> None:
    select = NonRedundant(0.9)
    for i in range(3):
        z = random_logits(seed + i)
        select.observe(z, select(z) > 0)
    assert select.mean is not None
    assert select.mean.sum().item() == pytest.approx(1)
