"""MEMO: one image, many views, one step, and back (Zhang et al., 2022)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import Unpack

from ..checks import refuse_non_finite
from ..core.adapter import Adapter, Options
from ..functional import marginal_entropy
from ..parts.augment import Augment, AugMix, views_of_each
from ..parts.parameters import Parameters

__all__ = ["MEMO"]


class MEMO(Adapter):
    """min_θ H(mean_k p(x_k)) over K augmented views of a single image x, then predict x; each image starts anew.

    Args:
        model: a classifier that takes images in [0, 1] (see `acclimate.Normalised`).
        views: K.
        prior: N of BatchNorm's statistics, N/(N+1) of the source's and 1/(N+1) of the current images'.
        augment: makes the views, each of an image of its own: a callable of (images, generator).
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. All parameters adapt unless
            others are named.
    """

    by_size = True
    cost = (65, 64)
    default_optimizer: ClassVar[Any] = SGD
    default_parameters: ClassVar[Parameters | None] = "all"
    task = "classification"
    episodic = True
    without = ("statistics", "strategy")

    def __init__(
        self,
        model: nn.Module,
        *,
        views: int = 64,
        prior: float = 16,
        augment: Augment | None = None,
        **options: Unpack[Options],
    ) -> None:
        if given := options.keys() & {*self.without}:
            raise TypeError(f"MEMO takes no {given.pop()}=; prior= says how BatchNorm's statistics are blended")
        options["statistics"] = "source"
        super().__init__(model, **options)
        if views < 1 or prior < 0:
            raise ValueError(f"MEMO: views={views} must be at least 1, and prior={prior} not negative")
        self.views, self.prior = views, prior
        self.unit_range = augment is None
        self.augment: Augment = AugMix() if augment is None else augment

    def normalising(self, size: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Blended statistics."""
        return self.norm.blended(1 / (self.prior + 1))

    def adapt(self, x: Tensor) -> Tensor:
        """Each image by itself."""
        refuse_non_finite(x, unit_range=self.unit_range)
        views = views_of_each(self.augment, x, self.views, self.generator)
        found = [self.piece(self._one, image, some) for image, some in zip(x[:, None], views, strict=True)]
        losses, logits = (torch.cat(of) for of in zip(*found, strict=True))
        refuse_non_finite(x, logits)
        self.step.losses = {"entropy": losses.mean()}
        return logits

    def _one(self, image: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        with self.episode():
            loss = marginal_entropy(self.traced(views))
            self.update(entropy=loss)
            return loss.detach()[None], self.infer(image)
