"""The plans of `acclimate demo` and `acclimate compare`: small networks, trained on clean digits, and a stream of
corrupted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checks import no_such
from ..methods import METHODS
from ..methods.cotta import ON_CIFAR10
from .plan import Plan, PlanError

__all__ = ["DEMO_METHODS", "DEMO_NETWORKS", "demo_plans", "digit_overrides"]

DEMO_NETWORKS = {"resnet": "digits-resnet", "vit": "digits-vit"}
DEMO_METHODS = ("source", "bn-adapt", "tent", "eta", "eata", "eata-c")

_LEARNING_RATES = {"resnet": {"entropy": 0.01, "consistency": 0.05}, "vit": {"entropy": 0.003, "consistency": 0.01}}
"""Chosen on this stream, for methods that minimise entropy and for EATA-C. The paper's rates are for streams of 11,730
batches of ImageNet; this one has 72 of digits. The other methods keep their presets."""

_LOSSES = dict.fromkeys(("tent", "sar", "rdumb", "eta", "eata"), "entropy") | dict.fromkeys(
    ("eta-c", "eata-c"), "consistency"
)

_ON_DIGITS: dict[str, dict[str, Any]] = {
    "cotta": ON_CIFAR10,  # ten classes as well
    "rdumb": {"every": 10},  # the default, 1,000 batches, is longer than the stream
}


def digit_overrides(network: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of methods on digits that differ from the presets."""
    rates = {method: {"lr": _LEARNING_RATES[network][kind]} for method, kind in _LOSSES.items()}
    return {name: {**rates.get(name, {}), **_ON_DIGITS.get(name, {})} for name in {**rates, **_ON_DIGITS}}


def demo_plans(
    methods: Sequence[str] | None = None,
    networks: Sequence[str] | None = None,
    *,
    images: int,
    seed: int,
    **fields: Any,
) -> list[Plan]:
    """Return one plan per network, by default for every method that classifies, on `images` digits per corruption."""
    every = [name for name, method in METHODS.items() if method.task != "segmentation"]
    if unfit := [name for name in methods or () if name in METHODS and name not in every]:
        raise PlanError(f"{unfit[0]} is for segmenters, and the demo classifies digits")
    if unknown := [name for name in networks or () if name not in DEMO_NETWORKS]:
        raise PlanError(no_such("network", unknown[0], DEMO_NETWORKS))
    chosen = {
        network: [name for name in methods or every if (network, name) != ("vit", "bn-adapt")]  # it has no BatchNorm
        for network in networks or DEMO_NETWORKS
    }
    if not any(chosen.values()):
        raise PlanError("bn-adapt needs BatchNorm layers, and the ViT has none")
    return [
        Plan(
            methods=names,
            model=DEMO_NETWORKS[network],
            data=f"demo:{images},{seed}",
            seeds=(seed,),
            source="demo:training",
            source_images=1000,
            probe_images=128,
            overrides={name: own for name, own in digit_overrides(network).items() if name in names},
            **fields,
        )
        for network, names in chosen.items()
        if names
    ]
