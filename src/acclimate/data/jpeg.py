"""JPEG compression and decompression, batched in torch."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["jpeg"]

# Quantisation tables of the standard (ITU T.81, annex K) at quality 50.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *[(99,) * 8] * 4,
)


def jpeg(x: Tensor, quality: int) -> Tensor:
    """Return images (B, C, H, W) in [0, 1] after JPEG compression, with 4:2:0 chroma if there are three channels."""
    levels = (x * 255).round()
    height, width = x.shape[-2:]
    if x.shape[1] != 3:
        return (_quantised(levels, _table(_LUMINANCE, quality, x.dtype, x.device)) / 255).clamp(0, 1)
    red, green, blue = levels[:, :1], levels[:, 1:2], levels[:, 2:]
    light = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).round_()
    even = (0, width % 2, 0, height % 2)
    halved = F.avg_pool2d(F.pad(torch.cat([blue, red, light], 1), even, mode="replicate"), 2)
    halved = (halved[:, :2] - halved[:, 2:]) / light.new_tensor([1.772, 1.402]).view(1, 2, 1, 1) + 128
    light = _quantised(light, _table(_LUMINANCE, quality, x.dtype, x.device))
    halved = _quantised(halved.round_(), _table(_CHROMINANCE, quality, x.dtype, x.device))
    colours = F.interpolate(halved, scale_factor=2, mode="bilinear", align_corners=False)[..., :height, :width]
    colours = colours.round().sub_(128)
    cb, cr = colours[:, :1], colours[:, 1:]
    green = light.sub(cb, alpha=0.344136).sub_(cr, alpha=0.714136)
    rgb = torch.cat([light.add(cr, alpha=1.402), green, light.add(cb, alpha=1.772)], 1)
    return rgb.round_().clamp_(0, 255).div_(255)


def _quantised(planes: Tensor, table: Tensor) -> Tensor:
    """Quantise the cosine transform of each block of 8 × 8, and transform back."""
    height, width = planes.shape[-2:]
    padded = F.pad(planes - 128, (0, -width % 8, 0, -height % 8), mode="replicate")
    cosines = _cosines(planes.dtype, planes.device)
    frequencies = _on_blocks(padded, cosines)
    by_block = frequencies.view(*planes.shape[:2], -1, 8, padded.shape[-1] // 8, 8)
    rounded = (by_block / table[:, None]).round_().mul_(table[:, None])
    back = _on_blocks(rounded.view_as(padded), cosines.mT)
    return back.add_(128).round_().clamp_(0, 255)[..., :height, :width]


def _on_blocks(planes: Tensor, matrix: Tensor) -> Tensor:
    """Return M @ block @ Mᵀ for each block of 8 × 8, at the block's position."""
    height, width = planes.shape[-2:]
    down = matrix @ planes.view(*planes.shape[:2], height // 8, 8, width)
    return (down.view(*planes.shape[:2], height, width // 8, 8) @ matrix.mT).view_as(planes)


@functools.cache
def _table(base: tuple[tuple[int, ...], ...], quality: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((torch.tensor(base) * scale + 50) // 100).clamp(1, 255).to(device, dtype)


@functools.cache
def _cosines(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal cosine transform, one row per frequency."""
    at = torch.arange(8, dtype=torch.float64)
    rows = torch.cos(math.pi * (2 * at + 1) * at[:, None] / 16) / 2
    rows[0] /= math.sqrt(2)
    return rows.to(device, dtype)
