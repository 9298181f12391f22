"""Choose settings for a network on corruptions and images that no result is judged on.

Each method tries the same few learning rates on the four corruptions that ImageNet-C keeps apart: speckle noise,
Gaussian blur, spatter and saturation, once as a lifelong stream and once each from the source. The most accurate
setting wins, and the better calibrated one where two are equal; one that forgets clean images does not take part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ..core.settings_file import is_settings_file
from ..core.signature import arguments_of
from ..data.corruptions import EXTRA
from ..data.on_the_fly import Corrupted
from ..data.types import ImageSet
from ..files import AnyPath, json_lines, rounded, write_text
from ..methods import METHODS
from .plan import Job, Plan, PlanError
from .result import Result
from .run import Run
from .stream import floating

__all__ = [
    "FACTORS",
    "SCENARIOS",
    "SEED",
    "Trial",
    "Tuning",
    "choose",
    "doubts",
    "learning_rate",
    "score",
    "settings_from",
    "settings_to_try",
    "trial_plans",
    "write_settings",
]

FACTORS = (1.0, 1 / 3, 3.0, 0.1, 10.0, 1 / 30)
"""Multiples of the preset's learning rate, in the order in which they are tried."""
SCENARIOS = ("lifelong", "single-domain")
SEED = 1000
"""Evaluations use small seeds, so streams for tuning are other streams."""
MOST_FORGOTTEN = 1.0
"""Points of clean accuracy that a setting may cost."""
ROUNDING = 1e-6
"""A difference of two scores that is none."""


@dataclass(frozen=True)
class Trial:
    """One setting of a method, and its scores in per cent."""

    method: str
    settings: Mapping[str, Any]
    accuracy: float
    """Mean over the lifelong stream and the single domains."""
    ece: float
    forgotten: float
    """Points of clean accuracy that were lost by the end of the lifelong stream."""
    seconds: float = field(default=0.0, compare=False)


def choose(trials: Sequence[Trial], *, most_forgotten: float = MOST_FORGOTTEN, equal: float = 0.1) -> Trial:
    """Return the most accurate trial that forgets little; of equal ones, the one with the lowest ECE.

    If all forget too much, return the one that forgets least.

    >>> low = Trial("eata", {"lr": 1}, accuracy=50.0, ece=9.0, forgotten=0.1)
    >>> high = Trial("eata", {"lr": 3}, accuracy=50.05, ece=12.0, forgotten=0.2)
    >>> collapsed = Trial("eata", {"lr": 9}, accuracy=52.0, ece=8.0, forgotten=20.0)
    >>> choose([low, high, collapsed]).settings
    {'lr': 1}
    """
    kept = [trial for trial in trials if trial.forgotten <= most_forgotten + ROUNDING]
    if not kept:
        return min(trials, key=lambda trial: trial.forgotten)
    best = max(trial.accuracy for trial in kept)
    return min((trial for trial in kept if trial.accuracy >= best - equal - ROUNDING), key=lambda trial: trial.ece)


def learning_rate(method: str, preset: str) -> float:
    """Return a method's learning rate in a preset, which may be inside its optimizer."""
    arguments = METHODS[method].presets.get(preset, {})
    inside = getattr(arguments.get("optimizer"), "keywords", {}).get("lr")
    return float(arguments.get("lr") or inside or METHODS[method].defaults.lr)


def settings_to_try(method: str, preset: str) -> list[dict[str, Any]]:
    """Return the settings of a method to try, the preset's own first."""
    rate = learning_rate(method, preset)
    return [{"lr": float(f"{factor * rate:.3g}")} for factor in FACTORS]


def trial_plans(plan: Plan, method: str, settings: Mapping[str, Any]) -> list[Plan]:
    """Return the plans of a trial: one setting of a method, lifelong and each corruption from the source.

    Forgetting is measured on the lifelong stream. Episodic methods give the same result in both scenarios.
    """
    plan = replace(plan, shifts=EXTRA, seeds=(SEED,), methods=(method,))
    plan = replace(plan, overrides={method: {**plan.overrides.get(method, {}), **settings}})
    scenarios = SCENARIOS[:1] if METHODS[method].episodic else SCENARIOS
    probes = {"lifelong": "snapshot", "single-domain": "none"}
    return [replace(plan, scenario=scenario, probe=probes[scenario]) for scenario in scenarios]


def score(method: str, settings: Mapping[str, Any], results: Sequence[Result], seconds: float = 0.0) -> Trial:
    """Return a trial with the scores of its results, the lifelong one first."""
    return Trial(
        method,
        dict(settings),
        accuracy=100 * mean(result.accuracy for result in results),
        ece=100 * mean(result.ece for result in results),
        forgotten=100 * _forgotten(results[0]),
        seconds=seconds,
    )


