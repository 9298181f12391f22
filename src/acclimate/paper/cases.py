"""The cases of each recipe: functions of a scale that yield plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal

from ..bench.hostile import HOSTILE
from ..bench.plan import Plan, PlanError
from ..bench.tune import FACTORS, settings_to_try, trial_plans
from ..core.settings_file import is_settings_file
from ..core.signature import arguments_of
from ..methods import METHODS
from . import studies
from .numbers import Case, Measure
from .scales import SCALES, Kind, Scale

__all__ = [
    "HOSTILE_SHIFTS",
    "LOSSES",
    "ablation",
    "ablation_r",
    "acdc",
    "backwards",
    "components",
    "directions",
    "drop_rates",
    "efficiency",
    "entropy_shares",
    "every_method",
    "few",
    "fisher_images",
    "forgetting",
    "hostile_streams",
    "imagenet_r",
    "in_fog",
    "mixed",
    "noise",
    "parameters",
    "rate",
    "rates",
    "selected",
    "slow_rates",
    "stability",
    "studied",
    "swept",
    "title",
    "toy",
    "tune",
    "tuned",
]

SELECTING = ("eta", "eata", "rdumb", "eta-c", "eata-c")
OURS = ("source", "tent", "eata", "eata-c")

Setting = tuple[str, dict[str, Any]]
"""A method and its arguments."""

SELECTIONS: dict[str, Setting] = {
    "S(x) = 1": ("tent", {}),
    "S_ent(x)": ("eta", {"select": "reliable"}),
    "S(x)": ("eta", {}),
}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "CL": {"weight": 0.0},
    "ER": {"alpha": 0.0},
    "FR": {"beta": 0.0},
    "SS": {"select": "everything"},
}
"""How each part of EATA-C is switched off."""
LOSSES: dict[str, Setting] = {
    "Tent": ("tent", {}),
    "consistency alone": ("eta-c", {"alpha": 0.0, "select": "everything"}),
}
"""Entropy, or L_c, on every sample."""
PARAMETERS: dict[str, Setting] = {
    "Source": ("source", {}),
    "SAR": ("sar", {}),
    "EATAC†, all parameters": ("eata-c", {"parameters": "all"}),
    "EATAC": ("eata-c", {}),
}
DIRECTIONS: dict[str, dict[str, Any]] = {
    "KL(y_fuse ‖ s), our default": {},
    "KL(s ‖ y_fuse), Eq. (10)": {"divergence": "reverse"},
}
HOSTILE_SHIFTS = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")
"""The first corruption of each kind: noise, blur, weather, digital."""
IMAGENET_R: dict[Kind, dict[str, dict[str, float]]] = {
    "resnet": {name: {"epsilon": value} for name, value in zip(SELECTING, (0.05, 0.05, 0.05, 0.07, 0.07), strict=True)},
    "vit": {name: {"epsilon": 0.05} for name in SELECTING},
}
"""ε as the paper gives it, for 200 classes."""


def title(method: str) -> str:
    """Return a method's name in tables."""
    return METHODS[method].__name__


