"""CoTTA: a weight- and augmentation-averaged teacher, stochastic restoration (Wang et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..functional import confidence, symmetric_cross_entropy
from ..parts.augment import Augment, Views, check_can_augment, mean_over_views
from ..parts.multiscale import RATIOS, check_ratios, probabilities, resized, teach
from ..parts.randomness import on_device
from ..parts.teacher import Teacher

__all__ = ["ON_CIFAR10", "CoTTA"]

ON_CIFAR10 = {"threshold": 0.92, "restoration": 0.01, "loss": "teacher"}
"""Settings of CoTTA's authors for CIFAR-10."""


class CoTTA(Adapter):
    """min_θ mean_b −½ Σ p_t log p − ½ Σ p log p_t, with p_t of a teacher, the moving average of θ.

    Where the anchor, which is the source network, is not confident about a batch, the teacher averages its logits over
    augmented views. After each step a few random elements of θ are restored to the source. Returns the
    teacher's logits.

    A segmenter learns the teacher's labels, min_θ mean −log p(ŷ_t): those of one view where the anchor is confident in
    a pixel, elsewhere those of a mean over resized and mirrored views (see `multiscale`).

    Paper: https://arxiv.org/abs/2203.13591

    >>> import acclimate, torch
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    >>> model = acclimate.CoTTA(net, views=2, augment=lambda x, generator: x.flip(-1))
    >>> model(torch.rand(4, 3, 8, 8)).shape
    torch.Size([4, 3])

    Args:
        model: a classifier that takes images in [0, 1] (see `acclimate.Normalised`), or a segmenter.
        momentum: the teacher's momentum.
        restoration: the probability that an element of θ is restored to the source; 0.01 on CIFAR and for segmenters.
        threshold: p_th; views are used if the anchor's confidence, averaged over a batch or in a pixel, is below it.
        views: the number of views, for a classifier.
        loss: `"symmetric"`, or `"teacher"`, only the cross-entropy −Σ p_t log p, as on CIFAR; for a classifier.
        augment: makes a classifier's view: a function of (images, generator).
        ratios: relative sizes of a segmenter's views.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. All parameters adapt by default.
    """

    cost = (35, 1)
    answers_first = False
    set_once = ("seed", "momentum")
    defaults: ClassVar[Defaults] = Defaults(
        lr=0.01, optimizer=partial(SGD, momentum=0.9, nesterov=True), parameters="all"
    )
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 0.01},
        "vit-base": {"lr": 5e-3},
        "segformer-b5": {
            "optimizer": partial(Adam, lr=7.5e-6),
            "threshold": 0.69,
            "restoration": 0.01,
            "statistics": "source",
        },
        "cifar-resnet": {"optimizer": partial(Adam, lr=1e-3), **ON_CIFAR10},
        "cifar-vit": {"optimizer": partial(Adam, lr=1e-5), **ON_CIFAR10},
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        momentum: float = 0.999,
        restoration: float = 0.001,
        threshold: float = 0.1,
        views: int = 32,
        loss: Literal["symmetric", "teacher"] = "symmetric",
        augment: Augment | None = None,
        ratios: Sequence[float] = RATIOS,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if views < 1 or not 0 <= restoration <= 1:
            raise ValueError(f"CoTTA: views={views} must be at least 1, and restoration={restoration} in [0, 1]")
        self.momentum, self.restoration, self.threshold = momentum, restoration, threshold
        self.views, self.loss, self.ratios = views, loss, check_ratios(ratios, "CoTTA")
        self.unit_range = augment is None
        self.augment: Augment = Views() if augment is None else augment
        self.teacher = Teacher(self.names, momentum)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the teacher, and let the student learn from it."""
        check_can_augment(self.augment, x, type(self).__name__)
        source = self.state.source_parameters()
        z_t = self._teach(x, source)
        z = self.predict(x).rows()
        self.update(consistency=self._consistency(z, z_t, x))
        self.teacher.follow(self.runner.adapted, source)
        self._restore_some(source)
        return z_t

    def _consistency(self, z: Tensor, z_t: Tensor, x: Tensor) -> Tensor:
        if z.dim() > 2:
            return self.world.mean_of(F.cross_entropy(resized(z, x), z_t.argmax(1)), len(x))
        if self.loss == "symmetric":
            return self.world.mean(symmetric_cross_entropy(z, z_t))
        return self.world.mean_of(F.cross_entropy(z, z_t.softmax(1)), len(x))

    @torch.no_grad()
    def _teach(self, x: Tensor, anchor: dict[str, Tensor]) -> Tensor:
        """Return the teacher's logits, averaged over views where the anchor is not confident."""
        teacher = self._teacher()
        z_t = self.infer(x, teacher)
        if z_t.dim() > 2:
            confident = probabilities(partial(self.logits, parameters=anchor), x).amax(1)
            z_t = teach(partial(self.logits, parameters=teacher), z_t, confident, x, self.ratios, self.threshold)
        elif self.world.mean(confidence(self.logits(x, anchor))) >= self.threshold:
            return z_t
        else:
            predict, together = partial(self.captured, self._predict_views, reads=teacher.values()), not self.coupled
            views, share = self.views, self.step.share
            z_t = mean_over_views(predict, self.augment, x, views, self.generator, together=together, share=share)
        self.refuse_non_finite(x, z_t)
        return z_t

    @torch.no_grad()
    def _predict_views(self, views: Tensor) -> Tensor:
        return self.logits(views, self._teacher())

    def answer(self, x: Tensor) -> Tensor:
        """Return the teacher's logits of one view."""
        return self.infer(x, self._teacher())

    def _teacher(self) -> Mapping[str, Tensor]:
        return self.teacher.of(self.state.source_parameters())

    @torch.no_grad()
    def _restore_some(self, source: dict[str, Tensor]) -> None:
        """Set random elements of θ back to their source values."""
        sizes = [p.numel() for p in self.adapted]
        chance = torch.rand(sum(sizes), generator=on_device(self.generator, self.device), device=self.device)
        chosen = torch.split(chance < self.restoration, sizes)
        weights = [some.view_as(p).to(p.dtype) for some, p in zip(chosen, self.adapted, strict=True)]
        torch._foreach_lerp_([p.detach() for p in self.adapted], [source[name] for name in self.names], weights)
