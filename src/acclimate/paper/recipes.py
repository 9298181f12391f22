"""The paper's tables and figures as recipes: cases to measure, and a layout. Titles say where in the paper each is."""

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
from .layouts import (
    boundaries,
    by_domain,
    calibration,
    curves,
    grid,
    heat_maps,
    hostile,
    indicators,
    measured_grid,
    pictures,
    sweep,
    trials,
    whole_table,
)
from .numbers import Case, Measure, Recipe
from .scales import SCALES, Kind, Scale

__all__ = ["RECIPES"]

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


# Cases: functions of a scale


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
    for case in every_method(replace(scale, settings=IMAGENET_R), "single-domain"):
        yield replace(case, home="")  # its data differ from those of the other recipes


def acdc(scale: Scale) -> Iterator[Case]:
    methods = ("source", "bn-adapt", "tent", "cotta", "dat", "eata", "eata-c")
    yield Case("all", scale.plan("segformer", *methods, scenario="rounds", probe="none"))


def mixed(scale: Scale) -> Iterator[Case]:
    for level, method in product((3, 5), OURS):
        plan = scale.plan(scale.nearest("vit"), method, scenario="mixed", severity=level, probe="none")
        yield Case(title(method), plan, f"level {level}")


def components(scale: Scale) -> Iterator[Case]:
    for network, level, (row, (method, arguments)) in product(scale.classifiers, (3, 5), SELECTIONS.items()):
        yield Case(row, noise(scale, network, method, arguments, severity=level), f"{network}, level {level}")


def ablation(scale: Scale, networks: Sequence[Kind] = ()) -> Iterator[Case]:
    experiments = [*product(((), ("SS",)), ((), ("FR",)), (("CL",), ("ER",), ("CL", "ER")))]
    for network in networks or scale.classifiers:
        yield Case("Source", scale.plan(network, "source", scenario="single-domain", probe="none"), network)
        for number, (selection, fisher, loss) in enumerate(experiments, 1):
            parts = (*loss, *fisher, *selection)
            arguments = {k: v for part, off in LEFT_OUT.items() if part not in parts for k, v in off.items()}
            plan = tuned(scale, network, "eata-c", "single-domain", **arguments)
            yield Case(f"{number}: {' '.join(parts)}", plan, network)


def ablation_r(scale: Scale) -> Iterator[Case]:
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
    probe = {"probe": "readapt", "probe_images": min(scale.clean, scale.fields.get("probe_images", scale.clean))}
    levels, scenarios, methods = (5, 1, 2, 3, 4), ("single-domain", "lifelong"), ("source", "tent", "eata")
    for level, scenario, method in product(levels, scenarios, methods):
        plan = scale.plan("resnet", method, scenario=scenario, severity=level, **probe)
        yield Case(title(method), plan, f"level {level}, {scenario}")


def backwards(scale: Scale) -> Iterator[Case]:
    for level, method in product((1, 2, 3, 4, 5), ("tent", "eta")):
        plan = scale.plan("resnet", method, scenario="single-domain", severity=level, probe="none")
        yield Case(title(method), plan, f"level {level}")


def in_fog(scale: Scale) -> Iterator[Case]:
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
    yield Case("ETA", noise(scale, "resnet", "eta", probe="snapshot"), x=0)
    for count in (200, 300, 500, 700, 1000, 1500, 2000, 3000):
        if count <= scale.clean:
            yield Case("EATA", noise(scale, "resnet", "eata", probe="snapshot", source_images=count), x=count)


def rates(scale: Scale) -> Iterator[Case]:
    for network, method, times in product(scale.classifiers, ("tent", "eata", "eata-c"), FACTORS):
        yield Case(title(method), tuned(scale, network, method, lr=rate(scale, network, method, times)), network, times)


def slow_rates(scale: Scale) -> Iterator[Case]:
    scenarios, methods, rates = ("lifelong", "single-domain"), ("cotta", "tea"), (1e-6, 1e-5, 1e-4, 1e-3)
    for scenario, network, method, lr in product(scenarios, scale.classifiers, methods, rates):
        yield Case(title(method), tuned(scale, network, method, scenario, lr=lr), f"{network}, {scenario}", lr)


def drop_rates(scale: Scale) -> Iterator[Case]:
    for network, times, drop in product(scale.classifiers, (0.3, 1.0, 3.0), (0.1, 0.2, 0.4, 0.6, 0.8)):
        plan = tuned(scale, network, "eata-c", drop=drop, lr=rate(scale, network, "eata-c", times))
        yield Case(f"{times:g} × the rate", plan, network, drop)


def parameters(scale: Scale) -> Iterator[Case]:
    drop = scale.setting(scale.nearest("vit"), "eata-c", "drop")
    return studied(partial(studies.divergence, drop=drop), 2, PARAMETERS)(scale)


