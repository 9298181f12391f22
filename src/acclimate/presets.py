"""The paper's hyper-parameters, by network. Thresholds scale with the number of classes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import Adam, AdamW

from .selection import Everything, Reliable, Scaled

__all__ = ["NETWORKS", "hyper_parameters"]

NETWORKS = ("resnet50", "vit-base", "segformer-b5")


def hyper_parameters(method: str, network: str) -> dict[str, Any]:
    """What the paper gives a method for a network, as keyword arguments."""
    if network not in NETWORKS:
        raise ValueError(f"no preset {network!r}: expected one of {', '.join(NETWORKS)}")
    source = {"statistics": "source"}  # one image at a time: its own statistics cost BN Adapt five points of mIoU
    entropies: dict[str, dict[str, Any]] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"lr": 1e-3},
        "segformer-b5": {"lr": 7.5e-5, **source},  # CoTTA's own program has 7.5e-6
    }
    selections: dict[str, dict[str, Any]] = {
        "resnet50": {"margin": 0.4, "epsilon": Scaled(0.05)},
        "vit-base": {"margin": 0.4, "epsilon": Scaled(0.05)},
        "segformer-b5": {"select": Reliable(0.1)},  # no redundancy filter: at 19 classes 1/√C is 0.23
    }
    consistencies: dict[str, dict[str, Any]] = {
        "resnet50": {"lr": 5e-3, "margin": 0.5, "epsilon": Scaled(0.07), "drop": 0.2, "alpha": 0.1},
        "vit-base": {"lr": 0.1, "margin": 0.4, "epsilon": Scaled(0.05), "drop": 0.2, "alpha": 0.1},
        "segformer-b5": {"lr": 5e-4, "select": Everything(), "drop": 0.6, "alpha": 0.0, **source},
    }
    entropy, eata, eata_c = entropies[network], selections[network], consistencies[network]
    segments = network == "segformer-b5"
    if network == "vit-base":
        compared: dict[str, dict[str, Any]] = {
            "MEMO": {"optimizer": partial(AdamW, lr=1e-5, weight_decay=0.01)},
            "CoTTA": {"lr": 5e-3},
            "ROID": {"lr": 2.5e-4},
            "TEA": {"lr": 5e-3},
        }
    else:
        compared = {"MEMO": {"lr": 2.5e-4}, "CoTTA": {"lr": 0.01}, "ROID": {"lr": 2.5e-4}, "TEA": {"lr": 2.5e-4}}
    pixels = {"CoTTA": {"optimizer": partial(Adam, lr=7.5e-6), "threshold": 0.69, "restoration": 0.01}, "DAT": {}}
    table: dict[str, dict[str, Any]] = {name: own | source for name, own in pixels.items()} if segments else compared
    table |= {
        "Source": {},
        "BNAdapt": {},
        "Tent": entropy,
        "SAR": entropy,
        "RDumb": entropy | eata,
        "ETA": entropy | eata,
        "EATA": entropy | eata | {"beta": 500.0 if segments else 2000.0},
        "ETAC": eata_c,
        "EATAC": eata_c | {"beta": 500.0 if segments else 50.0},
    }
    if method not in table:
        raise ValueError(f"no preset of {method} for {network}: it has its own defaults")
    return dict(table[method])
