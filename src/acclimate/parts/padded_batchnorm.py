"""BatchNorm's equations over the first rows of a padded batch, so that one program serves any number of rows.

Sums are in two stages, per image and then over the batch: only the second knows how many rows count, and a compiler
generates fast code for the first even where the batch size is symbolic. The variance is the mean of the images'
variances plus the variance of their means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["moments_of_first", "standardised"]


def moments_of_first(x: Tensor, count: Tensor, source: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel over the first `count` rows, with gradients; over all if it is zero.

    One value per channel has no variance: the `source` statistics replace it, if there are any.

    >>> x = torch.tensor([[1.0, 4.0], [3.0, 8.0], [9.0, 9.0]])
    >>> moments_of_first(x, torch.tensor(2), (None, None))
    (tensor([2., 6.]), tensor([1., 4.]))
    """
    values = x if x.dtype == torch.float64 else x.float()
    count = torch.where(count > 0, count, x.shape[0])
    counts = (torch.arange(x.shape[0], device=x.device) < count).to(values.dtype)
    share = (counts / count).unsqueeze(1)
    variances, means = torch.var_mean(values, [*range(2, x.dim())], correction=0) if x.dim() > 2 else (0, values)
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    source_mean, source_variance = source
    if source_mean is None or source_variance is None or math.prod(x.shape[2:]) > 1:
        return mean, variance
    alone = count == 1
    return torch.where(alone, source_mean.to(mean), mean), torch.where(alone, source_variance.to(mean), variance)


def standardised(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return (x − mean) / √(variance + eps) per channel."""
    values = x if x.dtype == torch.float64 else x.float()

    def of_each_image(channels: Tensor) -> Tensor:  # expanded in two stages, so that its gradient is summed in two
        return channels.expand(x.shape[0], x.shape[1])[(..., *[None] * (x.dim() - 2))]

    return ((values - of_each_image(mean)) * of_each_image((variance + eps).rsqrt())).to(x.dtype)
