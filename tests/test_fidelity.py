"""Compare each corruption and severity with the package imagecorruptions, on real digits."""

from __future__ import annotations

import functools

import pytest

from acclimate.data.corruptions import CORRUPTIONS
from benchmarks.corruptions import Likeness, likeness

pytest.importorskip("imagecorruptions", reason="the reference is not installed: run make test", exc_type=ImportError)

DIGITS = 200


@functools.cache
def alike(family: str, severity: int, seed: int) -> Likeness:
    return likeness(family, severity, DIGITS, seed)


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("family", CORRUPTIONS)
def test_pixels_match_the_reference(family: str, severity: int) -> None:
    seen = alike(family, severity, 0)
    ice = family == "frost"  # generated here; the reference uses photographs
    assert seen.psnr[1] == pytest.approx(seen.psnr[0], abs={"frost": 1.5, "spatter": 1.0}.get(family, 0.6))
    assert seen.mean[1] == pytest.approx(seen.mean[0], abs=0.04 if ice else 0.015)
    assert seen.deviation[1] == pytest.approx(seen.deviation[0], abs=0.02 if ice else 0.012)


@pytest.mark.parametrize("family", CORRUPTIONS)
def test_accuracy_matches_the_reference(family: str) -> None:
    """On 200 digits and five severities, chance alone makes one or two points. The reference's glass has no seed."""
    runs = [(s, seed) for s in range(1, 6) for seed in range(8 if family == "glass_blur" else 1)]
    theirs, ours = (sum(alike(family, *run).accuracy[i] for run in runs) / len(runs) for i in (0, 1))
    assert ours == pytest.approx(theirs, abs=0.1 if family == "frost" else 0.04)
