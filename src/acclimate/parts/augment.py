"""Augmented views of a batch: tensors in [0, 1], on their own device, from an explicit generator.

    view = Views()(x, generator)          # CoTTA's chain
    views = AugMix()(x, generator)        # MEMO's, a mixture of its own for each image

Any callable of (images, generator) that returns images of the same shape may stand in their place. Colour operations
are kornia's, an extra: pip install 'acclimate[augment]'.
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

from .randomness import on_device

__all__ = ["AugMix", "Augment", "Views", "several", "views_of_each"]

Augment: TypeAlias = Callable[[Tensor, Generator], Tensor]

_MOST = 1 << 23  # numbers in the views of several images that are made at once


def _kornia(part: str) -> Any:
    try:
        return import_module(f"kornia.{part}")
    except ImportError as error:
        raise ImportError(
            "augmented views need kornia: pip install 'acclimate[augment]', or give augment= a callable of (images, "
            "generator)"
        ) from error


def _uniform(low: float, high: float, generator: Generator) -> float:
    return float(torch.empty((), dtype=torch.float64).uniform_(low, high, generator=generator))


class Turn(NamedTuple):
    """Where a view looks: turned about the centre by `angle` degrees, zoomed, shifted right and down by pixels.

    Then blurred if σ > 0, and mirrored.
    """

    angle: float
    shift: tuple[int, int]
    zoom: float
    sigma: float = 0.0
    mirrored: bool = False


Colours: TypeAlias = Sequence[tuple[int, float]]
"""Which change of colours comes when, and its factor."""


@dataclass(frozen=True)
class Views:
    """Colour jitter in random order, a small rotation, shift and zoom, blur, flip, noise: the chain of CoTTA.

    One draw for the whole batch, as in the authors' program; the noise is each pixel's own. ROID's chain is
    `Views(padding="reflection", blur=False, noise=0.0)`.
    """

    padding: Literal["border", "reflection"] = "border"
    blur: bool = True
    noise: float = 0.005

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """A view of each image."""
        return self.several(x, 1, generator)

    def several(self, x: Tensor, count: int, generator: Generator) -> Tensor:
        """So many views of the batch, one after the other: those of as many calls, worked on together."""
        colours, turns, noises = zip(*(self._draw(x, generator) for _ in range(count)), strict=True)
        y = warp(jitter(x.clamp(0, 1).repeat(count, 1, 1, 1), colours), turns, self.padding)
        if self.noise:
            y = y + self.noise * torch.cat(noises)
        return y.clamp(0, 1)

    def _draw(self, x: Tensor, generator: Generator) -> tuple[Colours, Turn, Tensor]:
        order = torch.randperm(len(_RANGES), generator=generator).tolist()
        colours = [(index, _uniform(*_RANGES[index], generator)) for index in order]
        turn = self._turn(x.shape[-2], x.shape[-1], generator)
        if not self.noise:
            return colours, turn, x[:0]
        many = on_device(generator, x.device)
        return colours, turn, torch.randn(x.shape, generator=many, device=x.device, dtype=x.dtype)

    def _turn(self, height: int, width: int, generator: Generator) -> Turn:
        angle = _uniform(-15, 15, generator)
        shift = [round(_uniform(-side / 8, side / 8, generator)) for side in (width, height)]  # 1/16 of the padded side
        zoom = _uniform(0.9, 1.1, generator)
        sigma = _uniform(0.001, 0.5, generator) if self.blur else 0.0
        return Turn(angle, (shift[0], shift[1]), zoom, sigma, float(torch.rand((), generator=generator)) < 0.5)


def several(augment: Augment, x: Tensor, count: int, generator: Generator) -> Tensor:
    """So many views of the batch by any augmentation."""
    if isinstance(augment, Views) and type(augment).__call__ is Views.__call__:
        return augment.several(x, count, generator)
    return torch.cat([augment(x, generator) for _ in range(count)])


def views_of_each(augment: Augment, x: Tensor, count: int, generator: Generator) -> Iterator[Tensor]:
    """So many views of each image in turn; AugMix, which draws for each image, makes those of many at once."""
    at_once = max(1, _MOST // (count * x[0].numel())) if isinstance(augment, AugMix) else 1
    for some in torch.split(x, at_once):
        yield from torch.split(augment(some.repeat_interleave(count, 0), generator), count)


def warp(x: Tensor, turns: Sequence[Turn], padding: str) -> Tensor:
    """A batch's views, one after the other, each by a turn of its own."""
    height, width = x.shape[-2:]
    blurred = turns[0].sigma > 0
    rim = 2 if blurred else 0  # so that the blur sees beyond the edge
    size = [len(turns), x.shape[1], height + 2 * rim, width + 2 * rim]
    matrix = x.new_tensor([_from_output(turn, height, width, rim) for turn in turns])
    grid = F.affine_grid(matrix, size, align_corners=True)
    each = len(x) // len(turns)
    y = F.grid_sample(x, grid.repeat_interleave(each, 0), padding_mode=padding, align_corners=True)
    return _blur(y, x.new_tensor([_taps(turn.sigma) for turn in turns]).repeat_interleave(each, 0)) if blurred else y


