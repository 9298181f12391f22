"""The paper's scenarios and some more: functions of a suite of data that return a `Scenario`.

scenario = lifelong(suite, severity=5)              # corruption after corruption, no reset
scenario = SCENARIOS["mixed"](suite, severity=3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator

from ..data.types import Suite
from .hostile import HOSTILE
from .stream import SampledDomain, Scenario, Stream, choose_shifts, label_of, sample_domain, sample_shifts

__all__ = [
    "SCENARIOS",
    "correlated",
    "episodic",
    "gradual",
    "lifelong",
    "mixed",
    "rounds",
    "sample_domain",
    "single_domain",
    "with_clean",
]


def lifelong(
    suite: Suite,
    *,
    severity: int = 5,
    shifts: Sequence[str] | None = None,
    batch_size: int = 64,
    images: int | None = None,
    seed: int = 0,
    workers: int = 0,
    broken: dict[Path, str] | None = None,
) -> Scenario:
    """One shift after another, without a reset.

    >>> from acclimate.data import open_suite
    >>> scenario = lifelong(open_suite("digits"), shifts=["fog", "contrast"], images=128)
    >>> [domain.name for domain in scenario.domains], len(scenario)
    (['fog', 'contrast'], 4)
    """
    how: dict[str, Any] = {"batch_size": batch_size, "images": images, "seed": seed, "workers": workers}
    return Scenario("lifelong", sample_shifts(suite, severity=severity, shifts=shifts, broken=broken, **how))


def single_domain(suite: Suite, **options: Any) -> Scenario:
    """Reset before each shift.

    >>> from acclimate.data import open_suite
    >>> single_domain(open_suite("digits"), shifts=["fog", "contrast"]).resets
    'domain'
    """
    return replace(lifelong(suite, **options), name="single-domain", resets="domain")


def episodic(suite: Suite, **options: Any) -> Scenario:
    """Reset before each batch. MEMO's own setting has batches of one."""
    return replace(lifelong(suite, **options), name="episodic", resets="batch")


def rounds(suite: Suite, *, times: int = 10, **options: Any) -> Scenario:
    """Repeat the same shifts, as ACDC's four conditions for ten rounds."""
    once = lifelong(suite, **options)
    domains = [
        replace(domain, name=f"{domain.name}, round {number}", round=number)
        for number in range(1, times + 1)
        for domain in _sampled(once)
    ]
    return Scenario(f"rounds-{times}", domains)


def gradual(suite: Suite, *, severity: int = 5, shifts: Sequence[str] | None = None, **options: Any) -> Scenario:
    """Each shift rises from severity 1 to `severity` and falls again."""
    levels = [*range(1, severity + 1), *range(severity - 1, 0, -1)]
    domains: list[Stream] = []
    for shift in choose_shifts(suite, shifts):
        for level in levels:
            (domain,) = _sampled(lifelong(suite, severity=level, shifts=[shift], **options))
            domains.append(replace(domain, name=f"{shift} {level}"))
    return Scenario("gradual", domains)


def mixed(suite: Suite, *, seed: int = 0, **options: Any) -> Scenario:
    """Shuffle all shifts into one domain, so that every batch has several.

    >>> from acclimate.data import open_suite
    >>> [domain.name for domain in mixed(open_suite("digits"), shifts=["fog", "contrast"], images=64).domains]
    ['mixed']
    """
    apart = _sampled(lifelong(suite, seed=seed, **options))
    picks = [(number, index) for number, domain in enumerate(apart) for _, index in domain.picks]
    order = torch.randperm(len(picks), generator=Generator().manual_seed(seed)).tolist()
    parts = [part for domain in apart for part in domain.parts]
    return Scenario("mixed", [replace(apart[0], name="mixed", parts=parts, picks=[picks[i] for i in order])])


def correlated(suite: Suite, *, concentration: float = 0.1, seed: int = 0, **options: Any) -> Scenario:
    """Lifelong with correlated labels: a Dirichlet sample spreads each class over time.

    A smaller concentration gives longer runs of one class.
    """
    if not concentration > 0:
        raise ValueError(f"concentration={concentration}: a Dirichlet distribution needs a positive one")
    once = lifelong(suite, seed=seed, **options)
    domains = [_in_runs(domain, concentration, seed) for domain in _sampled(once)]
    return Scenario("correlated", domains)


def with_clean(scenario: Scenario, clean: Stream) -> Scenario:
    """Add the paper's probe of forgetting: the clean set after each domain, adapted to without a reset."""
    return replace(scenario, clean_between=clean)


def _sampled(scenario: Scenario) -> list[SampledDomain]:
    return [domain for domain in scenario.domains if isinstance(domain, SampledDomain)]


def _in_runs(domain: SampledDomain, concentration: float, seed: int) -> SampledDomain:
    labels = np.array([label_of(domain.parts[part], index) for part, index in domain.picks])
    random = np.random.default_rng(seed)
    slots = max(2, len(domain))
    when = np.empty(len(labels))
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        reached = random.dirichlet([concentration] * slots).cumsum()
        slot = np.searchsorted(reached, (np.arange(len(own)) + 0.5) / len(own)).clip(max=slots - 1)
        when[own] = slot + random.random(slots)[slot]  # within a slot, class after class
    return replace(domain, picks=[domain.picks[i] for i in np.argsort(when, kind="stable")])


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "lifelong": lifelong,
    "single-domain": single_domain,
    "episodic": episodic,
    "mixed": mixed,
    "rounds": rounds,
    "gradual": gradual,
    "correlated": correlated,
    **HOSTILE,
}
"""Scenarios by their name on the command line."""
