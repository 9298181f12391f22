"""ImageNet-C-style corruptions (Hendrycks & Dietterich, 2019), batched in torch on the images' device.

    noisy = corrupt(x, "gaussian_noise", severity=5, generator=g)      # x: (B, C, H, W) in [0, 1]
    noisy = corrupt(x, "gaussian_noise", severity=5, generator=g, like="cifar-c")

Severities 1 to 5 have the published parameters: those of ImageNet-C, at any image size, or the milder ones of
Tiny-ImageNet-C and CIFAR-10-C, chosen for 64 and 32 pixels. An explicit generator makes a stream reproducible. Call
results on these images ImageNet-C-style, never ImageNet-C: the files of that data set were made with other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

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
from .severities import Like, parameters_of
from .textures import drop_shading, grey, ice, noise_like, plasma, tint

__all__ = ["BENCHMARK", "CORRUPTIONS", "EXTRA", "corrupt", "corrupted"]

Corruption: TypeAlias = Callable[..., Tensor]
"""A function of images, a generator, and the parameters of a severity."""


def corrupt(x: Tensor, name: str, severity: int, generator: Generator, *, like: Like = "imagenet-c") -> Tensor:
    """Return a corrupted copy of images in [0, 1], of at least 28 pixels per side and any number of channels.

    >>> x = torch.rand(2, 3, 32, 32)
    >>> corrupt(x, "fog", severity=3, generator=Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    parameters_of(name, severity, like)
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"expected floating-point images of shape (B, C, H, W), got {x.dtype} of {tuple(x.shape)}")
    if x.numel() and not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError("corruptions take images in [0, 1]: undo the normalisation first")
    return corrupted(x, name, severity, generator, like)


def corrupted(x: Tensor, name: str, severity: int, generator: Generator, like: Like) -> Tensor:
    """Corrupt images that are known to lie in [0, 1]. Skips the check, which would synchronise with the device."""
    if min(x.shape[-2:]) < 28:
        raise ValueError(
            f"images of {x.shape[-2]}×{x.shape[-1]} pixels are too small to corrupt: expected at least 28×28"
        )
    return CORRUPTIONS[name](x, generator, *parameters_of(name, severity, like)).clamp(0, 1)


def gaussian_noise(x: Tensor, generator: Generator, sigma: float) -> Tensor:
    """x + N(0, σ²)."""
    return x + sigma * noise_like(x, generator)


def shot_noise(x: Tensor, generator: Generator, photons: float) -> Tensor:
    """Poisson(λx)/λ: noise of counting photons."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, generator: Generator, amount: float) -> Tensor:
    """Salt-and-pepper noise, half of each."""
    chance = torch.rand(x.shape, generator=generator, device=x.device)
    return x.masked_fill(chance < amount / 2, 0.0).masked_fill(chance > 1 - amount / 2, 1.0)


def speckle_noise(x: Tensor, generator: Generator, sigma: float) -> Tensor:
    """x + x·N(0, σ²)."""
    return x + x * sigma * noise_like(x, generator)


def gaussian_blur(x: Tensor, _: Generator, sigma: float) -> Tensor:
    """Blur with a Gaussian of σ pixels, truncated at 4σ."""
    return separable_blur(x, gaussian_kernel(int(4 * sigma + 0.5), sigma, x))


def defocus_blur(x: Tensor, _: Generator, radius: float, alias: float) -> Tensor:
    """Blur with a disk that has a soft edge."""
    reach = max(8, int(radius))
    at = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).to(x.dtype)
    kernel = separable_blur((disk / disk.sum())[None, None], gaussian_kernel(1 if radius <= 8 else 2, alias, x))[0, 0]
    return convolve(x, kernel)


def motion_blur(x: Tensor, generator: Generator, radius: int, sigma: float) -> Tensor:
    """Blur with a one-sided Gaussian streak, in a random direction per image."""
    return streak(x, radius, sigma, (-45, 45), generator)


def zoom_blur(x: Tensor, _: Generator, furthest: float, step: float) -> Tensor:
    """Average the image and views of it zoomed into the centre."""
    zooms = torch.arange(1, furthest, step, dtype=torch.float64).tolist()
    total = x.clone()
    for zoom in zooms:
        total += zoomed(x, zoom)
    return total / (len(zooms) + 1)


def fog(x: Tensor, generator: Generator, thickness: float, decay: float) -> Tensor:
    """Blend the image with a plasma fractal."""
    mist = plasma(x, decay, generator)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * mist) * brightest / (brightest + thickness)


def brightness(x: Tensor, _: Generator, more: float) -> Tensor:
    """Raise the value in HSV by a constant. Hue and saturation stay, so RGB is scaled."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-12), raised)


