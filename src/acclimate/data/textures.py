"""Textures to blend with images: noise, plasma fractals, ice and shaded drops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .filters import convolve, distance_to, equalised, streak

__all__ = ["drop_shading", "grey", "ice", "noise_like", "plasma", "tint"]


def noise_like(x: Tensor, generator: Generator) -> Tensor:
    """Return N(0, 1) noise of the shape of x."""
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def grey(x: Tensor) -> Tensor:
    """Return the luminance of RGB images; others are returned unchanged."""
    if x.shape[1] != 3:
        return x
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def tint(x: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """Return a colour of levels 0 to 255 as a factor for images like x; its luminance if x is not RGB."""
    shade = x.new_tensor(colour).view(1, 3, 1, 1) / 255
    return shade if x.shape[1] == 3 else grey(shade)


def plasma(like: Tensor, decay: float, generator: Generator) -> Tensor:
    """Return diamond-square heights in [0, 1], (B, 1, H, W). Each halving of the step divides the noise by decay².

    As in ImageNet-C, they are computed on a torus with a power of two as its side, and cropped.
    """
    count, (height, width) = len(like), like.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()

    def jitter(*shape: int) -> Tensor:
        return amplitude**2 * (2 * torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype) - 1)

    heights = torch.zeros(count, side, side, device=like.device, dtype=like.dtype)
    step, amplitude = side, 1.0
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
        step, amplitude = half, amplitude / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True))[:, None, :height, :width]


def ice(x: Tensor, generator: Generator) -> Tensor:
    """Return bluish needles in random directions and patches, as bright and contrasted as ImageNet-C's photos."""
    layers = x.new_empty(3 * len(x), 1, *x.shape[-2:])
    needles = _standardised(streak(noise_like(layers, generator), 8, 4, (-90, 90), generator))
    patches = _standardised(plasma(layers, 1.5, generator))
    texture = (needles + 1.5 * patches).view(3, len(x), *layers.shape[1:]).amax(0)
    texture = 0.13 * _standardised(texture)
    light = 0.3 + 0.58 * torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device, dtype=x.dtype)
    return ((light + texture) * tint(x, (225, 261, 280))).clamp(0, 1)


def _standardised(x: Tensor) -> Tensor:
    centred = x - x.mean((2, 3), keepdim=True)
    return centred / centred.std((2, 3), keepdim=True).clamp(min=1e-6)


def drop_shading(liquid: Tensor) -> Tensor:
    """Return the shading of drops: brighter towards the lower right, by the distance from their outlines."""
    wet = F.pad((liquid > 0).to(liquid.dtype), (0, 1, 0, 1), mode="replicate")
    here = wet[..., :-1, :-1]
    outline = (here != wet[..., :-1, 1:]) | (here != wet[..., 1:, :-1])
    distance = distance_to(outline, 20).clamp(max=20)
    shade = equalised(_box(distance).floor())
    kernel = liquid.new_tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    shade = convolve(shade, kernel).clamp(0, 255)
    return _box(shade)


def _box(x: Tensor) -> Tensor:
    return convolve(x, x.new_full((3, 3), 1 / 9))
