"""Methods on signals (B, C, L) and feature vectors (B, F)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES
from networks import CLASSES, NOT_IMAGES, make, stream
from torch import Generator, Tensor

from acclimate import Adapter, CoTTA
from acclimate.parts.augment import AugMix, Views

VIEWS = ("memo", "cotta", "roid")
TABLE = [
    (name, family)
    for name in CASES
    for family in NOT_IMAGES
    if name != "dat" and (name != "bn-adapt" or "BatchNorm" in family)
]


def noisy(x: Tensor, generator: Generator) -> Tensor:
    return x + 0.05 * torch.randn(x.shape, generator=generator)


def batches(family: str, count: int = 4, seed: int = 100) -> list[Tensor]:
    return [NOT_IMAGES[family][1](x) for x in stream(count, seed=seed)]


def adapter_of(name: str, family: str, **keywords: object) -> Adapter:
    case = CASES[name]
    if "source" in case.arguments():
        keywords["source"] = batches(family, 3, seed=500)
    return case.make(make(family), **({"lr": 1e-2} if case.learns else {}), **keywords)


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_method_adapts_resets_saves_and_loads(name: str, family: str, tmp_path: Path) -> None:
    own = {"augment": noisy} if name in VIEWS else {}
    adapter = adapter_of(name, family, **own)
    source = {key: tensor.clone() for key, tensor in adapter.model.state_dict().items()}
    first = [adapter(x) for x in batches(family)]
    assert all(logits.shape == (8, CLASSES) and logits.isfinite().all() for logits in first)
    assert (int(adapter.passes.backwards) > 0) == CASES[name].learns
    learned = any(not torch.equal(tensor, source[key]) for key, tensor in adapter.model.state_dict().items())
    assert learned == (CASES[name].learns and CASES[name].lasts)

    adapter.save(tmp_path / "state.safetensors")
    later = batches(family, 2, seed=200)
    expected = [adapter(x) for x in later]
    other = adapter_of(name, family, **own)
    other.load(tmp_path / "state.safetensors")
    assert all(torch.equal(a, other(x)) for a, x in zip(expected, later, strict=True))

    adapter.reset()
    assert all(torch.equal(tensor, source[key]) for key, tensor in adapter.model.state_dict().items())
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, batches(family), strict=True))


@pytest.mark.parametrize("family", NOT_IMAGES)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_anything_but_images_are_refused_at_once(name: str, family: str) -> None:
    """Also where this batch would need no view: the anchor is confident."""
    adapter = adapter_of(name, family, augment=None, **({"threshold": 0.0} if name == "cotta" else {}))
    before = adapter.snapshot()
    with pytest.raises(ValueError, match=r"\(B, C, H, W\).* augment="):
        adapter(batches(family)[0])
    after = adapter.snapshot()
    assert all(torch.equal(tensor, after.tensors[key]) for key, tensor in before.tensors.items())


@pytest.mark.parametrize("augment", [Views(), AugMix()])
def test_given_augmentations_of_images_are_checked_too(augment: Views | AugMix) -> None:
    family = next(iter(NOT_IMAGES))
    with pytest.raises(ValueError, match="augment="):
        CoTTA(make(family), augment=augment, threshold=2.0)(batches(family)[0])


def test_dat_says_that_it_is_for_segmenters() -> None:
    family = next(iter(NOT_IMAGES))
    with pytest.raises(ValueError, match="DAT is for segmentation"):
        adapter_of("dat", family)(batches(family)[0])
