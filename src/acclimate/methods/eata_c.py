"""EATA-C and ETA-C: agree with your own sub-networks, and be as sure as you agree (Tan et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..checks import check_images
from ..core.adapter import Adapter, Options
from ..core.prediction import Strategy
from ..core.record import Step, Uncertainty
from ..engine import recordable
from ..functional import certainty, consistency, entropy
from ..parts.branches import Names
from ..parts.fisher import Fisher, Images
from ..parts.selection import Choice, Epsilon, NonRedundant, Reliable, Scaled, Selector, chosen
from ..parts.subnetwork import StochasticDepth

__all__ = ["EATAC", "ETAC"]


class EATAC(Adapter):
    """min_θ S_c(x)·(L_c(x) + α·C(x)·H(x; θ_sub)) + β·R(θ, θ°) (Eq. 14).

    The full network predicts, without a gradient. A sub-network, sampled by stochastic depth, then predicts the
    selected samples and learns to agree (L_c); where both predict the same class it grows more certain, else less.

    The defaults are the paper's for ResNet-50; `EATAC.preset("vit-base", net, …)` has those of other networks.

    Args:
        model: a residual network that returns logits (see `acclimate.parts.subnetwork`).
        source: unlabelled in-distribution images for the Fisher importance; used once, here.
        alpha: α, the weight of the min-max entropy; 0 leaves it out.
        beta: β, the weight of the pull towards the source; 0 is ETA-C and needs no `source`.
        drop: the sub-network's drop ratio.
        smoothing: the paper's p of Eq. (11); None takes `drop`.
        margin: E0 = margin · ln C (Eq. 3).
        epsilon: ε (Eq. 5); `"auto"` is 0.07 at 1,000 classes, and scales as 1/√C.
        weight: of the consistency loss; 0 leaves it out.
        fisher: how the importance is estimated (see `EATA`).
        divergence: `"forward"`, KL(ŷ_fuse ‖ ŷ_sub), or `"reverse"`, KL(ŷ_sub ‖ ŷ_fuse) (see `functional.consistency`).
        schedule: of the drop ratio over blocks: `"linear"` or `"uniform"`.
        per: sub-networks `"sample"` by sample, or one a `"batch"`, whose dropped blocks are not run.
        branches: names of residual branches, for a network that is not known; or `blocks` (see `subnetwork`).
        blocks: names of modules that return x + f(x).
        select: another S_c(x), in the place of `Reliable(margin, weighted=False) * NonRedundant(epsilon)` (see `EATA`).
        options: `lr`, `optimizer`, `parameters` (`"all"` is EATA-C†), `statistics`, `strategy`, `classes`, `seed`: see
            `Adapter`. BatchNorm normalises the selected samples by their own statistics (`strategy="replay-subset"`,
            the default), or by the full batch's, repeated from the first pass (`"replay"`).
    """

    cost = (2, 1)
    select: Selector
    default_lr: ClassVar[float] = 5e-3
    default_strategy: ClassVar[Strategy] = "replay-subset"

    def __init__(
        self,
        model: nn.Module,
        *,
        source: Images | None = None,
        alpha: float = 0.1,
        beta: float = 50.0,
        drop: float = 0.2,
        smoothing: float | None = None,
        margin: float = 0.5,
        epsilon: Epsilon = "auto",
        weight: float = 1.0,
        fisher: Literal["batch", "sample"] = "batch",
        divergence: Literal["forward", "reverse"] = "forward",
        schedule: Literal["linear", "uniform"] = "linear",
        per: Literal["sample", "batch"] = "sample",
        branches: Names | None = None,
        blocks: Names | None = None,
        select: Choice = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        self.alpha, self.beta, self.drop, self.weight = alpha, beta, drop, weight
        self.smoothing = drop if smoothing is None else smoothing
        self.margin, self.epsilon, self.fisher = margin, epsilon, fisher
        self.divergence, self.schedule, self.per = divergence, schedule, per
        self.branches, self.blocks = branches, blocks
        if self.strategy in ("masked", "sparse"):
            raise ValueError('a sub-network needs a pass of its own: strategy="replay-subset" or "replay"')
        if smoothing is not None and not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing}: expected a number in [0, 1]")
        if divergence not in ("forward", "reverse"):
            raise ValueError(f'divergence={divergence!r}: expected "forward" or "reverse"')
        not_redundant = NonRedundant(Scaled(0.07) if epsilon == "auto" else epsilon)
        self.select = chosen(select, Reliable(margin, weighted=False), not_redundant)
        self.depth = StochasticDepth(model, branches, blocks) if drop else None
        with self.subnetwork():  # a wrong drop, schedule or per is told here, not at the first batch
            pass
        self.regulariser = Fisher.weighted(beta, self, source, fisher)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the full network, then let a sub-network learn from the selected samples."""
        batch = self.predict(x)
        keep = self.select(batch.logits) > 0  # Eq. (15)
        with self.subnetwork():
            kept = batch.kept(keep)
            z, z_sub = kept.of(batch.logits), kept.logits
            divergence = consistency(z, z_sub, self.smoothing, self.divergence)  # Eq. (10), (11)
            c = certainty(z, z_sub)  # Eq. (13)
            self.update(
                when=kept.any,
                consistency=self.weight * kept.mean(divergence),
                entropy=self.alpha * kept.mean(c * entropy(z_sub)),  # Eq. (12)
                fisher=self.beta * self.regulariser(self.adapted),  # Eq. (14)
            )
        self.step.opinions, self.step.counts = Uncertainty(divergence.detach(), c < 0), kept.counts
        self.select.observe(batch.logits, keep)  # Eq. (4)
        return batch.logits

    @contextmanager
    def subnetwork(self) -> Iterator[None]:
        """Inside it, the model is a sub-network, drawn from the adapter's generator at each pass."""
        if self.depth is None:
            yield
            return
        with self.depth.sampled(self.drop, schedule=self.schedule, per=self.per, generator=self.generator) as self.draw:
            try:
                yield
            finally:
                self.draw = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def uncertainty(self, x: Tensor) -> Uncertainty:
        """Model and data uncertainty of every sample of a batch, without learning; nothing changes."""
        x = check_images(x, self.device)
        step, random = self.step, self.generator.get_state()
        self.step = Step(len(x))
        try:
            batch = self.predict(x.clone() if x.is_inference() else x)
            with self.subnetwork():
                z_sub = batch.rows()
        finally:
            self.step = step
            self.generator.set_state(random)
        z = batch.logits
        return Uncertainty(consistency(z, z_sub, self.smoothing, self.divergence), certainty(z, z_sub) < 0)


class ETAC(EATAC):
    """EATA-C without the Fisher regulariser: min_θ S_c(x)·(L_c(x) + α·C(x)·H(x; θ_sub)). Needs no source images."""

    without = ("source", "beta", "fisher")

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        if given := [name for name in self.without if name in arguments]:
            raise TypeError(f"ETAC has no Fisher regulariser, so it takes no {given[0]}=; EATAC does")
        super().__init__(model, beta=0.0, **arguments)
