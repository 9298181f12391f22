"""Source: the frozen network, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from ..adapter import Adapter

__all__ = ["Source"]


class Source(Adapter):
    """No adaptation: evaluation mode, statistics of training."""

    cost = (1, 0)
    default_parameters: ClassVar[None] = None

    def __init__(self, model: nn.Module, *, classes: Sequence[int] | None = None, seed: int = 0) -> None:
        super().__init__(model, statistics="source", classes=classes, seed=seed)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.infer(x)
