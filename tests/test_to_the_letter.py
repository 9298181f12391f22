"""The paper to the letter: its experiments, its settings and its numbers, written down from the paper itself.

Nothing here is derived from the library: each table repeats what the paper says, and the library must agree with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from networks import make, stream
from test_eata_c import BRANCHES
from torch.optim import SGD, Adam, AdamW

from acclimate.bench.plan import Plan
from acclimate.core.adapter import Adapter
from acclimate.methods import METHODS
from acclimate.paper.published import notes_beside, paper_rows, paper_table_of
from acclimate.paper.recipes import RECIPES
from acclimate.paper.scales import SCALES

# Experiments ----------------------------------------------------------------------------------------------------------

R50 = "timm:resnet50.tv_in1k"
VIT = "timm:vit_base_patch16_224.augreg_in21k_ft_in1k@imagenet"
B5 = "hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"
PRESET = {R50: "resnet50", VIT: "vit-base", B5: "segformer-b5"}
DATA = {"imagenet-r": "imagenet-r:/r", "ablation-r": "imagenet-r:/r", "acdc": "acdc:/acdc,/cityscapes"}

Experiment = tuple[Any, ...]


def on(
    network: str,
    method: str,
    scenario: str = "single-domain",
    *,
    level: int = 5,
    domain: str | None = None,
    probe: str = "none",
    x: float | None = None,
    images: int = 2000,
    study: tuple[Any, ...] = (),
    **settings: Any,
) -> Experiment:
    """One experiment; without a domain it is on all fifteen corruptions. `images` are those for Fisher's importance."""
    shifts = None if domain is None else (domain,)
    return network, method, scenario, level, shifts, probe, images, x, study, tuple(sorted(settings.items()))


def experiments(recipe: str) -> list[Experiment]:
    """What a recipe runs at the paper's scale."""
    found = []
    for case in RECIPES[recipe].plans(SCALES["paper"].on(data=DATA.get(recipe, "imagenet-c:/c,/clean"))):
        plan, measure = case.plan, case.measure
        if recipe != "toy":
            assert plan.preset == PRESET[plan.model]
            assert plan.data == DATA.get(recipe, "imagenet-c:/c,/clean")
            assert plan.batch_size == (1 if recipe == "acdc" else 64)
            assert plan.images is None, "all images of a domain"
        study: tuple[Any, ...] = ()
        if isinstance(measure, partial):
            study = measure.func.__name__, *sorted(measure.keywords.items())
        elif measure is not None:
            study = (measure.__name__,)
        for method in plan.methods:
            settings = tuple(sorted(plan.overrides.get(method, {}).items()))
            shifts = None if plan.shifts is None else tuple(plan.shifts)
            protocol = plan.scenario, plan.severity, shifts, plan.probe, plan.source_images
            found.append((plan.model, method, *protocol, case.x, study, settings))
    return found


EVERY = "source bn-adapt tent memo cotta sar roid rdumb tea eta eata eta-c eata-c".split()  # noqa: SIM905
OF_VIT = [method for method in EVERY if method != "bn-adapt"]
OURS = ("source", "tent", "eata", "eata-c")
NOISE = "gaussian_noise"
OFF = {"CL": {"weight": 0.0}, "ER": {"alpha": 0.0}, "FR": {"beta": 0.0}, "SS": {"select": "everything"}}
ABLATIONS = ["CL", "ER", "CL ER", "CL FR", "ER FR", "CL ER FR", "CL SS", "ER SS", "CL ER SS", "CL FR SS", "ER FR SS"]
ABLATIONS += ["CL ER FR SS"]


def ablated(parts: str) -> dict[str, Any]:
    return {k: v for part, off in OFF.items() if part not in parts.split() for k, v in off.items()}


def epsilons(network: str, method: str) -> dict[str, float]:
    """ImageNet-R: ε is 0.05, and 0.07 for EATA-C on ResNet-50, and does not grow because there are 200 classes."""
    if method in ("eta", "eata", "rdumb", "eta-c", "eata-c"):
        return {"epsilon": 0.07 if network == R50 and method.endswith("-c") else 0.05}
    return {}


LOSSES = {"tent": {}, "eta-c": {"alpha": 0.0, "select": "everything"}}
"""Figure 11: entropy minimisation, and the consistency loss alone."""
LEARNING_RATE = {"tent": 1e-3, "eta-c": 0.1}

