"""BatchNorm with the statistics of the batch of all ranks, as if one process had the whole batch.

Each layer sends one message of two numbers per channel and pass, and another one of the same size in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batchnorm import Normalisation, Statistics
from .ranks import Ranks

__all__ = ["PooledNormalisation"]


class PooledNormalisation(Normalisation):
    """The ways in which BatchNorm layers can normalise, with the moments of all ranks."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self.ranks = ranks

    @contextmanager
    def batch(self, size: int | None = None) -> Iterator[None]:  # noqa: ARG002
        """Use the statistics of all ranks, with gradients through them; source buffers stay as they are."""
        through: dict[nn.Module, tuple[Tensor, ...]] = {}

        def note(layer: _BatchNorm, x: Tensor) -> Statistics:
            mean, variance, count = self._source_or_pooled(layer, x)
            through[layer] = mean, (variance + layer.eps).rsqrt(), count
            return mean, variance

        def add_gradient(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *others = inputs
            return (_ThroughStatistics.apply(x, *through.pop(layer), self.ranks, self.counted), *others)  # type: ignore[no-untyped-call]

        with self._using(note):
            hooks = [layer.register_forward_pre_hook(add_gradient) for layer in self.layers]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    @torch.no_grad()
    def _moments(self, x: Tensor, correction: int = 0) -> Statistics:
        mean, variance, count = self._pooled(x)
        return mean, variance * count / (count - correction).clamp(min=1)

    def _source_or_batch(self, layer: _BatchNorm, x: Tensor) -> Statistics:
        mean, variance, _ = self._source_or_pooled(layer, x)
        return mean, variance

    @torch.no_grad()
    def _source_or_pooled(self, layer: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments of all ranks; the source's where there is one value per channel on all of them."""
        mean, variance, count = self._pooled(x)
        if layer.running_mean is None or layer.running_var is None:
            return mean, variance, count
        pairs = ((layer.running_mean, mean), (layer.running_var, variance))
        mean, variance = (torch.where(count == 1, source.to(own.dtype), own) for source, own in pairs)
        return mean, variance, count

    def _pooled(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance per channel, and the number of values per channel.

        Rows that do not count have weight zero, so that a rank without any takes part. Sums are in double precision,
        because the square of the mean is subtracted.
        """
        values = x.detach() if x.dtype == torch.float64 else x.detach().float()
        own_mean = values.mean(_over(x), keepdim=True)
        own_variance = (values - own_mean).square().mean(_over(x))  # on a CPU, torch.var_mean takes ten times as long
        own_mean = own_mean.flatten()
        number = values.new_full((1,), x.numel() / x.shape[1] if self.counted else 0.0, dtype=torch.float64)
        first, second = own_mean.double(), own_variance.double() + own_mean.double().square()
        totals = self.ranks.sum(torch.cat([number * first, number * second, number]))
        count = totals[-1].clamp(min=1)
        mean, square = (totals[:-1] / count).chunk(2)
        return mean.to(values.dtype), (square - mean.square()).clamp(min=0).to(values.dtype), count.to(values.dtype)


class _ThroughStatistics(torch.autograd.Function):
    """The identity, on the input of a layer that takes its statistics as constants; adds the gradient through them.

    With n values per channel and x̂ = (x − μ)/σ, a constant μ and σ give the gradient G, and the one of the batch
    is G − ΣG/n − x̂·Σ(G·x̂)/n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, count: Tensor, ranks: Ranks, counted: bool) -> Tensor:
        ctx.save_for_backward(x, mean, scale, count)
        ctx.ranks, ctx.counted = ranks, counted
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, count = ctx.saved_tensors
        (gradient,) = gradients
        shape = (1, -1, *[1] * (x.dim() - 2))
        centred = x - mean.view(shape)
        sums = [gradient.sum(_over(x), dtype=mean.dtype), (gradient * centred).sum(_over(x))]
        first, second = ctx.ranks.sum(torch.cat(sums)).chunk(2)
        if not ctx.counted:
            return gradient, None, None, None, None, None
        share = torch.where(count > 1, 1 / count, 0.0)  # a lone value is normalised by constants
        shift, slope = first * share, second * share * scale.square()
        corrected = torch.addcmul(gradient - shift.view(shape), centred, slope.view(shape), value=-1)
        return corrected.to(gradient.dtype), None, None, None, None, None


def _over(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
