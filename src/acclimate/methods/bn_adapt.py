"""BN Adapt: source statistics corrected by those of the batch (Schneider et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import NETWORKS, Defaults, Presets, Running
from ..engine import recordable
from ..parts.batchnorm import Mode

__all__ = ["BNAdapt"]


class BNAdapt(Adapter):
    """μ = N/(N+n)·μ_source + n/(N+n)·μ_batch, and the same for the variance, with batch size n. No backward.

    Paper: https://arxiv.org/abs/2006.16971

    >>> import acclimate, torch
    >>> model = acclimate.BNAdapt(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Args:
        model: a network with BatchNorm layers.
        prior: N, the number of samples that the source statistics count for; 0 uses the batch's alone.
        options: `engine`, `precision`, `classes`, `seed`: see `Adapter`.
    """

    cost = (1, 0)
    defaults: ClassVar[Defaults] = Defaults(parameters=None)
    # on ACDC, one image at a time, the statistics of that image alone: the paper's 52.0 is below its source network
    presets: ClassVar[Presets] = {**{network: {} for network in NETWORKS}, "segformer-b5": {"prior": 0}}

    def __init__(self, model: nn.Module, *, prior: float = 64, **options: Unpack[Running]) -> None:
        super().__init__(model, statistics="source" if prior else "batch", **options)
        if not self.runner.normalisation.layers:
            raise ValueError("BNAdapt needs BatchNorm layers, and the model has none: use Tent or EATA")
        if prior < 0:
            raise ValueError(f"BNAdapt: prior={prior} is negative")
        self.prior = prior

    @property
    def coupled(self) -> bool:
        """Whether the logits of a sample depend on the rest of its batch: always."""
        return True

    def mode(self, size: int) -> Mode:
        """Blend the statistics."""
        return size / (self.prior + size) if self.prior else super().mode(size)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.infer(x)