def contrast(x: Tensor, _: Generator, share: float) -> Tensor:
    """Shrink each channel towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + share * (x - mean)


def pixelate(x: Tensor, _: Generator, share: float) -> Tensor:
    """Average to fewer pixels, then enlarge."""
    down, across = (box_matrix(side, int(side * share), x) for side in x.shape[-2:])
    return F.interpolate(down @ x @ across.mT, size=x.shape[-2:], mode="nearest-exact")


def glass_blur(x: Tensor, generator: Generator, sigma: float, reach: int, rounds: int) -> Tensor:
    """Blur, replace pixels with random neighbours, blur again."""
    blur = gaussian_kernel(int(4 * sigma + 0.5), sigma, x)
    y = (separable_blur(x, blur) * 255).floor() / 255
    order = local_shuffle(len(x), x.shape[-2:], reach, rounds, x.device, generator)
    y = y.flatten(2).gather(2, order[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return separable_blur(y, blur)


def snow(
    x: Tensor,
    generator: Generator,
    mean: float,
    deviation: float,
    zoom: float,
    least: float,
    radius: int,
    sigma: float,
    share: float,
) -> Tensor:
    """Fade the image and add flakes: enlarged, thresholded, streaked noise, and its rotation by 180 degrees."""
    flakes = zoomed(mean + deviation * noise_like(x[:, :1], generator), zoom).clamp(0, 1)
    flakes = flakes.masked_fill(flakes < least, 0.0)
    flakes = streak(flakes, radius, sigma, (-135, -45), generator)
    flakes = (flakes * 255).round() / 255
    pale = share * x + (1 - share) * torch.maximum(x, 1.5 * grey(x) + 0.5)
    return pale + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, generator: Generator, through: float, opaque: float) -> Tensor:
    """Add ice over a darker image. ImageNet-C uses photographs of ice; this texture is generated."""
    return through * x + opaque * ice(x, generator)


def elastic_transform(x: Tensor, generator: Generator, strength: float, smoothness: float, corners: float) -> Tensor:
    """Displace pixels by a smooth random field, optionally after an affine map that moves three corners.

    Lengths are fractions of the image's side.
    """
    height, width = x.shape[-2:]
    if corners:
        x = _corners_moved(x, corners * height, generator)
    field = torch.rand(len(x), 2, height, width, generator=generator, device=x.device, dtype=x.dtype)
    sigmas = (max(smoothness * side, 1e-3) for side in (height, width))
    down, across = (gaussian_kernel(int(3 * sigma + 0.5), sigma, x) for sigma in sigmas)
    shifts = strength * height * separable_blur(2 * field - 1, down, across)
    scale = x.new_tensor([2 / width, 2 / height])
    return F.grid_sample(
        x, pixel_grid(x) + shifts.movedim(1, -1) * scale, padding_mode="reflection", align_corners=False
    )


def _corners_moved(x: Tensor, furthest: float, generator: Generator) -> Tensor:
    """Apply a random affine map per image, which moves three corners of a square by up to `furthest` pixels."""
    height, width = x.shape[-2:]
    across, down, third = width // 2, height // 2, min(height, width) // 3
    corners = [(across + third, down + third), (across + third, down - third), (across - third, down - third)]
    before = x.new_tensor([[*corner, 1.0] for corner in corners]).expand(len(x), 3, 3)
    moved = 2 * torch.rand(len(x), 3, 2, generator=generator, device=x.device, dtype=x.dtype) - 1
    after = before + F.pad(furthest * moved, (0, 1))
    back = torch.linalg.solve_ex(after, before)[0].mT  # points are columns: before = back @ after
    right, low = (width - 1) / 2, (height - 1) / 2
    unit = x.new_tensor([[1 / right, 0, -1], [0, 1 / low, -1], [0, 0, 1]])  # from pixels to [−1, 1]
    matrix = unit @ back @ x.new_tensor([[right, 0, right], [0, low, low], [0, 0, 1]])
    grid = F.affine_grid(matrix[:, :2], list(x.shape), align_corners=True)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def jpeg_compression(x: Tensor, _: Generator, quality: int) -> Tensor:
    """Compress as JPEG and decode."""
    return jpeg(x, quality)


def spatter(
    x: Tensor,
    generator: Generator,
    mean: float,
    deviation: float,
    sigma: float,
    least: float,
    strength: float,
    liquid: Literal["water", "mud"],
) -> Tensor:
    """Add drops of water or mud."""
    wet = mean + deviation * noise_like(x[:, :1], generator)
    wet = separable_blur(wet, gaussian_kernel(int(4 * sigma + 0.5), sigma, x))
    wet = wet.masked_fill(wet < least, 0.0)
    if liquid == "water":
        drops = wet * drop_shading(wet)
        drops = strength * drops / drops.amax((2, 3), keepdim=True).clamp(min=1e-12)
        return x + drops * tint(x, (175, 238, 238))
    mud = separable_blur((wet > least).to(x.dtype), gaussian_kernel(int(4 * strength + 0.5), strength, x))
    mud = mud.masked_fill(mud < 0.8, 0.0)
    return x * (1 - mud) + mud * tint(x, (63, 42, 20))


def saturate(x: Tensor, _: Generator, factor: float, more: float) -> Tensor:
    """Scale and raise the saturation in HSV. Images without three channels are unchanged."""
    if x.shape[1] != 3:
        return x
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = value - low
    saturation = chroma / value.clamp(min=1e-12)
    wanted = (factor * saturation + more).clamp(0, 1)
    below = (value - x) / chroma.clamp(min=1e-12)  # distance below the value, in units of chroma
    red = x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)  # grey has hue 0
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
"""The fifteen corruptions of ImageNet-C in its order, then its four extra ones."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The corruptions that ImageNet-C holds out for validation."""

BENCHMARK = tuple(name for name in CORRUPTIONS if name not in EXTRA)
"""The fifteen corruptions that results are averaged over."""
