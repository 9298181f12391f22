"""EATA and ETA: learn from reliable, non-redundant samples, and do not forget (Niu et al., 2022)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Options, Presets
from ..core.step import Step
from ..engine import recordable
from ..functional import entropy
from ..parts.fisher import Fisher, Images, refuse_beta, refuse_fisher
from ..parts.selection import Choice, Epsilon, Scaled, make_selector

__all__ = ["EATA", "ETA", "Selecting"]


class Selecting(Options, total=False):
    """Options of methods that select as EATA does."""

    margin: float | None
    epsilon: Epsilon | None
    select: Choice


class EATA(Adapter):
    """min_θ S(x)·H(x) + β·R(θ, θ°) (Eq. 8).

    Paper: https://arxiv.org/abs/2204.02610

    >>> import acclimate, torch
    >>> net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> model = acclimate.EATA(net, source=torch.rand(64, 4))
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Args:
        model: any module that returns logits.
        source: unlabelled in-distribution images, a few hundred to 2,000, for the Fisher importance; used once, here.
            `collect_in_distribution` finds some in a stream.
        margin: E0 = margin · ln C; a sample is reliable where its entropy is below E0 (Eq. 3). None: all are.
        epsilon: a sample is redundant where |cos| to the mean of learned predictions reaches this (Eq. 5). `"auto"` is
            the paper's 0.05 at 1,000 classes and scales as 1/√C. None: no sample is redundant.
        beta: β, the weight of the pull towards the source; 0 is ETA and needs no `source`.
        fisher: `"batch"`, as in the released program, or `"sample"`, Eq. (9) as written (β must then be smaller).
        select: another S(x) instead of `Reliable(margin) * NonRedundant(epsilon)`: a selector, `"reliable"` for the
            first factor alone, or `"everything"`.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    selective = subset = True
    set_once = ("seed", "margin", "epsilon", "fisher")
    # For ten classes ε is 0.4. The rate is higher and β lower, so that a step's pull towards the source is the paper's.
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4, "margin": 0.4, "epsilon": Scaled(0.05), "beta": 2000.0},
        "vit-base": {"lr": 1e-3, "margin": 0.4, "epsilon": Scaled(0.05), "beta": 2000.0},
        # no redundancy filter: at 19 classes 1/√C is 0.23
        "segformer-b5": {"lr": 7.5e-5, "statistics": "source", "margin": 0.1, "epsilon": None, "beta": 500.0},
        "cifar-resnet": {"lr": 5e-3, "margin": 0.4, "epsilon": 0.4, "beta": 100.0},
        "cifar-vit": {"lr": 2.5e-3, "margin": 0.4, "epsilon": 0.4, "beta": 800.0},
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        source: Images | None = None,
        margin: float | None = 0.4,
        epsilon: Epsilon | None = "auto",
        beta: float = 2000.0,
        fisher: Literal["batch", "sample"] = "batch",
        select: Choice = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        self.margin, self.epsilon, self.beta, self.fisher = margin, epsilon, beta, fisher
        self.select = make_selector(select, margin, epsilon).shared_by(self.world)
        self.regulariser = Fisher.weighted(beta, self, source, fisher)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "beta":
            refuse_beta(self, value)
        super().__setattr__(name, value)

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

    def watch(self, step: Step) -> None:
        """Warn if almost none or almost all samples have been kept for many batches."""
        if step.kept is not None:
            self.select.watch(step.kept)


class ETA(EATA):
    """EATA without the Fisher regulariser: min_θ S(x)·H(x) (Eq. 2). Needs no source images.

    Paper: https://arxiv.org/abs/2204.02610

    >>> import acclimate, torch
    >>> model = acclimate.ETA(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)))
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Args:
        model: any module that returns logits.
        arguments: `margin`, `epsilon` and `select`, as for `EATA`, and what every adapter takes.
    """

    without = ("source", "beta", "fisher")
    presets: ClassVar[Presets] = {
        network: {name: value for name, value in preset.items() if name != "beta"}
        for network, preset in EATA.presets.items()
    }

    def __init__(self, model: nn.Module, **arguments: Unpack[Selecting]) -> None:
        refuse_fisher(type(self).__name__, arguments)
        super().__init__(model, beta=0.0, **arguments)
