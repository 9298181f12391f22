"""What a run may cost: seconds and images, estimated from a few batches."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..methods import METHODS
from ..parts.parameters import norm_parameters
from .run import Run
from .stream import SampledDomain, Scenario

__all__ = ["images_met", "seconds", "speed"]


def speed(run: Run, batches: int = 2) -> tuple[float, float]:
    """Measure the seconds per sample of a forward and of a backward pass, on a few batches."""
    scenario = run.scenario(run.plan.seeds[0])
    forward, step = (_seconds(run, method, scenario, batches) for method in ("source", "tent"))
    return forward, max(step - forward, 0.0)


def seconds(run: Run, speed: tuple[float, float]) -> dict[str, float]:
    """Estimate the seconds of each method for all seeds at a speed."""
    costs = {method: METHODS[method].cost for method in run.plan.methods}
    images = images_met(run) * len(run.plan.seeds)
    return {method: images * (there * speed[0] + back * speed[1]) for method, (there, back) in costs.items()}


def images_met(run: Run) -> int:
    """Count the images that a method predicts under one seed, including the probes."""
    scenario = run.scenario(run.plan.seeds[0])
    images = sum(len(domain.picks) for domain in scenario.domains if isinstance(domain, SampledDomain))
    return images + (len(scenario.domains) + 1) * run.plan.probe_images * (run.plan.probe != "none")


def _seconds(run: Run, method: str, scenario: Scenario, batches: int) -> float:
    """Return the seconds per sample."""
    model = run.network.model
    options: dict[str, Any] = {"precision": run.plan.precision}
    if method != "source" and not norm_parameters(model):
        options["parameters"] = "all"  # a backward pass is timed on any network
    adapter = METHODS[method].preset(run.family, model, **options)
    taken, seen = 0.0, 0
    for index, (x, _) in zip(range(batches + 1), scenario.domains[0].on(run.plan.device), strict=False):
        start = time.perf_counter()
        adapter(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        spent = time.perf_counter() - start
        if index <= 1:  # the first batch warms up, and counts only if there is no other
            taken, seen = 0.0, 0
        taken, seen = taken + spent, seen + len(x)
    adapter.reset()
    return taken / max(seen, 1)
