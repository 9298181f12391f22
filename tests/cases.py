"""The contract table: a new method is one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from networks import FAMILIES, stream
from torch import nn

from acclimate import (
    DAT,
    EATA,
    EATAC,
    ETA,
    ETAC,
    MEMO,
    METHODS,
    ROID,
    SAR,
    TEA,
    Adapter,
    BNAdapt,
    CoTTA,
    RDumb,
    Source,
    Tent,
)
from acclimate.parts.augment import Views

A_TRAP = pytest.mark.filterwarnings("ignore:.*stops gradients through the batch statistics")
"""For tests of `strategy="replay"` and `detach_statistics=True` on BatchNorm networks, which warn."""

CLASSIFIERS = ("bn", "ln", "gn")


@dataclass(frozen=True)
class Case:
    method: type[Adapter]
    arguments: Callable[[], Mapping[str, Any]] = dict
    families: tuple[str, ...] = tuple(FAMILIES)
    learns: bool = True
    lasts: bool = True
    """What it learns outlasts a call."""
    first: bool = True
    """It returns the forward before the update, as it is."""
    mixes: tuple[str, ...] = ()
    """Families whose returned logits are a mean of probabilities instead."""
    selects: bool = False
    """It may find nothing to learn from."""
    by_rows: bool = True
    """All passes but the first are those of `rows`, so that strategies may replace them."""
    noisy: bool = False
    """No two devices agree: it draws random numbers there, or its views round to 8 bits."""

    def plain(self, family: str) -> bool:
        """Whether it returns the first forward as it is."""
        return self.first and family not in self.mixes

    def make(self, model: nn.Module, **keywords: Any) -> Adapter:
        return self.method(model, **{**self.arguments(), **keywords})


def _source() -> dict[str, Any]:
    return {"source": stream(batches=3, seed=500)}


def _blocks() -> dict[str, Any]:
    """The tiny networks are nobody's: their residual blocks are named."""
    return {"blocks": "blocks.*"}


CASES = {
    "source": Case(Source, learns=False),
    "bn-adapt": Case(BNAdapt, families=("bn", "seg"), learns=False),
    "tent": Case(Tent),
    "memo": Case(MEMO, lambda: {"views": 4}, CLASSIFIERS, lasts=False, first=False, by_rows=False, noisy=True),
    "cotta": Case(
        CoTTA,
        lambda: {"views": 3, "threshold": 2.0, "restoration": 0.05, "augment": Views(noise=0.0), "ratios": (0.5, 1.0)},
        mixes=("seg",),
        by_rows=False,
        noisy=True,
    ),
    "sar": Case(SAR, selects=True, by_rows=False),
    "roid": Case(ROID, families=CLASSIFIERS, first=False),
    "rdumb": Case(RDumb, lambda: {"every": 2}, selects=True),
    "tea": Case(TEA, lambda: {"steps": 3, "buffer": 20}, CLASSIFIERS, first=False, by_rows=False, noisy=True),
    "dat": Case(
        DAT,
        lambda: {"ratios": (0.5, 1.0), "uncertain": 0.5, "certain": 0.3, "share": 0.2, "search": 20},
        ("seg",),
        mixes=("seg",),
        by_rows=False,
    ),
    "eta": Case(ETA, selects=True),
    "eata": Case(EATA, lambda: _source() | {"beta": 50.0}, selects=True),
    "eta-c": Case(ETAC, _blocks, selects=True),
    "eata-c": Case(EATAC, lambda: _source() | _blocks(), selects=True),
}
assert CASES.keys() == METHODS.keys(), "every method has a row in the contract table"

TABLE = [(name, family) for name, case in CASES.items() for family in case.families]
LEARNERS = [(name, family) for name, family in TABLE if CASES[name].learns]
