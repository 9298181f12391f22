"""Trials: held-out images in the style of the stream show which of two networks does better there."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import CLASSES, ConvNet, images, make
from torch import Generator, Tensor, nn

from acclimate import DAT, Adapter, CoTTA, Guard, Policy, Tent
from acclimate.bench.demo import digit_overrides
from acclimate.bench.networks import load_network
from acclimate.data.corruptions import corrupted
from acclimate.data.digits import load_digits
from acclimate.methods import METHODS
from acclimate.online.policy import POLICIES
from acclimate.online.probe import Probe
from acclimate.online.style import StyleTransfer, class_weights
from acclimate.online.trial import Trial
from acclimate.parts.world import Share, World

DIGITS = load_digits()[0]
WIDE = 48
LEAVE = (Policy("harm", "leave", above=0.0),)


def random(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# Style ----------------------------------------------------------------------------------------------------------------


def test_a_style_worked_out_with_numpy() -> None:
    x = images(70, 1)  # more than are transformed at once
    style = StyleTransfer(images(64)).style(x)
    pixels = x.double().numpy()
    means = pixels.mean((2, 3), keepdims=True)
    power = (np.abs(np.fft.rfft2(pixels - means)) ** 2).mean(0)
    assert style.power.numpy() == pytest.approx(power, rel=1e-4, abs=1e-4)
    assert style.brightness.numpy() == pytest.approx(means.mean(0), rel=1e-5)
    assert style.spread.numpy() == pytest.approx(means.std(0), rel=1e-3)
    assert (float(style.least), float(style.most)) == (float(x.min()), float(x.max()))


def test_images_keep_their_own_style() -> None:
    held_out = images(64)
    transfer = StyleTransfer(held_out)
    assert torch.allclose(transfer(held_out[:8], transfer.style(held_out), random()), held_out[:8], atol=1e-4)


def test_blur_and_contrast_are_undone_by_the_inverse_filter() -> None:
    """A linear filter changes each frequency by a factor, which is what the transfer finds."""
    held_out = torch.rand(256, 1, 16, 16, generator=random())
    kernel = torch.tensor([0.25, 0.5, 0.25]).view(1, 1, 1, 3)
    filtered = F.conv2d(F.pad(held_out, (1, 1, 0, 0), "circular"), kernel)  # its transfer function is not negative
    transfer = StyleTransfer(held_out)
    assert torch.allclose(transfer(held_out[:16], transfer.style(filtered), random()), filtered[:16], atol=1e-3)


def test_noise_is_added_with_the_power_that_the_stream_has_in_addition() -> None:
    held_out = torch.rand(512, 1, 16, 16, generator=random())
    smooth = F.avg_pool2d(held_out, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    grainy = smooth + 0.2 * torch.randn(smooth.shape, generator=random(1))
    transfer = StyleTransfer(smooth)
    added = transfer(smooth, transfer.style(grainy), random(2)) - smooth
    assert float(added.std()) == pytest.approx(0.2, rel=0.05)
    assert abs(float((added[:, :, 1:] * added[:, :, :-1]).mean())) < 0.002, "it is white"


def test_pixels_stay_within_the_range_of_the_stream() -> None:
    held_out = images(64)
    transfer, x = StyleTransfer(held_out), 0.5 * images(32, 3)
    styled = transfer(held_out, transfer.style(x), random())
    assert float(styled.max()) <= float(x.max())
    assert float(styled.min()) >= float(x.min())


@pytest.mark.parametrize(
    ("held_out", "x", "taken"),
    [
        (images(32), images(4), True),
        (images(32), images(4)[:, :, :8], False),
        (images(32)[:, :, 0], images(4)[:, :, 0], True),
        (images(32)[:, :, 0, 0], images(4)[:, :, 0, 0], False),
        (images(32), (255 * images(4)).byte(), False),
    ],
    ids=["images", "another size", "signals", "vectors", "bytes"],
)
def test_what_has_a_style(held_out: Tensor, x: Tensor, taken: bool) -> None:
    assert StyleTransfer(held_out).takes(x) == taken


def test_class_weights_worked_out_by_hand() -> None:
    stream = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    styled = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    first, second = np.array([0.8, 0.2, 0.5]) / 1.5, np.array([0.5, 0.5, 0.5]) / 1.5
    assert class_weights(stream, styled).numpy() == pytest.approx((first + second) / 2)


def test_the_style_of_a_batch_that_ranks_share() -> None:
    class Halves(World):
        """Two ranks in one process: sums and means of the first are kept for the second."""

        parts: tuple[Tensor, ...]

        def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
            return torch.cat([values, self._like(values)]).mean(dim or 0)

        def mean_of(self, mean: Tensor, number: int) -> Tensor:
            return 0.5 * (mean + transfer.style(self.parts[1]).power)

        def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([values, self.parts[1]]).aminmax()

        def _like(self, values: Tensor) -> Tensor:
            means = self.parts[1].mean((2, 3), keepdim=True)
            centre = torch.cat(self.parts).mean((2, 3), keepdim=True).mean(0)
            first = torch.equal(values, self.parts[0].mean((2, 3), keepdim=True))
            return means if first else (means - centre).square()

    x = images(40, 2)
    transfer, world = StyleTransfer(images(32)), Halves()
    world.parts = (x[:20], x[20:])
    for ours, whole in zip(transfer.style(x[:20], world), transfer.style(x), strict=True):
        assert torch.allclose(ours, whole, atol=1e-5)


def test_a_rank_without_images_adds_no_power() -> None:
    class Two(World):
        def mean_of(self, mean: Tensor, number: int) -> Tensor:
            assert (number, bool(mean.any())) == (0, False)
            return mean

        def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
            return values.sum(dim or 0)

        def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(()), torch.ones(())

    assert StyleTransfer(images(32)).style(images(2)[:0], Two()).power.shape == StyleTransfer(images(32)).power.shape


# Trials ---------------------------------------------------------------------------------------------------------------


def digits_guard(method: str = "eata", probe: int = 512, **options: object) -> Guard:
    loaded = load_network("digits-vit", "cpu")
    settings = {**digit_overrides("vit").get(method, {}), **options}
    if method == "eata":
        settings["source"] = [DIGITS.x[512:640]]
    return Guard(METHODS[method].preset(loaded.family, loaded.model, **settings), probe=DIGITS.x[:probe], every=1)


def trial(guard: Guard, x: Tensor, seed: int = 0) -> Trial:
    stream = guard.adapter.predict_source(x).softmax(1)
    found = Trial.on(guard.probe, guard.adapter, x, Share(0, len(x), len(x)), stream, random(seed))
    assert found is not None
    return found


@torch.no_grad()
def damage(guard: Guard, size: float) -> None:
    for parameter in guard.adapted:
        parameter.add_(size * torch.randn(parameter.shape, generator=random(3)))


def noisy(start: int, count: int = 64) -> Tensor:
    return corrupted(DIGITS.x[start : start + count], "gaussian_noise", 3, random(start), "imagenet-c")


def test_a_network_that_has_learned_nothing_gains_nothing() -> None:
    guard = digits_guard()
    found = trial(guard, noisy(1000))
    assert found.compare() == (0.0, 0.0)
    assert found.passes == 2 * 64, "one round"


def test_a_damaged_network_does_worse_where_it_really_does() -> None:
    guard, x, y = digits_guard(), noisy(1000, 256), DIGITS.y[1000:1256]
    damage(guard, 0.5)
    right = [
        (predict(x).argmax(1) == y).float().mean()
        for predict in (guard.adapter.predict_only, guard.adapter.predict_source)
    ]
    lost = float(right[1] - right[0])
    found = trial(guard, x)
    gain, harm = found.compare()
    assert lost > 0.2
    assert gain == pytest.approx(-lost, abs=0.15)
    assert 0 < harm < -gain
    assert found.passes == 4 * 2 * 64, "four rounds, since it seems to be worse"
    assert found.gain() == pytest.approx(gain), "the same images again"
    guard.adapter.reset()
    assert found.gain() == 0


def test_harm_is_the_loss_less_two_standard_errors() -> None:
    guard = digits_guard()
    damage(guard, 0.5)
    found = trial(guard, noisy(1000))
    gain, harm = found.compare()
    each = torch.cat([found._gains(one) for one in found.rounds])
    assert gain == pytest.approx(float(each.mean()), abs=1e-6)
    assert harm == pytest.approx(float(-each.mean() - 2 * each.std() / 256**0.5), abs=1e-6)
    assert len(torch.cat([one.drawn for one in found.rounds]).unique()) == 256, "no image twice"


def test_images_that_are_drawn_twice_count_once() -> None:
    guard = digits_guard(probe=100)
    damage(guard, 0.5)
    found = trial(guard, noisy(1000))
    _, harm = found.compare()
    each = torch.cat([found._gains(one) for one in found.rounds])
    assert len(each) == 256
    different = len(torch.cat([one.drawn for one in found.rounds]).unique())
    assert 64 < different <= 100
    assert harm == pytest.approx(float(-each.mean() - 2 * each.std() / different**0.5), abs=1e-6)


def test_images_of_the_class_of_the_stream_are_drawn() -> None:
    guard = digits_guard()
    sevens = DIGITS.x[1000:][DIGITS.y[1000:] == 7][:64]
    found = trial(guard, sevens)
    assert found.passes == 64, "the first round shows that few images count"
    found.compare()
    (drawn,) = found.rounds
    assert float((drawn.answers == 7).float().mean()) > 0.6
    assert float(drawn.weights.mean()) == pytest.approx(1, abs=1e-5)
    assert len(trial(guard, DIGITS.x[1000:1064]).rounds) == 1, "an even mixture is drawn as it is"


def test_where_there_can_be_no_trial() -> None:
    def on(probe: Probe | None, adapter: Adapter, x: Tensor) -> Trial | None:
        return Trial.on(probe, adapter, x, Share(0, len(x), len(x)), torch.ones(len(x), CLASSES) / CLASSES, random())

    probe = images(64, 900)
    for family, possible in (("ln", True), ("gn", True), ("bn", False), ("seg", False)):
        guard = Guard(Tent(make(family)), probe=probe)
        assert (on(guard.probe, guard.adapter, images(16)) is not None) == possible, family
    guard = Guard(Tent(make("ln")), probe=probe)
    assert on(None, guard.adapter, images(16)) is None
    assert on(guard.probe, guard.adapter, images(15)) is None, "too few images to show a style"
    assert on(guard.probe, guard.adapter, images(16)[..., :8]) is None, "another size"
    huge = images(16)
    huge[0, 0, 0, 0] = 1e30
    assert on(guard.probe, guard.adapter, huge) is None, "a style that is not finite"
    for name in ("memo", "source"):
        adapter = METHODS[name](make("ln"))
        assert on(guard.probe, adapter, images(16)) is None, name


def test_large_images_are_predicted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("acclimate.online.probe._VALUES", 5 * images(1).numel())
    adapter = Tent(make("ln"), lr=1e-6)
    for name in ("predict_source", "predict_only"):
        usual = getattr(adapter, name)
        monkeypatch.setattr(adapter, name, lambda x, usual=usual, **o: sizes.append(len(x)) or usual(x, **o))
    guard = Guard(adapter, probe=images(64, 900), every=1)
    guard(0.3 * images(WIDE))
    assert guard.health.signals.gain is not None
    assert {size for size in sizes if size != WIDE} == {5, 4, 2}, "64 and 32 images, five at a time"


# In a guard -----------------------------------------------------------------------------------------------------------


def test_a_policy_can_leave_the_answers_to_the_source_while_the_method_learns() -> None:
    guard = digits_guard()
    guard.policies = LEAVE
    guard(noisy(1000))
    assert torch.equal(guard(noisy(1064)), guard.last.logits)
    assert guard.health.worse == 0
    damage(guard, 0.5)
    guard(noisy(1128))  # a check finds the harm
    guard(noisy(1192))
    x = noisy(1256)
    assert torch.equal(guard.predict_only(x), guard.adapter.predict_source(x))
    before = [p.detach().clone() for p in guard.adapted]
    logits = guard(x)
    assert torch.equal(logits, guard.adapter.predict_source(x))
    assert torch.equal(guard.last.logits, logits)
    assert guard.last.updated
    assert not all(map(torch.equal, guard.adapted, before)), "it goes on learning"
    health = guard.health
    assert (health.worse > 0, health.alarms, health.doing, health.left) == (True, [], "learning", True)
    assert "the source answers" in str(health)
    guard.adapter.restore(guard.adapter.state.source())
    for start in (1320, 1384):
        guard(noisy(start))
    left = guard.health.worse
    assert not torch.equal(guard(noisy(1448)), guard.adapter.predict_source(noisy(1448)))
    assert guard.health.worse == left


def test_checks_are_frequent_while_the_source_answers() -> None:
    guard = digits_guard()
    guard.every, guard.policies = 64, LEAVE
    for start in range(0, 40 * 32, 32):
        guard(noisy(start, 48))
    damage(guard, 0.5)
    while not guard._judge.leaves:
        guard(noisy(1000, 48))
    first = guard.health.history[-1].batch
    for _ in range(4):
        guard(noisy(1100, 48))
    batches = [signals.batch for signals in guard.health.history if signals.batch > first]
    assert batches == [first + 2, first + 4]


def test_what_is_left_to_the_source_is_part_of_the_state(tmp_path: Path) -> None:
    guard, other = digits_guard(), digits_guard()
    for each in (guard, other):
        each.policies = LEAVE
    damage(guard, 0.5)
    guard(noisy(1000))
    guard(noisy(1064))
    assert guard._judge.leaves
    guard.save(tmp_path / "state")
    other.load(tmp_path / "state")
    for start in (1128, 1192, 1256):
        assert torch.equal(guard(noisy(start)), other(noisy(start)))
    assert guard.health == other.health


def test_harm_is_rolled_back_until_there_is_none() -> None:
    guard = digits_guard()
    guard.policies = POLICIES
    for start in range(1000, 1256, 64):
        guard(noisy(start))
    damage(guard, 1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="batch")
        for start in range(1256, 1512, 64):
            guard(noisy(start))
    health = guard.health
    assert [alarm.signal for alarm in health.alarms] == ["harm"]
    assert health.rollbacks == 1
    x, y = noisy(1600, 256), DIGITS.y[1600:1856]
    ours, source = (
        (predict(x).argmax(1) == y).float().mean() for predict in (guard.predict_only, guard.predict_source)
    )
    assert float(ours) >= float(source) - 0.05


def test_a_method_is_tried_as_it_answers() -> None:
    """CoTTA answers with views where the source is not confident; `predict_only` has one view."""
    guard = digits_guard("cotta", views=4, threshold=2.0, augment=lambda x, generator: torch.rand_like(x))
    x = noisy(1000)
    gain, harm = trial(guard, x).compare()
    assert gain < -0.3
    assert harm > 0
    before = guard.adapter.snapshot()
    trial(guard, x).compare()
    assert all(torch.equal(before.tensors[n], t) for n, t in guard.adapter.snapshot().tensors.items())


def test_a_method_that_answers_otherwise_than_it_is_tried_must_show_a_gain() -> None:
    guard = digits_guard("cotta", views=4, threshold=0.0)  # one view, so that nothing is gained or lost
    gain, harm = trial(guard, noisy(1000)).compare()
    assert gain == 0
    assert 0 < harm < 1e-3
    guard.policies = POLICIES
    guard(noisy(1000))
    assert torch.equal(guard(noisy(1064)), guard.adapter.predict_source(noisy(1064)))
    assert guard.health.alarms == []
    assert trial(digits_guard("eata"), noisy(1000)).compare() == (0.0, 0.0), "EATA answers as it is tried"


@pytest.mark.parametrize("method", [CoTTA, DAT])
def test_a_segmenter_with_coarse_logits_is_tried_at_their_resolution(method: type[Adapter]) -> None:
    net = ConvNet(lambda width: nn.GroupNorm(2, width), dense=True).eval()  # its logits are half as large as images
    guard = Guard(method(net, lr=1e-6, ratios=(0.5, 1.0)), probe=images(64, 900), policies=(), every=1)
    guard(images(16))
    assert guard.health.signals.gain is not None


def test_a_guard_previews_its_own_answer() -> None:
    guard = digits_guard("cotta", views=4, threshold=2.0)
    guard.policies = LEAVE
    for start in (1000, 1064, 1128):
        x = noisy(start)
        previewed = guard.preview(x)
        assert torch.equal(previewed, guard.preview(x))
        assert torch.equal(previewed, guard(x)) == (start > 1000 or not guard._judge.leaves)
    guard.frozen = True
    x = noisy(1200)
    assert torch.equal(guard.preview(x), guard(x))


def test_a_verdict_ends_with_a_rollback_and_with_freezing() -> None:
    for end in ("rollback", "frozen"):
        guard = digits_guard()
        guard.policies = LEAVE
        damage(guard, 0.5)
        guard(noisy(1000))
        assert guard._judge.leaves
        if end == "frozen":
            guard.frozen = True
        else:
            guard.rollback()
        assert not guard._judge.leaves
        x = noisy(1064)
        assert torch.equal(guard(x), guard.adapter.predict_only(x))


def test_single_images_are_counted_when_they_are_answered() -> None:
    guard = digits_guard()
    guard.policies = LEAVE
    damage(guard, 0.5)
    for i in range(48):
        guard(noisy(1000 + i, 1))
    assert guard._judge.leaves
    assert guard.health.worse == 0, "the adapted network has answered all of them"
    for i in range(5):
        x = noisy(1100 + i, 1)
        assert torch.equal(guard(x), guard.adapter.predict_source(x))
    assert guard.health.worse == 5


def test_the_last_trial_does_not_decide_about_the_next_batch() -> None:
    guard = digits_guard()
    guard(noisy(1000))
    assert guard._judge.trial is not None
    guard.every = 64
    guard._next = 1000
    guard(noisy(1064))
    assert guard._judge.trial is None
    guard.reset()
    assert guard._judge.trial is None
