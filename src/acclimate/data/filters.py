"""Blurs, streaks, zooms and other filters for batches of images (B, C, H, W), on their device."""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = [
    "box_matrix",
    "convolve",
    "distance_to",
    "equalised",
    "gaussian_kernel",
    "local_shuffle",
    "pixel_grid",
    "separable_blur",
    "streak",
    "zoomed",
]


def gaussian_kernel(reach: int, sigma: float, like: Tensor) -> Tensor:
    """Return the 2·reach + 1 weights of a one-dimensional Gaussian; they sum to one."""
    at = torch.arange(-reach, reach + 1, device=like.device, dtype=like.dtype)
    kernel = (-(at**2) / (2 * sigma**2)).exp()
    return kernel / kernel.sum()


def separable_blur(x: Tensor, kernel: Tensor, across: Tensor | None = None) -> Tensor:
    """Blur along the height with `kernel` and along the width with `across`, or `kernel` again."""
    height, width = x.shape[-2:]
    return _band_matrix(kernel, height) @ x @ _band_matrix(kernel if across is None else across, width).mT


def _band_matrix(kernel: Tensor, side: int) -> Tensor:
    """Return (side, side) with a kernel around the diagonal of each row; weights outside are added to the border."""
    reach = len(kernel) // 2
    at = torch.arange(side, device=kernel.device)
    columns = (at[:, None] + torch.arange(-reach, reach + 1, device=kernel.device)).clamp(0, side - 1)
    return kernel.new_zeros(side, side).scatter_add_(1, columns, kernel.expand(side, -1))


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with one kernel, with replicated borders."""
    top, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (left, left, top, top), mode="replicate")
    if kernel.numel() > 49:  # large: by Fourier transform
        size = padded.shape[-2:]
        product = torch.fft.rfft2(padded) * torch.fft.rfft2(kernel.flip(0, 1), s=size)
        whole: Tensor = torch.fft.irfft2(product, s=size)
        return whole[..., 2 * top :, 2 * left :].contiguous()
    return F.conv2d(padded.flatten(0, 1).unsqueeze(1), kernel[None, None]).view_as(x)


def streak(x: Tensor, radius: int, sigma: float, angles: tuple[int, int], generator: Generator) -> Tensor:
    """Blur along a line, to one side, at a random angle per image. Pixels shifted by a whole side or more are black."""
    low, high = (math.radians(angle) for angle in angles)
    angle = low + (high - low) * torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype)
    direction = torch.stack([angle.cos(), angle.sin()], 1)
    steps = torch.arange(2 * radius + 1, device=x.device, dtype=x.dtype)
    weights = (-(steps**2) / (2 * sigma**2)).exp()
    weights = weights / weights.sum()
    shifts = (steps[:, None, None] * direction - 0.5).ceil()  # whole pixels: (steps, B, 2)
    size = x.new_tensor([x.shape[-1], x.shape[-2]])
    weights = weights[:, None] * (shifts.abs() < size).all(2)
    return (_sum_shifted_cpu if x.device.type == "cpu" else _sum_shifted)(x, shifts, weights)


def _sum_shifted(x: Tensor, shifts: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_s w_s · (x shifted by s), with one kernel launch per step for all images."""
    total, grid = torch.zeros_like(x), pixel_grid(x)
    scale = 2 / x.new_tensor([x.shape[-1], x.shape[-2]])
    for shift, weight in zip(shifts, weights, strict=True):
        points = (grid + (shift * scale)[:, None, None]).expand(len(x), -1, -1, -1)
        moved = F.grid_sample(x, points, "nearest", padding_mode="border", align_corners=False)
        total += weight.view(-1, 1, 1, 1) * moved
    return total


def _sum_shifted_cpu(x: Tensor, shifts: Tensor, weights: Tensor) -> Tensor:
    """Return the same sum from slices of the padded image, one image at a time: faster on a CPU."""
    reach, (height, width) = len(shifts), x.shape[-2:]
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    total = torch.zeros_like(x)
    for moves, shares in zip(shifts.int().tolist(), weights.tolist(), strict=True):
        for row, ((across, down), share) in enumerate(zip(moves, shares, strict=True)):
            top, left = reach + down, reach + across
            total[row].add_(padded[row, :, top : top + height, left : left + width], alpha=share)
    return total


