"""The paper's tables and figures as recipes: cases to measure, and a layout. Titles say where in the paper each is."""

from __future__ import annotations

from functools import partial

from . import cases, studies
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
from .numbers import Recipe

__all__ = ["RECIPES"]

PERCENT: dict[str, tuple[str, str, float]] = {"accuracy": ("Acc.", ".1f", 100), "ece": ("ECE", ".1f", 100)}
COST: dict[str, tuple[str, str, float]] = {"seconds": ("Time (s)", ".1f", 1), "gpu_memory": ("Mem. (MB)", ",.0f", 1)}
CONSISTENCY = {"consistency alone": cases.LOSSES["consistency alone"]}
LIFELONG, SINGLE_DOMAIN = (partial(cases.every_method, scenario=name) for name in ("lifelong", "single-domain"))

_ALL = (
    Recipe("lifelong", "Table 2: ImageNet-C, level 5, lifelong", LIFELONG, whole_table),
    Recipe("single-domain", "Table A: ImageNet-C, level 5, one domain at a time", SINGLE_DOMAIN, whole_table),
    Recipe(
        "imagenet-r",
        "Table 3: ImageNet-R",
        cases.imagenet_r,
        whole_table,
        needs="--scale paper --data imagenet-r:FOLDER",
        data=("imagenet-r",),
    ),
    Recipe(
        "acdc",
        "Tables 4 and B: Cityscapes to ACDC, ten rounds",
        cases.acdc,
        whole_table,
        "The table has the first, fourth, seventh … and last round, the csv every one.",
        needs="--scale paper --data acdc:FOLDER,CITYSCAPES",
        data=("acdc", "scenes", "cityscapes"),
    ),
    Recipe("mixed", "Table 9: fifteen corruptions mixed, levels 3 and 5", cases.mixed, grid("accuracy", "ece")),
    Recipe(
        "components",
        "Table 5: the parts of S(x)",
        cases.components,
        grid("accuracy", "backwards"),
        "The paper's caption says ResNet-50, but its first row is Tent on ViT-Base; the recipe runs both.",
    ),
    Recipe(
        "ablation",
        "Tables 6 and C, right: the parts of EATA-C",
        cases.ablation,
        grid("accuracy", "ece", "forwards", "backwards"),
        "CL: consistency loss, ER: min-max entropy, FR: Fisher regulariser, SS: sample selection. In the paper's "
        "table for ResNet-50 the row Source is that of ViT-Base.",
    ),
    Recipe(
        "ablation-r",
        "Table C, left: the parts of EATA-C on ImageNet-R",
        cases.ablation_r,
        grid("accuracy", "ece", "forwards", "backwards"),
        "ε is as in imagenet-r, so that the last row is the one of EATA-C there.",
        needs="--scale paper --data imagenet-r:FOLDER",
        data=("imagenet-r",),
    ),
    Recipe(
        "efficiency",
        "Table 7: time and peak memory",
        cases.efficiency,
        grid("accuracy", "time", "memory"),
        "1 ms per image is 50 s for the paper's 50,000 images. With replay-subset, EATA runs selected samples again "
        "with a graph, as the paper's very likely does; otherwise all samples are in one graph. The last row is the "
        "memory that the Fisher regulariser adds, 9.8 MB in the paper; without a GPU that of its tensors alone.",
    ),
    Recipe(
        "forgetting",
        "Figures 3, F and G: clean accuracy along the stream, levels 1 to 5",
        cases.forgetting,
        by_domain("forgetting"),
    ),
    Recipe("backwards", "Figure D: backward passes by corruption and level", cases.backwards, by_domain("backwards")),
    Recipe("calibration", "Figure 10: calibration by confidence, fog, level 5", cases.in_fog, calibration),
    Recipe(
        "sweep-e0",
        "Figure 4: E0",
        cases.swept("resnet", "eata", "margin", 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
        sweep("E0 / ln C", "accuracy", "ece", "backwards"),
    ),
    Recipe(
        "sweep-epsilon",
        "Figure 5: ε",
        cases.swept("resnet", "eata", "epsilon", 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08),
        sweep("ε at 1,000 classes", "accuracy", "ece", "backwards"),
        "With fewer classes ε grows as 1/√C.",
    ),
    Recipe(
        "sweep-fisher",
        "Figure 6: images for the Fisher importance",
        cases.fisher_images,
        sweep("Q", "accuracy", "clean"),
    ),
    Recipe(
        "sweep-alpha",
        "Figure 7: α, the weight of the min-max entropy",
        cases.swept("vit", "eata-c", "alpha", 0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
        sweep("α", "accuracy", "ece"),
    ),
    Recipe(
        "sweep-beta",
        "Figure 8: β, the weight of the Fisher regulariser",
        cases.swept("vit", "eata-c", "beta", 0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 140.0),
        sweep("β", "accuracy", "ece", "clean"),
    ),
    Recipe(
        "sweep-drop",
        "Figure 9: the sub-network's drop ratio",
        cases.swept("vit", "eata-c", "drop", 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
        sweep("drop ratio", "accuracy", "ece"),
    ),
    Recipe(
        "tune",
        "Beyond the paper: choose learning rates on other images and other corruptions than those of the tables",
        cases.tune,
        trials,
        "The most accurate setting is chosen, of those within 0.1 points the one with the lowest ECE; one that loses "
        "more than a point of clean accuracy is excluded. Slow methods see fewer images.",
        needs="images apart for choosing: --scale imagenet-5k or tiny-imagenet, or --data cifar10:FOLDER,judge",
        apart=True,
    ),
    Recipe(
        "hostile",
        "Beyond the paper: streams that break methods, without and with a guard",
        cases.hostile_streams,
        hostile,
        "Points above or below the source network, without → with a guard; the row Source has accuracies. Four "
        "corruptions at severity 3; some streams begin with clean images.",
    ),
    Recipe(
        "directions",
        "Eq. (10) in both directions, lifelong",
        cases.directions,
        grid("accuracy", "ece"),
        "s is the sub-network's prediction. Gradients go through s alone in the first, through both in the second.",
    ),
    Recipe(
        "rates",
        "Beyond the paper: multiples of the learning rate, lifelong",
        cases.rates,
        sweep("times the usual learning rate", "accuracy", "ece", xscale="log"),
        "It shows whether a preset suits a network, on the grid of the recipe tune; β stays as it is.",
    ),
    Recipe(
        "slow-rates",
        "Beyond the paper: learning rates of slow methods",
        cases.slow_rates,
        sweep("learning rate", "accuracy", "ece", xscale="log"),
        "Rates of Adam, for CIFAR-10. Use fewer --images to save time; high rates lose more on longer streams.",
    ),
    Recipe(
        "drop-rates",
        "Beyond the paper: EATA-C's drop ratio by its learning rate, lifelong",
        cases.drop_rates,
        sweep("drop ratio", "accuracy", "ece"),
        "A higher drop ratio also raises the loss, which acts like a higher rate; the recipe separates the two.",
    ),
    Recipe(
        "held-out",
        "Figure 11a: the adapted network on a held-out fifth",
        cases.studied(studies.held_out, 2, cases.LOSSES),
        curves("batches", accuracy=("Acc. (%)", 100), ece=("ECE (%)", 100)),
    ),
    Recipe("stability", "Figure 11b and c: learning rates by steps per batch", cases.stability, heat_maps("lr")),
    Recipe(
        "indicator",
        "Table 8: the data-uncertainty indicator along the stream",
        cases.studied(studies.indicator, 10, {"EATAC": ("eata-c", {})}),
        indicators,
    ),
    Recipe(
        "uncertain",
        "Figure C: samples with disagreeing predictions along the stream, adapting by consistency alone",
        cases.studied(studies.indicator, 10, CONSISTENCY),
        curves("batches", uncertain=("#Uncertain", 1), right=("misclassified among them (%)", 100)),
    ),
    Recipe(
        "entropy-share",
        "Figure 2: adapting to the samples of highest or lowest entropy",
        cases.entropy_shares,
        measured_grid(PERCENT, "share of samples (%)"),
    ),
    Recipe(
        "parameters",
        "Table D: norm layers alone, or all parameters",
        cases.parameters,
        measured_grid({"loss": ("Loss", ".3f", 1), **PERCENT, **COST}),
    ),
    Recipe("selected", "Figure E: samples that are selected, and samples that are not", cases.selected, pictures),
    Recipe("toy", "Figure B: sub-networks disagree near the decision boundary", cases.toy, boundaries),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by its name on the command line."""
