"""Style transfer: held-out images with the brightness, blur, contrast and noise of a batch of the stream.

    transfer = StyleTransfer(held_out)
    styled = transfer(held_out[:64], transfer.style(x), generator)

Nobody knows the labels of a stream. But what the source network has predicted for held-out images is nearly always
right, so on the same images in the stream's style one can see which of two networks does better there.

The style is of second order. With the mean power S of an image's frequencies, held out (h) and in the batch (x),

    x' = F⁻¹( √min(1, Sₓ/S_h) · F(h) + √max(0, Sₓ − S_h) · F(ε)/√pixels ),   ε ~ N(0, 1):

frequencies that the batch lacks are filtered out, as by blur or fog, and those that it has in addition are added as
noise. The brightness of the images follows mean and spread of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..parts.world import ALONE, World

__all__ = ["Style", "StyleTransfer", "class_weights"]

_TINY = 1e-12
_CHUNK = 64  # images whose spectra are in memory at once


class Style(NamedTuple):
    """The style of a batch, per channel."""

    power: Tensor
    """The mean power of each frequency, without the mean of an image."""
    brightness: Tensor
    spread: Tensor
    """Mean and standard deviation of the images' means."""
    least: Tensor
    most: Tensor
    """The smallest and the largest value."""

    @property
    def finite(self) -> bool:
        """Whether all of it is."""
        return all(bool(each.isfinite().all()) for each in self)


class StyleTransfer(nn.Module):
    """Gives held-out images the style of a batch.

    >>> random = torch.Generator().manual_seed(0)
    >>> held_out = torch.rand(64, 1, 8, 8, generator=random)
    >>> transfer = StyleTransfer(held_out)
    >>> styled = transfer(held_out, transfer.style(0.2 * held_out), random)
    >>> bool(torch.allclose(styled, 0.2 * held_out, atol=1e-4))
    True
    """

    power: Tensor
    brightness: Tensor
    spread: Tensor

    def __init__(self, held_out: Tensor) -> None:
        super().__init__()
        self.shape = held_out.shape[1:]
        if self.takes(held_out):
            own = self.style(held_out)
            for name in ("power", "brightness", "spread"):
                self.register_buffer(name, getattr(own, name), persistent=False)

    def takes(self, x: Tensor) -> bool:
        """Return whether held-out images can be given the style of a batch: images or signals of their shape."""
        return x.dim() > 2 and x.is_floating_point() and x.shape[1:] == self.shape and min(self.shape[1:]) > 1

    def style(self, x: Tensor, world: World = ALONE) -> Style:
        """Return the style of a batch; of that of all ranks, where several share it."""
        means = _means(x)
        brightness = world.mean(means, 0)
        spread = world.mean((means - brightness).square(), 0).sqrt()
        power = world.mean_of(_mean_power(x), len(x))
        return Style(power, brightness, spread, *world.extremes(x.float()))

    def forward(self, images: Tensor, style: Style, generator: Generator) -> Tensor:
        """Return held-out images in another style."""
        means = _means(images)
        passed = (style.power / self.power.clamp(min=_TINY)).clamp(max=1.0)
        added = (style.power - passed * self.power).clamp(min=0.0)
        noise = torch.randn(images.shape, generator=generator).to(images.device)
        spectrum, pixels = _spectrum(images.float() - means), images[0, 0].numel()
        mixed = passed.sqrt() * spectrum + (added / pixels).sqrt() * _spectrum(noise)
        centred = torch.fft.irfftn(mixed, images.shape[2:], dim=_axes(images))
        narrower = (style.spread / self.spread.clamp(min=_TINY)).clamp(max=1.0)
        styled = centred + style.brightness + narrower * (means - self.brightness)
        return torch.maximum(torch.minimum(styled, style.most), style.least).to(images.dtype)


def _axes(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.dim()))


def _means(x: Tensor) -> Tensor:
    return x.float().mean(_axes(x), keepdim=True)


def _mean_power(x: Tensor) -> Tensor:
    """Return the mean power of each frequency, without the mean of an image; zero where there are no images."""
    if not len(x):
        return _mean_power(x.new_zeros(1, *x.shape[1:]))  # some FFTs refuse an empty batch
    powers = [_spectrum(some.float() - _means(some)).abs().square().sum(0) for some in torch.split(x, _CHUNK)]
    return torch.stack(powers).sum(0) / len(x)


def _spectrum(x: Tensor) -> Tensor:
    frequencies: Tensor = torch.fft.rfftn(x, dim=_axes(x))
    return frequencies


def class_weights(stream: Tensor, styled: Tensor) -> Tensor:
    """Return a weight per styled image: how common its class seems to be in the stream, as one network sees both.

    With predictions p of the stream and q of the styled images it is one step of expectation maximisation from equal
    weights, wᵢ = mean_b (p_b·qᵢ / Σ_j p_b·q_j).

    >>> class_weights(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    tensor([0.9000, 0.1000])
    """
    alike = stream @ styled.T
    return (alike / alike.sum(1, keepdim=True).clamp(min=_TINY)).mean(0)