PAPER: dict[str, Iterable[Experiment]] = {
    "lifelong": [on(R50, m, "lifelong") for m in EVERY] + [on(VIT, m, "lifelong") for m in OF_VIT],
    "single-domain": [on(R50, m) for m in EVERY] + [on(VIT, m) for m in OF_VIT],
    "imagenet-r": [on(R50, m, **epsilons(R50, m)) for m in EVERY] + [on(VIT, m, **epsilons(VIT, m)) for m in OF_VIT],
    "acdc": [on(B5, m, "rounds", images=20) for m in ("source", "bn-adapt", "tent", "cotta", "dat", "eata", "eata-c")],
    "mixed": [on(VIT, m, "mixed", level=level) for level in (3, 5) for m in OURS],
    "components": [
        on(network, method, level=level, domain=NOISE, **settings)
        for network in (R50, VIT)
        for level in (3, 5)
        for method, settings in (("tent", {}), ("eta", {"select": "reliable"}), ("eta", {}))
    ],
    "ablation": [on(net, "source") for net in (R50, VIT)]
    + [on(net, "eata-c", **ablated(parts)) for net in (R50, VIT) for parts in ABLATIONS],
    "ablation-r": [on(R50, "source")] + [on(R50, "eata-c", epsilon=0.07, **ablated(parts)) for parts in ABLATIONS],
    "efficiency": [
        *(
            on(net, m, domain=NOISE)
            for net in (R50, VIT)
            for m in ("source", "tent", "sar", "roid", "cotta", "tea", "memo", "eata", "eata-c")
        ),
        *(on(net, m, domain=NOISE, epsilon=0.02) for net in (R50, VIT) for m in ("eata", "eata-c")),
        *(on(net, "eata", domain=NOISE, strategy="replay-subset") for net in (R50, VIT)),
        *(on(net, "eata", domain=NOISE, strategy="replay-subset", epsilon=0.02) for net in (R50, VIT)),
        *(on(net, "eata", domain=NOISE, study=("regulariser",)) for net in (R50, VIT)),
    ],
    "forgetting": [
        on(R50, m, scenario, level=level, probe="readapt")
        for level in (1, 2, 3, 4, 5)
        for scenario in ("single-domain", "lifelong")
        for m in ("source", "tent", "eata")
    ],
    "backwards": [on(R50, m, level=level) for level in (1, 2, 3, 4, 5) for m in ("tent", "eta")],
    "calibration": [on(VIT, m, domain="fog") for m in OURS],
    "sweep-e0": [
        on(R50, "eata", domain=NOISE, probe="snapshot", x=e, margin=e)
        for e in (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55)
    ],
    "sweep-epsilon": [
        on(R50, "eata", domain=NOISE, probe="snapshot", x=e, epsilon=e)
        for e in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
    ],
    "sweep-fisher": [
        on(R50, "eta", domain=NOISE, probe="snapshot", x=0),
        *(
            on(R50, "eata", domain=NOISE, probe="snapshot", x=q, images=q)
            for q in (200, 300, 500, 700, 1000, 1500, 2000, 3000)
        ),
    ],
    "sweep-alpha": [
        on(VIT, "eata-c", domain=NOISE, probe="snapshot", x=a, alpha=a)
        for a in (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
    ],
    "sweep-beta": [
        on(VIT, "eata-c", domain=NOISE, probe="snapshot", x=b, beta=b) for b in (0, 20, 40, 60, 80, 100, 120, 140)
    ],
    "sweep-drop": [
        on(VIT, "eata-c", domain=NOISE, probe="snapshot", x=d, drop=d)
        for d in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
    ],
    "held-out": [on(VIT, m, domain=NOISE, study=("held_out",), **own) for m, own in LOSSES.items()],
    "stability": [
        on(VIT, m, domain=NOISE, x=rate, lr=rate, study=("several_steps", ("steps", steps)), **own)
        for m, own in LOSSES.items()
        for steps in (1, 2, 3, 4, 5)
        for rate in (float(f"{factor * LEARNING_RATE[m]:.3g}") for factor in (0.1, 0.3, 1, 3))
    ],
    "indicator": [on(VIT, "eata-c", domain=NOISE, study=("indicator",))],
    "uncertain": [on(VIT, "eta-c", domain=NOISE, study=("indicator",), **LOSSES["eta-c"])],
    "entropy-share": [
        on(R50, "tent", level=3, domain=NOISE, x=p, study=("entropy_share", ("percent", p), ("which", which)))
        for which in ("highest", "lowest")
        for p in range(10, 101, 10)
    ],
    "parameters": [
        on(VIT, m, domain=NOISE, study=("divergence", ("drop", 0.2)), **own)
        for m, own in (("source", {}), ("sar", {}), ("eata-c", {"parameters": "all"}), ("eata-c", {}))
    ],
    "selected": [on(VIT, "eta", domain=NOISE, study=("selected",), select="reliable")],
}
"""Every table and figure: network, data, level, domains, scenario, methods, settings and probe."""

BEYOND = {"tune", "directions", "rates", "slow-rates", "drop-rates", "toy", "hostile"}
"""Not experiments of the paper; the toy figure has neither network nor data."""


@pytest.mark.parametrize("recipe", PAPER)
def test_a_recipe_is_the_papers_experiment(recipe: str) -> None:
    assert Counter(experiments(recipe)) == Counter(PAPER[recipe])


def test_every_recipe_of_the_paper_is_pinned() -> None:
    assert set(RECIPES) == set(PAPER) | BEYOND


PLACES = {
    "efficiency": {
        ("EATA", "resnet"): {},
        ("EATA, replay-subset", "resnet"): {"strategy": "replay-subset"},
        ("EATA, ε = 0.02", "vit"): {"epsilon": 0.02},
        ("EATA, replay-subset, ε = 0.02", "vit"): {"strategy": "replay-subset", "epsilon": 0.02},
        ("EATAC", "vit"): {},
        ("EATAC, ε = 0.02", "resnet"): {"epsilon": 0.02},
    },
    "components": {
        **{("S(x) = 1", f"{net}, level {level}"): {} for net in ("resnet", "vit") for level in (3, 5)},
        **{
            ("S_ent(x)", f"{net}, level {level}"): {"select": "reliable"}
            for net in ("resnet", "vit")
            for level in (3, 5)
        },
        **{("S(x)", f"{net}, level {level}"): {} for net in ("resnet", "vit") for level in (3, 5)},
    },
    "ablation": {
        (f"{i}: {parts}", net): ablated(parts) for i, parts in enumerate(ABLATIONS, 1) for net in ("resnet", "vit")
    },
    "parameters": {("EATAC†, all parameters", ""): {"parameters": "all"}, ("EATAC", ""): {}},
    "mixed": {(row, f"level {level}"): {} for row in ("Source", "Tent", "EATA", "EATAC") for level in (3, 5)},
}
"""Rows and columns of tables, and the settings that belong there."""


@pytest.mark.parametrize("recipe", PLACES)
def test_a_row_shows_what_it_says(recipe: str) -> None:
    cases = {(c.row, c.column): c.plan for c in RECIPES[recipe].plans(SCALES["paper"].on(data="imagenet-c:/c,/clean"))}
    for (row, column), settings in PLACES[recipe].items():
        plan = cases[row, column]
        (method,) = plan.methods
        assert plan.overrides.get(method, {}) == settings, (row, column)
        assert plan.model == (R50 if "resnet" in column else VIT), (row, column)
        if "level" in column:
            assert plan.severity == int(column[-1])
        title = {"source": "Source", "tent": "Tent", "eata": "EATA", "eata-c": "EATAC"}.get(method, "")
        assert recipe in ("components", "ablation") or row.partition(",")[0].rstrip("†") == title


def test_the_ablation_on_imagenet_r_shares_its_last_row() -> None:
    scale = SCALES["paper"].on(data="imagenet-r:/r")
    whole = next(case.plan for case in RECIPES["imagenet-r"].plans(scale) if case.plan.model == R50)
    (row,) = (case.plan for case in RECIPES["ablation-r"].plans(scale) if case.row == "12: CL ER FR SS")
    for name in ("model", "data", "scenario", "preset", "batch_size", "source_images", "images"):
        assert getattr(row, name) == getattr(whole, name)
    assert row.overrides["eata-c"] == whole.overrides["eata-c"] == {"epsilon": 0.07}
    (published,) = (r for r in paper_rows() if (r.data, r.network, r.method) == ("imagenet-r", "resnet50", "EATAC"))
    table = paper_table_of("ablation-r")
    assert table is not None
    assert table[1][-1] == ["12: CL ER FR SS", "47.1", "13.3", "35,122", "5,122"]
    assert (published.average, published.forwards, published.backwards) == ([47.1, 13.3], 35122, 5122)


def test_acdc_runs_ten_rounds() -> None:
    (case,) = RECIPES["acdc"].plans(SCALES["paper"].on(data="acdc:/acdc,/cityscapes"))
    assert case.plan.rounds == 10


def test_the_toy_needs_no_data() -> None:
    (case,) = RECIPES["toy"].plans(SCALES["paper"].on(data="imagenet-c:/c,/clean"))
    assert case.plan.data == "digits"


@pytest.mark.parametrize(
    ("name", "times"), [("rates", (1.0, 1 / 3, 3.0, 0.1, 10.0, 1 / 30)), ("drop-rates", (0.3, 1.0, 3.0))]
)
def test_rates_beyond_the_paper_are_multiples_of_the_presets(name: str, times: tuple[float, ...]) -> None:
    usual = {(R50, "tent"): 2.5e-4, (VIT, "tent"): 1e-3, (R50, "eata"): 2.5e-4, (VIT, "eata"): 1e-3}
    usual |= {(R50, "eata-c"): 5e-3, (VIT, "eata-c"): 0.1}
    drops = (0.1, 0.2, 0.4, 0.6, 0.8)
    rates = [(net, m, float(f"{t * lr:.3g}")) for (net, m), lr in usual.items() for t in times]
    expected = (
        [on(net, m, "lifelong", x=t, lr=float(f"{t * lr:.3g}")) for (net, m), lr in usual.items() for t in times]
        if name == "rates"
        else [on(net, m, "lifelong", x=d, lr=lr, drop=d) for net, m, lr in rates if m == "eata-c" for d in drops]
    )
    assert Counter(experiments(name)) == Counter(expected)


def test_slow_rates_beyond_the_paper() -> None:
    expected = [
        on(net, m, scenario, x=lr, lr=lr)
        for scenario, net, m, lr in product(
            ("lifelong", "single-domain"), (R50, VIT), ("cotta", "tea"), (1e-6, 1e-5, 1e-4, 1e-3)
        )
    ]
    assert Counter(experiments("slow-rates")) == Counter(expected)


# Settings -------------------------------------------------------------------------------------------------------------

SENTENCES = {
    "In EATA and ETA, the learning rate is 0.00025/0.001 for ResNet-50/ViT-Base on ImageNet, and 7.5e-5 on ACDC": {
        (method, network): {"lr": lr}
        for method in ("eta", "eata")
        for network, lr in (("resnet50", 2.5e-4), ("vit-base", 1e-3), ("segformer-b5", 7.5e-5))
    },
    "In EATA-C, the learning rate is 0.005/0.1 for ResNet-50/ViT-Base on ImageNet, and 0.0005 on ACDC": {
        (method, network): {"lr": lr}
        for method in ("eta-c", "eata-c")
        for network, lr in (("resnet50", 5e-3), ("vit-base", 0.1), ("segformer-b5", 5e-4))
    },
    "We use SGD as the update rule, with a momentum of 0.9": {
        (method, network): {"optimizer": SGD, "momentum": 0.9, "nesterov": False, "weight_decay": 0}
        for method in ("tent", "eta", "eata", "eta-c", "eata-c")
        for network in ("resnet50", "vit-base", "segformer-b5")
    },
    "The sub-network is obtained via stochastic depth with a drop ratio of 0.2/0.6 for ImageNet/ACDC": {
        ("eata-c", network): {"drop": drop, "smoothing": drop, "schedule": "linear", "per": "sample"}
        for network, drop in (("resnet50", 0.2), ("vit-base", 0.2), ("segformer-b5", 0.6))
    },
    "E0 is set to 0.4 ln C in classification experiments and 0.1 ln C in segmentation": {
        ("eata", network): {"margin": margin}
        for network, margin in (("resnet50", 0.4), ("vit-base", 0.4), ("segformer-b5", 0.1))
    },
    "We fix the similarity threshold to 0.05 for all experiments (not on ACDC: docs/faithful.md)": {
        ("eata", "resnet50"): {"select": "Reliable(0.4) * NonRedundant(Scaled(0.05))"},
        ("eata", "vit-base"): {"select": "Reliable(0.4) * NonRedundant(Scaled(0.05))"},
        ("eata", "segformer-b5"): {"select": "Reliable(0.1)"},
    },
    "The trade-off parameter β is set to 2,000/500 for ImageNet/ACDC": {
        ("eata", network): {"beta": beta}
        for network, beta in (("resnet50", 2000), ("vit-base", 2000), ("segformer-b5", 500))
    },
    "For EATA-C, E0 is set to 0.4/0.5 ln C, and ε is set to 0.05/0.07 for ViTBase/ResNet-50 on ImageNet": {
        ("eata-c", "vit-base"): {"select": "Reliable(0.4, weighted=False) * NonRedundant(Scaled(0.05))"},
        ("eata-c", "resnet50"): {"select": "Reliable(0.5, weighted=False) * NonRedundant(Scaled(0.07))"},
    },
    "We set β to 50/500 on ImageNet/ACDC and α to 0.1 on ImageNet": {
        ("eata-c", "resnet50"): {"beta": 50, "alpha": 0.1},
        ("eata-c", "vit-base"): {"beta": 50, "alpha": 0.1},
        ("eata-c", "segformer-b5"): {"beta": 500},
    },
    "For semantic segmentation, EATA-C does not perform min-max entropy regularization and active sample selection": {
        ("eata-c", "segformer-b5"): {"alpha": 0, "select": "Everything()"},
    },
    "For BN adaptation, both the batch size B and prior strength N are set to 64 (on ACDC 52.0 is batch statistics)": {
        ("bn-adapt", "resnet50"): {"prior": 64},
        ("bn-adapt", "segformer-b5"): {"prior": 0},
    },
    "The learning rate in CoTTA for ViTBase is set to 0.005, and the augmentation threshold p_th is set to 0.1": {
        ("cotta", "vit-base"): {"lr": 5e-3, "threshold": 0.1},
        ("cotta", "resnet50"): {"lr": 0.01, "threshold": 0.1},
    },
    "CoTTA's own paper and program": {
        ("cotta", "resnet50"): {
            "momentum_": 0.999,
            "restoration": 0.001,
            "views": 32,
            "optimizer": SGD,
            "nesterov": True,
        },
        ("cotta", "segformer-b5"): {"optimizer": Adam, "lr": 7.5e-6, "threshold": 0.69, "restoration": 0.01}
        | {"ratios": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)},
    },
    "TEA uses SGD with a learning rate of 0.00025/0.005 for ResNet-50/ViT-Base": {
        ("tea", "resnet50"): {"lr": 2.5e-4, "optimizer": SGD, "steps": 20, "step_size": 0.1, "noise": 0.01},
        ("tea", "vit-base"): {"lr": 5e-3, "optimizer": SGD, "buffer": 10_000, "renewal": 0.05},
    },
    "The learning rate of Tent is set to 0.00025/0.001 for ResNet-50/ViTBase; the same as our EATA": {
        ("tent", network): {"lr": lr}
        for network, lr in (("resnet50", 2.5e-4), ("vit-base", 1e-3), ("segformer-b5", 7.5e-5))
    },
    "MEMO's own paper": {
        ("memo", "resnet50"): {"lr": 2.5e-4, "optimizer": SGD, "momentum": 0, "views": 64, "prior": 16},
        ("memo", "vit-base"): {"lr": 1e-5, "optimizer": AdamW, "weight_decay": 0.01, "views": 64},
    },
    "SAR's own paper": {
        ("sar", "resnet50"): {
            "lr": 2.5e-4,
            "margin": 0.4,
            "rho": 0.05,
            "floor": 0.2,
            "optimizer": SGD,
            "momentum": 0.9,
        },
        ("sar", "vit-base"): {"lr": 1e-3, "margin": 0.4, "rho": 0.05, "floor": 0.2},
        ("sar", "segformer-b5"): {"lr": 7.5e-5},
    },
    "ROID's own paper": {
        ("roid", network): {"lr": 2.5e-4, "optimizer": SGD, "nesterov": True, "temperature": 1 / 3, "momentum_": 0.99}
        for network in ("resnet50", "vit-base")
    },
    "RDumb's own paper": {
        ("rdumb", "resnet50"): {"lr": 2.5e-4, "every": 1000},
        ("rdumb", "vit-base"): {"lr": 1e-3, "every": 1000},
    },
    "DAT's own paper and program": {
        ("dat", "segformer-b5"): {"optimizer": Adam, "lr": 2.5e-4, "momentum_": 0.999, "threshold": 0.69}
        | {"uncertain": 0.85, "certain": 0.99, "share": 0.001, "search": 100}
        | {"ratios": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)},
    },
    "On ACDC the one BatchNorm layer keeps its source statistics (docs/faithful.md)": {
        (method, "segformer-b5"): {"statistics": "source"}
        for method in ("tent", "sar", "rdumb", "cotta", "dat", "eta", "eata", "eta-c", "eata-c")
    },
}
"""The settings by sentence of the paper; `momentum_` is an argument of the method, not of its optimizer."""


