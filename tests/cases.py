"""The contract table: a new method is one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from networks import FAMILIES, stream
from torch import nn

from acclimate import EATA, EATAC, ETA, ETAC, METHODS, Adapter, BNAdapt, Source, Tent


@dataclass(frozen=True)
class Case:
    method: type[Adapter]
    arguments: Callable[[], Mapping[str, Any]] = dict
    families: tuple[str, ...] = tuple(FAMILIES)
    learns: bool = True

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
    "eta": Case(ETA),
    "eata": Case(EATA, _source),
    "eta-c": Case(ETAC, _blocks),
    "eata-c": Case(EATAC, lambda: _source() | _blocks()),
}
assert CASES.keys() == METHODS.keys(), "every method has a row in the contract table"

TABLE = [(name, family) for name, case in CASES.items() for family in case.families]
LEARNERS = [(name, family) for name, family in TABLE if CASES[name].learns]
