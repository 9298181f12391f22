"""What a teacher says of each pixel, over views of several sizes, each also mirrored: CoTTA's and DAT's lesson.

z_t = teach(teacher, teacher(x), anchor, x, RATIOS, threshold=0.69)
loss = F.cross_entropy(resized(z, x), z_t.argmax(1))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import refuse_non_finite

__all__ = ["RATIOS", "checked", "probabilities", "resized", "teach"]

RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Sizes of views; with each mirrored, there are fourteen."""

Network: TypeAlias = Callable[[Tensor], Tensor]
"""Images to logits (B, C, h, w), of whatever resolution."""


def resized(logits: Tensor, x: Tensor) -> Tensor:
    """Logits at the resolution of the images x."""
    same = logits.shape[-2:] == x.shape[-2:]
    return logits if same else F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


def probabilities(network: Network, x: Tensor, ratio: float = 1.0, *, mirrored: bool = False) -> Tensor:
    """Of each pixel of x, as a view of another size, perhaps mirrored, has them."""
    size = [int(side * ratio) for side in x.shape[-2:]]
    view = x if ratio == 1 else F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    p = resized(network(view.flip(-1) if mirrored else view), x).softmax(1)
    return p.flip(-1) if mirrored else p


@torch.no_grad()
def teach(
    network: Network, logits: Tensor, anchor: Tensor, x: Tensor, ratios: Sequence[float], threshold: float
) -> Tensor:
    """A teacher's log-probabilities (B, C, H, W) at the images' resolution.

    Its `logits` of the images as they are count where the `anchor`, a confidence in each pixel, is above the
    threshold, and a mean over views elsewhere. Views are run in turn: one at a time is in memory.
    """
    alone = resized(logits, x).softmax(1)
    total = torch.zeros_like(alone)
    for ratio in ratios:
        for mirrored in (False, True):
            as_it_is = ratio == 1 and not mirrored
            total += alone if as_it_is else probabilities(network, x, ratio, mirrored=mirrored)
    chosen = torch.where((anchor > threshold).unsqueeze(1), alone, total / (2 * len(ratios)))
    log_p = chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()
    refuse_non_finite(x, log_p)
    return log_p


def checked(ratios: Sequence[float], method: str) -> tuple[float, ...]:
    """Sizes of views that can be made."""
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"{method}: ratios={tuple(ratios)}; expected sizes of views as fractions, such as (0.5, 1, 2)")
    return tuple(ratios)
