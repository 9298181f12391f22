"""Augmented views of a batch: images in [0, 1], on their device, from an explicit generator.

    view = Views()(x, generator)          # CoTTA: the same transform for the whole batch
    view = AugMix()(x, generator)         # MEMO: another mixture for each image

Any callable of (images, generator) that returns images of the same shape can replace them. Colour operations need
kornia, which the extra `augment` installs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..extras import install_command
from .randomness import draw, on_device
from .world import Share

__all__ = [
    "AugMix",
    "Augment",
    "Views",
    "check_can_augment",
    "mean_over_views",
    "require_kornia",
    "several",
    "views_of_each",
]

Augment: TypeAlias = Callable[[Tensor, Generator], Tensor]
"""Returns a view of each image, sampled with the generator."""

_LARGEST_CHUNK = 256 * 3 * 224 * 224  # elements in the views of `mean_over_views` that are made at once
_LARGEST_AUGMIX = 1 << 23  # elements in the views of `views_of_each` that are made at once


def _kornia(part: str) -> Any:
    try:
        return import_module(f"kornia.{part}")
    except ImportError as error:
        raise ImportError(
            f"augmented views need kornia: {install_command('augment')}; or pass augment=, a callable of (images, "
            "generator)"
        ) from error


def require_kornia(augment: object) -> None:
    """Raise if views need kornia, and it is missing: before a long run, not in the middle of it."""
    if isinstance(augment, (Views, AugMix)):
        _kornia("enhance")


def _uniform(low: float, high: float, generator: Generator) -> float:
    return float(torch.empty((), dtype=torch.float64).uniform_(low, high, generator=generator))


class Warp(NamedTuple):
    """Rotate about the centre by `angle` degrees, zoom, shift right and down by pixels; blur if σ > 0; mirror."""

    angle: float
    shift: tuple[int, int]
    zoom: float
    sigma: float = 0.0
    mirrored: bool = False


Jitter: TypeAlias = Sequence[tuple[int, float]]
"""Colour operations in order: the index in `_RANGES` and the factor of each."""


@dataclass(frozen=True)
class Views:
    """The augmentation of CoTTA: colour jitter in random order, a small rotation, shift and zoom, blur, flip, noise.

    As in the authors' program, the transform is sampled once per batch, the noise for every pixel. ROID uses
    `Views(padding="reflection", blur=False, noise=0.0)`.
    """

    padding: Literal["border", "reflection"] = "border"
    blur: bool = True
    noise: float = 0.005

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return a view of each image."""
        return self.several(x, 1, generator)

    def several(self, x: Tensor, count: int, generator: Generator, share: Share | None = None) -> Tensor:
        """Return `count` views of the batch, concatenated: those of `count` calls, computed together.

        If x is one rank's `share` of a batch, they are its rows of the views of the whole batch.
        """
        jitters, warps, noises = zip(*(self._sample(x, generator, share) for _ in range(count)), strict=True)
        if not len(x):
            return x
        y = warp(jitter(x.clamp(0, 1).repeat(count, 1, 1, 1), jitters), warps, self.padding)
        if self.noise:
            y = y + self.noise * torch.cat(noises)
        return y.clamp(0, 1)

    def _sample(self, x: Tensor, generator: Generator, share: Share | None = None) -> tuple[Jitter, Warp, Tensor]:
        order = torch.randperm(len(_RANGES), generator=generator).tolist()
        factors = [(index, _uniform(*_RANGES[index], generator)) for index in order]
        warping = self._sample_warp(x.shape[-2], x.shape[-1], generator)
        if not self.noise:
            return factors, warping, x[:0]
        return factors, warping, draw(torch.randn, x, on_device(generator, x.device), share)

    def _sample_warp(self, height: int, width: int, generator: Generator) -> Warp:
        angle = _uniform(-15, 15, generator)
        shift = [round(_uniform(-side / 8, side / 8, generator)) for side in (width, height)]  # 1/16 of the padded side
        zoom = _uniform(0.9, 1.1, generator)
        sigma = _uniform(0.001, 0.5, generator) if self.blur else 0.0
        return Warp(angle, (shift[0], shift[1]), zoom, sigma, float(torch.rand((), generator=generator)) < 0.5)


