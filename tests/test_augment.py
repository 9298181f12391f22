"""Augmented views compared with torchvision and Pillow, which the authors' programs use; normalisation inside."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from networks import images, make, stream
from PIL import Image, ImageOps
from torch import Generator, Tensor, nn

from acclimate import EATAC, ROID, CoTTA, Normalised
from acclimate.parts import augment as augmentations
from acclimate.parts.augment import (
    Augment,
    AugMix,
    Views,
    Warp,
    _affine,
    _autocontrast,
    _crop_and_flip,
    _geometry,
    jitter,
    mean_over_views,
    several,
    warp,
)
from acclimate.parts.normalised import IMAGENET


def pictures(count: int = 4, size: int = 32, seed: int = 0) -> Tensor:
    """Return smooth images of 8-bit values."""
    return (images(count, seed, size).clamp(0, 1) * 255).round() / 255


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("channels", [1, 3])
def test_colour_jitter_matches_torchvision(seed: int, channels: int) -> None:
    import torchvision.transforms.functional as tv

    x = pictures()[:, :channels]
    ours = jitter(x, [Views()._sample(x, seeded(seed))[0]])
    steps = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue, tv.adjust_gamma]
    ranges = [(0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)]
    generator = seeded(seed)
    theirs = x
    for index in torch.randperm(5, generator=generator).tolist():
        factor = float(torch.empty((), dtype=torch.float64).uniform_(*ranges[index], generator=generator))
        theirs = steps[index](theirs, factor)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert (ours - x).abs().mean() > 0.01


@pytest.mark.parametrize("padding", ["border", "reflection"])
@pytest.mark.parametrize(
    ("angle", "shift", "zoom", "sigma"),
    [(0.0, (3, -2), 1.0, 0.0), (12.0, (-4, 1), 0.93, 0.0), (-7.0, (2, 4), 1.08, 0.5), (15.0, (4, 4), 0.9, 0.3)],
)
def test_warp_matches_torchvision_on_a_padded_image(
    padding: str, angle: float, shift: tuple[int, int], zoom: float, sigma: float
) -> None:
    """The authors pad by half, warp, blur and crop the centre. We get the same without padding."""
    import torchvision.transforms.functional as tv

    x = pictures(size=32)
    padded = tv.pad(x, [16], padding_mode={"border": "edge", "reflection": "reflect"}[padding])
    moved = tv.affine(padded, angle, list(shift), zoom, [0.0, 0.0], interpolation=tv.InterpolationMode.BILINEAR)
    blurred = tv.gaussian_blur(moved, [5, 5], [sigma, sigma]) if sigma else moved
    expected = tv.center_crop(blurred, [32])
    mirrored = warp(x, [Warp(angle, shift, zoom, sigma, mirrored=True)], padding)
    torch.testing.assert_close(mirrored, expected.flip(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(warp(x, [Warp(angle, shift, zoom, sigma)], padding), expected, rtol=0, atol=1e-4)


def test_views_are_images_and_reproducible() -> None:
    x = pictures()
    for chain in (Views(), Views(padding="reflection", blur=False, noise=0.0)):
        view = chain(x, seeded(1))
        assert view.shape == x.shape
        assert 0 <= float(view.min()) <= float(view.max()) <= 1
        assert torch.equal(view, chain(x, seeded(1)))
        assert not torch.equal(view, chain(x, seeded(2)))
        assert not torch.equal(view, x)
    clean, noisy = Views(noise=0.0)(x, seeded(1)), Views(noise=0.05)(x, seeded(1))
    assert 0.02 < float((noisy - clean).std()) < 0.06


@pytest.mark.parametrize("chain", [Views(), Views(padding="reflection", blur=False, noise=0.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_several_views_equal_several_calls(chain: Views, channels: int) -> None:
    x, generator = pictures()[:, :channels], seeded(3)
    one_by_one = torch.cat([chain(x, generator) for _ in range(9)])
    together = seeded(3)
    torch.testing.assert_close(several(chain, x, 9, together), one_by_one, rtol=0, atol=1e-5)
    assert torch.equal(together.get_state(), generator.get_state())
    halved = several(lambda y, _: y / 2, x, 2, generator)
    assert torch.equal(halved, torch.cat([x / 2, x / 2])), "any callable works"

    class Dimmed(Views):
        def __call__(self, x: Tensor, generator: Generator) -> Tensor:
            return super().__call__(x, generator) / 2

    assert float(several(Dimmed(), x, 3, generator).max()) <= 0.5, "and so does a subclass"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("limit", [1, 5, 9])
@pytest.mark.parametrize("augment", [Views(), lambda x, g: x * torch.rand(len(x), 1, 1, 1, generator=g)])
def test_mean_over_views(together: bool, limit: int, augment: Augment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks bound how many views are made at once, and change neither the views nor their mean."""
    x, count, expected_generator, generator = pictures(), 9, seeded(3), seeded(3)
    monkeypatch.setattr(augmentations, "_LARGEST_CHUNK", limit * x.numel() + 1)
    lengths: list[int] = []

    def predict(rows: Tensor) -> Tensor:
        lengths.append(len(rows))
        return rows.flatten(1)[:, :10].softmax(1)

    found = mean_over_views(predict, augment, x, count, generator, together=together)
    chunks = [len(x) * views for views in {1: [1] * 9, 5: [5, 4], 9: [9]}[limit]]
    assert lengths == (chunks if together else [len(x)] * count)
    each = [predict(augment(x, expected_generator)) for _ in range(count)]
    torch.testing.assert_close(found, torch.stack(each).mean(0))
    assert torch.equal(generator.get_state(), expected_generator.get_state())


