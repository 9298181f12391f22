"""Stochastic depth on networks that were built without it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from importlib import import_module

import pytest
import torch
from networks import ConvNet, TinyViT, batch_norm, images, make
from torch import Generator, Tensor, nn

from acclimate import StochasticDepth, subnetwork
from acclimate.bench.own_networks import SmallResNet, SmallViT


def timm_model(name: str, **keywords: object) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=7, **keywords)


def torchvision_model(name: str, *arguments: object, **keywords: object) -> nn.Module:
    import torchvision

    module, _, made = name.rpartition(".")
    return getattr(getattr(torchvision.models, module), made)(*arguments, num_classes=7, **keywords)


def transformers_model(family: str, model: str, **keywords: object) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(num_labels=7, **keywords)
    return getattr(transformers, f"{family}For{model}")(config)


def torchvision_resnet(block: str) -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=7)


def torchvision_efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    return EfficientNet([FusedMBConvConfig(2, 3, 1, 16, 16, 2), MBConvConfig(2, 3, 1, 16, 16, 2)], 0.0, num_classes=7)


def torchvision_maxvit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    return MaxVit((64, 64), 8, 2, [16, 16], [1, 1], 8, 0.0, num_classes=7)


def timm_class(module: str, name: str, **keywords: object) -> nn.Module:
    return getattr(import_module(f"timm.models.{module}"), name)(num_classes=7, **keywords)


def with_text(family: str) -> nn.Module:
    """A network of images and texts; only the first part classifies."""
    import transformers

    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{family}Config")(
        num_labels=7, vision_config={**SIZES, "patch_size": 16}, text_config=text
    )
    return getattr(transformers, f"{family}ForImageClassification")(config)


def torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=7)


SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 64}
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 2, 1, 1]}
SWIN = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4], "image_size": 64, "window_size": 2}
PVT = {"image_size": 64, **STAGES, "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]}
BIT = {"embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "num_groups": 4}
EFFICIENT = {
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "hidden_dim": 1280,
    "in_channels": [32, 16],
    "out_channels": [16, 24],
    "kernel_sizes": [3, 3],
    "strides": [1, 2],
    "expand_ratios": [1, 2],
    "num_block_repeats": [2, 2],
    "depthwise_padding": [],
}
CVT = {
    "patch_sizes": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [2, 1],
    "embed_dim": [8, 16],
    "depth": [1, 2],
    "num_heads": [1, 2],
    "mlp_ratio": [2.0, 2.0],
    "qkv_bias": [True, True],
    "cls_token": [False, True],
    **{f"{name}_rate": [0.0, 0.0] for name in ("attention_drop", "drop", "drop_path")},
    "qkv_projection_method": ["dw_bn", "dw_bn"],
    "kernel_qkv": [3, 3],
    "padding_kv": [1, 1],
    "stride_kv": [2, 2],
    "padding_q": [1, 1],
    "stride_q": [1, 1],
}
TIMM_DINO = {"img_size": 64, "patch_size": 16, "depth": 3, "embed_dim": 48, "num_heads": 2}
HF_DINO = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}

FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many branches there are
    "timm resnet, basic": (lambda: timm_model("resnet10t"), 4),
    "timm resnet, bottleneck": (lambda: timm_model("resnet14t"), 4),
    "timm resnext with se": (lambda: timm_model("resnet14t", cardinality=2, block_args={"attn_layer": "se"}), 4),
    "timm resnet v2": (lambda: timm_model("resnetv2_50", layers=(1, 1, 1, 1)), 4),
    "timm regnet": (lambda: timm_model("regnetx_002"), 13),
    "timm vit": (lambda: timm_model("test_vit", img_size=64), 12),
    "timm deit": (lambda: timm_model("deit_tiny_patch16_224", img_size=64, depth=3, embed_dim=48), 6),
    "timm dinov2": (lambda: timm_model("vit_small_patch14_reg4_dinov2", **TIMM_DINO), 6),
    "timm dinov2, giant": (lambda: timm_model("vit_giant_patch14_dinov2", **TIMM_DINO), 6),
    "timm convnext": (lambda: timm_model("test_convnext"), 9),
    "timm swin": (
        lambda: timm_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 2), num_heads=(2, 2)
        ),
        6,
    ),
    "timm swin v2": (
        lambda: timm_model(
            "swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=24, depths=(1, 2), num_heads=(2, 2)
        ),
        6,
    ),
    "timm efficientnet": (lambda: timm_model("efficientnet_lite0"), 9),
    "timm res2net": (lambda: timm_model("res2net50_14w_8s", layers=(1, 1, 1, 1)), 4),
    "timm nfnet": (lambda: timm_model("test_nfnet"), 4),
    "timm byobnet": (lambda: timm_model("test_byobnet"), 4),
    "timm convnext v2": (lambda: timm_model("test_convnext2"), 4),
    "timm mambaout": (lambda: timm_model("test_mambaout"), 6),
    "timm beit": (
        lambda: timm_model("beit_base_patch16_224", img_size=64, embed_dim=48, depth=3, num_heads=2),
        6,
    ),
    "timm cait": (lambda: timm_model("cait_xxs24_224", img_size=64, depth=2, embed_dim=48, num_heads=2), 4),
    "timm xcit": (lambda: timm_model("xcit_nano_12_p16_224", img_size=64, depth=2, embed_dim=48, num_heads=2), 6),
    "timm metaformer": (lambda: timm_class("metaformer", "MetaFormer", depths=(1,) * 4, dims=(8, 16, 16, 16)), 8),
    "timm focalnet": (lambda: timm_class("focalnet", "FocalNet", depths=(1,) * 4, embed_dim=16), 8),
    "timm edgenext": (lambda: timm_model("edgenext_xx_small"), 12),
    "timm davit": (
        lambda: timm_model("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2)),
        16,
    ),
    "torchvision resnet, basic": (lambda: torchvision_resnet("BasicBlock"), 4),
    "torchvision resnext, bottleneck": (lambda: torchvision_resnet("Bottleneck"), 4),
    "torchvision vit": (
        lambda: torchvision_model("vision_transformer.VisionTransformer", 64, 16, 3, 2, 32, 64),
        6,
    ),
    "torchvision convnext": (torchvision_convnext, 4),
    "torchvision swin": (
        lambda: torchvision_model("swin_transformer.SwinTransformer", [4, 4], 16, [1, 2], [2, 2], [4, 4]),
        6,
    ),
    "torchvision efficientnet": (torchvision_efficientnet, 4),
    "torchvision regnet": (lambda: torchvision_model("regnet.regnet_y_400mf"), 16),
    "torchvision mnasnet": (lambda: torchvision_model("mnasnet.mnasnet0_5"), 10),
    "torchvision maxvit": (torchvision_maxvit, 10),
    **{
        f"transformers {family.lower()}": (
            partial(transformers_model, family, "ImageClassification", **keywords),
            count,
        )
        for family, keywords, count in (
            *((family, SIZES, 6) for family in ("DeiT", "ViTMSN", "IJepa", "Beit", "Data2VecVision")),
            ("Cvt", CVT, 6),
            ("Pvt", PVT, 8),
            ("PvtV2", PVT, 8),
            ("Swinv2", SWIN, 10),
            ("Hiera", {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8]}, 10),
            ("PoolFormer", {**STAGES, "depths": [1, 1, 1, 1]}, 8),
            ("ConvNextV2", STAGES, 5),
            ("ResNet", RESNET, 5),
            ("RegNet", {**RESNET, "groups_width": 8}, 5),
            ("Bit", BIT, 4),
            ("EfficientNet", EFFICIENT, 2),
            ("MobileNetV2", {"depth_multiplier": 0.35}, 10),
            ("SwiftFormer", {"embed_dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, 8),
        )
    },
    "transformers clip": (lambda: with_text("CLIP"), 6),
    "transformers siglip": (lambda: with_text("Siglip"), 6),
    "transformers vit": (lambda: transformers_model("ViT", "ImageClassification", **SIZES), 6),
    "transformers dinov2": (lambda: transformers_model("Dinov2", "ImageClassification", **HF_DINO), 6),
    "transformers dinov2, giant": (
        lambda: transformers_model("Dinov2", "ImageClassification", **HF_DINO, use_swiglu_ffn=True, drop_path_rate=0.3),
        6,
    ),
    "transformers dinov2 with registers": (
        lambda: transformers_model("Dinov2WithRegisters", "ImageClassification", **HF_DINO),
        6,
    ),
    "transformers segformer": (
        lambda: transformers_model(
            "Segformer",
            "SemanticSegmentation",
            **STAGES,
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16,
        ),
        10,
    ),
    "transformers convnext": (lambda: transformers_model("ConvNext", "ImageClassification", **STAGES), 5),
    "transformers swin": (lambda: transformers_model("Swin", "ImageClassification", **SWIN), 10),
    "our resnet": (lambda: SmallResNet(channels=3), 6),
    "our vit": (lambda: SmallViT(channels=3, width=16, depth=3, heads=2), 6),
}


def built(family: str) -> tuple[nn.Module, Tensor]:
    """A network whose branches all matter: zero initialisations of layer scales and last norms are undone."""
    torch.manual_seed(0)
    model = FAMILIES[family][0]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.abs().max() < 1e-3 or p.dim() == 1:
                p.add_(0.3 + 0.1 * torch.randn_like(p))
        for p in list(model.parameters())[-2:]:
            p.copy_(0.1 * torch.randn_like(p))
    return model, images(4, size=32 if family == "our vit" else 64)


def predict(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return getattr(output, "logits", output)


@pytest.fixture(params=FAMILIES)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return built(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_branches_of_each_family_are_known(family: str) -> None:
    assert len(StochasticDepth(built(family)[0]).branches) == FAMILIES[family][1]


@torch.no_grad()
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_drop_zero_is_the_identity_and_nothing_remains(network: tuple[nn.Module, Tensor], per: str) -> None:
    model, x = network
    full = predict(model, x)
    found = [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with subnetwork(model, 0.0, per=per):
        assert torch.equal(predict(model, x), full)
    with subnetwork(model, 0.9, per=per, generator=Generator().manual_seed(0)):
        changed = [predict(model, x) for _ in range(2)]
    assert all(z.isfinite().all() for z in changed)
    assert not torch.equal(changed[0], full)
    assert [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == found
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(predict(model, x), full)


@torch.no_grad()
def test_dropping_per_batch_and_per_sample_agree(network: tuple[nn.Module, Tensor]) -> None:
    """With all branches gone, a batch whose branches are skipped equals one whose branches are masked."""
    model, x = network
    nearly = 1 - 1e-9
    with subnetwork(model, nearly, schedule="uniform", per="sample", generator=Generator().manual_seed(0)):
        masked = predict(model, x)
    depth = StochasticDepth(model)
    with depth.sampled(nearly, schedule="uniform", per="batch", generator=Generator().manual_seed(0)):
        run_and_zeroed = predict(model, x)
        skipped = predict(model, x)
    torch.testing.assert_close(run_and_zeroed, masked)
    torch.testing.assert_close(skipped, masked)


@torch.no_grad()
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_with_all_branches_gone_their_weights_do_not_matter(network: tuple[nn.Module, Tensor], per: str) -> None:
    """What is hooked is the whole branch: nothing of it is left in the output."""
    model, x = network
    depth = StochasticDepth(model)

    def outputs() -> Tensor:
        with depth.sampled(1 - 1e-9, schedule="uniform", per=per, generator=Generator().manual_seed(0)):
            return torch.stack([predict(model, x), predict(model, x)])

    before = outputs()
    for branch in depth.branches:
        for module in branch.modules:
            for p in module.parameters():
                p.mul_(1.5).add_(0.3)
    torch.testing.assert_close(outputs(), before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_kept_branches_are_scaled_alike(network: tuple[nn.Module, Tensor]) -> None:
    """A batch of which every branch stayed equals samples whose branches all stayed: both are scaled by 1/(1 − r)."""
    model, x = network
    full = predict(model, x)

    drawn = {}
    for per in ("sample", "batch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *size, **_: torch.ones(size))
            with subnetwork(model, 0.3, per=per):
                drawn[per] = predict(model, x)
    torch.testing.assert_close(drawn["sample"], drawn["batch"])
    assert not torch.allclose(drawn["sample"], full)


@torch.no_grad()
@pytest.mark.parametrize("family", ["timm resnet, bottleneck", "timm vit", "torchvision vit", "transformers segformer"])
def test_skipped_branches_are_not_executed(family: str) -> None:
    model, x = built(family)
    depth = StochasticDepth(model)
    nearly = 1 - 1e-9
    parts = [part for branch in depth.branches for module in branch.modules for part in module.modules()]
    heavy = [part for part in parts if isinstance(part, (nn.Conv2d, nn.Linear))]
    ran: list[nn.Module] = []
    for module in heavy:
        original = module.forward
        module.forward = lambda *a, m=module, f=original, **k: (ran.append(m), f(*a, **k))[1]
    with depth.sampled(nearly, schedule="uniform", per="batch", generator=Generator().manual_seed(0)):
        predict(model, x)
        first = len(ran)
        ran.clear()
        predict(model, x)
    assert first >= len(depth.branches)
    assert ran == []


def branch_network() -> tuple[nn.Module, Tensor]:
    """x + f(x) with f known: the expected output over many draws can be worked out."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x)

    torch.manual_seed(0)
    return Sum(), torch.randn(4000, 3)