def built(method: str, network: str) -> Adapter:
    family = {"resnet50": "bn", "vit-base": "ln", "segformer-b5": "seg"}[network]
    arguments: dict[str, Any] = {"source": stream(1)} if method in ("eata", "eata-c") else {}
    if method.endswith("-c"):
        arguments["branches"] = BRANCHES.get(family, BRANCHES["bn"])
    return METHODS[method].preset(network, make(family), **arguments)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_preset_is_the_papers_sentence(sentence: str) -> None:
    for (method, network), settings in SENTENCES[sentence].items():
        adapter = built(method, network)
        group = adapter.optimizer.param_groups[0] if adapter.optimizer is not None else {}
        for name, value in settings.items():
            found: Any = getattr(adapter, name.rstrip("_"), None)
            if name in ("lr", "momentum", "nesterov", "weight_decay"):
                found = group[name]
            elif name == "optimizer":
                found = type(adapter.optimizer)
            elif name == "select":
                found = repr(adapter.select)
            assert found == value, (method, network, name)


def test_samples_for_the_importance() -> None:
    """We use 2,000/20 samples for ImageNet/ACDC to calculate ω."""
    assert Plan(data="imagenet-c:/c").source_images == 2000
    assert Plan(data="acdc:/acdc,/cityscapes").source_images == 20
    assert Plan(data="corrupted:cityscapes:/c").source_images == 20


