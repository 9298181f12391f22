"""BN Adapt: source statistics corrected by the batch's (Schneider et al., 2020)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter, Running
from ..engine import recordable

__all__ = ["BNAdapt"]


class BNAdapt(Adapter):
    """μ = N/(N+n)·μ_source + n/(N+n)·μ_batch, and the same for the variance; n is the batch size. No backward.

    Args:
        model: a network with BatchNorm layers.
        prior: N, how many samples the source statistics count for; 0 takes the batch's alone.
        options: `engine`, `precision`, `classes`, `seed`: see `Adapter`.
    """

    by_size = True
    cost = (1, 0)
    default_parameters: ClassVar[None] = None

    def __init__(self, model: nn.Module, *, prior: float = 64, **options: Unpack[Running]) -> None:
        super().__init__(model, statistics="source" if prior else "batch", **options)
        if not self.norm.layers:
            raise ValueError("BNAdapt needs BatchNorm layers, and the model has none: Tent and EATA adapt other norms")
        if prior < 0:
            raise ValueError(f"BNAdapt: prior={prior} is negative")
        self.prior = prior

    def normalising(self, size: int) -> AbstractContextManager[None]:
        """Blended statistics."""
        return self.norm.blended(size / (self.prior + size)) if self.prior else super().normalising(size)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.infer(x)
