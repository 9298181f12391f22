"""Source: the frozen network, for comparison."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter, Running
from ..engine import recordable

__all__ = ["Source"]


class Source(Adapter):
    """No adaptation: evaluation mode, statistics of training."""

    cost = (1, 0)
    default_parameters: ClassVar[None] = None

    def __init__(self, model: nn.Module, **options: Unpack[Running]) -> None:
        super().__init__(model, statistics="source", **options)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.infer(x)
