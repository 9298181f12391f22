"""CoTTA: a weight- and augmentation-averaged teacher, and stochastic restoration (Wang et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import Unpack

from ..checks import refuse_non_finite
from ..core.adapter import Adapter, Options
from ..functional import confidence, symmetric_cross_entropy
from ..parts.augment import Augment, Views, several
from ..parts.multiscale import RATIOS, checked, probabilities, resized, teach
from ..parts.parameters import Parameters
from ..parts.randomness import on_device
from ..parts.teacher import Teacher

__all__ = ["CoTTA"]

_MOST = 256 * 3 * 224 * 224  # numbers in the views that are made, and where BatchNorm allows it run, at once


class CoTTA(Adapter):
    """min_θ mean_b −½ Σ p_t log p − ½ Σ p log p_t, where p_t is a teacher's, the moving average of θ.

    Where the anchor, which is the source network, is unsure of a batch, the teacher averages its logits over augmented
    views. After each step a few elements of θ, drawn at random, go back to the source. Returns the teacher's logits.

    A segmenter learns the teacher's labels, min_θ mean −log p(ŷ_t): those of one view where the anchor is sure of a
    pixel, those of a mean over views of several sizes, each also mirrored, where it is not (see `pixels`).

    Args:
        model: a classifier that takes images in [0, 1] (see `acclimate.Normalised`), or a segmenter.
        momentum: of the teacher.
        restoration: the probability that an element of θ goes back to the source; 0.01 on CIFAR and for segmenters.
        threshold: p_th: there are views where the anchor's confidence is below it, a batch's mean or a pixel's.
        views: how many, for a classifier.
        loss: `"symmetric"`, or `"teacher"`, the cross-entropy −Σ p_t log p alone, as on CIFAR; of a classifier.
        augment: makes a classifier's view: a callable of (images, generator).
        ratios: sizes of a segmenter's views.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. All
            parameters adapt unless others are named.
    """

    cost = (35, 1)
    default_lr: ClassVar[float] = 0.01
    default_optimizer: ClassVar[Any] = partial(SGD, momentum=0.9, nesterov=True)
    default_parameters: ClassVar[Parameters | None] = "all"

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
        if loss not in ("symmetric", "teacher"):
            raise ValueError(f'CoTTA: loss={loss!r}; expected "symmetric" or "teacher"')
        if views < 1 or not 0 <= restoration <= 1:
            raise ValueError(f"CoTTA: views={views} must be at least 1, and restoration={restoration} in [0, 1]")
        self.momentum, self.restoration, self.threshold = momentum, restoration, threshold
        self.views, self.loss, self.ratios = views, loss, checked(ratios, "CoTTA")
        self.unit_range = augment is None
        self.augment: Augment = Views() if augment is None else augment
        self.teacher = Teacher(self.names, momentum)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the teacher, and let the student learn from it."""
        source = self.source_parameters()
        z_t = self._teach(x, source)
        z = self.predict(x).rows()
        if z.dim() > 2:
            loss = F.cross_entropy(resized(z, x), z_t.argmax(1))
        elif self.loss == "symmetric":
            loss = symmetric_cross_entropy(z, z_t).mean()
        else:
            loss = F.cross_entropy(z, z_t.softmax(1))
        self.update(consistency=loss)
        self.teacher.follow(dict(zip(self.names, self.adapted, strict=True)), source)
        self._restore_some(source)
        return z_t

    @torch.no_grad()
    def _teach(self, x: Tensor, source: dict[str, Tensor]) -> Tensor:
        """The teacher's logits, averaged over views where the anchor is unsure."""
        teacher = self.teacher.of(source)
        logits = self.infer(x, teacher)
        if logits.dim() > 2:
            anchor = probabilities(partial(self.logits, parameters=source), x).amax(1)
            return teach(partial(self.logits, parameters=teacher), logits, anchor, x, self.ratios, self.threshold)
        if confidence(self.logits(x, source)).mean() >= self.threshold:
            return logits
        total = torch.zeros_like(logits)
        at_once = max(1, _MOST // x.numel())
        for start in range(0, self.views, at_once):
            count = min(at_once, self.views - start)
            views = several(self.augment, x, count, self.generator)
            together = len(x) if self.coupled else len(views)  # where BatchNorm ties a view's images to each other
            for some in torch.split(views, together):
                seen = self.piece(self._seen, some, reads=teacher.values())
                total += seen.view(-1, *logits.shape).sum(0)
        refuse_non_finite(x, total)
        return total / self.views

    @torch.no_grad()
    def _seen(self, views: Tensor) -> Tensor:
        """The teacher's logits of views."""
        return self.logits(views, self.teacher.of(self.source_parameters()))

    @torch.no_grad()
    def _restore_some(self, source: dict[str, Tensor]) -> None:
        sizes = [p.numel() for p in self.adapted]
        chance = torch.rand(sum(sizes), generator=on_device(self.generator, self.device), device=self.device)
        chosen = torch.split(chance < self.restoration, sizes)
        weights = [some.view_as(p).to(p.dtype) for some, p in zip(chosen, self.adapted, strict=True)]
        torch._foreach_lerp_([p.detach() for p in self.adapted], [source[name] for name in self.names], weights)
