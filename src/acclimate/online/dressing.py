"""Held-out images dressed like a batch of the stream: its brightness, blur, contrast and noise, with known answers.

    wardrobe = Wardrobe(held_out)
    dressed = wardrobe.dress(held_out[:64], wardrobe.look(x), generator)

Nobody knows the labels of a stream. But what the source network has predicted for held-out images is nearly always
right, so on the same images in the stream's look one can see which of two networks does better there.

The look is of second order. With the mean power S of an image's frequencies, held out (h) and in the batch (x),

    x' = F⁻¹( √min(1, Sₓ/S_h) · F(h) + √max(0, Sₓ − S_h) · F(ε)/√pixels ),   ε ~ N(0, 1):

frequencies that the batch lacks are filtered out, as by blur or fog, and those that it has in addition are added as
noise. The brightness of the images follows mean and spread of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..parts.world import ALONE, World

__all__ = ["Look", "Wardrobe", "class_weights"]

_TINY = 1e-12


class Look(NamedTuple):
    """How the images of a batch look, per channel."""

    power: Tensor
    """The mean power of each frequency, without the mean of an image."""
    brightness: Tensor
    spread: Tensor
    """Mean and standard deviation of the images' means."""
    least: Tensor
    most: Tensor
    """The smallest and the largest value."""


class Wardrobe(nn.Module):
    """Gives held-out images the look of a batch.

    >>> random = torch.Generator().manual_seed(0)
    >>> held_out = torch.rand(64, 1, 8, 8, generator=random)
    >>> wardrobe = Wardrobe(held_out)
    >>> dressed = wardrobe.dress(held_out, wardrobe.look(0.2 * held_out), random)
    >>> bool(torch.allclose(dressed, 0.2 * held_out, atol=1e-4))
    True
    """

    power: Tensor
    brightness: Tensor
    spread: Tensor

    def __init__(self, held_out: Tensor) -> None:
        super().__init__()
        self.shape = held_out.shape[1:]
        if self.takes(held_out):
            own = self.look(held_out)
            for name in ("power", "brightness", "spread"):
                self.register_buffer(name, getattr(own, name), persistent=False)

    def takes(self, x: Tensor) -> bool:
        """Return whether a batch has a look that held-out images can be given: images or signals of their shape."""
        return x.dim() > 2 and x.is_floating_point() and x.shape[1:] == self.shape and min(self.shape[1:]) > 1

    def look(self, x: Tensor, world: World = ALONE) -> Look:
        """Return the look of a batch; of that of all ranks, where several share it."""
        centred, means = _centred(x.float())
        power = world.mean(_spectrum(centred).abs().square(), 0)
        brightness = world.mean(means, 0)
        spread = world.mean((means - brightness).square(), 0).sqrt()
        return Look(power, brightness, spread, *world.extremes(x.float()))

    def dress(self, images: Tensor, look: Look, generator: Generator) -> Tensor:
        """Return held-out images with another look."""
        centred, means = _centred(images.float())
        passed = (look.power / self.power.clamp(min=_TINY)).clamp(max=1.0)
        added = (look.power - passed * self.power).clamp(min=0.0)
        noise = torch.randn(images.shape, generator=generator).to(images.device)
        mixed = passed.sqrt() * _spectrum(centred) + (added / centred[0, 0].numel()).sqrt() * _spectrum(noise)
        pixels = torch.fft.irfftn(mixed, images.shape[2:], dim=_axes(images))
        narrower = (look.spread / self.spread.clamp(min=_TINY)).clamp(max=1.0)
        dressed = pixels + look.brightness + narrower * (means - self.brightness)
        return torch.maximum(torch.minimum(dressed, look.most), look.least).to(images.dtype)


def _axes(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.dim()))


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    means = x.mean(_axes(x), keepdim=True)
    return x - means, means


def _spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfftn(x, dim=_axes(x))


def class_weights(stream: Tensor, dressed: Tensor) -> Tensor:
    """Return a weight per dressed image: how common its class seems to be in the stream, as one network sees both.

    With predictions p of the stream and q of the dressed images it is one step of expectation maximisation from equal
    weights, wᵢ = mean_b (p_b·qᵢ / Σ_j p_b·q_j).

    >>> class_weights(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    tensor([0.9000, 0.1000])
    """
    alike = stream @ dressed.T
    return (alike / alike.sum(1, keepdim=True).clamp(min=_TINY)).mean(0)
