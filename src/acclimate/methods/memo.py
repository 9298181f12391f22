"""MEMO: one step on many views of one image, then a reset (Zhang et al., 2022)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..functional import marginal_entropy
from ..parts.augment import Augment, AugMix, check_can_augment, views_of_each
from ..parts.batchnorm import Mode

__all__ = ["MEMO"]


class MEMO(Adapter):
    """min_θ H(mean_k p(x_k)) over K augmented views of one image x, then predict x; each image starts from the source.

    Paper: https://arxiv.org/abs/2110.09506

    >>> import acclimate, torch
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    >>> model = acclimate.MEMO(net, views=2, augment=lambda x, generator: x.flip(-1))
    >>> model(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 3])

    Args:
        model: a classifier that takes images in [0, 1] (see `acclimate.Normalised`).
        views: K, the number of views per image.
        prior: N of BatchNorm's statistics: N/(N+1) of the source's and 1/(N+1) of the current images'.
        augment: makes one view per image: a function of (images, generator).
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`. All parameters adapt by default.
    """

    cost = (65, 64)
    answers_first = False
    defaults: ClassVar[Defaults] = Defaults(optimizer=SGD, parameters="all")
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"optimizer": partial(AdamW, lr=1e-5, weight_decay=0.01)},
        "cifar-resnet": {"lr": 2.5e-4, "views": 32},  # its authors' 5e-3 is for GroupNorm
        "cifar-vit": {"optimizer": partial(AdamW, lr=1e-5, weight_decay=0.01), "views": 32},
    }
    task = "classification"
    episodic = True
    without = ("statistics", "detach_statistics", "strategy")

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
            raise TypeError(f"MEMO takes no {given.pop()}=; prior= sets how BatchNorm's statistics are blended")
        options["statistics"] = "source"
        super().__init__(model, **options)
        if views < 1 or prior < 0:
            raise ValueError(f"MEMO: views={views} must be at least 1, and prior={prior} not negative")
        self.views, self.prior = views, prior
        self.unit_range = augment is None
        self.augment: Augment = AugMix() if augment is None else augment

    def mode(self, size: int) -> Mode:  # noqa: ARG002
        """Blend the statistics."""
        return 1 / (self.prior + 1)

    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to each image separately."""
        check_can_augment(self.augment, x, type(self).__name__)
        self.refuse_non_finite(x, unit_range=self.unit_range)
        views = views_of_each(self.augment, x, self.views, self.generator, self.step.share)
        with self.world.together():
            pairs = zip(x.unsqueeze(1), views, strict=True)
            results = [self.captured(self._one, image, own) for image, own in pairs]
            results = results or [(x.new_zeros(0), self._each(x))]  # a rank without images
        losses, logits = (torch.cat(each) for each in zip(*results, strict=True))
        self.refuse_non_finite(x, torch.cat([losses.unsqueeze(1), logits], 1))
        self.step.losses = {"entropy": self.world.mean(losses)}
        (self.step.dropped,) = self.world.counts(self.step.dropped)
        return logits

    def answer(self, x: Tensor) -> Tensor:
        """Return the logits of each image, normalised separately."""
        with self.world.together():
            return self._each(x)

    def _each(self, x: Tensor) -> Tensor:
        with self.apart():
            return torch.cat([self.infer(image) for image in torch.split(x, 1)])

    def _one(self, image: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        with self.episode():
            loss = marginal_entropy(self.traced(views))
            self.update(entropy=loss)
            return loss.detach()[None], self.infer(image)
