"""The paper's tables and figures, each as cases and a form. Titles say where in the paper they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from ..bench.plan import Plan, PlanError
from ..methods import METHODS
from . import studies
from .layouts import (
    Layout,
    boundaries,
    by_domain,
    calibration,
    curves,
    grid,
    heat_maps,
    indicators,
    measured_grid,
    pictures,
    sweep,
    whole_table,
)
from .recipe import Case, Recipe
from .scales import SCALES, Kind, Scale

__all__ = ["RECIPES"]

RECIPES: dict[str, Recipe] = {}
"""Every recipe by its name on the command line."""

NETWORKS: Sequence[Kind] = ("resnet", "vit")
OURS = ("source", "tent", "eata", "eata-c")


def recipe(name: str, title: str, form: Layout, note: str = "") -> Callable[[Callable[[Scale], Iterable[Case]]], None]:
    """Register what a function of a scale names."""

    def register(cases: Callable[[Scale], Iterable[Case]]) -> None:
        RECIPES[name] = Recipe(name, title, cases, form, note)

    return register


def shown(method: str) -> str:
    """A method's name in tables."""
    return METHODS[method].__name__


def noise(scale: Scale, network: Kind, method: str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
    """A method on Gaussian noise alone."""
    usual: dict[str, Any] = {"shifts": ("gaussian_noise",), "scenario": "single-domain", "probe": "none"}
    return scale.plan(network, method, arguments=arguments, **{**usual, **fields})


def tuned(scale: Scale, network: Kind, method: str, scenario: str = "lifelong", **arguments: Any) -> Plan:
    """A method with arguments of its own on every corruption."""
    return scale.plan(network, method, arguments=arguments, scenario=scenario, probe="none")


# Comparisons -------------------------------------------------------------------------------------------------------


def everything(scale: Scale, scenario: str) -> Iterator[Case]:
    """All methods for classification, on both networks; those that take long on fewer images.

    Of a method that starts anew with each image, one run serves every scenario.
    """
    for network in NETWORKS:
        methods = [name for name, method in METHODS.items() if method.task != "segmentation"]
        if network == "vit":
            methods.remove("bn-adapt")
        rest = [name for name in methods if name not in scale.few]
        yield Case("all", scale.plan(network, *rest, scenario=scenario, probe="none"), network)
        for name in methods:
            if name in scale.few:
                own, home = ("lifelong", "lifelong") if METHODS[name].episodic else (scenario, "")
                plan = scale.plan(network, name, scenario=own, probe="none", images=few(scale, name))
                yield Case(shown(name), plan, network, home=home)


def few(scale: Scale, method: str) -> int | None:
    """How many images of each domain a method takes."""
    most = scale.few.get(method)
    whole: int | None = scale.fields.get("images")
    return whole if most is None else min(most, whole or most)


@recipe("lifelong", "Table 2: ImageNet-C, level 5, lifelong", whole_table)
def _(scale: Scale) -> Iterator[Case]:
    return everything(scale, "lifelong")


@recipe("single-domain", "Table A: ImageNet-C, level 5, one domain at a time", whole_table)
def _(scale: Scale) -> Iterator[Case]:
    return everything(scale, "single-domain")


@recipe("imagenet-r", "Table 3: ImageNet-R", whole_table, "It needs --scale paper --data imagenet-r:FOLDER.")
def _(scale: Scale) -> Iterator[Case]:
    if not scale.data.startswith("imagenet-r:"):
        raise PlanError("the recipe imagenet-r needs --scale paper --data imagenet-r:FOLDER")
    unscaled = {name: {"epsilon": 0.05} for name in ("eta", "eata", "rdumb")}  # as the paper has it, for 200 classes
    settings: dict[Kind, dict[str, dict[str, float]]] = {
        "resnet": {**unscaled, "eta-c": {"epsilon": 0.07}, "eata-c": {"epsilon": 0.07}},
        "vit": {**unscaled, "eta-c": {"epsilon": 0.05}, "eata-c": {"epsilon": 0.05}},
    }
    for case in everything(replace(scale, settings=settings), "single-domain"):
        yield replace(case, home="")  # of other data


@recipe("mixed", "Table 9: fifteen corruptions mixed, levels 3 and 5", grid("accuracy", "ece"))
def _(scale: Scale) -> Iterator[Case]:
    for level, method in product((3, 5), OURS):
        plan = scale.plan("vit", method, scenario="mixed", severity=level, probe="none")
        yield Case(shown(method), plan, f"level {level}")


@recipe(
    "components",
    "Table 5: the parts of S(x)",
    grid("accuracy", "backwards"),
    "The paper's caption says ResNet-50, and its first row is Tent's on ViT-Base: both are here.",
)
def _(scale: Scale) -> Iterator[Case]:
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "S(x) = 1": ("tent", {}),
        "S_ent(x)": ("eta", {"select": "reliable"}),
        "S(x)": ("eta", {}),
    }
    for network, level in product(NETWORKS, (3, 5)):
        for row, (method, arguments) in parts.items():
            yield Case(row, noise(scale, network, method, arguments, severity=level), f"{network}, level {level}")


