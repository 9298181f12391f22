"""ROID: weighting by certainty and diversity, weight ensembling (Marsden et al., 2024)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..functional import entropy, soft_likelihood_ratio, symmetric_cross_entropy
from ..parts.augment import Augment, Views, check_can_augment, several

__all__ = ["ROID"]


class ROID(Adapter):
    """min_θ 1/B Σ_keep w·(SLR(z) + SCE(z, z')), z' the logits of an augmented view; then θ ← μ·θ + (1 − μ)·θ°.

    Diverse predictions are kept, d = minmax(1 − cos(m, p)) ≥ mean(d), with weight w = exp(d·minmax(−H)/T); m is the
    moving average of all predictions.

    Paper: https://arxiv.org/abs/2306.00650

    >>> import acclimate, torch
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 3))
    >>> model = acclimate.ROID(net, augment=lambda x, generator: x.flip(-1))
    >>> model(torch.rand(8, 3, 8, 8)).shape
    torch.Size([8, 3])

    Args:
        model: a classifier that takes images in [0, 1] (see `acclimate.Normalised`).
        temperature: T.
        momentum: μ, the share of the adapted parameters after a step; the rest is the source's.
        prior: the returned logits are corrected by the batch's smoothed class frequencies π': `"log"` adds log π'; the
            `"released"` program multiplies by π', which leaves hardly any confidence; None returns them uncorrected.
        augment: makes the view: a function of (images, generator).
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    cost = (2, 2)
    counted = "graph"
    defaults: ClassVar[Defaults] = Defaults(optimizer=partial(SGD, momentum=0.9, nesterov=True))
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"lr": 2.5e-4},
        "cifar-resnet": {"optimizer": partial(Adam, lr=1e-3)},
        "cifar-vit": {"optimizer": partial(Adam, lr=1e-3)},
    }
    task = "classification"
    mean: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1 / 3,
        momentum: float = 0.99,
        prior: Literal["log", "released"] | None = "log",
        augment: Augment | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if not 0 <= momentum <= 1 or not temperature > 0:
            raise ValueError(f"ROID: momentum={momentum} must lie in [0, 1] and temperature={temperature} above 0")
        self.temperature, self.momentum, self.prior = temperature, momentum, prior
        self.unit_range = augment is None
        self.augment: Augment = Views(padding="reflection", blur=False, noise=0.0) if augment is None else augment
        self.register_buffer("mean", None)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then learn from the diverse samples and a view of them."""
        check_can_augment(self.augment, x, type(self).__name__)
        batch = self.predict(x)
        p = batch.logits.softmax(1)
        mean = p.new_full(p.shape[1:], 1 / p.shape[1]) if self.mean is None else self.mean
        d = self._minmax(1 - F.cosine_similarity(mean[None], p))
        keep = d >= self.world.mean(d)
        w = (d * self._minmax(-entropy(batch.logits)) / self.temperature).exp()[keep]
        z = batch.rows(keep)
        view = several(self.augment, x[keep], 1, self.generator, self.world.share(len(z)))
        z_view = self.traced(view)
        self.refuse_non_finite(view, z_view)
        self.update(
            likelihood_ratio=self.world.sum((w * soft_likelihood_ratio(z)).sum()) / self.step.total,
            consistency=self.world.sum((w * symmetric_cross_entropy(z, z_view)).sum()) / self.step.total,
        )
        self._ensemble()
        self.mean = 0.9 * mean + 0.1 * self.world.mean(p, 0)
        return self.correct(batch.logits)

    @torch.no_grad()
    def _ensemble(self) -> None:
        """θ ← μ·θ + (1 − μ)·θ°."""
        adapted, source = [p.detach() for p in self.adapted], [*self.state.source_parameters().values()]
        torch._foreach_mul_(adapted, self.momentum)
        torch._foreach_add_(adapted, source, alpha=1 - self.momentum)

    def _minmax(self, values: Tensor) -> Tensor:
        """Scale to [0, 1]; zero where all are equal, as in a batch of one."""
        low, high = self.world.extremes(values)
        return torch.where(high > low, (values - low) / (high - low), 0.0)

    def correct(self, logits: Tensor) -> Tensor:
        """Correct the logits by how often each class is predicted."""
        if self.prior is None:
            return logits
        size, classes = self.step.overall(len(logits)), logits.shape[1]
        frequency = self.world.mean(logits.softmax(1), 0)  # π
        smooth = max(1 / size, 1 / classes) / frequency.max()
        frequency = (frequency + smooth) / (1 + smooth * classes)  # π'
        return logits + frequency.log() if self.prior == "log" else logits * frequency
