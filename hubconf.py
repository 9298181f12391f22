"""Our small trained networks for torch.hub: `torch.hub.load(REPOSITORY, "cifar10_vit")`."""

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "src"))

dependencies = ["torch", "numpy", "safetensors"]


def _load(name: str) -> nn.Module:
    from acclimate.bench.networks import load_network

    return load_network(name).model


def digits_resnet() -> nn.Module:
    """Return the demo's ResNet for digits, (B, 1, 32, 32) in [0, 1]."""
    return _load("digits-resnet")


def digits_vit() -> nn.Module:
    """Return the demo's ViT for digits, (B, 1, 32, 32) in [0, 1]."""
    return _load("digits-vit")


def cifar10_resnet() -> nn.Module:
    """Return our ResNet for CIFAR-10, (B, 3, 32, 32) in [0, 1]."""
    return _load("cifar10-resnet")


def cifar10_vit() -> nn.Module:
    """Return our ViT for CIFAR-10, (B, 3, 32, 32) in [0, 1]."""
    return _load("cifar10-vit")