def _from_output(turn: Turn, height: int, width: int, rim: int) -> list[list[float]]:
    """Where a pixel of the output lies in the input, both in coordinates from −1 to 1."""
    cos, sin = (f(math.radians(turn.angle)) / turn.zoom for f in (math.cos, math.sin))
    right, down = max(width - 1, 1) / 2, max(height - 1, 1) / 2  # half an image, in pixels
    far_right, far_down = right + rim, down + rim
    back, up = turn.shift
    rows = [
        [cos * far_right / right, sin * far_down / right, -(cos * back + sin * up) / right],
        [-sin * far_right / down, cos * far_down / down, (sin * back - cos * up) / down],
    ]
    return [[-row[0] if turn.mirrored else row[0], *row[1:]] for row in rows]


def _taps(sigma: float) -> list[float]:
    weights = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(-2, 3)]
    return [weight / sum(weights) for weight in weights]


def _blur(x: Tensor, taps: Tensor) -> Tensor:
    """Each image by five weights of its own along both sides, which lose two pixels at each end."""
    height, width = x.shape[-2] - 4, x.shape[-1] - 4
    weights = taps.T[:, :, None, None, None]
    x = torch.stack([w * x[..., i : i + height, :] for i, w in enumerate(weights)]).sum(0)
    return torch.stack([w * x[..., i : i + width] for i, w in enumerate(weights)]).sum(0)


_RANGES = ((0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3))
"""Of the factors of brightness, contrast, saturation, hue and gamma."""


def jitter(x: Tensor, colours: Sequence[Colours]) -> Tensor:
    """A batch's views, one after the other, each by changes of its own; equal changes of several views are one."""
    enhance = _kornia("enhance")
    changes: list[Callable[[Tensor, Tensor], Tensor]] = [
        enhance.adjust_brightness_accumulative,
        enhance.adjust_contrast_with_mean_subtraction,
        enhance.adjust_saturation_with_gray_subtraction,
        lambda y, factor: enhance.adjust_hue(y, 2 * math.pi * factor),
        lambda y, factor: enhance.adjust_gamma(y.clamp(min=1e-8), factor),
    ]
    grey = x.shape[1] != 3
    each = len(x) // len(colours)
    views = list(torch.split(x, each))
    for step, index in product(range(len(_RANGES)), range(len(changes))):
        own = {view: order[step][1] for view, order in enumerate(colours) if order[step][0] == index}
        if own and not (grey and index in (2, 3)):
            factors = x.new_tensor([*own.values()]).repeat_interleave(each)
            changed = changes[index](torch.cat([views[view] for view in own]), factors)
            for view, part in zip(own, torch.split(changed, each), strict=True):
                views[view] = part
    return torch.cat(views)


@dataclass(frozen=True)
class AugMix:
    """Random resized crop and flip, then a mixture of `width` chains of 1 to `depth` operations (Hendrycks, 2020).

    Each image has a crop, chains and weights of its own.
    """

    width: int = 3
    depth: int = 3
    crop: tuple[float, float] = (0.08, 1.0)
    """The share of an image's area that a crop has."""

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """A view of each image."""
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
    """A crop of a share of the area, its sides in a ratio of 3:4 to 4:3 where they fit, resized to the whole."""
    count = len(x)
    share = torch.empty(count).uniform_(*area, generator=generator).sqrt()
    ratio = torch.empty(count).uniform_(math.log(3 / 4), math.log(4 / 3), generator=generator).mul(0.5).exp()
    height, width = (share / ratio).clamp(max=1), (share * ratio).clamp(max=1)
    down, across = ((2 * torch.rand(count, generator=generator) - 1) * (1 - side) for side in (height, width))
    flip = 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()
    zero = torch.zeros(count)
    matrix = torch.stack([width * flip, zero, across, zero, height, down], 1).view(-1, 2, 3)
    return _sample(x, matrix, padding="border")


def _one_operation_each(x: Tensor, active: Tensor, generator: Generator) -> Tensor:
    """One of nine operations, of severity 1 of 10, on each active image."""
    operation = torch.randint(9, (len(x),), generator=generator)
    level = torch.empty(len(x)).uniform_(0.1, 1.0, generator=generator) / 10
    sign = 1 - 2 * (torch.rand(len(x), generator=generator) < 0.5).float()
    enhance = _kornia("enhance")
    y = x.clone()
    for index, apply in enumerate([_autocontrast, enhance.equalize, lambda part: enhance.posterize(part, 4)]):
        if rows := _rows(active & (operation == index)):
            y[rows] = apply(x[rows])
    if rows := _rows(active & (operation == 3)):
        y[rows] = enhance.solarize(x[rows], (1 - (256 * level[rows]).floor() / 256).to(x))
    if rows := _rows(active & (operation > 3)):
        y[rows] = _sample(x[rows], _geometry(operation[rows], sign[rows], level[rows], x.shape[-2:]), padding="grey")
    return y


def _rows(mask: Tensor) -> list[int]:
    rows: list[int] = mask.nonzero().flatten().tolist()
    return rows


def _geometry(operation: Tensor, sign: Tensor, level: Tensor, size: torch.Size) -> Tensor:
    """Output to input coordinates in [−1, 1]: rotation (4), shear along x (5) or y (6), shift along x (7) or y (8).

    Rotations are about the centre, shears about the top left corner.
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


def _sample(x: Tensor, matrix: Tensor, padding: Literal["border", "grey"]) -> Tensor:
    """Each image by a matrix of its own from output to input coordinates; outside it is grey, or as the border."""
    grid = F.affine_grid(matrix.to(x), list(x.shape), align_corners=False)
    if padding == "border":
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    grey = 128 / 255
    return F.grid_sample(x - grey, grid, padding_mode="zeros", align_corners=False) + grey


def _autocontrast(x: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-12), x)
