"""A teacher's prediction for each pixel, averaged over resized and mirrored views: used by CoTTA and DAT.

z_t = teach(teacher, teacher(x), anchor, x, RATIOS, threshold=0.69)
loss = F.cross_entropy(resized(z, x), z_t.argmax(1))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RATIOS", "check_ratios", "probabilities", "resized", "teach"]

RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Relative sizes of the views; each is also mirrored, which makes fourteen."""

Network: TypeAlias = Callable[[Tensor], Tensor]
"""Images to logits (B, C, h, w), at any resolution."""


def resized(logits: Tensor, x: Tensor) -> Tensor:
    """Return logits at the resolution of the images x."""
    same = logits.shape[-2:] == x.shape[-2:]
    return logits if same else F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


def probabilities(network: Network, x: Tensor, ratio: float = 1.0, *, mirrored: bool = False) -> Tensor:
    """Return the class probabilities of each pixel of x, predicted from a resized and perhaps mirrored view."""
    size = [int(side * ratio) for side in x.shape[-2:]]
    view = x if ratio == 1 else F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    p = resized(network(view.flip(-1) if mirrored else view), x).softmax(1)
    return p.flip(-1) if mirrored else p


@torch.no_grad()
def teach(
    network: Network, logits: Tensor, anchor: Tensor, x: Tensor, ratios: Sequence[float], threshold: float
) -> Tensor:
    """Return a teacher's log-probabilities (B, C, H, W) at the images' resolution.

    Where the `anchor`, a confidence per pixel, is above the threshold, the teacher's `logits` of the original images
    are used, elsewhere the mean over views. Views run one after the other, to save memory.
    """
    single = resized(logits, x).softmax(1)
    total = torch.zeros_like(single)
    for ratio in ratios:
        for mirrored in (False, True):
            original = ratio == 1 and not mirrored
            total += single if original else probabilities(network, x, ratio, mirrored=mirrored)
    chosen = torch.where((anchor > threshold).unsqueeze(1), single, total / (2 * len(ratios)))
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()


def check_ratios(ratios: Sequence[float], method: str) -> tuple[float, ...]:
    """Return the relative sizes of views; raise if there are none or one is not positive."""
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"{method}: ratios={tuple(ratios)}; expected relative sizes of views, such as (0.5, 1, 2)")
    return tuple(ratios)