def studied(measure: Measure, times: float, rows: Mapping[str, Setting]) -> Callable[[Scale], Iterator[Case]]:
    """Return cases of one measurement on Gaussian noise, on the ViT if there is one."""

    def cases(scale: Scale) -> Iterator[Case]:
        for row, (method, arguments) in rows.items():
            yield Case(row, noise(scale, scale.nearest("vit"), method, arguments), measure=measure, times=times)

    return cases


def stability(scale: Scale) -> Iterator[Case]:
    experiments = product(LOSSES.items(), (1, 2, 3, 4, 5), (0.1, 0.3, 1.0, 3.0))
    for (row, (method, arguments)), steps, factor in experiments:
        network, measure = scale.nearest("vit"), partial(studies.several_steps, steps=steps)
        lr = rate(scale, network, method, factor)
        plan = noise(scale, network, method, {**arguments, "lr": lr})
        yield Case(row, plan, f"{steps} step{'s' * (steps > 1)}", lr, measure, steps)


def entropy_shares(scale: Scale) -> Iterator[Case]:
    ends: tuple[Literal["highest", "lowest"], ...] = ("highest", "lowest")
    for which, percent in product(ends, range(10, 101, 10)):
        measure = partial(studies.entropy_share, which=which, percent=percent)
        yield Case(f"{which} entropy", noise(scale, "resnet", "tent", severity=3), x=percent, measure=measure, times=2)


def selected(scale: Scale) -> Iterator[Case]:
    plan = noise(_one_seed(scale, scale), scale.nearest("vit"), "eta", {"select": "reliable"})
    yield Case("ETA", plan, measure=studies.selected)


def toy(scale: Scale) -> Iterator[Case]:
    """Yield one case that needs no data; its plan names the digits, since every plan names data."""
    yield Case("toy", noise(_one_seed(SCALES["digits"], scale), "vit", "source", images=1), measure=studies.boundary)


def _one_seed(at: Scale, asked: Scale) -> Scale:
    return at.on(seeds=asked.fields.get("seeds", (0,))[:1])


# Recipes

PERCENT: dict[str, tuple[str, str, float]] = {"accuracy": ("Acc.", ".1f", 100), "ece": ("ECE", ".1f", 100)}
COST: dict[str, tuple[str, str, float]] = {"seconds": ("Time (s)", ".1f", 1), "gpu_memory": ("Mem. (MB)", ",.0f", 1)}
CONSISTENCY = {"consistency alone": LOSSES["consistency alone"]}
LIFELONG, SINGLE_DOMAIN = (partial(every_method, scenario=name) for name in ("lifelong", "single-domain"))