def test_half_of_the_views_are_flipped() -> None:
    ramp = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    generator = seeded()
    flipped = [bool((view := Views()(ramp, generator))[..., 4].mean() > view[..., -5].mean()) for _ in range(60)]
    assert 18 <= sum(flipped) <= 42


def as_pillow(x: Tensor) -> list[Image.Image]:
    return [Image.fromarray((image.movedim(0, -1) * 255).round().byte().numpy()) for image in x]


def from_pillow(pictures: list[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).movedim(-1, 0) for picture in pictures]) / 255


def test_augmix_colour_operations_match_pillow() -> None:
    import kornia.enhance as enhance

    x = 0.1 + 0.7 * pictures()
    x = (x * 255).round() / 255
    cases = [
        (_autocontrast(x), ImageOps.autocontrast),
        (enhance.equalize(x), ImageOps.equalize),
        (enhance.posterize(x, 4), lambda picture: ImageOps.posterize(picture, 4)),
        (enhance.solarize(x, torch.full((len(x),), 240 / 256)), lambda picture: ImageOps.solarize(picture, 240)),
    ]
    for ours, pillow in cases:
        torch.testing.assert_close(ours, from_pillow([pillow(p) for p in as_pillow(x)]), rtol=0, atol=1.1 / 255)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_augmix_geometric_operations_match_pillow(size: tuple[int, int]) -> None:
    height, width = size
    x = nn.functional.interpolate(pictures(5, 8), size=size, mode="bicubic").clamp(0, 1)
    operation, sign = torch.arange(4, 9), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    level = torch.full((5,), 0.1)
    ours = _affine(x, _geometry(operation, sign, level, x.shape[-2:]), padding="grey")
    matrices = [
        (1, -0.03, 0, 0, 1, 0),
        (1, 0, 0, 0.03, 1, 0),
        (1, 0, -int(width / 30), 0, 1, 0),
        (1, 0, 0, 0, 1, int(height / 30)),
    ]
    old = as_pillow(x)
    bilinear = Image.Resampling.BILINEAR
    theirs = [old[0].rotate(-3, resample=bilinear)] + [
        picture.transform((width, height), Image.Transform.AFFINE, matrix, resample=bilinear)
        for picture, matrix in zip(old[1:], matrices, strict=True)
    ]
    inside = (slice(None), slice(None), slice(3, -3), slice(3, -3))
    torch.testing.assert_close(ours[inside], from_pillow(theirs)[inside], rtol=0, atol=4 / 255)


def test_pixels_outside_the_image_are_grey() -> None:
    x = torch.zeros(1, 3, 64, 64)
    moved = _affine(x, _geometry(torch.tensor([7]), torch.ones(1), torch.tensor([0.1]), x.shape[-2:]), padding="grey")
    torch.testing.assert_close(moved[..., -1], torch.full((1, 3, 64), 128 / 255))
    torch.testing.assert_close(moved[..., 0], torch.zeros(1, 3, 64))


