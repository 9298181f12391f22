"""ImageNet-C-style corruptions (Hendrycks & Dietterich, 2019), batched in torch on the images' device.

    noisy = corrupt(x, "gaussian_noise", severity=5, generator=g)      # x: (B, C, H, W) in [0, 1]

Severities 1–5 carry the published ImageNet-C parameters, whatever the image size. A generator is asked for, so that a
stream can be made again. Results on these are called ImageNet-C-style, never ImageNet-C: the files of that data set
were made with other libraries.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .jpeg import jpeg

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
    return _streak(x, radius, sigma, (-45, 45), generator)


def zoom_blur(x: Tensor, level: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """The mean of the image and of views zoomed into its centre."""
    furthest, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[level]
    zooms = torch.arange(1, furthest, step, dtype=torch.float64).tolist()
    total = x.clone()
    for zoom in zooms:
        total += _zoomed(x, zoom)
    return total / (len(zooms) + 1)


def fog(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A plasma fractal laid over the image."""
    thickness, decay = ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[level]
    mist = _plasma(x, decay, generator)
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
    down, across = (_box_filter(side, int(side * share), x) for side in x.shape[-2:])
    return F.interpolate(down @ x @ across.mT, size=x.shape[-2:], mode="nearest-exact")


def glass_blur(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Blurred, pixels replaced by neighbours at random, blurred again."""
    sigma, reach, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[level]
    blur = _gaussian(int(4 * sigma + 0.5), sigma, x)
    y = (_separable_blur(x, blur) * 255).floor() / 255
    order = _local_shuffle(len(x), x.shape[-2:], reach, rounds, x.device, generator)
    y = y.flatten(2).gather(2, order[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return _separable_blur(y, blur)


def snow(x: Tensor, level: int, generator: Generator) -> Tensor:
    """A paler image, and flakes: noise enlarged, cut off and streaked, and the same turned round."""
    mean, deviation, zoom, least, radius, sigma, share = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[level]
    flakes = _zoomed(mean + deviation * _noise(x[:, :1], generator), zoom).clamp(0, 1)
    flakes = flakes.masked_fill(flakes < least, 0.0)
    flakes = _streak(flakes, radius, sigma, (-135, -45), generator)
    flakes = (flakes * 255).round() / 255
    pale = share * x + (1 - share) * torch.maximum(x, 1.5 * _grey(x) + 0.5)
    return pale + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Ice over a darker image. ImageNet-C lays photographs over it; this ice is made, of ridges in a plasma fractal."""
    through, opaque = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[level]
    return through * x + opaque * _ice(x, generator)


def elastic_transform(x: Tensor, level: int, generator: Generator) -> Tensor:
    """Each pixel a little off its place, by a smooth field of shifts."""
    strength = 250 * (0.05, 0.065, 0.085, 0.1, 0.12)[level]
    height, width = x.shape[-2:]
    furthest = 0.005 * height
    field = torch.rand(len(x), 2, height, width, generator=generator, device=x.device, dtype=x.dtype)
    down, across = (_gaussian(int(3 * sigma + 0.5), sigma, x) for sigma in (0.01 * height, 0.01 * width))
    shifts = strength * furthest * _separable_blur(2 * field - 1, down, across)
    scale = x.new_tensor([2 / width, 2 / height])
    return F.grid_sample(x, _grid(x) + shifts.movedim(1, -1) * scale, padding_mode="reflection", align_corners=False)


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
    liquid = mean + deviation * _noise(x[:, :1], generator)
    liquid = _separable_blur(liquid, _gaussian(int(4 * sigma + 0.5), sigma, x))
    liquid = liquid.masked_fill(liquid < least, 0.0)
    if level < 3:
        drops = liquid * _drop_shading(liquid)
        drops = strength * drops / drops.amax((2, 3), keepdim=True).clamp(min=1e-12)
        return x + drops * _tint(x, (175, 238, 238))
    mud = _separable_blur((liquid > least).to(x.dtype), _gaussian(int(4 * strength + 0.5), strength, x))
    mud = mud.masked_fill(mud < 0.8, 0.0)
    return x * (1 - mud) + mud * _tint(x, (63, 42, 20))


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


def _streak(x: Tensor, radius: int, sigma: float, angles: tuple[int, int], generator: Generator) -> Tensor:
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
    total, grid = torch.zeros_like(x), _grid(x)
    scale = 2 / x.new_tensor([x.shape[-1], x.shape[-2]])
    for shift, weight in zip(shifts, weights, strict=True):
        places = (grid + (shift * scale)[:, None, None]).expand(len(x), -1, -1, -1)
        moved = F.grid_sample(x, places, "nearest", padding_mode="border", align_corners=False)
        total += weight.view(-1, 1, 1, 1) * moved
    return total


def _sum_of_slices(x: Tensor, shifts: Tensor, weights: Tensor) -> Tensor:
    """The same, image by image out of a padded one, which a CPU does faster."""
    reach, (height, width) = len(shifts), x.shape[-2:]
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    total = torch.zeros_like(x)
    for moves, shares in zip(shifts.int().tolist(), weights.tolist(), strict=True):
        for row, ((across, down), share) in enumerate(zip(moves, shares, strict=True)):
            top, left = reach + down, reach + across
            total[row].add_(padded[row, :, top : top + height, left : left + width], alpha=share)
    return total


def _gaussian(reach: int, sigma: float, like: Tensor) -> Tensor:
    at = torch.arange(-reach, reach + 1, device=like.device, dtype=like.dtype)
    kernel = (-(at**2) / (2 * sigma**2)).exp()
    return kernel / kernel.sum()


def _separable_blur(x: Tensor, kernel: Tensor, across: Tensor | None = None) -> Tensor:
    """Along both sides, by a kernel each, as products with band matrices: the fastest way on every device."""
    height, width = x.shape[-2:]
    return _band(kernel, height) @ x @ _band(kernel if across is None else across, width).mT


def _band(kernel: Tensor, side: int) -> Tensor:
    """(side, side): each row a kernel around the diagonal; what falls outside is added to the border."""
    reach = len(kernel) // 2
    at = torch.arange(side, device=kernel.device)
    columns = (at[:, None] + torch.arange(-reach, reach + 1, device=kernel.device)).clamp(0, side - 1)
    return kernel.new_zeros(side, side).scatter_add_(1, columns, kernel.expand(side, -1))


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel with one kernel; the border repeats outwards."""
    top, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (left, left, top, top), mode="replicate")
    if kernel.numel() > 49:  # by Fourier transform
        size = padded.shape[-2:]
        product = torch.fft.rfft2(padded) * torch.fft.rfft2(kernel.flip(0, 1), s=size)
        whole: Tensor = torch.fft.irfft2(product, s=size)
        return whole[..., 2 * top :, 2 * left :].contiguous()
    return F.conv2d(padded.flatten(0, 1).unsqueeze(1), kernel[None, None]).view_as(x)


def _grid(x: Tensor) -> Tensor:
    """Where each pixel is, in [−1, 1]: (1, H, W, 2)."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device, dtype=x.dtype) * 2 + 1) / height - 1
    columns = (torch.arange(width, device=x.device, dtype=x.dtype) * 2 + 1) / width - 1
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).unsqueeze(0)