@torch.no_grad()
@pytest.mark.parametrize("named", [{"branches": "branch"}, {"branches": ["branch"]}, {"blocks": ""}])
def test_the_expected_output_is_the_full_branch(named: dict) -> None:
    model, x = branch_network()
    x = x[:1].expand(20000, -1)
    with subnetwork(model, 0.3, generator=Generator().manual_seed(0), **named):
        outputs = model(x)
    full = model(x[:1])
    kept = (outputs - x).abs().sum(1) > 0
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(outputs[kept][0], x[0] + (full[0] - x[0]) / 0.7)
    torch.testing.assert_close(outputs.mean(0), full[0], rtol=0.05, atol=0.03)


def test_rates() -> None:
    depth = StochasticDepth(SmallViT(depth=5))
    assert depth.rates(0.2) == pytest.approx([0, 0, 0.05, 0.05, 0.1, 0.1, 0.15, 0.15, 0.2, 0.2])
    assert depth.rates(0.2, "uniform") == [0.2] * 10
    assert StochasticDepth(branch_network()[0], branches="branch").rates(0.2) == [0.2]


@torch.no_grad()
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_samples_depend_only_on_the_generator(per: str) -> None:
    model, x = SmallViT(channels=3).eval(), images(4, size=32)
    state = torch.get_rng_state()

    def drawn(seed: int) -> Tensor:
        with subnetwork(model, 0.5, per=per, generator=Generator().manual_seed(seed)):
            return torch.stack([model(x), model(x)])

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert not torch.equal(drawn(0)[0], drawn(0)[1])  # each pass draws anew
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_reach_what_stayed() -> None:
    for per in ("sample", "batch"):
        model = make("ln").train()
        with subnetwork(model, 0.5, per=per, branches="blocks.*.mlp", generator=Generator().manual_seed(0)):
            model(images()).sum().backward()
        assert model.blocks[0].mlp[0].weight.grad.abs().sum() > 0  # its rate is 0, and the second block's 0.5


