"""EATA-C and ETA-C: consistency with sub-networks, min-max entropy (Tan et al., 2025)."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..core.step import Step, Uncertainty
from ..engine import recordable
from ..functional import certainty, consistency, entropy
from ..parts.branches import Names
from ..parts.fisher import Fisher, Images, refuse_beta, refuse_fisher
from ..parts.selection import Choice, Epsilon, Scaled, make_selector
from ..parts.sharing import exclusive
from ..parts.subnetwork import StochasticDepth, SubNetworks
from .eata import Selecting

__all__ = ["EATAC", "ETAC"]


class EATAC(Adapter):
    """min_θ S_c(x)·(L_c(x) + α·C(x)·H(x; θ_sub)) + β·R(θ, θ°) (Eq. 14).

    The full network predicts, without a gradient. A sub-network, sampled by stochastic depth, then predicts the
    selected samples and learns to agree (L_c). Where both predict the same class its entropy falls, elsewhere it rises.

    The defaults are the paper's for ResNet-50; `EATAC.preset("vit-base", net, …)` has those for other networks.

    Paper: https://arxiv.org/abs/2403.11491

    >>> import acclimate, torch
    >>> from acclimate.bench.own_networks import SmallResNet
    >>> model = acclimate.EATAC(SmallResNet(), source=torch.rand(64, 1, 32, 32))
    >>> model(torch.rand(8, 1, 32, 32)).shape
    torch.Size([8, 10])

    Args:
        model: a residual network that returns logits (see `acclimate.subnetwork`).
        source: unlabelled in-distribution images for the Fisher importance; used once, here.
        alpha: α, the weight of the min-max entropy; 0 leaves it out.
        beta: β, the weight of the pull towards the source; 0 is ETA-C and needs no `source`.
        drop: the sub-network's drop ratio.
        smoothing: the paper's p of Eq. (11); None uses `drop`.
        margin: E0 = margin · ln C (Eq. 3); None leaves the filter out.
        epsilon: ε (Eq. 5); `"auto"` is 0.07 at 1,000 classes and scales as 1/√C; None leaves the filter out.
        weight: the weight of the consistency loss; 0 leaves it out.
        fisher: how the importance is estimated (see `EATA`).
        divergence: `"forward"`, KL(ŷ_fuse ‖ ŷ_sub), deviates from the paper: `"reverse"`, KL(ŷ_sub ‖ ŷ_fuse), is
            Eq. (10) as written. The default is more accurate: 39.2 % with an ECE of 3.3 %, against 37.3 % and 3.2 %
            (ImageNet ResNet-50, fifteen corruptions, lifelong, one seed; see docs/results.md).
        schedule: how the drop ratio is spread over the blocks: `"linear"` or `"uniform"`.
        per: sample one sub-network per `"sample"`, or one per `"batch"`, which does not run dropped blocks.
        branches: names of residual branches, for an unknown network; or `blocks` (see `subnetwork`).
        blocks: names of modules that return x + f(x).
        select: another S_c(x) instead of `Reliable(margin, weighted=False) * NonRedundant(epsilon)` (see `EATA`).
        options: `lr`, `optimizer`, `parameters` (`"all"` is EATA-C†), `statistics`, `strategy`, `classes`, `seed`: see
            `Adapter`. BatchNorm normalises the selected samples with their own statistics (`strategy="replay-subset"`,
            the default). `"replay"` repeats those of the full batch without a gradient, which costs accuracy.
    """

    cost = (2, 1)
    set_once = ("seed", "margin", "epsilon", "fisher", "branches", "blocks")
    defaults: ClassVar[Defaults] = Defaults(lr=5e-3, strategy="replay-subset")
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 5e-3, "margin": 0.5, "epsilon": Scaled(0.07), "drop": 0.2, "alpha": 0.1, "beta": 50.0},
        "vit-base": {"lr": 0.1, "margin": 0.4, "epsilon": Scaled(0.05), "drop": 0.2, "alpha": 0.1, "beta": 50.0},
        "segformer-b5": {
            "lr": 5e-4,
            "margin": None,
            "epsilon": None,
            "drop": 0.6,
            "alpha": 0.0,
            "beta": 500.0,
            "statistics": "source",
        },
        # twice the paper's drop ratio is better calibrated on these (docs/results.md)
        "cifar-resnet": {"lr": 0.05, "margin": 0.5, "epsilon": Scaled(0.07), "drop": 0.4, "alpha": 0.1, "beta": 50.0},
        "cifar-vit": {"lr": 3e-3, "margin": 0.4, "epsilon": Scaled(0.05), "drop": 0.4, "alpha": 0.1, "beta": 50.0},
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        source: Images | None = None,
        alpha: float = 0.1,
        beta: float = 50.0,
        drop: float = 0.2,
        smoothing: float | None = None,
        margin: float | None = 0.5,
        epsilon: Epsilon | None = "auto",
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
        self.smoothing = smoothing
        self.margin, self.epsilon, self.fisher = margin, epsilon, fisher
        self.divergence, self.schedule, self.per = divergence, schedule, per
        self.branches, self.blocks = branches, blocks
        if self.strategy in ("masked", "sparse"):
            raise ValueError('a sub-network needs a pass of its own: strategy="replay-subset" or "replay"')
        epsilon = Scaled(0.07) if epsilon == "auto" else epsilon
        self.select = make_selector(select, margin, epsilon, weighted=False).shared_by(self.world)
        self.subnetworks()  # a wrong drop, schedule or per raises here, not at the first batch
        self.regulariser = Fisher.weighted(beta, self, source, fisher)

    @property
    def smoothing(self) -> float:
        """The paper's p of Eq. (11): the drop ratio, unless another number was set."""
        return self.drop if self._smoothing is None else self._smoothing

    @smoothing.setter
    def smoothing(self, smoothing: float | None) -> None:
        if smoothing is not None and not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing}: expected a number in [0, 1], or None for the drop ratio")
        self._smoothing = smoothing

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "beta":
            refuse_beta(self, value)
        super().__setattr__(name, value)

    @recordable
    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the full network, then let a sub-network learn from the selected samples."""
        batch = self.predict(x)
        keep = self.select(batch.logits) > 0  # Eq. (15)
        kept = batch.kept(keep, self.subnetworks())
        z, z_sub = kept.of(batch.logits), kept.logits
        l_c = consistency(z, z_sub, self.smoothing, self.divergence)  # Eq. (10), (11)
        c = certainty(z, z_sub)  # Eq. (13)
        self.update(
            when=kept.any,
            consistency=self.weight * kept.mean(l_c),
            entropy=self.alpha * kept.mean(c * entropy(z_sub)),  # Eq. (12)
            fisher=self.beta * self.regulariser(self.adapted),  # Eq. (14)
        )
        self.step.assess(Uncertainty(l_c.detach(), c < 0), kept.counts)
        self.select.observe(batch.logits, keep)  # Eq. (4)
        return batch.logits

    def subnetworks(self) -> SubNetworks | None:
        """Return the sub-networks to sample from; None if the drop ratio is 0."""
        return self.depth.subnetworks(self.drop, schedule=self.schedule, per=self.per) if self.drop else None

    @cached_property
    def depth(self) -> StochasticDepth:
        """The residual branches that sub-networks drop."""
        return StochasticDepth(self.model, self.branches, self.blocks)

    def watch(self, step: Step) -> None:
        """Warn if almost none or almost all samples have been kept for many batches."""
        if step.kept is not None:
            self.select.watch(step.kept)

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def opinions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the network and of a sampled sub-network, without learning.

        The sample comes from the adapter's generator, which advances.
        """
        x, share = self.admit(x)
        with self._aside(share), self.runner.tf32():
            batch = self.predict(x.clone() if x.is_inference() else x)
            return batch.logits, batch.rows(subnetworks=self.subnetworks())

    @exclusive
    def uncertainty(self, x: Tensor) -> Uncertainty:
        """Return model and data uncertainty of every sample of a batch, without learning; nothing changes."""
        random = self.generator.get_state()
        try:
            z, z_sub = self.opinions(x)
        finally:
            self.generator.set_state(random)
        return Uncertainty(consistency(z, z_sub, self.smoothing, self.divergence), certainty(z, z_sub) < 0)