def _plasma(like: Tensor, decay: float, generator: Generator) -> Tensor:
    """Diamond-square heights in [0, 1] on a torus, (B, 1, H, W): each halving of the step divides the wobble by decay².

    The torus' side is the next power of two, as in ImageNet-C, and cropped.
    """
    count, (height, width) = len(like), like.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()

    def jitter(*shape: int) -> Tensor:
        return wobble**2 * (2 * torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype) - 1)

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
    return (heights / heights.amax((1, 2), keepdim=True))[:, None, :height, :width]


def _zoomed(x: Tensor, zoom: float) -> Tensor:
    """The centre enlarged, its corners kept in the corners, then cut to size from the upper left."""
    height, width = x.shape[-2:]
    high, wide = (math.ceil(side / zoom) for side in (height, width))
    top, left = (height - high) // 2, (width - wide) // 2
    centre = x[..., top : top + high, left : left + wide]
    size = [round(high * zoom), round(wide * zoom)]
    return F.interpolate(centre, size=size, mode="bilinear", align_corners=True)[..., :height, :width]


def _box_filter(before: int, after: int, like: Tensor) -> Tensor:
    """(after, before): each new pixel the mean of those old ones whose centres it covers, as Pillow's box does it."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    offsets = (torch.arange(before, dtype=torch.float64) + 0.5 - centres[:, None]) / scale
    inside = ((offsets > -0.5) & (offsets <= 0.5)).double()
    return (inside / inside.sum(1, keepdim=True)).to(like)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _tint(x: Tensor, colour: tuple[int, int, int]) -> Tensor:
    tint = x.new_tensor(colour).view(1, 3, 1, 1) / 255
    return tint if x.shape[1] == 3 else _grey(tint)


def _local_shuffle(
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


def _drop_shading(liquid: Tensor) -> Tensor:
    """Light on drops: brighter towards the lower right of their outlines, by the distance from these."""
    wet = F.pad((liquid > 0).to(liquid.dtype), (0, 1, 0, 1), mode="replicate")
    here = wet[..., :-1, :-1]
    outline = (here != wet[..., :-1, 1:]) | (here != wet[..., 1:, :-1])
    distance = _distance(outline, 20).clamp(max=20)
    shade = _equalised(_box(distance).floor())
    kernel = liquid.new_tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    shade = _convolve(shade, kernel).clamp(0, 255)
    return _box(shade)


def _box(x: Tensor) -> Tensor:
    return _convolve(x, x.new_full((3, 3), 1 / 9))


def _distance(points: Tensor, furthest: int) -> Tensor:
    """To the nearest point, as far as `furthest`: (B, 1, H, W)."""
    far = float(2 * furthest * furthest)
    squared = torch.where(points, 0.0, far)
    for dimension, margin in ((3, (furthest, furthest, 0, 0)), (2, (0, 0, furthest, furthest))):
        side = squared.shape[dimension]
        padded = F.pad(squared, margin, value=far)
        shifted = (padded.narrow(dimension, k, side) + (k - furthest) ** 2 for k in range(2 * furthest + 1))
        squared = functools.reduce(torch.minimum, shifted)
    return squared.sqrt()


def _equalised(x: Tensor) -> Tensor:
    """Levels 0 to 255 spread evenly, each image by its own histogram, as OpenCV does it."""
    levels = x.flatten(1).long().clamp(0, 255)
    histogram = x.new_zeros(len(x), 256).scatter_add_(1, levels, x.new_ones(levels.shape))
    first = histogram.gather(1, (histogram > 0).int().argmax(1, keepdim=True))  # of the darkest level that occurs
    below = histogram.cumsum(1) - first
    table = (255 * below / (levels.shape[1] - first).clamp(min=1)).round()
    return table.gather(1, levels).view_as(x)


def _ice(x: Tensor, generator: Generator) -> Tensor:
    """Needles in a few directions, in patches: bluish, in the mean and spread of light that the photographs have."""
    layers = x.new_empty(3 * len(x), 1, *x.shape[-2:])
    needles = _standardised(_streak(_noise(layers, generator), 8, 4, (-90, 90), generator))
    patches = _standardised(_plasma(layers, 1.5, generator))
    texture = (needles + 1.5 * patches).view(3, len(x), *layers.shape[1:]).amax(0)
    texture = 0.13 * _standardised(texture)
    light = 0.3 + 0.58 * torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device, dtype=x.dtype)
    return ((light + texture) * _tint(x, (225, 261, 280))).clamp(0, 1)


def _standardised(x: Tensor) -> Tensor:
    centred = x - x.mean((2, 3), keepdim=True)
    return centred / centred.std((2, 3), keepdim=True).clamp(min=1e-6)


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
