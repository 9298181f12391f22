"""BatchNorm for a symbolic batch size, in two stages: per image, then over the batch.

A sum over (N, H, W) compiles to slow code where N is symbolic. A sum over (H, W) has known bounds, and leaves one
number per channel and image to be summed over N. The equations are torch's: the variance is the mean of the images'
variances plus the variance of their means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["batch_norm", "in_stages", "var_mean"]

_IMAGE_DIMS = 4
_CORRECTIONS = ({"correction": 0}, {"correction": 1})


def in_stages(graph: GraphModule) -> GraphModule:
    """Return the graph with BatchNorm layers that sum in two stages, forward and backward."""
    aten: Any = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target is aten.batch_norm.default and node.args[0].meta["val"].dim() == _IMAGE_DIMS:
            node.target = batch_norm
        elif node.target is aten.var_mean.correction and [*node.args[1]] == [0, 2, 3] and node.kwargs in _CORRECTIONS:
            node.target = var_mean
    graph.recompile()
    return graph


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    _momentum: float,
    eps: float,
    _cudnn: bool,
) -> Tensor:
    """Compute torch's batch_norm of a batch of images."""
    values = x if x.dtype == torch.float64 else x.float()
    if training or mean is None or variance is None:
        variance, mean = var_mean(values, correction=0)
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight

    def of_each_image(channels: Tensor) -> Tensor:  # expanded in two stages, so that its gradient is summed in two
        return channels.expand(x.shape[0], x.shape[1])[:, :, None, None]

    normalised = (values - of_each_image(mean)) * of_each_image(scale)
    return (normalised if bias is None else normalised + of_each_image(bias)).to(x.dtype)


def var_mean(x: Tensor, _dims: object = None, *, correction: int) -> tuple[Tensor, Tensor]:
    """Compute torch's var_mean of each channel of a batch of images."""
    variances, means = torch.var_mean(x, (2, 3), correction=0)
    variance = variances.mean(0) + means.var(0, correction=0)
    if correction:
        count = x.shape[0] * x.shape[2] * x.shape[3]
        variance = variance * (count / (count - correction))
    return variance, means.mean(0)