class ConsistencyOptions(Selecting, total=False):
    """Options of EATA-C, except those of the Fisher regulariser."""

    alpha: float
    drop: float
    smoothing: float | None
    weight: float
    divergence: Literal["forward", "reverse"]
    schedule: Literal["linear", "uniform"]
    per: Literal["sample", "batch"]
    branches: Names | None
    blocks: Names | None


class ETAC(EATAC):
    """EATA-C without the Fisher regulariser: min_θ S_c(x)·(L_c(x) + α·C(x)·H(x; θ_sub)). Needs no source images.

    Paper: https://arxiv.org/abs/2403.11491

    >>> import acclimate, torch
    >>> from acclimate.bench.own_networks import SmallResNet
    >>> model = acclimate.ETAC(SmallResNet())
    >>> model(torch.rand(8, 1, 32, 32)).shape
    torch.Size([8, 10])

    Args:
        model: a residual network that returns logits.
        arguments: those of `EATAC`, without `source`, `beta` and `fisher`.
    """

    without = ("source", "beta", "fisher")
    presets: ClassVar[Presets] = {
        network: {name: value for name, value in preset.items() if name != "beta"}
        for network, preset in EATAC.presets.items()
    }

    def __init__(self, model: nn.Module, **arguments: Unpack[ConsistencyOptions]) -> None:
        refuse_fisher(type(self).__name__, arguments)
        super().__init__(model, beta=0.0, **arguments)