LEFT_OUT: dict[str, dict[str, Any]] = {
    "CL": {"weight": 0.0},
    "ER": {"alpha": 0.0},
    "FR": {"beta": 0.0},
    "SS": {"select": "everything"},
}
"""How a part of EATA-C is left out: consistency loss, entropy and Fisher regulariser, sample selection."""


@recipe(
    "ablation",
    "Tables 6 and C: the parts of EATA-C",
    grid("accuracy", "ece", "forwards", "backwards"),
    "CL: consistency loss, ER: min-max entropy, FR: Fisher regulariser, SS: sample selection. In the paper's table of "
    "ResNet-50 the row Source is ViT-Base's; Table C has ImageNet-R, too.",
)
def _(scale: Scale) -> Iterator[Case]:
    for network in NETWORKS:
        yield Case("Source", scale.plan(network, "source", scenario="single-domain", probe="none"), network)
        losses = (("CL",), ("ER",), ("CL", "ER"))
        experiments = product(((), ("SS",)), ((), ("FR",)), losses)
        for number, (selection, fisher, loss) in enumerate(experiments, 1):
            parts = (*loss, *fisher, *selection)
            arguments = {k: v for part, off in LEFT_OUT.items() if part not in parts for k, v in off.items()}
            plan = tuned(scale, network, "eata-c", "single-domain", **arguments)
            yield Case(f"{number}: {' '.join(parts)}", plan, network)


@recipe(
    "efficiency",
    "Table 7: time and peak memory",
    grid("accuracy", "time", "memory"),
    "A millisecond an image is 50 s for the paper's 50,000.",
)
def _(scale: Scale) -> Iterator[Case]:
    methods = ("source", "tent", "sar", "roid", "cotta", "tea", "memo", "eata", "eata-c")
    for network in NETWORKS:
        for method in methods:
            yield Case(shown(method), noise(scale, network, method, images=few(scale, method)), network)
        for method in ("eata", "eata-c"):
            plan = noise(scale, network, method, {"epsilon": scale.epsilon(0.02)})
            yield Case(f"{shown(method)}, ε = 0.02", plan, network)


@recipe("forgetting", "Figures 3, F and G: clean accuracy along the stream, levels 1 to 5", by_domain("forgetting"))
def _(scale: Scale) -> Iterator[Case]:
    methods = ("source", "tent", "eata")
    whole = min(scale.clean, scale.fields.get("probe_images", scale.clean))
    for level, scenario, method in product((5, 1, 2, 3, 4), ("single-domain", "lifelong"), methods):
        plan = scale.plan("resnet", method, scenario=scenario, severity=level, probe="readapt", probe_images=whole)
        yield Case(shown(method), plan, f"level {level}, {scenario}")


@recipe("backwards", "Figure D: backward passes by corruption and level", by_domain("backwards"))
def _(scale: Scale) -> Iterator[Case]:
    for level, method in product((1, 2, 3, 4, 5), ("tent", "eta")):
        plan = scale.plan("resnet", method, scenario="single-domain", severity=level, probe="none")
        yield Case(shown(method), plan, f"level {level}")


@recipe("calibration", "Figure 10: calibration by confidence, fog, level 5", calibration)
def _(scale: Scale) -> Iterator[Case]:
    for method in OURS:
        yield Case(shown(method), noise(scale, "vit", method, shifts=("fog",)))


