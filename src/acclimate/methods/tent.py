"""Tent: entropy minimisation (Wang et al., 2021)."""

from __future__ import annotations

from torch import Tensor

from ..core.adapter import Adapter
from ..engine import recordable
from ..functional import entropy

__all__ = ["Tent"]


class Tent(Adapter):
    """min mean_b H(p_b): one step a batch, on every sample. Collapses on long streams; EATA is the cure."""

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then lower the batch's mean entropy."""
        batch = self.predict(x)
        self.update(entropy=entropy(batch.rows()).mean())
        return batch.logits
