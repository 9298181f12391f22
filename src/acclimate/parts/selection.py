"""S(x): which samples to learn from, and with what weight.

    select = Reliable(0.4) * NonRedundant("auto")
    s = select(logits)                     # (B,), zero where a sample is dropped
    select.observe(logits, s > 0)          # which samples were learned from, for the next batch

A selector is a module with its state in buffers, so an adapter saves, moves and resets it with everything else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ..checks import warn
from ..functional import entropy, moving_average, reliability, similarity, threshold
from .world import ALONE, World

__all__ = ["Choice", "Epsilon", "Everything", "NonRedundant", "Reliable", "Scaled", "Selector", "make_selector"]


class AcceptanceAlarm:
    """Warn once when under 1 % or over 99 % of the samples in `window` batches were kept.

    Rates stay on the device and are read once per window.
    """

    def __init__(self, window: int = 50) -> None:
        self.window = window
        self.raised = False
        self._rates: list[Tensor] = []

    def watch(self, keep: Tensor) -> None:
        """Add the mask of one batch."""
        if self.raised or not len(keep):
            return
        self._rates.append(keep.float().mean())
        if len(self._rates) < self.window:
            return
        rate = float(torch.stack(self._rates).mean())
        self._rates.clear()
        if not 0.01 <= rate <= 0.99:
            self.raised = True
            share, remedy = (
                ("under 1 %", "the adapter hardly learns. Increase margin or epsilon (epsilon='auto' fits the classes)")
                if rate < 0.5
                else ("over 99 %", "nothing is filtered out. Decrease margin or epsilon for this number of classes")
            )
            warn(f"the selection kept {share} of the samples in the last {self.window} batches: {remedy}")


class Selector(nn.Module, ABC):
    """A weight S(x) ≥ 0 for each sample, or each pixel, from its logits. Selectors multiply.

    >>> select = Reliable(0.4) * NonRedundant("auto")
    >>> select(torch.tensor([[9.0, 0.0, 0.0], [1.0, 1.0, 1.0]])) > 0  # confident, and uniform
    tensor([ True, False])
    """

    world: World = ALONE
    """The ranks that share a batch: `self.world.sum` adds up what they have."""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """Return S(x) without a gradient: (B,) for (B, C) logits, (B, H, W) for (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.alarm = AcceptanceAlarm()

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        """Note which samples of a batch were kept: the state for the next batch. Most selectors have none.

        May be recorded as a CUDA graph.
        """

    def shared_by(self, world: World) -> Self:
        """Return this selector, whose state is over the batch of all ranks."""
        for module in self.modules():
            if isinstance(module, Selector):
                module.world = world
        return self

    def watch(self, keep: Tensor) -> None:
        """Warn if almost none or almost all samples have been kept for many batches."""
        self.alarm.watch(keep)

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
    """S(x) = 1: no selection.

    >>> Everything()(torch.zeros(2, 3))
    tensor([1., 1.])
    """

    def forward(self, logits: Tensor) -> Tensor:
        """Return one for each sample."""
        return torch.ones_like(logits.detach()[:, 0])

    def watch(self, keep: Tensor) -> None:
        """Do not warn: keeping everything is its purpose."""

    def __repr__(self) -> str:
        return "Everything()"


class Reliable(Selector):
    """S_ent(x) = exp(E0 − H(x)) where H(x) < E0 = margin · ln C, else 0 (Eq. 3).

    `weighted=False` is the indicator alone, which EATA-C uses (Eq. 15).

    >>> Reliable(0.4, weighted=False)(torch.tensor([[9.0, 0.0], [0.0, 0.0]]))
    tensor([1., 0.])
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

    >>> round(Scaled(0.05).at(10), 3)
    0.5
    """

    value: float

    def at(self, num_classes: int) -> float:
        """Return ε for a number of classes."""
        return self.value * math.sqrt(1000 / num_classes)

    def __repr__(self) -> str:
        return f"Scaled({self.value})"


Epsilon: TypeAlias = float | Scaled | Literal["auto"]


class NonRedundant(Selector):
    """S_div(x) = 1 where |cos(m, p(x))| < ε, else 0, with m a moving average of kept predictions (Eq. 4 and 5).

    `"auto"` is `Scaled(0.05)`: the paper's 0.05 at 1,000 classes, 0.5 at 10.

    >>> select, z = NonRedundant(0.9), torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    >>> select.observe(z, torch.tensor([True, False]))
    >>> select(z)
    tensor([0., 1.])
    """

    mean: Tensor | None
    zero_is_empty: ClassVar[bool] = True
    """All zeros while it is empty, so that a reset can write it in place."""

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
        self.mean = moving_average(self._mean(z), z, keep, self.momentum, self.world.sum)

    def _mean(self, logits: Tensor) -> Tensor:
        return logits.new_zeros(logits.shape[1]) if self.mean is None else self.mean

    def __repr__(self) -> str:
        return f"NonRedundant({self.epsilon!r}{'' if self.momentum == 0.9 else f', momentum={self.momentum}'})"


Choice: TypeAlias = Selector | Literal["everything", "reliable"] | None
"""A selector of your own, the name of one, or None for the paper's."""


def make_selector(choice: Choice, margin: float | None, epsilon: Epsilon | None, *, weighted: bool = True) -> Selector:
    """Return the selector of a choice; None as margin or epsilon leaves that filter out."""
    if isinstance(choice, Selector):
        return choice
    if choice not in (None, "reliable", "everything"):
        raise ValueError(f'select={choice!r}: expected a Selector, "everything" or "reliable"')
    if choice == "reliable" and margin is None:
        raise ValueError('select="reliable" needs a margin, such as 0.4; margin=None leaves that filter out')
    if choice == "everything" or (margin is None and epsilon is None):
        return Everything()
    if margin is not None and (choice == "reliable" or epsilon is None):
        return Reliable(margin, weighted=weighted)
    assert epsilon is not None  # noqa: S101
    redundancy = NonRedundant(epsilon)
    return redundancy if margin is None else Reliable(margin, weighted=weighted) * redundancy
