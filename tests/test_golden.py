"""Each method, step by step, against a literal transcription of its formulas."""

from __future__ import annotations

import pytest
import torch
import transcriptions as plain
from cases import A_TRAP
from networks import make, stream
from torch import Tensor

from acclimate import EATA, ETA, BNAdapt, Tent
from acclimate.core.prediction import Strategy
from acclimate.parts.fisher import Fisher

CLASSIFIERS = ["bn", "ln", "gn"]
LR = 5e-3


def double(batches: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in batches]


BATCHES = double(stream(6, size=12))
SOURCE = double(stream(3, size=10, seed=500))


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_tent(family: str) -> None:
    adapter = Tent(make(family).double(), lr=LR)
    agree([adapter(x) for x in BATCHES], plain.tent(make(family).double(), BATCHES, LR))


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_eta(family: str) -> None:
    adapter = ETA(make(family).double(), lr=LR, margin=0.5, epsilon=0.6)
    ours, kept = [], []
    for x in BATCHES:
        ours.append(adapter(x))
        kept.append(adapter.last.backwards)
    theirs, expected = plain.eata(make(family).double(), BATCHES, LR, margin=0.5, epsilon=0.6)
    agree(ours, theirs)
    assert kept == expected
    assert 0 < sum(kept) < 12 * len(BATCHES), "the golden run must both keep and leave out"


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("how", ["batch", "sample"])
def test_eata(family: str, how: str) -> None:
    by, beta = (plain.fisher_by_batch, 20.0) if how == "batch" else (plain.fisher_by_sample, 2.0)
    fisher = by(make(family).double(), SOURCE)
    adapter = EATA(make(family).double(), source=SOURCE, lr=LR, margin=0.5, epsilon=0.6, beta=beta, fisher=how)
    theirs, _ = plain.eata(make(family).double(), BATCHES, LR, margin=0.5, epsilon=0.6, beta=beta, fisher=fisher)
    pulls = []
    for x, expected in zip(BATCHES, theirs, strict=True):
        agree([adapter(x)], [expected])
        pulls += [float(adapter.last.terms["fisher"])] if adapter.last.updated else []
    assert pulls[0] == 0 < pulls[-1], "the first step starts at the source"


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("how", ["batch", "sample"])
def test_fisher_equals_a_plain_loop(family: str, how: str) -> None:
    by = plain.fisher_by_batch if how == "batch" else plain.fisher_by_sample
    ours = Fisher.estimate(Tent(make(family).double()), SOURCE, how).importance
    theirs = torch.cat([f.flatten() for f in by(make(family).double(), SOURCE)])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_pull_grows_with_distance_by_hand() -> None:
    """Eq. (7): ω = (2, 3), θ − θ° = (1, −2) gives 2·1 + 3·4 = 14."""
    fisher = Fisher(torch.tensor([2.0, 3.0]), torch.tensor([5.0, 5.0]))
    theta = [torch.nn.Parameter(torch.tensor([6.0])), torch.nn.Parameter(torch.tensor([3.0]))]
    assert fisher(theta).item() == 14
    assert Fisher()(theta).item() == 0


