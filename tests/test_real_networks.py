"""Networks as people have them: timm's and transformers', with random weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import images
from torch import nn

from acclimate import EATA, Tent


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


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", [Tent, EATA])
def test_adapts_and_goes_back(network: str, method: type, tmp_path) -> None:
    torch.manual_seed(0)
    model = NETWORKS[network]().train()  # as it comes out of training: dropout and drop path must stay off
    keys = list(model.state_dict())
    arguments = {"source": images(8, size=64), "margin": 0.999, "epsilon": 2.0} if method is EATA else {}
    adapter = method(model, lr=1e-2, **arguments)
    source = {k: v.clone() for k, v in model.state_dict().items()}
    stream = [images(6, seed=i, size=64) for i in range(3)]

    first = [adapter(x) for x in stream]
    assert all(z.isfinite().all() for z in first)
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, source[k])}
    assert moved
    assert moved <= set(adapter.names)
    assert list(model.state_dict()) == keys
    assert all(m.training for m in model.modules())

    adapter.save(tmp_path / "state")
    adapter.reset()
    assert all(torch.equal(v, source[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream, strict=True))
    adapter.reset()
    adapter.load(tmp_path / "state")
    assert {k for k, v in model.state_dict().items() if not torch.equal(v, source[k])} == moved