# Sweeps ------------------------------------------------------------------------------------------------------------


def swept(scale: Scale, network: Kind, method: str, name: str, values: Sequence[float]) -> Iterator[Case]:
    """A method on Gaussian noise, with an argument at several values."""
    for value in values:
        number = scale.epsilon(value) if name == "epsilon" else value
        yield Case(shown(method), noise(scale, network, method, {name: number}, probe="snapshot"), x=value)


@recipe("sweep-e0", "Figure 4: E0", sweep("E0 / ln C", "accuracy", "ece", "backwards"))
def _(scale: Scale) -> Iterator[Case]:
    return swept(scale, "resnet", "eata", "margin", (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55))


@recipe(
    "sweep-epsilon",
    "Figure 5: ε",
    sweep("ε at 1,000 classes", "accuracy", "ece", "backwards"),
    "ε grows as 1/√C where there are fewer classes.",
)
def _(scale: Scale) -> Iterator[Case]:
    return swept(scale, "resnet", "eata", "epsilon", (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08))


@recipe("sweep-fisher", "Figure 6: images for the Fisher importance", sweep("Q", "accuracy", "clean"))
def _(scale: Scale) -> Iterator[Case]:
    yield Case("ETA", noise(scale, "resnet", "eta", probe="snapshot"), x=0)
    for count in (200, 300, 500, 700, 1000, 1500, 2000, 3000):
        if count <= scale.clean:
            yield Case("EATA", noise(scale, "resnet", "eata", probe="snapshot", source_images=count), x=count)


@recipe("sweep-alpha", "Figure 7: α, the weight of the min-max entropy", sweep("α", "accuracy", "ece"))
def _(scale: Scale) -> Iterator[Case]:
    return swept(scale, "vit", "eata-c", "alpha", (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3))


@recipe("sweep-beta", "Figure 8: β, the weight of the Fisher regulariser", sweep("β", "accuracy", "ece", "clean"))
def _(scale: Scale) -> Iterator[Case]:
    return swept(scale, "vit", "eata-c", "beta", (0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 140.0))


@recipe("sweep-drop", "Figure 9: the sub-network's drop ratio", sweep("drop ratio", "accuracy", "ece"))
def _(scale: Scale) -> Iterator[Case]:
    return swept(scale, "vit", "eata-c", "drop", (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4))


def rate(scale: Scale, network: Kind, method: str, times: float) -> float:
    """A multiple of the learning rate that a method has at a scale."""
    preset = METHODS[method].presets[scale.presets[network]]
    usual = scale.settings.get(network, {}).get(method, {}).get("lr", preset["lr"])
    return float(f"{times * usual:.3g}")


@recipe(
    "rates",
    "Beyond the paper: multiples of the learning rate, lifelong",
    sweep("times the usual learning rate", "accuracy", "ece", xscale="log"),
    "It shows whether a preset suits a network; β stays as it is.",
)
def _(scale: Scale) -> Iterator[Case]:
    for network, method, times in product(NETWORKS, ("tent", "eata", "eata-c"), (0.05, 0.2, 1.0, 5.0, 30.0)):
        plan = tuned(scale, network, method, lr=rate(scale, network, method, times))
        yield Case(shown(method), plan, network, times)


@recipe(
    "slow-rates",
    "Beyond the paper: learning rates of methods that take long",
    sweep("learning rate", "accuracy", "ece", xscale="log"),
    "Rates of Adam, for CIFAR-10. Give fewer --images, but a long stream loses more at high rates.",
)
def _(scale: Scale) -> Iterator[Case]:
    for scenario, network, method in product(("lifelong", "single-domain"), NETWORKS, ("cotta", "tea")):
        for lr in (1e-6, 1e-5, 1e-4, 1e-3):
            plan = tuned(scale, network, method, scenario, lr=lr)
            yield Case(shown(method), plan, f"{network}, {scenario}", lr)


@recipe(
    "drop-rates",
    "Beyond the paper: EATA-C's drop ratio by its learning rate, lifelong",
    sweep("drop ratio", "accuracy", "ece"),
    "A sub-network that differs more has the greater loss, so that it is a higher rate, too: it shows what is left.",
)
def _(scale: Scale) -> Iterator[Case]:
    for network, times, drop in product(NETWORKS, (0.3, 1.0, 3.0), (0.1, 0.2, 0.4, 0.6, 0.8)):
        plan = tuned(scale, network, "eata-c", drop=drop, lr=rate(scale, network, "eata-c", times))
        yield Case(f"{times:g} × the rate", plan, network, drop)