@torch.no_grad()
def test_branches_and_blocks_named_by_the_user() -> None:
    """A branch is what is added; a block is the sum. Dropped, both leave the identity."""
    model, x = TinyViT().eval(), images()
    by_branch = StochasticDepth(model, branches=["blocks.*.attention", "blocks.*.mlp"])
    assert [b.block for b in by_branch.branches] == [0, 0, 1, 1]
    assert [b.name for b in by_branch.branches][:2] == ["blocks.0.attention", "blocks.0.mlp"]
    by_block = StochasticDepth(model, blocks="blocks.*")
    assert [b.block for b in by_block.branches] == [0, 1]
    bare = model.head(model.norm(model.patches(x).flatten(2).mT).mean(1))
    for depth in (by_branch, by_block):
        for per in ("sample", "batch"):
            with depth.sampled(1 - 1e-9, schedule="uniform", per=per, generator=Generator().manual_seed(1)):
                for _ in range(2):
                    torch.testing.assert_close(model(x), bare)


def test_what_follows_a_skipped_block_may_work_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.b:
                x = block(x).relu_()
            return x

    model = InPlace()
    with subnetwork(model, 0.7, per="batch", blocks="b.*", schedule="uniform", generator=Generator().manual_seed(0)):
        for _ in range(8):
            model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert model.b[0].weight.grad is not None