class Tuning:
    """Trials of some methods on a network, each carried out like a run, so that a stopped one resumes.

    Args:
        plan: network, data and what a run needs; its corruptions, scenario and seeds are replaced.
        out: the folder of the trials.
        labels: `"data"`, or `"source"` where the data has no true ones: the source network's predictions of the clean
            images count as right.
    """

    def __init__(self, plan: Plan, out: Path, labels: str = "data") -> None:
        if labels not in ("data", "source"):
            raise PlanError(f'labels={labels!r}: expected "data" or "source"')
        if plan.preset is not None and is_settings_file(plan.preset):
            raise PlanError(f"--preset {plan.preset}: settings start from a preset with a name, not from a file")
        for name in plan.methods:
            if "lr" not in arguments_of(METHODS[name]):
                raise PlanError(f"{name} has no learning rate to choose: leave it out")
        self.plan = replace(plan, shifts=EXTRA, seeds=(SEED,), probe="snapshot", scenario="lifelong")
        self.out, self.labels = out, labels

    @cached_property
    def first(self) -> Run:
        """A run that the others share network and data with."""
        return self._prepared(Run(self.plan, self.out / "source"))

    @property
    def batches(self) -> int:
        """The batches of all trials."""
        plans = sum(len(trial_plans(self.plan, method, {})) for method in self.plan.methods)
        return plans * len(FACTORS) * len(self.first.scenario(SEED))

    def trials(self, seconds: float | None = None, on_batch: Callable[[str], None] | None = None) -> Iterator[Trial]:
        """Yield trials, one setting of every method after another. Each method has one before the time is over."""
        start = time.monotonic()
        grids = {method: settings_to_try(method, self.first.family) for method in self.plan.methods}
        for turn in range(len(FACTORS)):
            for method, settings in grids.items():
                if turn and seconds is not None and time.monotonic() - start > seconds:
                    return
                yield self.trial(method, settings[turn], on_batch)

    def trial(self, method: str, settings: Mapping[str, Any], on_batch: Callable[[str], None] | None = None) -> Trial:
        """Try one setting of a method."""
        start, results = time.monotonic(), []
        for plan in trial_plans(self.plan, method, settings):
            name = "-".join([method, plan.scenario, *(f"{key}{value}" for key, value in settings.items())])
            run = self._prepared(Run(plan, self.out / name, like=self.first))

            def advance(batch: Any, score: float, name: str = name) -> None:  # noqa: ARG001
                if on_batch is not None:
                    on_batch(name)

            results.append(run.do(Job(method, SEED), on_batch=advance))
        return score(method, settings, results, time.monotonic() - start)

    def _prepared(self, run: Run) -> Run:
        """Give a run the source network's predictions as labels, if asked."""
        if self.labels == "source" and "suite" not in vars(run):
            shared = run.like
            run.suite = shared.suite if shared is not None else self._relabelled(run)
        return run

    @staticmethod
    @torch.no_grad()
    def _relabelled(run: Run) -> Corrupted:
        suite = run.suite
        if not isinstance(suite, Corrupted):
            raise PlanError(f"{run.plan.data} is not corrupted on the fly: give a folder of clean images")
        images = suite.images
        device, batch = run.plan.device, run.plan.batch_size
        labels: list[int] = []
        for start in range(0, len(images), batch):
            x = torch.stack([floating(images[i][0]) for i in range(start, min(start + batch, len(images)))])
            labels += run.network.model(x.to(device)).argmax(1).tolist()
        return Corrupted(suite.name, _Relabelled(images, labels), suite.classes, like=suite.like, outputs=suite.outputs)


class _Relabelled:
    def __init__(self, images: ImageSet, labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index][0], self.labels[index]

    def __len__(self) -> int:
        return len(self.images)


def settings_from(
    plan: Plan,
    trials: Sequence[Trial],
    preset: str,
    *,
    labels: str = "data",
    most_forgotten: float = MOST_FORGOTTEN,
) -> tuple[dict[str, Any], list[Trial]]:
    """Return the chosen settings with all trials, as `write_settings` takes them; and the chosen trials.

    Args:
        plan: the network and the protocol.
        trials: of all methods.
        preset: the one that the settings change.
        labels: whose labels count as right.
        most_forgotten: points of clean accuracy that a setting may cost.
    """
    by_method: dict[str, list[Trial]] = {}
    for trial in trials:
        by_method.setdefault(trial.method, []).append(trial)
    chosen = {name: choose(found, most_forgotten=most_forgotten) for name, found in by_method.items()}
    protocol = {key: value for key, value in plan.protocol.items() if key not in ("scenario", "data")}
    content = {
        "start": preset,
        "model": plan.model.partition("=")[0],
        "methods": {METHODS[name].__name__: dict(trial.settings) for name, trial in chosen.items()},
        "protocol": {
            **protocol,
            "scenarios": SCENARIOS,
            "labels": labels,
            "seed": SEED,
            "most_forgotten": most_forgotten,
            "data": plan.data.partition(":")[0],
        },
        "trials": [asdict(trial) for trial in trials],
    }
    return content, [*chosen.values()]


def doubts(trials: Sequence[Trial], chosen: Sequence[Trial]) -> list[str]:
    """Return what speaks against a choice: the lowest of several rates, which may mean that nothing was learned."""
    found = []
    for trial in chosen:
        rates = [each.settings["lr"] for each in trials if each.method == trial.method]
        if len(rates) > 1 and trial.settings["lr"] == min(rates):
            found.append(
                f"{trial.method}: the lowest rate is the best, so that it hardly learns. Try more images; otherwise "
                "the method does not help this network"
            )
    return found


def write_settings(file: AnyPath, content: Mapping[str, Any], command: str, origin: Mapping[str, Any]) -> None:
    """Write settings that were chosen, with the command and the origin: versions, device, commit."""
    write_text(file, json_lines(rounded({"command": command, "origin": origin, **content}, digits=6), depth=2))


def _forgotten(result: Result) -> float:
    after = result.domains[-1].clean_accuracy
    return 0.0 if result.clean_before is None or after is None else result.clean_before - after
