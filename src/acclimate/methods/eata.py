"""EATA and ETA: learn from reliable, non-redundant samples, and do not forget (Niu et al., 2022)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter, Options
from ..engine import recordable
from ..functional import entropy
from ..parts.fisher import Fisher, Images
from ..parts.selection import Choice, Epsilon, NonRedundant, Reliable, Selector, chosen

__all__ = ["EATA", "ETA"]


class EATA(Adapter):
    """min_θ S(x)·H(x) + β·R(θ, θ°) (Eq. 8).

    Args:
        model: any module that returns logits.
        source: unlabelled in-distribution images, some hundred to 2,000, for the Fisher importance; used once, here.
            `collect_in_distribution` finds them in a stream.
        margin: E0 = margin · ln C; a sample is reliable where its entropy is below E0 (Eq. 3).
        epsilon: a sample is redundant where |cos| to the mean of what was learned from reaches this (Eq. 5); `"auto"`
            is the paper's 0.05 at 1,000 classes, and scales as 1/√C.
        beta: β, the weight of the pull towards the source; 0 is ETA and needs no `source`.
        fisher: `"batch"`, as the released program has it, or `"sample"`, Eq. (9) as written (β is then smaller).
        select: another S(x), in the place of `Reliable(margin) * NonRedundant(epsilon)`: a selector, or by name
            `"reliable"`, the first of them, or `"everything"`.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    selective = True
    select: Selector

    def __init__(
        self,
        model: nn.Module,
        *,
        source: Images | None = None,
        margin: float = 0.4,
        epsilon: Epsilon = "auto",
        beta: float = 2000.0,
        fisher: Literal["batch", "sample"] = "batch",
        select: Choice = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        self.margin, self.epsilon, self.beta, self.fisher = margin, epsilon, beta, fisher
        self.select = chosen(select, Reliable(margin), NonRedundant(epsilon))
        self.regulariser = Fisher.weighted(beta, self, source, fisher)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then learn from the samples with S(x) > 0, if there are any."""
        batch = self.predict(x)
        s = self.select(batch.logits)  # Eq. (6)
        kept = batch.kept(s > 0)
        self.update(
            when=kept.any,
            entropy=kept.mean(kept.of(s) * entropy(kept.logits)),  # Eq. (2)
            fisher=self.beta * self.regulariser(self.adapted),  # Eq. (8)
        )
        self.select.observe(batch.logits, s > 0)  # Eq. (4)
        return batch.logits


class ETA(EATA):
    """EATA without the Fisher regulariser: min_θ S(x)·H(x) (Eq. 2). Needs no source images."""

    without = ("source", "beta", "fisher")

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.4,
        epsilon: Epsilon = "auto",
        select: Choice = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, beta=0.0, margin=margin, epsilon=epsilon, select=select, **options)