@torch.no_grad()
def test_other_types_and_sizes_of_input_after_the_first() -> None:
    model, x = SmallResNet(channels=3).eval(), images(4, size=32)
    depth = StochasticDepth(model)

    def both(x: Tensor) -> list[Tensor]:
        outputs = []
        for per in ("sample", "batch"):
            with depth.sampled(1 - 1e-9, schedule="uniform", per=per, generator=Generator().manual_seed(0)):
                outputs.append(model(x))
        return outputs

    for batch in (x, x[:2], images(3, size=48), x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(*both(batch))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(*both(x))
    model.bfloat16()
    torch.testing.assert_close(*both(x.bfloat16()))


def test_it_can_be_pickled_after_use() -> None:
    model, x = SmallResNet(channels=3).eval(), images(4, size=32)
    depth = StochasticDepth(model)
    with torch.no_grad(), depth.sampled(0.5, per="batch", generator=Generator().manual_seed(0)):
        model(x)
    again = pickle.loads(pickle.dumps(depth))
    assert again.branches[0].first is again.model.blocks[0].conv1


@torch.no_grad()
def test_a_block_that_changes_the_shape_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 1)).eval()
    x = images()
    for per in ("sample", "batch"):
        depth = StochasticDepth(model, blocks=["0", "1"])
        with depth.sampled(1 - 1e-9, schedule="uniform", per=per, generator=Generator().manual_seed(0)):
            for _ in range(2):
                torch.testing.assert_close(model(x), model[0](x), rtol=1e-5, atol=1e-5)


