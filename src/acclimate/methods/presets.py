"""Hyper-parameters by network: the paper's, and those of two small networks with ten classes.

The paper's learning rates are for a thousand classes. With ten, a prediction has up to three times less entropy, and
EATA's weights are up to six times smaller (10^0.4 against 1000^0.4). `"cifar-resnet"` and `"cifar-vit"` are what suits
two networks of 0.9 million parameters on CIFAR-10 (docs/results.md): a place to start from, not the paper's. Tent and
SAR share EATA's rate, as in the paper; CoTTA, ROID and TEA have their authors' settings for CIFAR-10, but for the
first's and the last's rates on the ViT. EATA's β falls as its rate rises, so that a step pulls as much towards the
source as the paper's. EATA-C leaves twice as much out of a sub-network, which is better calibrated there.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

from torch.optim import Adam, AdamW

from ..parts.selection import Everything, Reliable, Scaled

__all__ = ["COTTA_ON_CIFAR10", "FEW", "NETWORKS", "hyper_parameters"]

Settings = dict[str, Any]

FEW = {"resnet50": "cifar-resnet", "vit-base": "cifar-vit"}
"""What to try in the place of the paper's, where there are few classes."""

_source = {"statistics": "source"}  # one image at a time: its own statistics cost BN Adapt five points of mIoU

COTTA_ON_CIFAR10: Settings = {"threshold": 0.92, "restoration": 0.01, "loss": "teacher"}
"""Its authors' settings, besides the optimizer."""

_ENTROPY: dict[str, Settings] = {
    "resnet50": {"lr": 2.5e-4},
    "vit-base": {"lr": 1e-3},
    "segformer-b5": {"lr": 7.5e-5, **_source},  # CoTTA's own program has 7.5e-6
    "cifar-resnet": {"lr": 5e-3},
    "cifar-vit": {"lr": 2.5e-3},
}
"""What minimises entropy: Tent's, and of those that came after it."""

_EATA: dict[str, Settings] = {
    "resnet50": {"margin": 0.4, "epsilon": Scaled(0.05), "beta": 2000.0},
    "vit-base": {"margin": 0.4, "epsilon": Scaled(0.05), "beta": 2000.0},
    "segformer-b5": {"select": Reliable(0.1), "beta": 500.0},  # no redundancy filter: at 19 classes 1/√C is 0.23
    "cifar-resnet": {"margin": 0.4, "epsilon": 0.4, "beta": 100.0},
    "cifar-vit": {"margin": 0.4, "epsilon": 0.4, "beta": 800.0},
}

_EATAC: dict[str, Settings] = {
    "resnet50": {"lr": 5e-3, "margin": 0.5, "epsilon": Scaled(0.07), "drop": 0.2, "alpha": 0.1, "beta": 50.0},
    "vit-base": {"lr": 0.1, "margin": 0.4, "epsilon": Scaled(0.05), "drop": 0.2, "alpha": 0.1, "beta": 50.0},
    "segformer-b5": {"lr": 5e-4, "select": Everything(), "drop": 0.6, "alpha": 0.0, "beta": 500.0, **_source},
    "cifar-resnet": {"lr": 0.05, "margin": 0.5, "epsilon": Scaled(0.07), "drop": 0.4, "alpha": 0.1, "beta": 50.0},
    "cifar-vit": {"lr": 3e-3, "margin": 0.4, "epsilon": Scaled(0.05), "drop": 0.4, "alpha": 0.1, "beta": 50.0},
}

_OTHERS: dict[str, dict[str, Settings]] = {
    "resnet50": {"MEMO": {"lr": 2.5e-4}, "CoTTA": {"lr": 0.01}, "ROID": {"lr": 2.5e-4}, "TEA": {"lr": 2.5e-4}},
    "vit-base": {
        "MEMO": {"optimizer": partial(AdamW, lr=1e-5, weight_decay=0.01)},
        "CoTTA": {"lr": 5e-3},
        "ROID": {"lr": 2.5e-4},
        "TEA": {"lr": 5e-3},
    },
    "segformer-b5": {
        "CoTTA": {"optimizer": partial(Adam, lr=7.5e-6), "threshold": 0.69, "restoration": 0.01, **_source},
        "DAT": _source,
    },
    "cifar-resnet": {
        "MEMO": {"lr": 2.5e-4, "views": 32},  # its authors' 5e-3 is for GroupNorm
        "CoTTA": {"optimizer": partial(Adam, lr=1e-3), **COTTA_ON_CIFAR10},
        "ROID": {"optimizer": partial(Adam, lr=1e-3)},
        "TEA": {"optimizer": partial(Adam, lr=1e-3)},
        "SAR": {"floor": 0.2 / 3},  # in proportion to ln C
    },
    "cifar-vit": {
        "MEMO": {"optimizer": partial(AdamW, lr=1e-5, weight_decay=0.01), "views": 32},
        "CoTTA": {"optimizer": partial(Adam, lr=1e-5), **COTTA_ON_CIFAR10},
        "ROID": {"optimizer": partial(Adam, lr=1e-3)},
        "TEA": {"optimizer": partial(Adam, lr=1e-4)},
    },
}

NETWORKS = tuple(_ENTROPY)


def hyper_parameters(method: str, network: str) -> Settings:
    """What a method takes for a network, as keyword arguments."""
    if network not in NETWORKS:
        raise ValueError(f"no preset {network!r}: expected one of {', '.join(NETWORKS)}")
    entropy, eata, eata_c, others = (table[network] for table in (_ENTROPY, _EATA, _EATAC, _OTHERS))
    eta, eta_c = ({name: value for name, value in own.items() if name != "beta"} for own in (eata, eata_c))
    table = {
        "Source": {},
        "BNAdapt": {},
        **others,
        "Tent": entropy,
        "SAR": entropy | others.get("SAR", {}),
        "RDumb": entropy | eta,
        "ETA": entropy | eta,
        "EATA": entropy | eata,
        "ETAC": eta_c,
        "EATAC": eata_c,
    }
    if method not in table:
        raise ValueError(f"no preset of {method} for {network}: it has its own defaults")
    return deepcopy(table[method])  # a selector belongs to one adapter
