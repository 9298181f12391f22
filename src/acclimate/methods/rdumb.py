"""RDumb: ETA that starts over at regular intervals (Press et al., 2023)."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import Unpack

from ..checks import DivergenceError, refuse_non_finite
from ..core.adapter import Options
from ..core.record import Count
from ..parts.selection import Choice, Epsilon
from .eata import ETA

__all__ = ["RDumb"]


class RDumb(ETA):
    """min_θ S(x)·H(x) (Eq. 2), and back to the source every `every` batches.

    Args:
        model: any module that returns logits.
        every: after this many batches network, optimizer and running mean go back to the source.
        margin: E0 = margin · ln C (Eq. 3).
        epsilon: ε (Eq. 5); see `EATA`.
        select: another S(x).
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1000,
        margin: float = 0.4,
        epsilon: Epsilon = "auto",
        select: Choice = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, margin=margin, epsilon=epsilon, select=select, **options)
        if every < 1:
            raise ValueError(f"RDumb: every={every}; it starts over after at least one batch")
        self.every = every
        self.batches = Count()

    def adapt(self, x: Tensor) -> Tensor:
        """Start over if it is time; then predict and learn as ETA does."""
        if int(self.batches) and int(self.batches) % self.every == 0:
            refuse_non_finite(x)
            self.start_over("select")
        try:
            logits = super().adapt(x)
        except DivergenceError:
            self.batches.add(1)  # so that the time to start over comes
            raise
        self.batches.add(1)
        return logits
