"""BatchNorm's statistics by the length of a `with` block, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from networks import NOT_IMAGES, images, make
from torch import Tensor, nn

from acclimate import Normalisation, norm_parameters
from acclimate.parts.parameters import is_norm

DIMENSIONS = {1: (nn.BatchNorm1d, (8, 4, 5)), 2: (nn.BatchNorm2d, (8, 4, 5, 3)), 3: (nn.BatchNorm3d, (8, 4, 3, 2, 2))}


def layer_and_input(dimension: int) -> tuple[nn.BatchNorm2d, Tensor]:
    layer, shape = DIMENSIONS[dimension]
    generator = torch.Generator().manual_seed(dimension)
    made = layer(4).double().eval()
    made.running_mean.copy_(torch.randn(4, generator=generator))
    made.running_var.copy_(0.5 + torch.rand(4, generator=generator))
    with torch.no_grad():
        made.weight.copy_(torch.randn(4, generator=generator))
        made.bias.copy_(torch.randn(4, generator=generator))
    return made, 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1


def normalised(layer: nn.BatchNorm2d, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    z = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
    return z * layer.weight.view(shape) + layer.bias.view(shape)


def others(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_each_mode_by_its_formula(dimension: int) -> None:
    layer, x = layer_and_input(dimension)
    norm = Normalisation(layer)
    mean, var = x.mean(others(x)), x.var(others(x), unbiased=False)
    with norm.source():
        torch.testing.assert_close(layer(x), normalised(layer, x, layer.running_mean, layer.running_var))
    with norm.batch():
        torch.testing.assert_close(layer(x), normalised(layer, x, mean, var))
    with norm.blended(0.25):
        blended_mean = 0.75 * layer.running_mean + 0.25 * mean
        blended_var = 0.75 * layer.running_var + 0.25 * x.var(others(x), unbiased=True)
        torch.testing.assert_close(layer(x), normalised(layer, x, blended_mean, blended_var))
    with norm.recorded() as record:
        torch.testing.assert_close(layer(x), normalised(layer, x, mean, var))
    with norm.replayed(record):
        torch.testing.assert_close(layer(x[:3]), normalised(layer, x[:3], mean, var))


MODES: dict[str, Callable[[Normalisation], object]] = {
    "source": lambda n: n.source(),
    "batch": lambda n: n.batch(),
    "batch of one": lambda n: n.batch(1),
    "blended": lambda n: n.blended(0.5),
    "recorded": lambda n: n.recorded(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(mode: str, training: bool, fails: bool) -> None:
    model = make("bn").train(training)
    model.blocks[0].norm1.eval()  # a mixture, to be kept
    found = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()]
    buffers = [id(b) for b in model.buffers()]
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext(), MODES[mode](Normalisation(model)):
        assert not model.drop.training
        model(images(4))
        if fails:
            raise KeyboardInterrupt
    assert all(torch.equal(v, found[k]) for k, v in model.state_dict().items())
    assert [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()] == flags
    assert [id(b) for b in model.buffers()] == buffers
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_layer_without_running_statistics() -> None:
    layer = nn.BatchNorm2d(4, track_running_stats=False)
    x = images(4).repeat(1, 2, 1, 1)[:, :4]
    expected = layer(x)
    norm = Normalisation(layer)
    with norm.recorded() as record:
        torch.testing.assert_close(layer(x), expected)
    with norm.replayed(record):
        torch.testing.assert_close(layer(x), expected)
    with norm.batch(1):
        torch.testing.assert_close(layer(x), expected)
    assert layer.running_mean is None
    assert not layer.track_running_stats


def test_a_layer_used_twice_is_recorded_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) ** 2)

    model, x = Twice(), images(6)
    norm = Normalisation(model)
    with norm.recorded() as record:
        full = model(x)
    assert len(record[model.norm]) == 2
    with norm.replayed(record):
        torch.testing.assert_close(model(x[:2]), full[:2])


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm(4),
        nn.LayerNorm((4, 2, 2)),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm(4),
    ],
    ids=repr,
)
def test_every_norm_layer_adapts(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer)
    assert set(norm_parameters(model)) == {f"1.{name}" for name, _ in layer.named_parameters()}


def test_layers_with_norm_only_in_their_name_do_not_adapt() -> None:
    class SpectralNormConv(nn.Conv2d):
        pass

    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

    assert not norm_parameters(nn.Sequential(SpectralNormConv(3, 4, 1), PreNorm(), nn.BatchNorm2d(4, affine=False)))


def test_timm_norm_layers_adapt() -> None:
    import timm.layers as timm

    for layer in (
        timm.LayerNorm2d(4),
        timm.GroupNorm1(4),
        timm.RmsNorm(4),
        timm.BatchNormAct2d(4),
        timm.GroupNormAct(4, group_size=2),
        timm.LayerNormAct2d(4),
        timm.EvoNorm2dS0(4, groups=2),
    ):
        assert is_norm(layer), layer
        assert {"weight", "bias"} & set(norm_parameters(layer)), layer
    bn = timm.BatchNormAct2d(3)
    x = 5 * images(6) + 2
    before = bn.running_mean.clone()
    with Normalisation(bn).batch():
        torch.testing.assert_close(bn(x), bn.act(nn.functional.batch_norm(x, None, None, training=True)))
    assert torch.equal(bn.running_mean, before)


class WithActivation(nn.BatchNorm2d):
    """A layer with a forward of its own, as timm has them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("family", ["bn", "seg", "features, BatchNorm1d", "signals, BatchNorm1d", "own"])
def test_rows_of_padding_do_not_count(family: str) -> None:
    """Logits and gradients are those of the first rows alone; also of one row, which may be one value per channel."""
    if family == "own":
        model = nn.Sequential(nn.Conv2d(3, 4, 3), WithActivation(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 5)).double()
    else:
        model = make(family).double().eval()
    x = images(6, 1).double()
    x = NOT_IMAGES[family][1](x) if family in NOT_IMAGES else x
    norm, parameters = Normalisation(model), [*model.parameters()]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for count in range(1, 7):
        with norm.padded(torch.tensor(count)):
            ours = model(x)[:count]
        with norm.batch(count):
            theirs = model(x[:count])
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        gradients = [torch.autograd.grad(y.square().mean(), parameters) for y in (ours, theirs)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    with norm.padded(torch.tensor(0)):
        assert model(x).isfinite().all()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
