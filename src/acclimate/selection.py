"""S(x): which samples to learn from, and with what weight.

    select = Reliable(0.4) * NonRedundant("auto")
    s = select(logits)                     # (B,), zero where a sample is left out
    select.observe(logits, s > 0)          # what was learned from, for the next batch

A selector is a module whose state lives in buffers, so an adapter saves, moves and resets it like everything else.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from .functional import entropy, moving_average, reliability, similarity, threshold

__all__ = ["Epsilon", "Everything", "NonRedundant", "Reliable", "Scaled", "Selector"]


class Selector(nn.Module, ABC):
    """A weight S(x) ≥ 0 for each sample, or each pixel, from its logits. Selectors multiply."""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """S(x), without a gradient: (B,) for (B, C) logits, (B, H, W) for (B, C, H, W)."""

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        """Take note of the samples that were kept. Most selectors remember nothing."""

    def __mul__(self, other: Selector) -> Selector:
        return _Product(self, other)


class _Product(Selector):
    def __init__(self, first: Selector, second: Selector) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, logits: Tensor) -> Tensor:
        return torch.mul(self.first(logits), self.second(logits))

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        self.first.observe(logits, keep)
        self.second.observe(logits, keep)

    def __repr__(self) -> str:
        return f"{self.first!r} * {self.second!r}"


class Everything(Selector):
    """S(x) = 1: no selection."""

    def forward(self, logits: Tensor) -> Tensor:
        """One for each sample."""
        return torch.ones_like(logits.detach()[:, 0])

    def __repr__(self) -> str:
        return "Everything()"


class Reliable(Selector):
    """S_ent(x) = exp(E0 − H(x)) where H(x) < E0 = margin · ln C, else 0 (Eq. 3).

    `weighted=False` leaves the indicator alone, as EATA-C does (Eq. 15).
    """

    def __init__(self, margin: float = 0.4, *, weighted: bool = True) -> None:
        super().__init__()
        if not margin > 0:
            raise ValueError(f"Reliable: margin={margin} keeps nothing; it is a fraction of ln C, such as 0.4")
        self.margin = margin
        self.weighted = weighted

    def forward(self, logits: Tensor) -> Tensor:
        """Eq. (3)."""
        e0 = threshold(self.margin, logits.shape[1])
        return reliability(entropy(logits.detach()), e0, weighted=self.weighted)

    def __repr__(self) -> str:
        return f"Reliable({self.margin}{'' if self.weighted else ', weighted=False'})"


@dataclass(frozen=True)
class Scaled:
    """An ε that is `value` at 1,000 classes and grows as 1/√C for fewer.

    A confident prediction against a nearly uniform mean has cosine 1/√C, so an ε that suits ImageNet keeps nothing on
    ten classes.
    """

    value: float

    def at(self, num_classes: int) -> float:
        """ε for a number of classes."""
        return self.value * math.sqrt(1000 / num_classes)

    def __repr__(self) -> str:
        return f"Scaled({self.value})"


Epsilon: TypeAlias = float | Scaled | Literal["auto"]


class NonRedundant(Selector):
    """S_div(x) = 1 where |cos(m, p(x))| < ε, else 0, for m a moving average of kept predictions (Eq. 4 and 5).

    `"auto"` is `Scaled(0.05)`: the paper's 0.05 at 1,000 classes, 0.5 at 10.
    """

    mean: Tensor | None

    def __init__(self, epsilon: Epsilon = "auto", *, momentum: float = 0.9) -> None:
        super().__init__()
        value = epsilon.value if isinstance(epsilon, Scaled) else epsilon
        if value != "auto" and not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(
                f'NonRedundant: epsilon={epsilon!r}; expected "auto", a positive cosine such as 0.05, or Scaled(0.05)'
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"NonRedundant: momentum={momentum}; expected a number in [0, 1)")
        self.epsilon = epsilon
        self.momentum = momentum
        self.register_buffer("mean", None)

    def forward(self, logits: Tensor) -> Tensor:
        """Eq. (5); everything passes until something was kept."""
        z = logits.detach()
        epsilon = Scaled(0.05) if self.epsilon == "auto" else self.epsilon
        epsilon = epsilon.at(z.shape[1]) if isinstance(epsilon, Scaled) else epsilon
        return (similarity(z, self._mean(z)) < epsilon).to(z.dtype)

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        """Eq. (4)."""
        z = logits.detach()
        self.mean = moving_average(self._mean(z), z, keep, self.momentum)

    def _mean(self, logits: Tensor) -> Tensor:
        return logits.new_zeros(logits.shape[1]) if self.mean is None else self.mean

    def __repr__(self) -> str:
        return f"NonRedundant({self.epsilon!r})"


class AcceptanceAlarm:
    """Warns, once, when a method has learned from almost nothing or almost everything for `window` batches.

    Counts stay on the device and are read once a window.
    """

    def __init__(self, name: str, window: int = 50) -> None:
        self.name = name
        self.window = window
        self.raised = False
        self._batches = 0
        self._rates: list[Tensor] = []

    def watch(self, kept: Tensor | None) -> None:
        """Take note of a batch's mask; None, from a method that does not select, is passed over."""
        if self.raised or kept is None:
            return
        self._rates.append(kept.float().mean())
        if len(self._rates) < self.window:
            return
        rates, self._rates = torch.stack(self._rates), []
        low, high = bool((rates < 0.01).all()), bool((rates > 0.99).all())
        if low or high:
            self.raised = True
            remedy = (
                "it hardly adapts. Is epsilon (epsilon='auto' scales with the classes) or margin too small?"
                if low
                else "it leaves nothing out, as Tent does. Are margin and epsilon too large for these classes?"
            )
            share = "under 1 %" if low else "over 99 %"
            warnings.warn(
                f"{self.name} learned from {share} of the samples in each of the last {self.window} batches: {remedy}",
                stacklevel=3,
            )
