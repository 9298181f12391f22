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
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..functional import entropy, moving_average, reliability, similarity, threshold

__all__ = ["Choice", "Epsilon", "Everything", "NonRedundant", "Reliable", "Scaled", "Selector", "chosen"]


class AcceptanceAlarm:
    """Warns, once, when under 1 % or over 99 % of the samples of `window` batches were kept.

    Rates stay on the device and are read once a window.
    """

    def __init__(self, window: int = 50) -> None:
        self.window = window
        self.raised = False
        self._rates: list[Tensor] = []

    def watch(self, keep: Tensor) -> None:
        """Take note of a batch's mask."""
        if self.raised:
            return
        self._rates.append(keep.float().mean())
        if len(self._rates) < self.window:
            return
        rate = float(torch.stack(self._rates).mean())
        self._rates.clear()
        if not 0.01 <= rate <= 0.99:
            self.raised = True
            share, remedy = (
                (
                    "under 1 %",
                    "it hardly adapts. Is margin too small, or epsilon ('auto' scales with the classes)?",
                )
                if rate < 0.5
                else ("over 99 %", "it leaves nothing out. Are margin and epsilon too large for these classes?")
            )
            warnings.warn(
                f"the selection kept {share} of the samples of the last {self.window} batches: {remedy}", stacklevel=4
            )


class Selector(nn.Module, ABC):
    """A weight S(x) ≥ 0 for each sample, or each pixel, from its logits. Selectors multiply."""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """S(x), without a gradient: (B,) for (B, C) logits, (B, H, W) for (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.alarm = AcceptanceAlarm()

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        """Take note of which samples were kept; warns where it has long been almost none, or almost all."""
        self.remember(logits.detach(), keep)
        if not (keep.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.watch(keep)

    def watch(self, keep: Tensor) -> None:
        """Warn where almost none, or almost all, have long been kept: not part of a recorded step."""
        self.alarm.watch(keep)

    def remember(self, logits: Tensor, keep: Tensor) -> None:
        """What a selector keeps of a batch for the next. Most keep nothing."""

    def __mul__(self, other: Selector) -> Selector:
        return _Product(self, other)


class _Product(Selector):
    def __init__(self, first: Selector, second: Selector) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, logits: Tensor) -> Tensor:
        return torch.mul(self.first(logits), self.second(logits))

    def remember(self, logits: Tensor, keep: Tensor) -> None:
        self.first.remember(logits, keep)
        self.second.remember(logits, keep)

    def __repr__(self) -> str:
        return f"{self.first!r} * {self.second!r}"


class Everything(Selector):
    """S(x) = 1: no selection."""

    def forward(self, logits: Tensor) -> Tensor:
        """One for each sample."""
        return torch.ones_like(logits.detach()[:, 0])

    def watch(self, keep: Tensor) -> None:
        """That all are kept is what it is for."""

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
    zero_is_empty: ClassVar[bool] = True
    """A reset leaves an empty mean where it is, as a recorded step needs it."""

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

    def remember(self, logits: Tensor, keep: Tensor) -> None:
        """Eq. (4)."""
        self.mean = moving_average(self._mean(logits), logits, keep, self.momentum)

    def _mean(self, logits: Tensor) -> Tensor:
        return logits.new_zeros(logits.shape[1]) if self.mean is None else self.mean

    def __repr__(self) -> str:
        return f"NonRedundant({self.epsilon!r})"


Choice: TypeAlias = Selector | Literal["everything", "reliable"] | None
"""A selector of one's own, a part of the paper's by its name, or, as None, the paper's."""


def chosen(choice: Choice, reliable: Selector, non_redundant: Selector) -> Selector:
    """What a choice stands for."""
    if isinstance(choice, Selector):
        return choice
    known = {None: reliable * non_redundant, "reliable": reliable, "everything": Everything()}
    if choice not in known:
        raise ValueError(f'select={choice!r}: expected a Selector, "everything" or "reliable"')
    return known[choice]