def test_the_error_for_an_unknown_network_says_how_to_name_branches() -> None:
    with pytest.raises(ValueError, match=r'no residual branch is known in ConvNet\. Name .* branches="layers'):
        StochasticDepth(ConvNet(batch_norm))
    with pytest.raises(ValueError, match=r"SmallViT has no module '\*\.mlp'"):
        StochasticDepth(SmallViT(), branches="*.mlp")
    with pytest.raises(ValueError, match="name no module"):
        StochasticDepth(SmallViT(), branches=[])
    with pytest.raises(ValueError, match=r"ConvNet has no module 'layers\.\*'; it has stem"):
        StochasticDepth(ConvNet(batch_norm), blocks="layers.*")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"drop": 1.0}, "rate in"),
        ({"drop": 0.1, "schedule": "cosine"}, "schedule="),
        ({"drop": 0.1, "per": "x"}, "per="),
    ],
)
def test_bad_use(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message), subnetwork(SmallViT(), **keywords):
        pass


def test_an_error_inside_leaves_nothing_behind() -> None:
    model = SmallResNet()
    for per in ("sample", "batch"):
        with pytest.raises(ZeroDivisionError), subnetwork(model, 0.5, per=per):
            raise ZeroDivisionError
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())


@torch.no_grad()
def test_a_branch_without_the_batch_in_front_is_refused() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x.view(-1, 3)).view_as(x)

    model = Windows()
    with subnetwork(model, 0.5, branches="f"), pytest.raises(ValueError, match="gave 8 rows for a batch of 4"):
        model(torch.randn(4, 2, 3))