@pytest.mark.parametrize("prior", [0, 16, 64])
def test_bn_adapt(prior: float) -> None:
    """A layer's blended statistics, and the formula applied to the network's first layer."""
    model = make("bn").double()
    x = BATCHES[0]
    conv, norm = model.stem[0], model.stem[1]
    seen: dict[str, Tensor] = {}
    norm.register_forward_hook(lambda _, inputs, output: seen.update(output=output.detach()))
    BNAdapt(model, prior=prior)(x)
    y = conv(x)
    share = prior / (prior + len(x))
    mean = share * norm.running_mean + (1 - share) * y.mean((0, 2, 3))
    # blended with the running variance, which is unbiased; alone, the batch's own as in training
    var = share * norm.running_var + (1 - share) * y.var((0, 2, 3), unbiased=prior > 0)
    centred = (y - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
    expected = norm.weight[:, None, None] * centred + norm.bias[:, None, None]
    torch.testing.assert_close(seen["output"], expected)


@pytest.mark.parametrize("family", ["ln", "gn"])
@pytest.mark.parametrize("strategy", ["replay", "replay-subset"])
def test_strategies_agree_where_samples_are_independent(family: str, strategy: Strategy) -> None:
    adapters = [
        EATA(make(family).double(), source=SOURCE, lr=LR, margin=0.5, epsilon=0.6, strategy=s)
        for s in ("masked", strategy)
    ]
    agree(*([adapter(x) for x in BATCHES] for adapter in adapters))
    masked, replay = (adapter.passes for adapter in adapters)
    assert masked.backwards == replay.backwards == replay.in_graph
    assert replay.forwards == masked.forwards + replay.backwards


@A_TRAP
@pytest.mark.parametrize("family", ["bn", "seg"])
def test_replayed_statistics_give_the_same_logits(family: str) -> None:
    """Under BatchNorm the second pass repeats the first's logits; only the gradient through the statistics differs."""
    adapter = ETA(make(family).double(), strategy="replay")
    x = BATCHES[0]
    with adapter.learning():
        batch = adapter.predict(x)
        keep = torch.zeros(len(x), dtype=torch.bool)
        keep[[1, 4, 5]] = True
        torch.testing.assert_close(batch.rows(keep), batch.logits[keep])
        everything = batch.rows()
        torch.testing.assert_close(everything, batch.logits)
        assert everything.requires_grad


def test_replay_gradient_is_masked_gradient_with_statistics_held() -> None:
    """On frozen (source) statistics, BatchNorm's samples are independent and all strategies agree."""
    runs = []
    for strategy in ("masked", "replay", "replay-subset"):
        adapter = ETA(make("bn").double(), lr=LR, margin=0.5, epsilon=0.6, statistics="source", strategy=strategy)
        runs.append([adapter(x) for x in BATCHES])
        assert adapter.passes.backwards > 0
    agree(runs[0], runs[1])
    agree(runs[0], runs[2])


def test_eta_on_pixels() -> None:
    """Segmentation is classification of every pixel."""
    adapter = ETA(make("seg").double(), lr=LR, margin=0.5, epsilon=0.6)

    class Pixels(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make("seg").double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).movedim(1, -1).flatten(0, -2)

    theirs, kept = plain.eata(Pixels(), BATCHES[:3], LR, margin=0.5, epsilon=0.6)
    for x, expected, count in zip(BATCHES[:3], theirs, kept, strict=True):
        agree([adapter(x).movedim(1, -1).flatten(0, -2)], [expected])
        assert adapter.last.kept is not None
        assert int(adapter.last.kept.sum()) == count > 0


@A_TRAP
def test_the_subset_has_statistics_of_its_own() -> None:
    """`replay-subset` normalises the kept samples as if they had come alone; `replay` as they were."""
    x = BATCHES[0]
    keep = torch.arange(len(x)) < 5
    came_alone = BNAdapt(make("bn").double(), prior=0)(x[:5])
    for strategy, alone in (("replay-subset", True), ("replay", False)):
        adapter = ETA(make("bn").double(), strategy=strategy)
        with adapter.learning():
            batch = adapter.predict(x)
            rows = batch.rows(keep).detach()
        torch.testing.assert_close(rows, came_alone if alone else batch.logits[keep])
    assert not torch.allclose(rows, came_alone)


def test_pixel_masks_give_the_same_step_by_slicing_and_by_replay() -> None:
    runs = []
    for strategy in ("masked", "replay"):
        adapter = ETA(make("seg").double(), lr=LR, margin=0.1, epsilon=0.9, statistics="source", strategy=strategy)
        runs.append([adapter(x) for x in BATCHES])
        assert adapter.last.kept is not None
        assert adapter.last.kept.shape == runs[-1][-1][:, 0].shape
    agree(*runs)