def test_crop_areas_and_aspect_ratios() -> None:
    """On a ramp the slope of a crop is its size relative to the image."""
    size, count = 64, 2000
    ramp = torch.linspace(-1, 1, size)
    x = torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size)]).expand(count, 2, size, size)
    crops = _crop_and_flip(x, (0.08, 1.0), seeded())
    across = (crops[:, 0, 32, 40] - crops[:, 0, 32, 24]) / (x[0, 0, 32, 40] - x[0, 0, 32, 24])
    down = (crops[:, 1, 40, 32] - crops[:, 1, 24, 32]) / (x[0, 1, 40, 32] - x[0, 1, 24, 32])
    assert 0.46 < float((across < 0).float().mean()) < 0.54, "half are flipped"
    assert bool((down > 0).all())
    areas = across.abs() * down
    assert float(areas.min()) > 0.07
    assert float(areas.max()) <= 1.001
    ratio = across.abs() / down
    free = areas < 0.5  # neither side reaches the image's
    assert float(ratio[free].min()) > 0.74
    assert float(ratio[free].max()) < 1.35
    assert abs(float(areas.median()) - 0.54) < 0.06


def test_augmix_samples_per_image() -> None:
    x = pictures(1).expand(64, -1, -1, -1)
    views = AugMix()(x, seeded())
    assert views.shape == x.shape
    assert 0 <= float(views.min()) <= float(views.max()) <= 1
    assert torch.equal(views, AugMix()(x, seeded()))
    flat = views.flatten(1)
    distances = torch.cdist(flat, flat) + 1e9 * torch.eye(64)
    assert float(distances.min()) > 0
    assert not torch.equal(views, AugMix()(x, seeded(1)))


def test_grey_images_and_double_precision() -> None:
    assert AugMix()(pictures()[:, :1], seeded()).shape == (4, 1, 32, 32)
    assert AugMix()(pictures().double(), seeded()).dtype == torch.float64
    assert Views()(pictures().double(), seeded()).dtype == torch.float64


def test_missing_kornia_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kornia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kornia", None)
    adapter = ROID(make("bn"))
    before = adapter.snapshot()
    with pytest.raises(ImportError, match=r"pip install .*\[augment\]'"):
        adapter(stream()[0])
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors if "generator" not in key)


def test_normalised_network_equals_the_network_on_normalised_images() -> None:
    net = make("bn")
    wrapped = Normalised(net, *IMAGENET)
    x = pictures(4, 16)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(wrapped(x), net((x - mean) / std))
    assert set(wrapped.state_dict()) == {f"model.{name}" for name in net.state_dict()}
    assert not wrapped.training
    assert CoTTA(wrapped, threshold=2.0, views=2)(x).isfinite().all()
    assert wrapped.double()(x.double()).dtype == torch.float64
    half = Normalised(make("bn").to(torch.bfloat16), *IMAGENET)
    assert half(x.to(torch.bfloat16)).dtype == torch.bfloat16


def test_normalisation_is_read_from_timm() -> None:
    import timm

    net = timm.create_model("resnet18", num_classes=10)
    wrapped = Normalised(net)
    assert wrapped.mean.flatten().tolist() == pytest.approx(net.pretrained_cfg["mean"])
    assert wrapped.std.flatten().tolist() == pytest.approx(net.pretrained_cfg["std"])
    assert EATAC(wrapped, beta=0.0).depth is not None, "residual branches are found inside the wrapper"
    with pytest.raises(ValueError, match="mean= and std="):
        Normalised(make("bn"))
    with pytest.raises(ValueError, match="std .*0"):
        Normalised(make("bn"), (0, 0, 0), (1, 0, 1))


def test_angles_are_uniform() -> None:
    """Over many views of a line, angles reach both ends of their range and have mean zero."""
    x = torch.zeros(1, 1, 65, 65)
    x[..., 32, 44:60] = 1
    chain = Views(blur=False, noise=0.0)
    generator, angles = seeded(), []
    grid = torch.arange(65.0) - 32
    for _ in range(200):
        view = warp(x, [chain._sample_warp(65, 65, generator)._replace(mirrored=False)], "border")[0, 0]
        total = view.sum()
        inner, outer = view[:, :51], view[:, 51:]
        run = (outer * grid[None, 51:]).sum() / outer.sum() - (inner * grid[None, :51]).sum() / inner.sum()
        rise = (outer * grid[:, None]).sum() / outer.sum() - (inner * grid[:, None]).sum() / inner.sum()
        if float(total) > 5 and math.isfinite(float(run)):
            angles.append(math.degrees(math.atan2(float(rise), float(run))))
    assert len(angles) > 100
    assert -16 < min(angles) < -11
    assert 11 < max(angles) < 16
    assert abs(sum(angles) / len(angles)) < 2.5