def noise(scale: Scale, network: Kind, method: str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
    """Plan a method on Gaussian noise alone."""
    usual: dict[str, Any] = {"shifts": ("gaussian_noise",), "scenario": "single-domain", "probe": "none"}
    return scale.plan(network, method, arguments=arguments, **{**usual, **fields})


def tuned(scale: Scale, network: Kind, method: str, scenario: str = "lifelong", **arguments: Any) -> Plan:
    """Plan a method with its own arguments on every corruption."""
    return scale.plan(network, method, arguments=arguments, scenario=scenario, probe="none")


def few(scale: Scale, method: str) -> int | None:
    """Return the number of images per domain for a method; slow ones get fewer."""
    most, images = scale.few.get(method), scale.fields.get("images")
    return images if most is None else min(most, images or most)


def rate(scale: Scale, network: Kind, method: str, times: float) -> float:
    """Return a multiple of the learning rate that a method has at a scale."""
    return float(f"{times * scale.setting(network, method, 'lr'):.3g}")


def every_method(scale: Scale, scenario: str) -> Iterator[Case]:
    """Yield every method for classification on both networks, slow ones on fewer images.

    Episodic methods behave the same in every scenario, so one run of them serves all.
    """
    for network in scale.classifiers:
        methods = [name for name, method in METHODS.items() if method.task != "segmentation"]
        if network == "vit":
            methods.remove("bn-adapt")
        rest = [name for name in methods if name not in scale.few]
        yield Case("all", scale.plan(network, *rest, scenario=scenario, probe="none"), network)
        for name in methods:
            if name in scale.few:
                own, home = ("lifelong", "lifelong") if METHODS[name].episodic else (scenario, "")
                plan = scale.plan(network, name, scenario=own, probe="none", images=few(scale, name))
                yield Case(title(name), plan, network, home=home)


def imagenet_r(scale: Scale) -> Iterator[Case]:
    """Yield cases of every method on ImageNet-R (Table 3)."""
    for case in every_method(replace(scale, settings=IMAGENET_R), "single-domain"):
        yield replace(case, home="")  # its data differ from those of the other recipes


def acdc(scale: Scale) -> Iterator[Case]:
    """Yield cases of the methods for segmentation, ten rounds (Tables 4 and B)."""
    methods = ("source", "bn-adapt", "tent", "cotta", "dat", "eata", "eata-c")
    yield Case("all", scale.plan("segformer", *methods, scenario="rounds", probe="none"))


def mixed(scale: Scale) -> Iterator[Case]:
    """Yield cases of mixed corruptions, levels 3 and 5 (Table 9)."""
    for level, method in product((3, 5), OURS):
        plan = scale.plan(scale.nearest("vit"), method, scenario="mixed", severity=level, probe="none")
        yield Case(title(method), plan, f"level {level}")


def components(scale: Scale) -> Iterator[Case]:
    """Yield cases of the components of S(x) (Table 5)."""
    for network, level, (row, (method, arguments)) in product(scale.classifiers, (3, 5), SELECTIONS.items()):
        yield Case(row, noise(scale, network, method, arguments, severity=level), f"{network}, level {level}")


def ablation(scale: Scale, networks: Sequence[Kind] = ()) -> Iterator[Case]:
    """Yield cases of EATA-C without some of its parts (Tables 6 and C)."""
    experiments = [*product(((), ("SS",)), ((), ("FR",)), (("CL",), ("ER",), ("CL", "ER")))]
    for network in networks or scale.classifiers:
        yield Case("Source", scale.plan(network, "source", scenario="single-domain", probe="none"), network)
        for number, (selection, fisher, loss) in enumerate(experiments, 1):
            parts = (*loss, *fisher, *selection)
            arguments = {k: v for part, off in LEFT_OUT.items() if part not in parts for k, v in off.items()}
            plan = tuned(scale, network, "eata-c", "single-domain", **arguments)
            yield Case(f"{number}: {' '.join(parts)}", plan, network)


def ablation_r(scale: Scale) -> Iterator[Case]:
    """Return cases of the same on ImageNet-R (Table C)."""
    return ablation(replace(scale, settings=IMAGENET_R), ("resnet",))


def tune(scale: Scale) -> Iterator[Case]:
    """Yield the trials of every method that has a learning rate, on images and corruptions that no table uses."""
    for network in scale.classifiers:
        preset = scale.presets[network]
        if is_settings_file(preset):
            raise PlanError(f"tune starts from a preset with a name, not from {preset}: leave --preset out")
        for method in (name for name, each in METHODS.items() if each.task != "segmentation"):
            if "lr" not in arguments_of(METHODS[method]):
                continue
            images = few(replace(scale, few={name: count // 4 for name, count in scale.few.items()}), method)
            plan = scale.plan(network, method, data=scale.held_out, images=images)
            for settings in settings_to_try(method, preset):
                for each in trial_plans(plan, method, settings):
                    yield Case(title(method), each, f"{network}, {each.scenario}", settings["lr"])


def directions(scale: Scale) -> Iterator[Case]:
    """Yield cases of both directions of Eq. (10)."""
    for network, (row, arguments) in product(scale.classifiers, DIRECTIONS.items()):
        yield Case(row, tuned(scale, network, "eata-c", **arguments), network)


def hostile_streams(scale: Scale) -> Iterator[Case]:
    """Yield every method on every stream that breaks some, without and with a guard; lifelong is the honest one.

    Slow methods and single images get fewer images, and a Source of their own to be compared with.
    """
    rows: dict[str, Setting] = {title(name): (name, {}) for name in METHODS if METHODS[name].task != "segmentation"}
    for network, scenario in product(scale.classifiers, ("lifelong", "correlated", *HOSTILE)):
        rows["ETA, 20 × the rate"] = "eta", {"lr": rate(scale, network, "eta", 20)}
        every = (scale.fields.get("images") or scale.clean) // (4 if scenario == "one-by-one" else 1)
        fields: dict[str, Any] = {"scenario": scenario, "severity": 3, "shifts": HOSTILE_SHIFTS}
        for row, (method, arguments) in rows.items():
            if (network, method) == ("vit", "bn-adapt"):
                continue
            images = every // 3 if sum(METHODS[method].cost) > 10 else every
            images = min(images, scale.few.get(method, images))
            for guard in (False, True) if method != "source" else (False,):
                plan = scale.plan(network, method, arguments=arguments, images=images, guard=guard, **fields)
                yield Case(row + ", guarded" * guard, plan, f"{network}, {scenario}")
            if images != every:
                plan = scale.plan(network, "source", images=images, **fields)
                yield Case(f"Source for {row}", plan, f"{network}, {scenario}")


def efficiency(scale: Scale) -> Iterator[Case]:
    """Yield cases of time and memory (Table 7)."""
    fewer, again = {"epsilon": scale.epsilon(0.02)}, {"strategy": "replay-subset"}
    for network in scale.classifiers:
        for method in ("source", "tent", "sar", "roid", "cotta", "tea", "memo"):
            yield Case(title(method), noise(scale, network, method, images=few(scale, method)), network)
        for suffix, arguments in ((", ε = 0.02", fewer), ("", {})):
            for row, own in (("EATA", {}), ("EATA, replay-subset", again)):
                yield Case(row + suffix, noise(scale, network, "eata", {**own, **arguments}), network)
            yield Case(f"EATAC{suffix}", noise(scale, network, "eata-c", arguments), network)
        plan = noise(scale, network, "eata")
        yield Case("Fisher regulariser", plan, network, measure=studies.regulariser, times=0)


def forgetting(scale: Scale) -> Iterator[Case]:
    """Yield cases of clean accuracy along the stream (Figures 3, F and G)."""
    probe = {"probe": "readapt", "probe_images": min(scale.clean, scale.fields.get("probe_images", scale.clean))}
    levels, scenarios, methods = (5, 1, 2, 3, 4), ("single-domain", "lifelong"), ("source", "tent", "eata")
    for level, scenario, method in product(levels, scenarios, methods):
        plan = scale.plan(scale.nearest("resnet"), method, scenario=scenario, severity=level, **probe)
        yield Case(title(method), plan, f"level {level}, {scenario}")


def backwards(scale: Scale) -> Iterator[Case]:
    """Yield cases of backward passes by corruption and level (Figure D)."""
    for level, method in product((1, 2, 3, 4, 5), ("tent", "eta")):
        network = scale.nearest("resnet")
        plan = scale.plan(network, method, scenario="single-domain", severity=level, probe="none")
        yield Case(title(method), plan, f"level {level}")


def in_fog(scale: Scale) -> Iterator[Case]:
    """Return cases of calibration in fog (Figure 10)."""
    return (Case(title(method), noise(scale, scale.nearest("vit"), method, shifts=("fog",))) for method in OURS)


def swept(network: Kind, method: str, argument: str, *values: float) -> Callable[[Scale], Iterator[Case]]:
    """Return cases of a method on Gaussian noise, at several values of one argument."""

    def cases(scale: Scale) -> Iterator[Case]:
        for value in values:
            given = scale.epsilon(value) if argument == "epsilon" else value
            plan = noise(scale, scale.nearest(network), method, {argument: given}, probe="snapshot")
            yield Case(title(method), plan, x=value)

    return cases


def fisher_images(scale: Scale) -> Iterator[Case]:
    """Yield cases of numbers of images for the Fisher importance (Figure 6)."""
    network = scale.nearest("resnet")
    yield Case("ETA", noise(scale, network, "eta", probe="snapshot"), x=0)
    for count in (200, 300, 500, 700, 1000, 1500, 2000, 3000):
        if count <= scale.clean:
            yield Case("EATA", noise(scale, network, "eata", probe="snapshot", source_images=count), x=count)


def rates(scale: Scale) -> Iterator[Case]:
    """Yield cases of learning rates on the stream that is judged."""
    for network, method, times in product(scale.classifiers, ("tent", "eata", "eata-c"), FACTORS):
        yield Case(title(method), tuned(scale, network, method, lr=rate(scale, network, method, times)), network, times)


def slow_rates(scale: Scale) -> Iterator[Case]:
    """Yield cases of learning rates of CoTTA and TEA with Adam."""
    scenarios, methods, rates = ("lifelong", "single-domain"), ("cotta", "tea"), (1e-6, 1e-5, 1e-4, 1e-3)
    for scenario, network, method, lr in product(scenarios, scale.classifiers, methods, rates):
        yield Case(title(method), tuned(scale, network, method, scenario, lr=lr), f"{network}, {scenario}", lr)


def drop_rates(scale: Scale) -> Iterator[Case]:
    """Yield cases of EATA-C's drop ratio by learning rate."""
    for network, times, drop in product(scale.classifiers, (0.3, 1.0, 3.0), (0.1, 0.2, 0.4, 0.6, 0.8)):
        plan = tuned(scale, network, "eata-c", drop=drop, lr=rate(scale, network, "eata-c", times))
        yield Case(f"{times:g} × the rate", plan, network, drop)


def parameters(scale: Scale) -> Iterator[Case]:
    """Return cases of norm layers alone, or all parameters (Table D)."""
    drop = scale.setting(scale.nearest("vit"), "eata-c", "drop")
    return studied(partial(studies.divergence, drop=drop), 2, PARAMETERS)(scale)


def studied(measure: Measure, times: float, rows: Mapping[str, Setting]) -> Callable[[Scale], Iterator[Case]]:
    """Return cases of one measurement on Gaussian noise, on the ViT unless another network is asked for."""

    def cases(scale: Scale) -> Iterator[Case]:
        for row, (method, arguments) in rows.items():
            yield Case(row, noise(scale, scale.nearest("vit"), method, arguments), measure=measure, times=times)

    return cases


def stability(scale: Scale) -> Iterator[Case]:
    """Yield cases of learning rates by steps per batch (Figure 11)."""
    experiments = product(LOSSES.items(), (1, 2, 3, 4, 5), (0.1, 0.3, 1.0, 3.0))
    for (row, (method, arguments)), steps, factor in experiments:
        network, measure = scale.nearest("vit"), partial(studies.several_steps, steps=steps)
        lr = rate(scale, network, method, factor)
        plan = noise(scale, network, method, {**arguments, "lr": lr})
        yield Case(row, plan, f"{steps} step{'s' * (steps > 1)}", lr, measure, steps)


def entropy_shares(scale: Scale) -> Iterator[Case]:
    """Yield cases of shares of samples by entropy (Figure 2)."""
    ends: tuple[Literal["highest", "lowest"], ...] = ("highest", "lowest")
    for which, percent in product(ends, range(10, 101, 10)):
        measure = partial(studies.entropy_share, which=which, percent=percent)
        plan = noise(scale, scale.nearest("resnet"), "tent", severity=3)
        yield Case(f"{which} entropy", plan, x=percent, measure=measure, times=2)


def selected(scale: Scale) -> Iterator[Case]:
    """Yield cases of the samples that S_ent selects (Figure E)."""
    plan = noise(_one_seed(scale, scale), scale.nearest("vit"), "eta", {"select": "reliable"})
    yield Case("ETA", plan, measure=studies.selected)


def toy(scale: Scale) -> Iterator[Case]:
    """Yield one case that needs no data; its plan names the digits, since every plan names data."""
    yield Case("toy", noise(_one_seed(SCALES["digits"], scale), "vit", "source", images=1), measure=studies.boundary)


def _one_seed(at: Scale, asked: Scale) -> Scale:
    return at.on(seeds=asked.fields.get("seeds", (0,))[:1])