def pixel_grid(x: Tensor) -> Tensor:
    """Return the coordinates of each pixel in [−1, 1]: (1, H, W, 2)."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device, dtype=x.dtype) * 2 + 1) / height - 1
    columns = (torch.arange(width, device=x.device, dtype=x.dtype) * 2 + 1) / width - 1
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).unsqueeze(0)


def zoomed(x: Tensor, zoom: float) -> Tensor:
    """Enlarge the centre with aligned corners, then crop to size from the upper left."""
    height, width = x.shape[-2:]
    high, wide = (math.ceil(side / zoom) for side in (height, width))
    top, left = (height - high) // 2, (width - wide) // 2
    centre = x[..., top : top + high, left : left + wide]
    size = [round(high * zoom), round(wide * zoom)]
    return F.interpolate(centre, size=size, mode="bilinear", align_corners=True)[..., :height, :width]


def box_matrix(before: int, after: int, like: Tensor) -> Tensor:
    """Return (after, before): each new pixel is the mean of the old ones with a centre inside it, as Pillow's box."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    offsets = (torch.arange(before, dtype=torch.float64) + 0.5 - centres[:, None]) / scale
    inside = ((offsets > -0.5) & (offsets <= 0.5)).double()
    return (inside / inside.sum(1, keepdim=True)).to(like)


def local_shuffle(
    count: int, size: torch.Size, reach: int, rounds: int, device: torch.device, generator: Generator
) -> Tensor:
    """Return (count, H·W): the index of the pixel shown at each position, after `rounds` of copying random neighbours.

    ImageNet-C's program intends to swap two pixels, but copies one over the other. It visits pixels one by one; here
    pixels with disjoint neighbourhoods are visited at once.
    """
    width = size[1]
    order = torch.arange(size[0] * width, device=device).repeat(count, 1)
    pixels, bounds = _pixel_groups(size, reach, device)
    for _ in range(rounds):
        across, down = torch.randint(-reach, reach, (2, count, len(pixels)), generator=generator, device=device)
        neighbours = pixels + down * width + across
        for begin, end in itertools.pairwise(bounds):
            copied = order.gather(1, neighbours[:, begin:end])
            order.index_copy_(1, pixels[begin:end], copied)
    return order


@functools.cache
def _pixel_groups(size: torch.Size, reach: int, device: torch.device, pitch: int = 15) -> tuple[Tensor, list[int]]:
    """Return pixel indices in groups, from the lower right to the upper left, and the bounds of the groups.

    The pixels of a group are `pitch` apart. A wider pitch is closer to visiting row by row, and makes more groups.
    """
    height, width = size
    rows, columns = (torch.arange(side - reach, reach, -1) for side in (height, width))
    groups = [
        (rows[i::pitch, None] * width + columns[j::pitch]).flatten()
        for i in range(min(pitch, len(rows)))
        for j in range(min(pitch, len(columns)))
    ]
    return torch.cat(groups).to(device), [0, *itertools.accumulate(map(len, groups))]


def distance_to(points: Tensor, furthest: int) -> Tensor:
    """Return the distance of each pixel to the nearest point, exact up to `furthest`: (B, 1, H, W)."""
    far = float(2 * furthest * furthest)
    squared = torch.where(points, 0.0, far)
    for dimension, margin in ((3, (furthest, furthest, 0, 0)), (2, (0, 0, furthest, furthest))):
        side = squared.shape[dimension]
        padded = F.pad(squared, margin, value=far)
        shifted = (padded.narrow(dimension, k, side) + (k - furthest) ** 2 for k in range(2 * furthest + 1))
        squared = functools.reduce(torch.minimum, shifted)
    return squared.sqrt()


def equalised(x: Tensor) -> Tensor:
    """Equalise the histogram of each image of levels 0 to 255, as OpenCV does."""
    levels = x.flatten(1).long().clamp(0, 255)
    histogram = x.new_zeros(len(x), 256).scatter_add_(1, levels, x.new_ones(levels.shape))
    first = histogram.gather(1, (histogram > 0).int().argmax(1, keepdim=True))  # count of the darkest level that occurs
    below = histogram.cumsum(1) - first
    table = (255 * below / (levels.shape[1] - first).clamp(min=1)).round()
    return table.gather(1, levels).view_as(x)
