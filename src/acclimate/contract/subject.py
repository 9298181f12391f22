"""What is tested: a method, with its arguments, on a tiny network."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ..core.adapter import Adapter
from .networks import FAMILIES, stream, tiny_network

__all__ = ["LR", "Subject", "applies", "subjects"]

LR = 1e-2
"""A learning rate that is large enough to be seen after a few steps."""


@dataclass(frozen=True)
class Subject:
    """A method with its arguments, and the family of tiny networks to test it on: `"bn"`, `"ln"`, `"gn"` or `"seg"`.

    >>> import acclimate
    >>> Subject(acclimate.Tent, "bn").make().names[0]
    'stem.1.weight'
    """

    method: type[Adapter]
    family: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def make(self, **more: Any) -> Adapter:
        """Return a new adapter around a new copy of the network. Methods that need source images have some."""
        given = {**deepcopy(dict(self.arguments)), **more}
        takes = inspect.signature(self.method).parameters
        if "source" in takes and "source" not in self.method.without:
            given.setdefault("source", stream(batches=3, seed=500))
        if self.learns and "optimizer" not in given:
            given.setdefault("lr", LR)
        return self.method(tiny_network(self.family), **given)

    @property
    def learns(self) -> bool:
        """Whether the method changes parameters."""
        return self.method.defaults.parameters is not None

    @property
    def lasts(self) -> bool:
        """Whether what it learns outlasts a call."""
        return self.learns and not self.method.episodic


def subjects(method: type[Adapter], arguments: Mapping[str, Any] | None = None) -> Iterator[Subject]:
    """Yield a method on each family of networks that its task allows."""
    for family in FAMILIES:
        if method.task in ("any", "segmentation" if family == "seg" else "classification"):
            yield Subject(method, family, arguments or {})


def applies(subject: Subject) -> str:
    """Return why a method refuses this kind of network, or nothing."""
    try:
        subject.make()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""