def check_can_augment(augment: Augment, x: Tensor, method: str) -> None:
    """Raise if the augmentation is one of ours, and x is not a batch of images."""
    if type(augment).__call__ in (Views.__call__, AugMix.__call__) and x.dim() != 4:
        raise ValueError(
            f"{method} makes views of images: expected shape (B, C, H, W), got {tuple(x.shape)}. Pass augment=, a "
            "function of (batch, generator) that returns a view of each sample, or use a method without views, such as "
            "EATA"
        )


def several(augment: Augment, x: Tensor, count: int, generator: Generator, share: Share | None = None) -> Tensor:
    """Return `count` views of the batch by any augmentation, concatenated.

    If x is one rank's `share` of a batch, random numbers are drawn for the whole batch. An augmentation of the user's
    gets a batch of that size, with zeros in place of the images of other ranks.
    """
    if isinstance(augment, Views) and type(augment).__call__ is Views.__call__:
        return augment.several(x, count, generator, share)
    share = share or Share(0, len(x), len(x))
    views = [share.of(augment(share.whole(x), generator)) for _ in range(count)]
    return views[0] if count == 1 else torch.cat(views)


def views_of_each(
    augment: Augment, x: Tensor, count: int, generator: Generator, share: Share | None = None
) -> Iterator[Tensor]:
    """Yield `count` views of each image in turn. AugMix samples per image, so it makes those of many images at once.

    If x is one rank's `share` of a batch, those of the whole batch are made and its own are yielded.
    """
    share = share or Share(0, len(x), len(x))
    at_once = max(1, _LARGEST_AUGMIX // (count * math.prod(x.shape[1:]))) if isinstance(augment, AugMix) else 1
    own, place = range(share.offset, share.offset + share.size), 0
    for some in torch.split(share.whole(x), at_once):
        for views in torch.split(augment(some.repeat_interleave(count, 0), generator), count):
            if place in own:
                yield views
            place += 1


def mean_over_views(
    predict: Callable[[Tensor], Tensor],
    augment: Augment,
    x: Tensor,
    count: int,
    generator: Generator,
    *,
    together: bool,
    share: Share | None = None,
) -> Tensor:
    """Return the mean of `predict(view)` over `count` views of the batch: logits of the batch's length.

    Views are made in chunks that fit in memory. `together` predicts a chunk in one call; otherwise each view has its
    own, as BatchNorm requires if it uses the statistics of the batch. x may be one rank's `share` of a batch.
    """
    total = x.new_zeros(())
    at_once = max(1, _LARGEST_CHUNK // max(1, x.numel()))
    for start in range(0, count, at_once):
        number = min(at_once, count - start)
        views = several(augment, x, number, generator, share)
        chunk = number if together else 1
        for rows in views.view(number // chunk, chunk * len(x), *views.shape[1:]):
            logits = predict(rows)
            total = total + logits.view(chunk, len(x), *logits.shape[1:]).sum(0)
    return total / count


def warp(x: Tensor, warps: Sequence[Warp], padding: str) -> Tensor:
    """Warp each view of a batch of concatenated views by its own transform."""
    height, width = x.shape[-2:]
    blurred = warps[0].sigma > 0
    margin = 2 if blurred else 0  # lets the blur see beyond the border
    size = [len(warps), x.shape[1], height + 2 * margin, width + 2 * margin]
    matrix = x.new_tensor([_output_to_input(each, height, width, margin) for each in warps])
    grid = F.affine_grid(matrix, size, align_corners=True)
    rows = len(x) // len(warps)
    y = F.grid_sample(x, grid.repeat_interleave(rows, 0), padding_mode=padding, align_corners=True)
    return _blur(y, x.new_tensor([_taps(each.sigma) for each in warps]).repeat_interleave(rows, 0)) if blurred else y


def _output_to_input(warping: Warp, height: int, width: int, margin: int) -> list[list[float]]:
    """Return the 2 × 3 matrix from output to input coordinates, both in [−1, 1]."""
    cos, sin = (f(math.radians(warping.angle)) / warping.zoom for f in (math.cos, math.sin))
    right, down = max(width - 1, 1) / 2, max(height - 1, 1) / 2  # half an image, in pixels
    far_right, far_down = right + margin, down + margin
    back, up = warping.shift
    rows = [
        [cos * far_right / right, sin * far_down / right, -(cos * back + sin * up) / right],
        [-sin * far_right / down, cos * far_down / down, (sin * back - cos * up) / down],
    ]
    return [[-row[0] if warping.mirrored else row[0], *row[1:]] for row in rows]


def _taps(sigma: float) -> list[float]:
    """Return five weights of a Gaussian that sum to one."""
    weights = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(-2, 3)]
    return [weight / sum(weights) for weight in weights]


def _blur(x: Tensor, taps: Tensor) -> Tensor:
    """Blur each image with its own five weights along both sides, which lose two pixels at each end."""
    height, width = x.shape[-2] - 4, x.shape[-1] - 4
    weights = taps.T[:, :, None, None, None]
    x = torch.stack([w * x[..., i : i + height, :] for i, w in enumerate(weights)]).sum(0)
    return torch.stack([w * x[..., i : i + width] for i, w in enumerate(weights)]).sum(0)


_RANGES = ((0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3))
"""Ranges of the factors of brightness, contrast, saturation, hue and gamma."""


def jitter(x: Tensor, jitters: Sequence[Jitter]) -> Tensor:
    """Change the colours of each view of a batch of concatenated views by its own operations.

    Views that need the same operation at the same step share one call.
    """
    enhance = _kornia("enhance")
    operations: list[Callable[[Tensor, Tensor], Tensor]] = [
        enhance.adjust_brightness_accumulative,
        enhance.adjust_contrast_with_mean_subtraction,
        enhance.adjust_saturation_with_gray_subtraction,
        lambda y, factor: enhance.adjust_hue(y, 2 * math.pi * factor),
        lambda y, factor: enhance.adjust_gamma(y.clamp(min=1e-8), factor),
    ]
    grey = x.shape[1] != 3
    rows = len(x) // len(jitters)
    views = list(torch.split(x, rows))
    for step, index in product(range(len(_RANGES)), range(len(operations))):
        own = {view: order[step][1] for view, order in enumerate(jitters) if order[step][0] == index}
        if own and not (grey and index in (2, 3)):  # saturation and hue need colours
            factors = x.new_tensor([*own.values()]).repeat_interleave(rows)
            changed = operations[index](torch.cat([views[view] for view in own]), factors)
            for view, result in zip(own, torch.split(changed, rows), strict=True):
                views[view] = result
    return torch.cat(views)


@dataclass(frozen=True)
class AugMix:
    """Random resized crop and flip, then a mixture of `width` chains of 1 to `depth` operations (Hendrycks, 2020).

    The crop, the chains and the weights are sampled per image.
    """

    width: int = 3
    depth: int = 3
    crop: tuple[float, float] = (0.08, 1.0)
    """The range of the crop's area, as a fraction of the image."""

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return a view of each image."""
        x = _crop_and_flip(x.clamp(0, 1), self.crop, generator)
        weights = -torch.rand(len(x), self.width, generator=generator).clamp(min=1e-12).log()  # Dirichlet(1, …, 1)
        weights = (weights / weights.sum(1, keepdim=True)).to(x)
        share = torch.rand(len(x), generator=generator).to(x).view(-1, 1, 1, 1)  # Beta(1, 1)
        chains = x.repeat_interleave(self.width, 0)
        lengths = torch.randint(1, self.depth + 1, (len(chains),), generator=generator)
        for step in range(self.depth):
            chains = _one_operation_each(chains, lengths > step, generator)
        chains = chains.view(len(x), self.width, *x.shape[1:])
        mixed = (weights.view(len(x), self.width, 1, 1, 1) * chains).sum(1)
        return share * x + (1 - share) * mixed


def _crop_and_flip(x: Tensor, area: tuple[float, float], generator: Generator) -> Tensor:
    """Crop a random fraction of the area, with an aspect ratio of 3:4 to 4:3 if it fits; resize; flip at random."""
    count = len(x)
    share = torch.empty(count).uniform_(*area, generator=generator).sqrt()
    ratio = torch.empty(count).uniform_(math.log(3 / 4), math.log(4 / 3), generator=generator).mul(0.5).exp()
    height, width = (share / ratio).clamp(max=1), (share * ratio).clamp(max=1)
    down, across = ((2 * torch.rand(count, generator=generator) - 1) * (1 - side) for side in (height, width))
    flip = 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()
    zero = torch.zeros(count)
    matrix = torch.stack([width * flip, zero, across, zero, height, down], 1).view(-1, 2, 3)
    return _affine(x, matrix, padding="border")


def _one_operation_each(x: Tensor, active: Tensor, generator: Generator) -> Tensor:
    """Apply a random one of nine operations, at severity 1 of 10, to each active image."""
    operation = torch.randint(9, (len(x),), generator=generator)
    level = torch.empty(len(x)).uniform_(0.1, 1.0, generator=generator) / 10
    sign = 1 - 2 * (torch.rand(len(x), generator=generator) < 0.5).float()
    enhance = _kornia("enhance")
    y = x.clone()
    for index, apply in enumerate([_autocontrast, enhance.equalize, lambda images: enhance.posterize(images, 4)]):
        if rows := _rows(active & (operation == index)):
            y[rows] = apply(x[rows])
    if rows := _rows(active & (operation == 3)):
        y[rows] = enhance.solarize(x[rows], (1 - (256 * level[rows]).floor() / 256).to(x))
    if rows := _rows(active & (operation > 3)):
        y[rows] = _affine(x[rows], _geometry(operation[rows], sign[rows], level[rows], x.shape[-2:]), padding="grey")
    return y


def _rows(mask: Tensor) -> list[int]:
    rows: list[int] = mask.nonzero().flatten().tolist()
    return rows


def _geometry(operation: Tensor, sign: Tensor, level: Tensor, size: torch.Size) -> Tensor:
    """Return 2 × 3 matrices from output to input coordinates in [−1, 1].

    Operations are rotation (4), shear along x (5) or y (6), and shift along x (7) or y (8). Rotations are about
    the centre, shears about the top left corner.
    """
    height, width = size
    degrees = sign * (30 * level).floor()
    turn = torch.where(operation == 4, degrees, 0).deg2rad()
    shear = 0.3 * sign * level
    shift = (sign * (width / 3 * level).floor() * 2 / width, sign * (height / 3 * level).floor() * 2 / height)
    along_x, along_y = turn.sin() * height / width, turn.sin() * width / height
    rows = [
        turn.cos(),
        along_x + torch.where(operation == 5, shear * height / width, 0),
        torch.where(operation == 5, shear * height / width, 0) + torch.where(operation == 7, shift[0], 0),
        -along_y + torch.where(operation == 6, shear * width / height, 0),
        turn.cos(),
        torch.where(operation == 6, shear * width / height, 0) + torch.where(operation == 8, shift[1], 0),
    ]
    return torch.stack(rows, 1).view(-1, 2, 3)


def _affine(x: Tensor, matrix: Tensor, padding: Literal["border", "grey"]) -> Tensor:
    """Transform each image by its own matrix from output to input coordinates; outside is grey or the border."""
    grid = F.affine_grid(matrix.to(x), list(x.shape), align_corners=False)
    if padding == "border":
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    grey = 128 / 255
    return F.grid_sample(x - grey, grid, padding_mode="zeros", align_corners=False) + grey


def _autocontrast(x: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-12), x)
