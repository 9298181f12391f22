"""Source: the frozen network, for comparison."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import NETWORKS, Defaults, Presets, Running
from ..engine import recordable

__all__ = ["Source"]


class Source(Adapter):
    """No adaptation: evaluation mode, statistics of the training data.

    >>> import acclimate, torch
    >>> model = acclimate.Source(torch.nn.Linear(4, 3))
    >>> model(torch.rand(2, 4)).shape
    torch.Size([2, 3])
    """

    cost = (1, 0)
    defaults: ClassVar[Defaults] = Defaults(parameters=None)
    presets: ClassVar[Presets] = {network: {} for network in NETWORKS}

    def __init__(self, model: nn.Module, **options: Unpack[Running]) -> None:
        super().__init__(model, statistics="source", **options)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.infer(x)
