"""ImageNet-C-style corruptions (Hendrycks & Dietterich, 2019), batched in torch on the images' device.

    noisy = corrupt(x, "gaussian_noise", severity=5, generator=g)      # x: (B, C, H, W) in [0, 1]

Severities 1–5 carry the published ImageNet-C parameters, whatever the image size. A generator is asked for, so that a
stream can be made again. Results on these are called ImageNet-C-style, never ImageNet-C: the files of that data set
were made with other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .filters import (
    box_matrix,
    convolve,
    gaussian_kernel,
    local_shuffle,
    pixel_grid,
    separable_blur,
    streak,
    zoomed,
)
from .jpeg import jpeg
from .textures import drop_shading, grey, ice, noise_like, plasma, tint

__all__ = ["BENCHMARK", "CORRUPTIONS", "EXTRA", "corrupt"]

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
    if x.numel() and not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError("corruptions take images in [0, 1]: undo the normalisation first")
    return CORRUPTIONS[name](x, severity - 1, generator).clamp(0, 1)


def gaussian_noise(x: Tensor, level: int, generator: Generator) -> Tensor:
    """x + N(0, σ²)."""
    return x + (0.08, 0.12, 0.18, 0.26, 0.38)[level] * noise_like(x, generator)


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
    return x + x * (0.15, 0.2, 0.35, 0.45, 0.6)[level] * noise_like(x, generator)


def gaussian_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """A Gaussian of σ pixels, cut off at 4σ."""
    sigma = (1, 2, 3, 4, 6)[level]
    return separable_blur(x, gaussian_kernel(4 * sigma, sigma, x))


def defocus_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """A disk, its edge softened."""
    radius, alias = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[level]
    reach = max(8, radius)
    at = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).to(x.dtype)
    kernel = separable_blur((disk / disk.sum())[None, None], gaussian_kernel(1 if radius <= 8 else 2, alias, x))[0, 0]
    return convolve(x, kernel)


def motion_blur(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A one-sided Gaussian streak, in a direction of its own for each image."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[level]
    return streak(x, radius, sigma, (-45, 45), generator)


def zoom_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """The mean of the image and of views zoomed into its centre."""
    furthest, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[level]
    zooms = torch.arange(1, furthest, step, dtype=torch.float64).tolist()
    total = x.clone()
    for zoom in zooms:
        total += zoomed(x, zoom)
    return total / (len(zooms) + 1)


def fog(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A plasma fractal laid over the image."""
    thickness, decay = ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[level]
    mist = plasma(x, decay, generator)
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
    down, across = (box_matrix(side, int(side * share), x) for side in x.shape[-2:])
    return F.interpolate(down @ x @ across.mT, size=x.shape[-2:], mode="nearest-exact")


def glass_blur(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Blurred, pixels replaced by neighbours at random, blurred again."""
    sigma, reach, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[level]
    blur = gaussian_kernel(int(4 * sigma + 0.5), sigma, x)
    y = (separable_blur(x, blur) * 255).floor() / 255
    order = local_shuffle(len(x), x.shape[-2:], reach, rounds, x.device, generator)
    y = y.flatten(2).gather(2, order[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return separable_blur(y, blur)


def snow(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A paler image, and flakes: noise enlarged, cut off and streaked, and the same turned round."""
    mean, deviation, zoom, least, radius, sigma, share = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[level]
    flakes = zoomed(mean + deviation * noise_like(x[:, :1], generator), zoom).clamp(0, 1)
    flakes = flakes.masked_fill(flakes < least, 0.0)
    flakes = streak(flakes, radius, sigma, (-135, -45), generator)
    flakes = (flakes * 255).round() / 255
    pale = share * x + (1 - share) * torch.maximum(x, 1.5 * grey(x) + 0.5)
    return pale + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Ice over a darker image. ImageNet-C lays photographs over it; this ice is made, of needles."""
    through, opaque = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[level]
    return through * x + opaque * ice(x, generator)


def elastic_transform(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Each pixel a little off its place, by a smooth field of shifts."""
    strength = 250 * (0.05, 0.065, 0.085, 0.1, 0.12)[level]
    height, width = x.shape[-2:]
    furthest = 0.005 * height
    field = torch.rand(len(x), 2, height, width, generator=generator, device=x.device, dtype=x.dtype)
    down, across = (gaussian_kernel(int(3 * sigma + 0.5), sigma, x) for sigma in (0.01 * height, 0.01 * width))
    shifts = strength * furthest * separable_blur(2 * field - 1, down, across)
    scale = x.new_tensor([2 / width, 2 / height])
    return F.grid_sample(
        x, pixel_grid(x) + shifts.movedim(1, -1) * scale, padding_mode="reflection", align_corners=False
    )


def jpeg_compression(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """Through JPEG: blocks of 8 pixels, colours at half the resolution, cosines rounded to quality 25 to 7."""
    return jpeg(x, (25, 18, 15, 10, 7)[level])


def spatter(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Drops of water, from severity 4 of mud."""
    mean, deviation, sigma, least, strength = (
        (0.65, 0.3, 4, 0.69, 0.6),
        (0.65, 0.3, 3, 0.68, 0.6),
        (0.65, 0.3, 2, 0.68, 0.5),
        (0.65, 0.3, 1, 0.65, 1.5),
        (0.67, 0.4, 1, 0.65, 1.5),
    )[level]
    liquid = mean + deviation * noise_like(x[:, :1], generator)
    liquid = separable_blur(liquid, gaussian_kernel(int(4 * sigma + 0.5), sigma, x))
    liquid = liquid.masked_fill(liquid < least, 0.0)
    if level < 3:
        drops = liquid * drop_shading(liquid)
        drops = strength * drops / drops.amax((2, 3), keepdim=True).clamp(min=1e-12)
        return x + drops * tint(x, (175, 238, 238))
    mud = separable_blur((liquid > least).to(x.dtype), gaussian_kernel(int(4 * strength + 0.5), strength, x))
    mud = mud.masked_fill(mud < 0.8, 0.0)
    return x * (1 - mud) + mud * tint(x, (63, 42, 20))


def saturate(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """HSV's saturation scaled and raised; images of one channel have none."""
    if x.shape[1] != 3:
        return x
    factor, more = ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2))[level]
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = value - low
    saturation = chroma / value.clamp(min=1e-12)
    wanted = (factor * saturation + more).clamp(0, 1)
    below = (value - x) / chroma.clamp(min=1e-12)  # how far each channel lies below the value, in chromas
    red = x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)  # a grey has hue 0
    return value * (1 - wanted * torch.where(chroma > 0, below, red))


CORRUPTIONS: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        speckle_noise,
        gaussian_blur,
        spatter,
        saturate,
    )
}
"""ImageNet-C's fifteen families in its order, then its four extra ones."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Those that ImageNet-C holds out for validation."""

BENCHMARK = tuple(name for name in CORRUPTIONS if name not in EXTRA)
"""The fifteen that results are averaged over."""
