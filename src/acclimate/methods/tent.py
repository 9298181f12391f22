"""Tent: entropy minimisation (Wang et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..core.adapter import Adapter
from ..core.options import Presets
from ..engine import recordable
from ..functional import entropy

__all__ = ["Tent"]


class Tent(Adapter):
    """min_θ mean_b H(p_b): one step per batch, on every sample. It may collapse on a long stream.

    Paper: https://arxiv.org/abs/2006.10726

    >>> import acclimate, torch
    >>> model = acclimate.Tent(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)), lr=1e-3)
    >>> model(torch.rand(8, 4)).shape, model.last.updated
    (torch.Size([8, 3]), True)
    """

    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"lr": 1e-3},
        "segformer-b5": {"lr": 7.5e-5, "statistics": "source"},  # CoTTA's program has 7.5e-6
        "cifar-resnet": {"lr": 5e-3},
        "cifar-vit": {"lr": 2.5e-3},
    }

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then lower the mean entropy of the batch."""
        batch = self.predict(x)
        self.update(entropy=self.world.mean(entropy(batch.rows())))
        return batch.logits
