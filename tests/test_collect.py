"""Selecting in-distribution images from a mixed stream."""

from __future__ import annotations

import pytest
import torch
from networks import images, make

from acclimate import EATA, collect_in_distribution
from acclimate.bench.own_networks import digits_resnet
from acclimate.data.corruptions import corrupt
from acclimate.data.digits import load_digits


@pytest.mark.parametrize("score", ["energy", "confidence"])
def test_images_with_the_highest_scores_are_collected(score: str) -> None:
    model = make("ln").eval()
    pool = images(50)
    with torch.no_grad():
        z = model(pool)
    value = z.logsumexp(1) if score == "energy" else z.softmax(1).amax(1)
    batches = collect_in_distribution(model, [pool[:20], pool[20:23], pool[23:]], count=12, score=score, batch_size=5)
    assert [len(b) for b in batches] == [5, 5, 2]
    expected = pool[value.topk(12).indices]
    assert {tuple(x.flatten().tolist()) for x in torch.cat(batches)} == {tuple(x.flatten().tolist()) for x in expected}


def test_threshold_and_short_stream() -> None:
    model = make("bn").train()
    pool = images(30)
    with torch.no_grad():
        value = model.eval()(pool).logsumexp(1)
    model.train()
    threshold = float(value.median())
    found = torch.cat(collect_in_distribution(model, pool, count=100, threshold=threshold))
    assert len(found) == int((value >= threshold).sum())
    assert model.training
    with pytest.raises(ValueError, match="no image was collected"):
        collect_in_distribution(model, pool, threshold=1e9)
    with pytest.raises(ValueError, match="'energy', 'confidence'"):
        collect_in_distribution(model, pool, score="luck")
    with pytest.raises(ValueError, match="count=0"):
        collect_in_distribution(model, pool, count=0)


def test_collected_images_work_as_source() -> None:
    model = make("seg")
    assert EATA(model, source=collect_in_distribution(model, images(20), count=10))(images(4)).isfinite().all()


@pytest.mark.parametrize("score", ["energy", "confidence"])
def test_clean_digits_are_preferred_to_pixelated_ones(score: str) -> None:
    """A score is only as good as the network: ours is more confident of noise than of digits."""
    digits = load_digits()[1].x[:200]
    coarse = corrupt(digits, "pixelate", 5, torch.Generator())
    found = torch.cat(collect_in_distribution(digits_resnet(), torch.cat([coarse, digits]), count=100, score=score))
    clean = {tuple(x.flatten().tolist()) for x in digits}
    assert sum(tuple(x.flatten().tolist()) in clean for x in found) >= 75
