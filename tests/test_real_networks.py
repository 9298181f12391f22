"""Networks as people have them: timm's and transformers', with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import images
from torch import Tensor, nn

from acclimate import EATA, EATAC, MEMO, ROID, SAR, TEA, Adapter, CoTTA, RDumb, Tent


def timm_model(name: str, **keywords: object) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10, **keywords)


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=64, num_labels=10
    )
    return ViTForImageClassification(config)


def hf_segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=10,
    )
    return SegformerForSemanticSegmentation(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm resnet": lambda: timm_model("test_resnet"),
    "timm resnet18": lambda: timm_model("resnet18"),
    "timm vit": lambda: timm_model("test_vit", img_size=64),
    "timm convnext": lambda: timm_model("test_convnext"),
    "timm efficientnet": lambda: timm_model("test_efficientnet", drop_path_rate=0.5, drop_rate=0.5),
    "transformers vit": hf_vit,
    "transformers segformer": hf_segformer,
}


EVERYTHING = {"margin": 0.999, "epsilon": 2.0, "source": images(8, size=64)}
SETTINGS: dict[type, dict[str, Any]] = {
    Tent: {},
    EATA: EVERYTHING,
    EATAC: EVERYTHING,
    SAR: {"margin": 0.999},
    RDumb: {"margin": 0.999, "epsilon": 2.0, "every": 2},
    ROID: {},
    CoTTA: {"threshold": 2.0, "views": 2},
    MEMO: {"views": 3},
    TEA: {"steps": 2},
}
CASES = [
    (network, method)
    for network in NETWORKS
    for method in (Tent, EATA, EATAC)
    if (network, method) != ("timm efficientnet", EATAC)  # this tiny one has no block with an identity
] + [
    (network, method)
    for network in ("timm resnet", "timm vit", "transformers vit")
    for method in (SAR, RDumb, ROID, CoTTA, MEMO, TEA)
]


def wrapped(network: str, method: type) -> tuple[Adapter, list[Tensor]]:
    """An adapter of a network as it comes out of training: dropout and drop path must stay off."""
    torch.manual_seed(0)
    model = NETWORKS[network]().train()
    adapter = method(model, lr=1e-2, **SETTINGS[method])
    return adapter, [images(6, seed=i, size=64) for i in range(3)]


@cache
def used(network: str) -> nn.Module:
    """The network after a call without us: transformers hangs hooks of its own on some."""
    model = NETWORKS[network]().eval()
    model(images(2, size=64))
    return model


def hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def weights(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.model.state_dict().items()}


def changed(before: dict[str, Tensor], adapter: Adapter) -> set[str]:
    now = adapter.model.state_dict()
    assert list(now) == list(before)
    return {name for name in before if not torch.equal(before[name], now[name])}


@pytest.mark.parametrize(("network", "method"), CASES)
def test_adapts_and_resets(network: str, method: type, tmp_path: Path) -> None:
    adapter, stream = wrapped(network, method)
    source = weights(adapter)
    first = [adapter(x) for x in stream]
    assert all(z.isfinite().all() and not z.requires_grad for z in first)
    moved = changed(source, adapter)
    assert bool(moved) != adapter.episodic
    assert moved <= set(adapter.names)
    assert all(m.training for m in adapter.model.modules())
    assert hooks(adapter.model) == hooks(used(network))

    adapter.save(tmp_path / "state")
    later = adapter(stream[0])
    adapter.reset()
    assert not changed(source, adapter)
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream, strict=True))
    adapter.reset()
    adapter.load(tmp_path / "state")
    assert changed(source, adapter) == moved
    assert torch.equal(adapter(stream[0]), later)


@pytest.mark.parametrize(("network", "method"), CASES)
def test_refuses_nan_and_works_without_gradients(network: str, method: type) -> None:
    adapter, (x, *_) = wrapped(network, method)
    source = weights(adapter)
    with pytest.raises(ValueError, match="NaN or infinity in 6 of 6 images"):
        adapter(x * float("nan"))
    assert not changed(source, adapter)
    expected = adapter(x)
    adapter.reset()
    with torch.inference_mode():
        assert torch.equal(adapter(x.clone()), expected)
    adapter.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a batch of one image")
        assert adapter(x[:1]).isfinite().all()
