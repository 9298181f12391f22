"""SAR: reliable entropy minimisation towards flat minima (Niu et al., 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..engine import recordable
from ..functional import entropy
from ..parts.selection import Reliable
from ..parts.sharpness import ascended

__all__ = ["SAR"]


class SAR(Adapter):
    """min_θ max_{‖δ‖ ≤ ρ} mean_R H(θ + δ), over the reliable samples R = {H < E0}.

    Where the moving average e of the loss falls below `floor`, the network has collapsed and starts over.

    Paper: https://arxiv.org/abs/2302.12400

    >>> import acclimate, torch
    >>> model = acclimate.SAR(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)), lr=1e-3)
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Args:
        model: any module that returns logits.
        margin: E0 = margin · ln C.
        rho: ρ, the distance to the sharpest point nearby.
        floor: the network starts over if e falls below this.
        reset: after starting over, e is `"empty"`. The `"released"` program keeps e and the optimizer's momentum, so
            that it starts over again and again until e has risen.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. The norm layers of the last stage
            do not adapt (`parameters="early-norm"`).
    """

    cost = (2, 2)
    selective = True
    set_once = ("seed", "margin")
    defaults: ClassVar[Defaults] = Defaults(parameters="early-norm")
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"lr": 1e-3},
        "segformer-b5": {"lr": 7.5e-5, "statistics": "source"},
        "cifar-resnet": {"lr": 5e-3, "floor": 0.2 / 3},  # in proportion to ln C
        "cifar-vit": {"lr": 2.5e-3},
    }
    average: Tensor
    """e; negative while it is empty."""

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
        self.register_buffer("average", self.adapted[0].new_tensor(-1.0))

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then step by the gradient at the sharpest point nearby."""
        batch = self.predict(x)
        kept = batch.kept(self.reliable(batch.logits) > 0, again=True)  # R
        if kept.any is not False:  # on a GPU, only the device knows
            g = self.gradients(kept.mean(entropy(kept.logits)))
            sound = self.sound(g)
            with ascended(self.adapted, g, self.rho):  # θ' = θ + ρ·g/‖g‖
                still = batch.again(kept, where=self.reliable)  # R'
                loss = still.mean(entropy(still.logits))
                g = self.gradients(loss)
            self.update(when=kept.any, gradients=g, sound=sound, entropy=loss)
            self._follow(loss.detach(), still.any)
        self._recover()
        return batch.logits

    def _follow(self, loss: Tensor, learned: bool | Tensor) -> None:
        """e ← 0.9·e + 0.1·loss; the first loss sets it."""
        e = torch.where(self.average < 0, loss, 0.9 * self.average + 0.1 * loss)
        self.average = torch.where(torch.as_tensor(learned, device=e.device) & e.isfinite(), e, self.average)

    def _recover(self) -> None:
        """Start over where e < floor."""
        collapsed = (self.average >= 0) & (self.average < self.floor)
        if self.reset_ == "released":
            self.state.start_over(optimizer=False, when=collapsed)
        else:
            self.state.start_over("average", when=collapsed)