# Studies -----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Tent": ("tent", {}),
    "consistency alone": ("eta-c", {"alpha": 0.0, "select": "everything"}),
}
"""Entropy, or L_c, on every sample."""


@recipe(
    "held-out",
    "Figure 11a: the adapted network on a fifth that it did not see",
    curves("batches", accuracy=("Acc. (%)", 100), ece=("ECE (%)", 100)),
)
def _(scale: Scale) -> Iterator[Case]:
    for row, (method, arguments) in LOSSES.items():
        yield Case(row, noise(scale, "vit", method, arguments), measure=studies.held_out, times=2)


@recipe("stability", "Figure 11b and c: learning rates by steps a batch", heat_maps("lr"))
def _(scale: Scale) -> Iterator[Case]:
    for row, (method, arguments) in LOSSES.items():
        for steps, factor in product((1, 2, 3, 4, 5), (0.1, 0.3, 1.0, 3.0)):
            lr = rate(scale, "vit", method, factor)
            plan = noise(scale, "vit", method, {**arguments, "lr": lr})
            yield Case(row, plan, f"{steps} step{'s' * (steps > 1)}", lr, studies.several_steps(steps), steps)


@recipe("indicator", "Table 8: the data-uncertainty indicator along the stream", indicators)
def _(scale: Scale) -> Iterator[Case]:
    yield Case("EATAC", noise(scale, "vit", "eata-c"), measure=studies.indicator, times=10)


@recipe(
    "uncertain",
    "Figure C: samples of disagreeing predictions along the stream, adapting by consistency alone",
    curves("batches", uncertain=("#Uncertain", 1), right=("misclassified among them (%)", 100)),
)
def _(scale: Scale) -> Iterator[Case]:
    row, method = "consistency alone", LOSSES["consistency alone"]
    yield Case(row, noise(scale, "vit", *method), measure=studies.indicator, times=10)


@recipe(
    "entropy-share",
    "Figure 2: adapting to the samples of highest or lowest entropy",
    measured_grid("share of samples (%)", accuracy=("Acc.", ".1f", 100), ece=("ECE", ".1f", 100)),
)
def _(scale: Scale) -> Iterator[Case]:
    ends: tuple[Literal["highest", "lowest"], ...] = ("highest", "lowest")
    for which, percent in product(ends, range(10, 101, 10)):
        measure = studies.entropy_share(which, percent)
        yield Case(f"{which} entropy", noise(scale, "resnet", "tent", severity=3), x=percent, measure=measure, times=2)


@recipe(
    "parameters",
    "Table D: norm layers alone, or all parameters",
    measured_grid(
        loss=("Loss", ".3f", 1),
        accuracy=("Acc.", ".1f", 100),
        ece=("ECE", ".1f", 100),
        seconds=("Time (s)", ".1f", 1),
        gpu_memory=("Mem. (MB)", ",.0f", 1),
    ),
)
def _(scale: Scale) -> Iterator[Case]:
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "Source": ("source", {}),
        "SAR": ("sar", {}),
        "EATAC†, all parameters": ("eata-c", {"parameters": "all"}),
        "EATAC": ("eata-c", {}),
    }
    for row, (method, arguments) in rows.items():
        yield Case(row, noise(scale, "vit", method, arguments), measure=studies.with_divergence(), times=2)


@recipe("selected", "Figure E: samples that are selected, and samples that are not", pictures)
def _(scale: Scale) -> Iterator[Case]:
    once = scale.on(seeds=scale.fields.get("seeds", (0,))[:1])
    yield Case("ETA", noise(once, "vit", "eta", {"select": "reliable"}), measure=studies.selected)


@recipe("toy", "Figure B: sub-networks disagree near the decision boundary", boundaries)
def _(scale: Scale) -> Iterator[Case]:
    once = SCALES["digits"].on(seeds=scale.fields.get("seeds", (0,))[:1])  # of which it needs nothing
    yield Case("toy", noise(once, "vit", "source", images=1), measure=studies.boundary)
