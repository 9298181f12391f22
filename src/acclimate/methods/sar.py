"""SAR: reliable entropy minimisation towards flat minima (Niu et al., 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn
from typing_extensions import Unpack

from ..adapter import Adapter, Options
from ..functional import entropy, kept_rows
from ..parameters import Parameters
from ..prediction import samples_of
from ..selection import Reliable
from ..sharpness import ascended

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
        options: `lr`, `optimizer`, `parameters`, `statistics`, `strategy`, `classes`, `seed`: see `Adapter`. The last
            stage's norm layers do not adapt (`parameters="early-norm"`).
    """

    cost = (2, 2)
    default_parameters: ClassVar[Parameters | None] = "early-norm"
    average: Tensor | None

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
        self.register_buffer("average", None)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then step by the gradient at the sharpest point nearby."""
        batch = self.predict(x)
        keep = self.reliable(batch.logits) > 0  # R
        z = batch.rows(keep)
        if len(z):
            with ascended(self.adapted, self.gradients(entropy(z).mean()), self.rho):  # θ' = θ + ρ·g/‖g‖
                z = batch.again(keep)
                still = self.reliable(z) > 0  # R'
                h = entropy(kept_rows(z, still))
                loss = h.sum() / max(len(h), 1)
                gradients = self.gradients(loss)
            self.descend(gradients, entropy=loss)
            self.step.backwards = self.step.backwards + samples_of(keep.masked_scatter(keep, still)).sum()
            if len(h):
                self._follow(loss.detach())
        self._recover()
        return batch.logits

    def _follow(self, loss: Tensor) -> None:
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss

    def _recover(self) -> None:
        if self.average is not None and bool(self.average < self.floor):
            if self.reset_ == "released":
                self.start_over(optimizer=False)
            else:
                self.start_over("average")
