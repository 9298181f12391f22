"""Augmented views of a batch: tensors in [0, 1], on their own device, from an explicit generator.

    view = Views()(x, generator)          # CoTTA's chain
    views = AugMix()(x, generator)        # MEMO's, a mixture of its own for each image

Any callable of (images, generator) that returns images of the same shape may stand in their place. Colour operations
are kornia's, an extra: pip install 'acclimate[augment]'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .randomness import on_device

__all__ = ["AugMix", "Augment", "Views"]

Augment: TypeAlias = Callable[[Tensor, Generator], Tensor]


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
        y = self._warp(_jitter(x.clamp(0, 1), generator), generator)
        if float(torch.rand((), generator=generator)) < 0.5:
            y = y.flip(-1)
        if self.noise:
            many = on_device(generator, y.device)
            y = y + self.noise * torch.randn(y.shape, generator=many, device=y.device, dtype=y.dtype)
        return y.clamp(0, 1)

    def _warp(self, x: Tensor, generator: Generator) -> Tensor:
        height, width = x.shape[-2:]
        angle = _uniform(-15, 15, generator)
        shift = [round(_uniform(-side / 8, side / 8, generator)) for side in (width, height)]  # 1/16 of the padded side
        zoom = _uniform(0.9, 1.1, generator)
        sigma = _uniform(0.001, 0.5, generator) if self.blur else 0.0
        return warp(x, angle, (shift[0], shift[1]), zoom, sigma, self.padding)


def warp(x: Tensor, angle: float, shift: tuple[int, int], zoom: float, sigma: float, padding: str) -> Tensor:
    """Turned about the centre by `angle` degrees, zoomed, shifted right and down by pixels, then blurred if σ > 0."""
    height, width = x.shape[-2:]
    rim = 2 if sigma else 0  # so that the blur sees beyond the edge
    cos, sin = zoom * math.cos(math.radians(angle)), zoom * math.sin(math.radians(angle))
    x0, y0 = (width - 1) / 2, (height - 1) / 2
    matrix = x.new_tensor(
        [
            [cos, -sin, x0 + shift[0] + rim - cos * x0 + sin * y0],
            [sin, cos, y0 + shift[1] + rim - sin * x0 - cos * y0],
        ]
    )
    size = (height + 2 * rim, width + 2 * rim)
    y: Tensor = _kornia("geometry").warp_affine(x, matrix.expand(len(x), 2, 3), size, padding_mode=padding)
    if not sigma:
        return y
    y = _kornia("filters").gaussian_blur2d(y, (5, 5), (sigma, sigma))
    return y[..., rim:-rim, rim:-rim]


def _jitter(x: Tensor, generator: Generator) -> Tensor:
    enhance = _kornia("enhance")
    colours = x.shape[1] == 3
    steps: list[Callable[[Tensor, float], Tensor]] = [
        enhance.adjust_brightness_accumulative,
        enhance.adjust_contrast_with_mean_subtraction,
        lambda y, factor: enhance.adjust_saturation_with_gray_subtraction(y, factor) if colours else y,
        lambda y, factor: enhance.adjust_hue(y, 2 * math.pi * factor) if colours else y,
        lambda y, factor: enhance.adjust_gamma(y.clamp(min=1e-8), factor),
    ]
    ranges = ((0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3))
    for index in torch.randperm(len(steps), generator=generator).tolist():
        x = steps[index](x, _uniform(*ranges[index], generator))
    return x


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
