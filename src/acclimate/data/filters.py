"""Blurs, streaks, zooms and the like, for batches of images (B, C, H, W) on their own device."""

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
    """One side's weights, which sum to one."""
    at = torch.arange(-reach, reach + 1, device=like.device, dtype=like.dtype)
    kernel = (-(at**2) / (2 * sigma**2)).exp()
    return kernel / kernel.sum()


def separable_blur(x: Tensor, kernel: Tensor, across: Tensor | None = None) -> Tensor:
    """Along both sides, by a kernel each, as products with band matrices."""
    height, width = x.shape[-2:]
    return _band(kernel, height) @ x @ _band(kernel if across is None else across, width).mT


def _band(kernel: Tensor, side: int) -> Tensor:
    """(side, side): each row a kernel around the diagonal; what falls outside is added to the border."""
    reach = len(kernel) // 2
    at = torch.arange(side, device=kernel.device)
    columns = (at[:, None] + torch.arange(-reach, reach + 1, device=kernel.device)).clamp(0, side - 1)
    return kernel.new_zeros(side, side).scatter_add_(1, columns, kernel.expand(side, -1))


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel with one kernel; the border repeats outwards."""
    top, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (left, left, top, top), mode="replicate")
    if kernel.numel() > 49:  # by Fourier transform
        size = padded.shape[-2:]
        product = torch.fft.rfft2(padded) * torch.fft.rfft2(kernel.flip(0, 1), s=size)
        whole: Tensor = torch.fft.irfft2(product, s=size)
        return whole[..., 2 * top :, 2 * left :].contiguous()
    return F.conv2d(padded.flatten(0, 1).unsqueeze(1), kernel[None, None]).view_as(x)


def streak(x: Tensor, radius: int, sigma: float, angles: tuple[int, int], generator: Generator) -> Tensor:
    """Blurred along a line, to one side, at an angle of each image's own. What would come from beyond is dark."""
    low, high = (math.radians(angle) for angle in angles)
    angle = low + (high - low) * torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype)
    direction = torch.stack([angle.cos(), angle.sin()], 1)
    steps = torch.arange(2 * radius + 1, device=x.device, dtype=x.dtype)
    weights = (-(steps**2) / (2 * sigma**2)).exp()
    weights = weights / weights.sum()
    shifts = (steps[:, None, None] * direction - 0.5).ceil()  # whole pixels: (steps, B, 2)
    size = x.new_tensor([x.shape[-1], x.shape[-2]])
    weights = weights[:, None] * (shifts.abs() < size).all(2)
    return (_sum_of_slices if x.device.type == "cpu" else _sum_of_samples)(x, shifts, weights)


def _sum_of_samples(x: Tensor, shifts: Tensor, weights: Tensor) -> Tensor:
    """Σ_s w_s · x shifted by s: a kernel a step, for all images."""
    total, grid = torch.zeros_like(x), pixel_grid(x)
    scale = 2 / x.new_tensor([x.shape[-1], x.shape[-2]])
    for shift, weight in zip(shifts, weights, strict=True):
        places = (grid + (shift * scale)[:, None, None]).expand(len(x), -1, -1, -1)
        moved = F.grid_sample(x, places, "nearest", padding_mode="border", align_corners=False)
        total += weight.view(-1, 1, 1, 1) * moved
    return total


def _sum_of_slices(x: Tensor, shifts: Tensor, weights: Tensor) -> Tensor:
    """The same, image by image out of a padded one, for a CPU, which has no launches to save."""
    reach, (height, width) = len(shifts), x.shape[-2:]
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    total = torch.zeros_like(x)
    for moves, shares in zip(shifts.int().tolist(), weights.tolist(), strict=True):
        for row, ((across, down), share) in enumerate(zip(moves, shares, strict=True)):
            top, left = reach + down, reach + across
            total[row].add_(padded[row, :, top : top + height, left : left + width], alpha=share)
    return total


def pixel_grid(x: Tensor) -> Tensor:
    """Where each pixel is, in [−1, 1]: (1, H, W, 2)."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device, dtype=x.dtype) * 2 + 1) / height - 1
    columns = (torch.arange(width, device=x.device, dtype=x.dtype) * 2 + 1) / width - 1
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).unsqueeze(0)


def zoomed(x: Tensor, zoom: float) -> Tensor:
    """The centre enlarged, its corners kept in the corners, then cut to size from the upper left."""
    height, width = x.shape[-2:]
    high, wide = (math.ceil(side / zoom) for side in (height, width))
    top, left = (height - high) // 2, (width - wide) // 2
    centre = x[..., top : top + high, left : left + wide]
    size = [round(high * zoom), round(wide * zoom)]
    return F.interpolate(centre, size=size, mode="bilinear", align_corners=True)[..., :height, :width]


def box_matrix(before: int, after: int, like: Tensor) -> Tensor:
    """(after, before): each new pixel the mean of those old ones whose centres it covers, as Pillow's box does it."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    offsets = (torch.arange(before, dtype=torch.float64) + 0.5 - centres[:, None]) / scale
    inside = ((offsets > -0.5) & (offsets <= 0.5)).double()
    return (inside / inside.sum(1, keepdim=True)).to(like)


def local_shuffle(
    count: int, size: torch.Size, reach: int, rounds: int, device: torch.device, generator: Generator
) -> Tensor:
    """(count, H·W): which pixel is seen where, after each has taken a random neighbour's place, `rounds` times.

    ImageNet-C's program means to swap the two, but copies one over the other. It goes pixel by pixel; pixels whose
    neighbourhoods do not meet are done at once here.
    """
    width = size[1]
    order = torch.arange(size[0] * width, device=device).repeat(count, 1)
    places, borders = _apart(size, reach, device)
    for _ in range(rounds):
        across, down = torch.randint(-reach, reach, (2, count, len(places)), generator=generator, device=device)
        neighbours = places + down * width + across
        for begin, end in itertools.pairwise(borders):
            taken = order.gather(1, neighbours[:, begin:end])
            order.index_copy_(1, places[begin:end], taken)
    return order


@functools.cache
def _apart(size: torch.Size, reach: int, device: torch.device, pitch: int = 15) -> tuple[Tensor, list[int]]:
    """Pixels in groups that lie a pitch apart, from the lower right up, and where the groups begin and end.

    The wider the pitch, the nearer to the order of rows, and the more groups.
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
    """To the nearest point, as far as `furthest`: (B, 1, H, W)."""
    far = float(2 * furthest * furthest)
    squared = torch.where(points, 0.0, far)
    for dimension, margin in ((3, (furthest, furthest, 0, 0)), (2, (0, 0, furthest, furthest))):
        side = squared.shape[dimension]
        padded = F.pad(squared, margin, value=far)
        shifted = (padded.narrow(dimension, k, side) + (k - furthest) ** 2 for k in range(2 * furthest + 1))
        squared = functools.reduce(torch.minimum, shifted)
    return squared.sqrt()


def equalised(x: Tensor) -> Tensor:
    """Levels 0 to 255 spread evenly, each image by its own histogram, as OpenCV does it."""
    levels = x.flatten(1).long().clamp(0, 255)
    histogram = x.new_zeros(len(x), 256).scatter_add_(1, levels, x.new_ones(levels.shape))
    first = histogram.gather(1, (histogram > 0).int().argmax(1, keepdim=True))  # of the darkest level that occurs
    below = histogram.cumsum(1) - first
    table = (255 * below / (levels.shape[1] - first).clamp(min=1)).round()
    return table.gather(1, levels).view_as(x)