# Published numbers ----------------------------------------------------------------------------------------------------

TABLES = {
    "components": """
        S(x) = 1 | 68.8 | 50,000 | 33.4 | 50,000
        S_ent(x) | 70.7 | 45,302 | 49.6 | 37,636
        S(x) | 70.8 | 36,057 | 50.4 | 28,168""",
    "ablation": """
        Source | 39.8 | 7.5 | 50,000 | 0 | 39.8 | 7.5 | 50,000 | 0
        1: CL | 47.7 | 4.3 | 100,000 | 50,000 | 65.6 | 3.3 | 100,000 | 50,000
        2: ER | 44.0 | 5.2 | 100,000 | 50,000 | 53.4 | 4.1 | 100,000 | 50,000
        3: CL ER | 48.6 | 4.3 | 100,000 | 50,000 | 65.9 | 2.5 | 100,000 | 50,000
        4: CL FR | 47.5 | 3.7 | 100,000 | 50,000 | 66.0 | 3.3 | 100,000 | 50,000
        5: ER FR | 43.4 | 4.2 | 100,000 | 50,000 | 53.0 | 4.5 | 100,000 | 50,000
        6: CL ER FR | 48.5 | 3.8 | 100,000 | 50,000 | 66.4 | 2.6 | 100,000 | 50,000
        7: CL SS | 48.9 | 5.9 | 83,583 | 33,583 | 65.6 | 4.4 | 83,182 | 33,182
        8: ER SS | 42.9 | 4.4 | 74,705 | 24,705 | 52.9 | 3.4 | 73,323 | 23,323
        9: CL ER SS | 48.9 | 5.4 | 82,882 | 32,882 | 65.3 | 3.4 | 82,015 | 32,015
        10: CL FR SS | 48.8 | 5.1 | 82,952 | 32,952 | 66.2 | 4.3 | 83,429 | 33,429
        11: ER FR SS | 42.3 | 3.8 | 74,226 | 24,226 | 53.2 | 3.4 | 73,723 | 23,723
        12: CL ER FR SS | 49.0 | 4.6 | 82,492 | 32,492 | 65.9 | 3.3 | 82,364 | 32,364""",
    "ablation-r": """
        Source | 38.0 | 17.7 | 30,000 | 0
        1: CL | 46.2 | 13.1 | 60,000 | 30,000
        2: ER | 44.3 | 12.0 | 60,000 | 30,000
        3: CL ER | 47.0 | 12.1 | 60,000 | 30,000
        4: CL FR | 45.8 | 13.2 | 60,000 | 30,000
        5: ER FR | 43.9 | 12.3 | 60,000 | 30,000
        6: CL ER FR | 46.7 | 12.3 | 60,000 | 30,000
        7: CL SS | 46.9 | 14.4 | 35,147 | 5,147
        8: ER SS | 44.6 | 11.9 | 34,991 | 4,991
        9: CL ER SS | 46.8 | 13.4 | 35,137 | 5,137
        10: CL FR SS | 47.1 | 13.7 | 35,179 | 5,179
        11: ER FR SS | 44.6 | 12.1 | 34,935 | 4,935
        12: CL ER FR SS | 47.1 | 13.3 | 35,122 | 5,122""",
    "efficiency": """
        Source | 1.8 | 54.6 | 771.7 | 12.9 | 55.7 | 816.6
        Tent | 28.0 | 99.9 | 5417.6 | 33.4 | 106.1 | 7433.2
        SAR | 29.6 | 149.0 | 5417.7 | 43.1 | 167.3 | 7433.2
        ROID | 36.7 | 190.2 | 9315.3 | 48.8 | 181.6 | 12321.4
        CoTTA | 19.9 | 241.0 | 12196.7 | 45.6 | 229.9 | 22296.5
        TEA | 18.5 | 2266.1 | 15942.0 | 46.9 | – | –
        MEMO | 6.8 | 36329.2 | 8154.3 | 32.2 | 39918.8 | 11061.1
        EATA, ε = 0.02 | 35.2 | 93.0 | 2285.2 | 50.7 | 85.1 | 4234.6
        EATAC, ε = 0.02 | 35.9 | 95.2 | 2205.5 | 55.0 | 88.8 | 4014.4
        EATA | 35.6 | 106.5 | 3693.0 | 50.5 | 108.7 | 5887.6
        EATAC | 37.2 | 122.4 | 3358.7 | 56.8 | 114.9 | 5786.6""",
    "indicator": """
        Sub-network acc. (%) | 9.3 | 47.0 | 50.2 | 50.7 | 51.9 | 52.0
        #Uncertain | 26,144 | 15,697 | 14,682 | 14,149 | 13,648 | 13,722
        Indicator acc. (%) | 97.1 | 90.0 | 88.9 | 89.3 | 88.6 | 89.1""",
    "mixed": """
        Source | 63.0 | 39.8
        Tent | 69.8 | 47.0
        EATA | 71.1 | 58.2
        EATAC | 72.4 | 60.4""",
    "parameters": """
        Source | 0.565 | 12.9 | 14.2 | 55.7 | 816.6
        SAR | – | 43.1 | 8.0 | 167.3 | 7433.2
        EATAC†, all parameters | 0.437 | 56.0 | 5.9 | 140.9 | 9920.5
        EATAC | 0.451 | 56.8 | 5.2 | 114.9 | 5786.6""",
}
"""Tables 5, 6 and C, 7, 8, 9 and D, copied from the paper."""
BOTH = ("ResNet-50", "ViT-Base")
LEVELS = ("level 3", "level 5")
PASSES = ("Acc.", "ECE", "#Forwards", "#Backwards")
HEADERS = {
    "components": ["", *(f"{level} {head}" for level in LEVELS for head in ("Acc.", "#Backwards"))],
    "ablation": ["", *(f"{net} {head}" for net in BOTH for head in PASSES)],
    "ablation-r": ["", *(f"ResNet-50 {head}" for head in PASSES)],
    "efficiency": ["A100", *(f"{net} {head}" for net in BOTH for head in ("Acc.", "Time (s)", "Mem. (MB)"))],
    "indicator": ["ViT-Base", "Source", *(f"after {batches} batches" for batches in (150, 300, 450, 600, 750))],
    "mixed": ["ViT-Base", "level 3 Acc.", "level 5 Acc."],
    "parameters": ["ViT-Base", "Loss", "Acc.", "ECE", "Time (s)", "Mem. (MB)"],
}


