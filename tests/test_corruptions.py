"""Corruptions: their effect on known images, and reproducibility."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Generator, Tensor

from acclimate.data import open_suite
from acclimate.data.corruptions import BENCHMARK, CORRUPTIONS, EXTRA, _corners_moved, corrupt
from acclimate.data.jpeg import jpeg
from acclimate.data.severities import SEVERITIES

SIZES = [(28, 28), (32, 32), (40, 64)]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def pictures(count: int = 16, channels: int = 3, size: tuple[int, int] = (32, 32)) -> Tensor:
    coarse = torch.rand(count, channels, 5, 5, generator=seeded(1))
    return torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_output_is_an_image_and_reproducible(name: str, size: tuple[int, int], channels: int) -> None:
    x = pictures(4, channels, size)
    before = x.clone()
    y = corrupt(x, name, 3, seeded())
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.min() >= 0
    assert y.max() <= 1
    assert torch.equal(x, before)
    assert torch.equal(y, x) == (name == "saturate" and channels == 1), "one channel has no saturation"
    assert torch.equal(y, corrupt(x, name, 3, seeded()))


DETERMINISTIC = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}


def test_all_corruptions_of_imagenet_c_exist() -> None:
    assert len(BENCHMARK) == 15
    assert len(EXTRA) == 4
    assert [*BENCHMARK, *EXTRA] == list(CORRUPTIONS)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_only_the_generator_is_random(name: str) -> None:
    x = pictures(4)
    state = torch.get_rng_state()
    differs = not torch.equal(corrupt(x, name, 2, seeded(0)), corrupt(x, name, 2, seeded(1)))
    assert differs == (name not in DETERMINISTIC)
    assert torch.equal(torch.get_rng_state(), state)


NOT_MONOTONE = {"fog", "pixelate", "glass_blur", "frost", "saturate"}  # mean squared change at the published parameters


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_higher_severity_changes_the_image_more(name: str) -> None:
    x = pictures(48, size=(64, 64))
    distance = [float((corrupt(x, name, severity, seeded()) - x).square().mean()) for severity in range(1, 6)]
    if name not in NOT_MONOTONE:
        assert distance == sorted(distance)
    assert name == "saturate" or distance[4] > 1.3 * distance[0]  # its first levels remove colour


@pytest.mark.parametrize(("severity", "sigma"), list(enumerate((0.08, 0.12, 0.18, 0.26, 0.38), 1)))
def test_gaussian_noise_standard_deviation(severity: int, sigma: float) -> None:
    y = CORRUPTIONS["gaussian_noise"](
        torch.full((8, 3, 64, 64), 0.5), seeded(), *SEVERITIES["imagenet-c"]["gaussian_noise"][severity - 1]
    )
    assert float(y.std()) == pytest.approx(sigma, rel=0.02)
    assert float(y.mean()) == pytest.approx(0.5, abs=0.005)


def test_shot_noise_variance() -> None:
    y = CORRUPTIONS["shot_noise"](torch.full((8, 3, 64, 64), 0.5), seeded(), 12)  # variance x/λ
    assert float(y.var()) == pytest.approx(0.5 / 12, rel=0.03)


def test_impulse_noise_is_half_salt_half_pepper() -> None:
    y = corrupt(torch.full((8, 3, 64, 64), 0.5), "impulse_noise", 5, seeded())
    assert float((y == 0).float().mean()) == pytest.approx(0.135, abs=0.005)
    assert float((y == 1).float().mean()) == pytest.approx(0.135, abs=0.005)


def test_contrast_and_brightness_by_hand() -> None:
    x = torch.zeros(1, 3, 32, 32)
    x[..., 16:] = torch.tensor([0.2, 0.4, 0.8])[:, None, None]
    y = corrupt(x, "contrast", 1, seeded())  # blue has mean 0.4; 0.4 of the contrast gives 0.24 and 0.56
    torch.testing.assert_close(y[0, 2, 0, [0, 31]], torch.tensor([0.24, 0.56]))
    z = corrupt(x, "brightness", 1, seeded())  # value 0.8 → 0.9 at the same hue; black becomes grey 0.1
    torch.testing.assert_close(z[0, :, 0, 31], torch.tensor([0.2, 0.4, 0.8]) * 0.9 / 0.8)
    torch.testing.assert_close(z[0, :, 0, 0], torch.full((3,), 0.1))


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur", "pixelate"])
def test_blurs_keep_a_constant_image(name: str) -> None:
    x = torch.full((2, 3, 48, 48), 0.3)
    torch.testing.assert_close(corrupt(x, name, 5, seeded()), x)


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur"])
def test_blurred_point_is_symmetric_and_sums_to_one(name: str) -> None:
    x = torch.zeros(1, 1, 65, 65)
    x[0, 0, 32, 32] = 1
    y = corrupt(x, name, 3, seeded())[0, 0]
    assert float(y.sum()) == pytest.approx(1, rel=1e-4)
    torch.testing.assert_close(y, y.flip(0))
    torch.testing.assert_close(y, y.T)


def test_fog_is_smooth_and_differs_per_image() -> None:
    y = corrupt(torch.zeros(64, 1, 64, 64) + 0.5, "fog", 3, seeded())
    assert len({tuple(image.flatten()[:5].tolist()) for image in y}) == 64
    assert float((y[..., 1:] - y[..., :-1]).abs().mean()) < 0.3 * float(y.std())


@pytest.mark.parametrize("size", [(32, 32), (37, 50), (64, 48)])
@pytest.mark.parametrize("quality", [7, 25, 60, 95])
def test_jpeg_matches_pillow(size: tuple[int, int], quality: int) -> None:
    x = (pictures(3, size=size) * 255).round() / 255
    theirs = []
    for image in x:
        file = io.BytesIO()
        picture = Image.fromarray((image.movedim(0, -1) * 255).round().byte().numpy())
        picture.save(file, "JPEG", quality=quality, subsampling=2)
        theirs.append(torch.from_numpy(np.array(Image.open(file))).movedim(-1, 0) / 255)
    ours, theirs = jpeg(x, quality), torch.stack(theirs)
    assert float((ours - theirs).abs().mean()) < 1.2 / 255  # rounding
    assert float((ours - x).abs().mean()) == pytest.approx(float((theirs - x).abs().mean()), rel=0.02)


def test_saturation_by_hand() -> None:
    """(0.8, 0.4, 0.4) has s = 0.5. Times 0.3 it is 0.15, so the lower channels rise to 0.8·0.85. Grey stays grey."""
    x = torch.tensor([0.8, 0.4, 0.4]).view(1, 3, 1, 1).expand(1, 3, 32, 32).clone()
    x[..., :16] = 0.5
    y = corrupt(x, "saturate", 1, seeded())
    torch.testing.assert_close(y[0, :, 0, 31], torch.tensor([0.8, 0.68, 0.68]))
    torch.testing.assert_close(y[0, :, 0, 0], torch.full((3,), 0.5))


def test_glass_blur_moves_pixels_only_nearby() -> None:
    """On a ramp the change in value bounds the displacement."""
    ramp = torch.linspace(0.2, 0.8, 64).expand(2, 3, 64, 64)
    y = corrupt(ramp, "glass_blur", 5, seeded())
    assert float((y - ramp).abs().max()) < 0.6 / 63 * 20
    assert float((y - ramp)[..., 12:-12, 12:-12].abs().mean()) > 0.2 / 63


@pytest.mark.parametrize(
    ("x", "name", "severity", "message"),
    [
        (pictures(1), "rust", 1, "no corruption 'rust'"),
        (pictures(1), "fog", 6, "severity=6"),
        (pictures(1)[0], "fog", 1, "of shape"),
        (pictures(1) * 2 + 1, "fog", 1, r"images in \[0, 1\]"),
        (torch.zeros(1, 3, 16, 16), "fog", 1, "at least 28"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 1, "floating-point"),
    ],
)
def test_invalid_arguments(x: Tensor, name: str, severity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(x, name, severity, seeded())


def test_all_benchmarks_have_severities_for_every_corruption() -> None:
    for levels in SEVERITIES.values():
        assert list(levels) == list(CORRUPTIONS)
        assert all(len(levels[name]) == 5 for name in levels)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severities_for_small_images_are_milder(name: str) -> None:
    x = pictures(8)
    for severity in range(1, 6):
        cifar, tiny, imagenet = (
            float((corrupt(x, name, severity, seeded(), like=like) - x).square().mean())
            for like in ("cifar-c", "tiny-imagenet-c", "imagenet-c")
        )
        assert min(cifar, tiny) > 0, severity
        if severity == 5:
            assert cifar < imagenet
            assert cifar <= tiny <= 1.01 * imagenet


def test_unknown_benchmark_raises() -> None:
    with pytest.raises(ValueError, match="like='mnist-c'"):
        corrupt(pictures(2), "fog", 1, seeded(), like="mnist-c")


def test_affine_map_moves_three_corners() -> None:
    """On ramps the value of a pixel is its original position."""
    ramp = torch.arange(32.0)
    x = torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32)]).expand(16, 2, 32, 32)
    y = _corners_moved(x, 2.0, seeded(3))
    moved = 2.0 * (2 * torch.rand(16, 3, 2, generator=seeded(3)) - 1)
    corners = torch.tensor([(26.0, 26.0), (26.0, 6.0), (6.0, 6.0)])
    grid = (corners + moved) * 2 / 31 - 1
    seen = torch.nn.functional.grid_sample(y, grid[:, :, None], align_corners=True)[..., 0].mT
    torch.testing.assert_close(seen, corners.expand(16, 3, 2), rtol=0, atol=0.02)


def test_suite_raises_for_invalid_shift_severity_and_size() -> None:
    suite = open_suite("digits")
    with pytest.raises(ValueError, match="severity=0"):
        suite.part("contrast", 0)
    with pytest.raises(ValueError, match="no corruption 'mist'"):
        suite.part("mist", 1)
    change = suite.part("contrast", 1).change
    assert change is not None
    with pytest.raises(ValueError, match="too small to corrupt"):
        change(torch.rand(1, 1, 16, 16), seeded())
