"""SAR: reliable entropy minimisation towards flat minima (Niu et al., 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter, Options
from ..functional import entropy
from ..parts.parameters import Parameters
from ..parts.selection import Reliable
from ..parts.sharpness import ascended

__all__ = ["SAR"]


class SAR(Adapter):
    """min_θ max_{‖δ‖ ≤ ρ} mean_R H(θ + δ), over the reliable samples R = {H < E0}.

    Where the moving average e of the loss falls below `floor`, the network is taken to have collapsed and starts over.

    Args:
        model: any module that returns logits.
        margin: E0 = margin · ln C.
        rho: ρ, how far off the sharpest point is looked for.
        floor: the least e.
        reset: after starting over, e is `"empty"`; the `"released"` program keeps e and the optimizer's momentum, so
            that it starts over again and again until e has risen.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. The last
            stage's norm layers do not adapt (`parameters="early-norm"`).
    """

    cost = (2, 2)
    selective = True
    default_parameters: ClassVar[Parameters | None] = "early-norm"
    average: Tensor
    """e; NaN while it is empty."""

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.4,
        rho: float = 0.05,
        floor: float = 0.2,
        reset: Literal["empty", "released"] = "empty",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if rho < 0:
            raise ValueError(f"SAR: rho={rho} is negative")
        if reset not in ("empty", "released"):
            raise ValueError(f'SAR: reset={reset!r}; expected "empty" or "released"')
        self.margin, self.rho, self.floor, self.reset_ = margin, rho, floor, reset
        self.reliable = Reliable(margin, weighted=False)
        self.register_buffer("average", torch.tensor(torch.nan, device=self.device))

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then step by the gradient at the sharpest point nearby."""
        batch = self.predict(x)
        kept = batch.kept(self.reliable(batch.logits) > 0)  # R
        if kept.any:
            uncertain = kept.mean(entropy(kept.logits))
            with ascended(self.adapted, self.gradients(uncertain), self.rho):  # θ' = θ + ρ·g/‖g‖
                kept = batch.again(kept)
                kept = kept.where(self.reliable(kept.logits) > 0)  # R'
                loss = kept.mean(entropy(kept.logits))
                gradients = self.gradients(loss)
            self.descend(gradients, entropy=loss)
            self.step.backwards = self.step.backwards + kept.samples
            self._follow(loss.detach(), kept.any)
        self._recover()
        return batch.logits

    def _follow(self, loss: Tensor, learned: bool | Tensor) -> None:
        e = torch.where(self.average.isnan(), loss, 0.9 * self.average + 0.1 * loss)
        self.average = torch.where(torch.as_tensor(learned, device=e.device), e, self.average)

    def _recover(self) -> None:
        if bool(self.average < self.floor):
            if self.reset_ == "released":
                self.start_over(optimizer=False)
            else:
                self.start_over("average")