@pytest.mark.parametrize("recipe", TABLES)
def test_a_published_table_is_the_papers(recipe: str) -> None:
    table = paper_table_of(recipe)
    assert table is not None
    header, rows = table
    assert header == HEADERS[recipe]
    assert rows == [[cell.strip() for cell in line.split("|")] for line in TABLES[recipe].strip().splitlines()]
    assert {len(row) for row in rows} == {len(header)}


def test_every_published_table_is_pinned() -> None:
    assert {name for name in RECIPES if paper_table_of(name)} == set(TABLES)
    ours = ["", "resnet Acc."], [["Source", "1.8"]]
    assert "9.8 MB" in notes_beside("efficiency", ours)


ROWS = "20e426a299556dd5"
"""Digest of all rows of Tables 2, 3, 4, A and B. The tests below compare them with the paper's source."""
SOURCE = Path(__file__).parents[2] / "shared" / "paper" / "eata-c.tex"


def test_published_rows_have_not_changed() -> None:
    """A changed cell shows here, also where the paper's source is not at hand."""
    text = json.dumps([vars(row) for row in paper_rows()], ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == ROWS


NAMES = {
    "BN Adapt": "BNAdapt",
    "BN Stats Adapt": "BNAdapt",
    "EATA-C": "EATAC",
    "RDump": "RDumb",
    "TENT-continual": "Tent",
}


def cells(line: str) -> list[str]:
    """The cells of a line of LaTeX, as plain text."""
    line = line.replace(r"\myeataC", "EATA-C").replace(r"\myeata", "EATA").replace(r"\\", "")
    line = re.sub(r"\$_\{\(.*?\)\}\$|\$\^\\dagger\$|~?\\cite\{.*?\}|\(Ours\)|\(lifelong\)|\*", "", line)
    line = re.sub(r"\\multirow\{.*?\}(\[.*?\])?\{\*\}(\[.*?\])?", "", line)
    return [re.sub(r"\\(textbf|underline)|[{}]", "", cell).strip() for cell in line.split("&")]


def in_source(label: str) -> list[list[str]]:
    """The lines of a table in the paper's source that have numbers."""
    if not SOURCE.is_file():
        pytest.skip("the paper's source, ../shared/paper/eata-c.tex, is not at hand")
    text = SOURCE.read_text()
    start = text.index(rf"\label{{{label}}}")
    return [cells(line) for line in text[start : text.index(r"\bottomrule", start)].splitlines() if line.count("&") > 3]


def number(text: str) -> float:
    whole, times, factor = text.replace(",", "").replace(r"$\times$", "×").partition("×")
    return float(whole) * (float(factor) if times else 1)


@pytest.mark.parametrize(
    ("label", "scenario"), [("tab:imagenet-c-level-5", "lifelong"), ("supp:tab:imagenet-c-level-5", "single-domain")]
)
def test_rows_on_imagenet_c_are_those_of_the_source(label: str, scenario: str) -> None:
    found = [
        [number(cell) for cell in line[place + 1 : place + 17]]
        for line in in_source(label)
        for place, kind in enumerate(line)
        if kind in ("Acc.", "ECE")
    ]
    rows = [row for row in paper_rows() if (row.data, row.scenario) == ("imagenet-c", scenario)]
    expected = [[*values, row.average[i]] for row in rows for i, values in enumerate((row.accuracy, row.ece))]
    assert sorted(found) == sorted(expected)


def test_rows_on_imagenet_r_are_those_of_the_source() -> None:
    found = [[number(cell) for cell in line[1:]] for line in in_source("tab:imagenet-r") if "Model" not in line[0]]
    rows = [row for row in paper_rows() if row.data == "imagenet-r"]
    assert found == [[*row.average, row.forwards, row.backwards] for row in rows]


def test_rows_on_acdc_are_those_of_the_source() -> None:
    for label, columns in (("tab:acdc", 17), ("tab:suppl:acdc", 20)):
        found: dict[str, list[float]] = {}
        for name, *values in in_source(label):
            if re.fullmatch(r"[\d.]+", values[0]):
                own = found.setdefault(NAMES.get(name, name), [])
                own += [number(value) for value in values if value != "cont."]
        rows = {
            row.method: [*row.accuracy, row.average[0]]
            for row in paper_rows()
            if row.data == "acdc" and (len(row.accuracy) == 40) == (columns == 20)
        }
        assert found == rows
