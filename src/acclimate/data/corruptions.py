"""ImageNet-C-style corruptions (Hendrycks & Dietterich, 2019), batched in torch on the images' device.

    noisy = corrupt(x, "gaussian_noise", severity=5, generator=g)      # x: (B, C, H, W) in [0, 1]

Severities 1–5 carry the published ImageNet-C parameters, whatever the image size. A generator is asked for, so that a
stream can be made again. Results on these are called ImageNet-C-style, never ImageNet-C: the files of that data set
were made with other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["CORRUPTIONS", "corrupt"]

Corruption: TypeAlias = Callable[[Tensor, int, Generator], Tensor]


def corrupt(x: Tensor, name: str, severity: int, generator: Generator) -> Tensor:
    """A corrupted copy of a batch of images in [0, 1], of any size from 28 pixels and any number of channels."""
    if name not in CORRUPTIONS:
        raise ValueError(f"no corruption {name!r}: expected one of {', '.join(CORRUPTIONS)}")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity={severity}: expected 1 to 5")
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"expected floating-point images of shape (B, C, H, W), got {x.dtype} of {tuple(x.shape)}")
    if min(x.shape[-2:]) < 28:
        raise ValueError(f"images of {x.shape[-2]}×{x.shape[-1]} pixels are too small to corrupt: 28 is the least")
    if x.numel() and not (float(x.min()) >= 0 and float(x.max()) <= 1):
        raise ValueError("corruptions take images in [0, 1]: undo the normalisation first")
    return CORRUPTIONS[name](x, severity - 1, generator).clamp(0, 1)


def _noise(x: Tensor, generator: Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def gaussian_noise(x: Tensor, level: int, generator: Generator) -> Tensor:
    """x + N(0, σ²)."""
    return x + (0.08, 0.12, 0.18, 0.26, 0.38)[level] * _noise(x, generator)


def shot_noise(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Photons counted: Poisson(λx)/λ."""
    photons = (60, 25, 12, 5, 3)[level]
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Salt and pepper, half of each."""
    amount = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    chance = torch.rand(x.shape, generator=generator, device=x.device)
    return x.masked_fill(chance < amount / 2, 0.0).masked_fill(chance > 1 - amount / 2, 1.0)


def speckle_noise(x: Tensor, level: int, generator: Generator) -> Tensor:
    """x + x·N(0, σ²)."""
    return x + x * (0.15, 0.2, 0.35, 0.45, 0.6)[level] * _noise(x, generator)


def gaussian_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """A Gaussian of σ pixels, cut off at 4σ."""
    sigma = (1, 2, 3, 4, 6)[level]
    return _separable_blur(x, _gaussian(4 * sigma, sigma, x))


def defocus_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """A disk, its edge softened."""
    radius, alias = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[level]
    reach = max(8, radius)
    at = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).to(x.dtype)
    kernel = _separable_blur((disk / disk.sum())[None, None], _gaussian(1 if radius <= 8 else 2, alias, x))[0, 0]
    return _convolve(x, kernel)


def motion_blur(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A one-sided Gaussian streak, in a direction of its own for each image."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[level]
    angles = math.radians(45) * (2 * torch.rand(len(x), generator=generator, device=x.device) - 1)
    steps = torch.arange(2 * radius + 1, device=x.device, dtype=x.dtype)
    weights = (-(steps**2) / (2 * sigma**2)).exp()
    weights = weights / weights.sum()
    height, width = x.shape[-2:]
    blurred = torch.zeros_like(x)
    for step, weight in zip(steps.tolist(), weights, strict=True):
        shift = torch.stack([2 * step * angles.cos() / width, 2 * step * angles.sin() / height], -1)
        blurred += weight * _sample(x, _grid(x) + shift[:, None, None])
    return blurred


def zoom_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """The mean of the image and of views zoomed into its centre."""
    furthest, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[level]
    zooms = torch.arange(1, furthest, step).tolist()
    views = [_sample(x, _grid(x) / zoom) for zoom in zooms]
    return (x + torch.stack(views).sum(0)) / (len(zooms) + 1)


def fog(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A plasma fractal laid over the image."""
    thickness, decay = ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[level]
    height, width = x.shape[-2:]
    side = max(256, 1 << (max(height, width) - 1).bit_length())  # the fractal is 256 wide in ImageNet-C, and cropped
    mist = _plasma(len(x), side, decay, x, generator)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * mist) * brightest / (brightest + thickness)


def brightness(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """HSV's value raised by a constant; hue and saturation stay, so RGB scales."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.1, 0.2, 0.3, 0.4, 0.5)[level]).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-12), raised)


def contrast(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """Each channel drawn towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + (0.4, 0.3, 0.2, 0.1, 0.05)[level] * (x - mean)


def pixelate(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """Box-averaged to fewer pixels, then enlarged."""
    share = (0.6, 0.5, 0.4, 0.3, 0.25)[level]
    small = (int(x.shape[-2] * share), int(x.shape[-1] * share))
    return F.interpolate(F.interpolate(x, size=small, mode="area"), size=x.shape[-2:], mode="nearest-exact")


def _gaussian(reach: int, sigma: float, like: Tensor) -> Tensor:
    at = torch.arange(-reach, reach + 1, device=like.device, dtype=like.dtype)
    kernel = (-(at**2) / (2 * sigma**2)).exp()
    return kernel / kernel.sum()


def _separable_blur(x: Tensor, kernel: Tensor) -> Tensor:
    return _convolve(_convolve(x, kernel[:, None]), kernel[None])


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel with one kernel; the border repeats outwards."""
    top, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (left, left, top, top), mode="replicate")
    planes = padded.flatten(0, 1).unsqueeze(1)
    return F.conv2d(planes, kernel[None, None]).view_as(x)


def _grid(x: Tensor) -> Tensor:
    """Where each pixel is, in [−1, 1]: (1, H, W, 2)."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device, dtype=x.dtype) * 2 + 1) / height - 1
    columns = (torch.arange(width, device=x.device, dtype=x.dtype) * 2 + 1) / width - 1
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).unsqueeze(0)


def _sample(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), padding_mode="border", align_corners=False)


def _plasma(count: int, side: int, decay: float, like: Tensor, generator: Generator) -> Tensor:
    """Diamond-square heights in [0, 1] on a torus, (count, side, side): each halving of the step divides the wobble."""

    def jitter(*shape: int) -> Tensor:
        return wobble * (2 * torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype) - 1)

    heights = torch.zeros(count, side, side, device=like.device, dtype=like.dtype)
    step, wobble = side, 1.0
    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        cells = corners.shape[1]
        across = corners + corners.roll(-1, 1)
        centres = (across + across.roll(-1, 2)) / 4 + jitter(count, cells, cells)
        heights[:, half::step, half::step] = centres
        beside, above = centres + centres.roll(1, 1), centres + centres.roll(1, 2)
        heights[:, ::step, half::step] = (beside + corners + corners.roll(-1, 2)) / 4 + jitter(count, cells, cells)
        heights[:, half::step, ::step] = (above + corners + corners.roll(-1, 1)) / 4 + jitter(count, cells, cells)
        step, wobble = half, wobble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


CORRUPTIONS: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        motion_blur,
        zoom_blur,
        fog,
        brightness,
        contrast,
        pixelate,
        speckle_noise,
        gaussian_blur,
    )
}
"""ImageNet-C's families that are built so far, in its order; the last two are among its four extra ones."""
