"""The equations, as pure functions of logits.

Classes are dimension 1, so every function takes both (B, C) logits of a classifier and (B, C, H, W) logits of
a segmenter. Numbers in brackets are the paper's equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "certainty",
    "confidence",
    "consistency",
    "entropy",
    "free_energy",
    "fused",
    "kept_rows",
    "marginal_entropy",
    "moving_average",
    "reliability",
    "similarity",
    "soft_likelihood_ratio",
    "symmetric_cross_entropy",
    "threshold",
]


def entropy(logits: Tensor) -> Tensor:
    """H(p) = −Σ p log p of p = softmax(logits), in nats.

    >>> entropy(torch.zeros(1, 4))  # uniform over four classes: ln 4
    tensor([1.3863])
    """
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def confidence(logits: Tensor) -> Tensor:
    """The largest softmax probability.

    >>> confidence(torch.zeros(1, 4))  # uniform over four classes
    tensor([0.2500])
    """
    return logits.softmax(1).amax(1)


def threshold(margin: float, num_classes: int) -> float:
    """E0 = margin · ln C: `margin` is a fraction of the largest entropy that C classes allow.

    >>> round(threshold(0.4, 1000), 2)
    2.76
    """
    return margin * math.log(num_classes)


def reliability(entropies: Tensor, e0: float, *, weighted: bool = True) -> Tensor:
    """S_ent(x) = exp(E0 − H) where H < E0, else 0 (Eq. 3); `weighted=False` keeps the indicator alone.

    >>> reliability(torch.tensor([0.0, 0.5, 2.0]), e0=1.0)
    tensor([2.7183, 1.6487, 0.0000])
    """
    weight = (e0 - entropies).exp() if weighted else torch.ones_like(entropies)
    return torch.where(entropies < e0, weight, 0.0)


def similarity(logits: Tensor, mean: Tensor) -> Tensor:
    """|cos(m, p)| between each prediction and the mean prediction m of shape (C,) (Eq. 5).

    >>> similarity(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), mean=torch.tensor([1.0, 0.0])).round(decimals=2)
    tensor([1., 0.])
    """
    m = mean.view(1, -1, *[1] * (logits.dim() - 2))
    return F.cosine_similarity(m, logits.softmax(1), dim=1).abs()


def moving_average(
    mean: Tensor,
    logits: Tensor,
    keep: Tensor,
    momentum: float = 0.9,
    total: Callable[[Tensor], Tensor] = lambda value: value,
) -> Tensor:
    """m ← momentum·m + (1 − momentum)·mean of the kept predictions (Eq. 4).

    An all-zero `mean` counts as empty and is replaced by the mean of the kept predictions. If nothing is kept, `mean`
    is returned unchanged. The host reads no value. `total` adds up the sums of several ranks.

    >>> logits = torch.tensor([[9.0, 0.0], [0.0, 0.0]])
    >>> moving_average(torch.zeros(2), logits, keep=torch.tensor([False, True]))
    tensor([0.5000, 0.5000])
    """
    weight = keep.unsqueeze(1).to(logits.dtype)
    over = [0, *range(2, logits.dim())]
    kept = total(weight.sum())
    current = total((logits.softmax(1) * weight).sum(over)) / kept.clamp(min=1)
    blended = torch.where((mean == 0).all(), current, momentum * mean + (1 - momentum) * current)
    return torch.where(kept > 0, blended, mean)


def fused(y: Tensor, s: Tensor, smoothing: float) -> Tensor:
    """ŷ_fuse = (ŷ + (1 − q)·ŷ_sub)/(2 − q) for probabilities, with q = `smoothing` (Eq. 11).

    >>> fused(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]), smoothing=0.0)
    tensor([[0.7500, 0.2500]])
    """
    return (y + (1 - smoothing) * s) / (2 - smoothing)


def consistency(
    logits: Tensor, sub_logits: Tensor, smoothing: float, direction: Literal["forward", "reverse"] = "forward"
) -> Tensor:
    """L_c, the divergence between a sub-network's prediction and the fused one, per sample (Eq. 10).

    `"forward"` is KL(ŷ_fuse ‖ ŷ_sub) towards a fixed ŷ_fuse: its gradient on the sub-network's logits is
    (ŷ_sub − ŷ)/(2 − q). `"reverse"` is Eq. (10) as written, KL(ŷ_sub ‖ ŷ_fuse), with a gradient through ŷ_fuse. None
    flows into `logits`. docs/faithful.md says why the default deviates.

    >>> z = torch.tensor([[2.0, 0.0]])
    >>> bool(consistency(z, z, smoothing=0.5) < 1e-6), bool(consistency(z, -z, smoothing=0.5) > 0.1)
    (True, True)
    """
    log_s = sub_logits.log_softmax(1)
    if direction == "forward":
        target = fused(logits.detach().softmax(1), log_s.detach().exp(), smoothing)
        return F.kl_div(log_s, target, reduction="none").sum(1)
    log_y = logits.detach().log_softmax(1)
    log_fused = log_y
    if smoothing < 1:  # in logarithms: probabilities underflow where both are certain
        log_fused = torch.logaddexp(log_y, log_s + math.log(1 - smoothing)) - math.log(2 - smoothing)
    return F.kl_div(log_fused, log_s, reduction="none", log_target=True).sum(1)


def certainty(logits: Tensor, sub_logits: Tensor) -> Tensor:
    """C(x) = +1 where full and sub-network predict the same class, else −1 (Eq. 13).

    >>> certainty(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([ 1., -1.])
    """
    return torch.where(logits.argmax(1) == sub_logits.argmax(1), 1.0, -1.0)


def marginal_entropy(logits: Tensor) -> Tensor:
    """H(mean_k p_k), the entropy of the mean prediction over views (K, C), computed in logarithms.

    >>> marginal_entropy(torch.tensor([[9.0, -9.0], [-9.0, 9.0]]))  # two views that disagree: ln 2
    tensor(0.6931)
    """
    log_mean = logits.log_softmax(1).logsumexp(0) - math.log(len(logits))
    return -(log_mean.exp() * log_mean).sum()


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """−½ Σ p_a log p_b − ½ Σ p_b log p_a of logits a and b, per sample.

    >>> symmetric_cross_entropy(torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([0.6931])
    """
    return -0.5 * (a.softmax(1) * b.log_softmax(1) + b.softmax(1) * a.log_softmax(1)).sum(1)


def soft_likelihood_ratio(logits: Tensor, clip: float = 0.99) -> Tensor:
    """−Σ q log(q/(1 − q) + 1e−5) of q = min(p, clip): like entropy, with a gradient also at certainty.

    >>> soft_likelihood_ratio(torch.zeros(1, 2)).abs() < 1e-4  # even odds
    tensor([True])
    """
    q = logits.softmax(1).clamp(max=clip)
    return -(q * (q / (1 - q) + 1e-5).log()).sum(1)


def free_energy(logits: Tensor) -> Tensor:
    """g(x) = log Σ exp z: the logarithm of the density that a classifier's logits imply, up to a constant.

    >>> free_energy(torch.zeros(1, 4))
    tensor([1.3863])
    """
    return logits.logsumexp(1)


def kept_rows(values: Tensor, keep: Tensor) -> Tensor:
    """The kept samples of (B, …) values, or the kept pixels of (B, C, H, W) values as (K, C).

    >>> kept_rows(torch.arange(6).view(3, 2), torch.tensor([True, False, True]))
    tensor([[0, 1],
            [4, 5]])
    """
    return values[keep] if keep.dim() == 1 else values.movedim(1, -1)[keep]
