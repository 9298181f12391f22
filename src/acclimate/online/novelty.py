"""How unlike the held-out images a batch is, by simple statistics of its pixels.

    novelty = Novelty(held_out)
    float(novelty(x))       # about 1 for images like those; fog, noise or blur give tens to thousands

A network knows images like its training images best as it was trained, so there is nothing to learn from them, and
nothing to lose if the source network answers them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parts.world import ALONE, Share, World

__all__ = ["FEWEST", "Novelty", "describe"]

FEWEST = 16
"""Images that are enough to judge a batch."""
_MOST = 32  # images of a batch that are described
_CHANNELS = 4  # that are described one by one
_TINY = 1e-4
_POOLS: dict[int, Callable[[Tensor, int], Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


class Novelty(nn.Module):
    """The squared distance of a batch's mean description from that of held-out images, in units of chance.

    With descriptions f of n images of the batch and N held-out ones, mean μ and covariance Σ of the latter:
    (f̄ − μ)ᵀ Σ⁻¹ (f̄ − μ) / ((1/n + 1/N) · dim f). That is Hotelling's T² per dimension, 1 on average for images of the
    same kind, whatever the size of the batch.

    >>> images = torch.rand(256, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> novelty = Novelty(images[:128])
    >>> bool(novelty(images[128:]) < 4), bool(novelty(0.5 * images[128:]) > 100)
    (True, True)
    """

    mean: Tensor
    inverse: Tensor

    def __init__(self, held_out: Tensor) -> None:
        super().__init__()
        f = describe(held_out)
        spread = torch.cov(f.T)
        spread = spread + torch.diag(1e-3 * spread.diag() + _TINY**2)
        self.count = len(f)
        self.register_buffer("mean", f.mean(0), persistent=False)
        self.register_buffer("inverse", torch.linalg.inv(spread), persistent=False)

    def forward(self, x: Tensor, share: Share | None = None, world: World = ALONE) -> Tensor:
        """Return the novelty of a batch; of that of all ranks, where several share it. NaN if it cannot be compared."""
        share = share or Share(0, len(x), len(x))
        step = -(-share.total // _MOST)
        some = x[-share.offset % step :: step]
        described = describe(some)
        if described.shape[1] != len(self.mean):  # other sizes may have fewer statistics
            return self.mean.new_tensor(math.nan)
        away = world.mean(described, 0) - self.mean
        n = -(-share.total // step)
        return away @ self.inverse @ away / ((1 / n + 1 / self.count) * len(away))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Novelty:  # noqa: ARG002
        """Follow to another device, in double precision."""
        device = fn(self.mean.float()).device
        self.mean, self.inverse = self.mean.to(device), self.inverse.to(device)
        return self


def describe(x: Tensor) -> Tensor:
    """Return simple statistics of each image (B, C, H, W), signal (B, C, L) or vector (B, F), in double precision.

    They are the mean of each channel, the contrast, and how much neighbours differ, and differences of neighbours,
    along each axis, at full and at half resolution. Noise, blur, fog and a change of colour each move some of them.
    """
    x = x.float()
    rows = x.flatten(2) if x.dim() > 2 and x.shape[1] <= _CHANNELS else x.flatten(1)[:, None]
    sizes = torch.stack([x.flatten(1).std(1, correction=0), *_differences(x)], 1)
    return torch.cat([rows.mean(2), (sizes + _TINY).log()], 1).double()


def _differences(x: Tensor) -> Iterator[Tensor]:
    for _ in range(2):
        for axis in range(2, x.dim()):
            if x.shape[axis] > 2:
                first = x.diff(dim=axis)
                yield first.abs().flatten(1).mean(1)
                yield first.diff(dim=axis).abs().flatten(1).mean(1)
        if x.dim() not in _POOLS or min(x.shape[2:]) < 8:
            return
        x = _POOLS[x.dim()](x, 2)