_ALL = (
    Recipe("lifelong", "Table 2: ImageNet-C, level 5, lifelong", LIFELONG, whole_table),
    Recipe("single-domain", "Table A: ImageNet-C, level 5, one domain at a time", SINGLE_DOMAIN, whole_table),
    Recipe(
        "imagenet-r",
        "Table 3: ImageNet-R",
        imagenet_r,
        whole_table,
        needs="--scale paper --data imagenet-r:FOLDER",
        data=("imagenet-r",),
    ),
    Recipe(
        "acdc",
        "Tables 4 and B: Cityscapes to ACDC, ten rounds",
        acdc,
        whole_table,
        "The table has the first, fourth, seventh … and last round, the csv every one.",
        needs="--scale paper --data acdc:FOLDER,CITYSCAPES",
        data=("acdc", "scenes", "cityscapes"),
    ),
    Recipe("mixed", "Table 9: fifteen corruptions mixed, levels 3 and 5", mixed, grid("accuracy", "ece")),
    Recipe(
        "components",
        "Table 5: the parts of S(x)",
        components,
        grid("accuracy", "backwards"),
        "The paper's caption says ResNet-50, but its first row is Tent on ViT-Base; the recipe runs both.",
    ),
    Recipe(
        "ablation",
        "Tables 6 and C, right: the parts of EATA-C",
        ablation,
        grid("accuracy", "ece", "forwards", "backwards"),
        "CL: consistency loss, ER: min-max entropy, FR: Fisher regulariser, SS: sample selection. In the paper's "
        "table for ResNet-50 the row Source is that of ViT-Base.",
    ),
    Recipe(
        "ablation-r",
        "Table C, left: the parts of EATA-C on ImageNet-R",
        ablation_r,
        grid("accuracy", "ece", "forwards", "backwards"),
        "ε is as in imagenet-r, so that the last row is the one of EATA-C there.",
        needs="--scale paper --data imagenet-r:FOLDER",
        data=("imagenet-r",),
    ),
    Recipe(
        "efficiency",
        "Table 7: time and peak memory",
        efficiency,
        grid("accuracy", "time", "memory"),
        "1 ms per image is 50 s for the paper's 50,000 images. With replay-subset, EATA runs selected samples again "
        "with a graph, as the paper's very likely does; otherwise all samples are in one graph. The last row is the "
        "memory that the Fisher regulariser adds, 9.8 MB in the paper; without a GPU that of its tensors alone.",
    ),
    Recipe(
        "forgetting",
        "Figures 3, F and G: clean accuracy along the stream, levels 1 to 5",
        forgetting,
        by_domain("forgetting"),
    ),
    Recipe("backwards", "Figure D: backward passes by corruption and level", backwards, by_domain("backwards")),
    Recipe("calibration", "Figure 10: calibration by confidence, fog, level 5", in_fog, calibration),
    Recipe(
        "sweep-e0",
        "Figure 4: E0",
        swept("resnet", "eata", "margin", 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
        sweep("E0 / ln C", "accuracy", "ece", "backwards"),
    ),
    Recipe(
        "sweep-epsilon",
        "Figure 5: ε",
        swept("resnet", "eata", "epsilon", 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08),
        sweep("ε at 1,000 classes", "accuracy", "ece", "backwards"),
        "With fewer classes ε grows as 1/√C.",
    ),
    Recipe(
        "sweep-fisher", "Figure 6: images for the Fisher importance", fisher_images, sweep("Q", "accuracy", "clean")
    ),
    Recipe(
        "sweep-alpha",
        "Figure 7: α, the weight of the min-max entropy",
        swept("vit", "eata-c", "alpha", 0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
        sweep("α", "accuracy", "ece"),
    ),
    Recipe(
        "sweep-beta",
        "Figure 8: β, the weight of the Fisher regulariser",
        swept("vit", "eata-c", "beta", 0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 140.0),
        sweep("β", "accuracy", "ece", "clean"),
    ),
    Recipe(
        "sweep-drop",
        "Figure 9: the sub-network's drop ratio",
        swept("vit", "eata-c", "drop", 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
        sweep("drop ratio", "accuracy", "ece"),
    ),
    Recipe(
        "tune",
        "Beyond the paper: choose learning rates on other images and other corruptions than those of the tables",
        tune,
        trials,
        "The most accurate setting is chosen, of those within 0.1 points the one with the lowest ECE; one that loses "
        "more than a point of clean accuracy is excluded. Slow methods see fewer images.",
        needs="a scale with images apart for choosing settings: imagenet-5k or tiny-imagenet",
        apart=True,
    ),
    Recipe(
        "hostile",
        "Beyond the paper: streams that break methods, without and with a guard",
        hostile_streams,
        hostile,
        "Points above or below the source network, without → with a guard; the row Source has accuracies. Four "
        "corruptions at severity 3; some streams begin with clean images.",
    ),
    Recipe(
        "directions",
        "Eq. (10) in both directions, lifelong",
        directions,
        grid("accuracy", "ece"),
        "s is the sub-network's prediction. Gradients go through s alone in the first, through both in the second.",
    ),
    Recipe(
        "rates",
        "Beyond the paper: multiples of the learning rate, lifelong",
        rates,
        sweep("times the usual learning rate", "accuracy", "ece", xscale="log"),
        "It shows whether a preset suits a network, on the grid of the recipe tune; β stays as it is.",
    ),
    Recipe(
        "slow-rates",
        "Beyond the paper: learning rates of slow methods",
        slow_rates,
        sweep("learning rate", "accuracy", "ece", xscale="log"),
        "Rates of Adam, for CIFAR-10. Use fewer --images to save time; high rates lose more on longer streams.",
    ),
    Recipe(
        "drop-rates",
        "Beyond the paper: EATA-C's drop ratio by its learning rate, lifelong",
        drop_rates,
        sweep("drop ratio", "accuracy", "ece"),
        "A higher drop ratio also raises the loss, which acts like a higher rate; the recipe separates the two.",
    ),
    Recipe(
        "held-out",
        "Figure 11a: the adapted network on a held-out fifth",
        studied(studies.held_out, 2, LOSSES),
        curves("batches", accuracy=("Acc. (%)", 100), ece=("ECE (%)", 100)),
    ),
    Recipe("stability", "Figure 11b and c: learning rates by steps per batch", stability, heat_maps("lr")),
    Recipe(
        "indicator",
        "Table 8: the data-uncertainty indicator along the stream",
        studied(studies.indicator, 10, {"EATAC": ("eata-c", {})}),
        indicators,
    ),
    Recipe(
        "uncertain",
        "Figure C: samples with disagreeing predictions along the stream, adapting by consistency alone",
        studied(studies.indicator, 10, CONSISTENCY),
        curves("batches", uncertain=("#Uncertain", 1), right=("misclassified among them (%)", 100)),
    ),
    Recipe(
        "entropy-share",
        "Figure 2: adapting to the samples of highest or lowest entropy",
        entropy_shares,
        measured_grid(PERCENT, "share of samples (%)"),
    ),
    Recipe(
        "parameters",
        "Table D: norm layers alone, or all parameters",
        parameters,
        measured_grid({"loss": ("Loss", ".3f", 1), **PERCENT, **COST}),
    ),
    Recipe("selected", "Figure E: samples that are selected, and samples that are not", selected, pictures),
    Recipe("toy", "Figure B: sub-networks disagree near the decision boundary", toy, boundaries),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by its name on the command line."""
