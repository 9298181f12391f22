"""DAT: tune the few tensors of a segmenter that the shift affects most (Ni et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from typing_extensions import Unpack

from ..core.adapter import Adapter
from ..core.options import Defaults, Options, Presets
from ..parts.multiscale import RATIOS, check_ratios, probabilities, resized, teach
from ..parts.optimizers import fresh
from ..parts.sharing import exclusive
from ..parts.teacher import Teacher

__all__ = ["DAT"]

_ANCHOR_RATIOS = (1.0, 1.25, 1.5)  # relative sizes over which the anchor's confidence u is averaged


class DAT(Adapter):
    """min_θ' mean over pixels 1[u > 0.99]·(−log p(ŷ_t)), for a few chosen tensors θ' of θ.

    Labels ŷ_t come from a teacher, as in CoTTA; u is the mean confidence of the anchor, the source network, over three
    sizes. With each of the first images of a domain, the tensors with the largest Σ|gradient| join θ', for the loss on
    uncertain pixels (u < 0.85) and for the loss on certain ones (u > 0.99). Each image has a new Adam. Its
    learning rate is halved with each round. Returns the teacher's logits.

    Paper: https://arxiv.org/abs/2309.13604

    >>> import acclimate, torch
    >>> model = acclimate.DAT(torch.nn.Conv2d(3, 4, 3, padding=1), ratios=(0.5, 1.0))
    >>> model(torch.rand(1, 3, 8, 8)).shape
    torch.Size([1, 4, 8, 8])

    Args:
        model: a segmenter.
        momentum: the teacher's momentum.
        threshold: where the anchor's confidence in a pixel is above this, one view is enough.
        uncertain: a pixel with u below this counts as shifted.
        certain: a pixel with u above this is learned from.
        share: the share of the tensors that joins with each image, for each of the two losses; at least one tensor.
        search: tensors join during this many images of a domain (`new_domain` starts one).
        ratios: relative sizes of the teacher's views.
        options: what every adapter takes, such as `lr`: see `Adapter`. All parameters may adapt by default.
    """

    chosen: Tensor
    seen: Tensor
    round: Tensor

    cost = (18, 2)
    answers_first = False
    set_once = ("seed", "momentum")
    task = "segmentation"
    defaults: ClassVar[Defaults] = Defaults(lr=2.5e-4, optimizer=partial(Adam, betas=(0.9, 0.999)), parameters="all")
    presets: ClassVar[Presets] = {"segformer-b5": {"statistics": "source"}}

    def __init__(
        self,
        model: nn.Module,
        *,
        momentum: float = 0.999,
        threshold: float = 0.69,
        uncertain: float = 0.85,
        certain: float = 0.99,
        share: float = 0.001,
        search: int = 100,
        ratios: Sequence[float] = RATIOS,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if not 0 < share <= 1:
            raise ValueError(f"DAT: share={share}; expected a fraction of the network's tensors, such as 0.001")
        self.momentum, self.threshold, self.uncertain, self.certain = momentum, threshold, uncertain, certain
        self.share, self.search, self.ratios = share, search, check_ratios(ratios, "DAT")
        self.teacher = Teacher(self.names, momentum)
        self.register_buffer("chosen", torch.zeros(len(self.adapted), dtype=torch.bool, device=self.device))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=self.device))
        self.register_buffer("round", torch.ones((), dtype=torch.int64, device=self.device))

    @exclusive
    def new_domain(self, *, round: int = 1) -> None:  # noqa: A002
        """Choose tensors again; the learning rate is halved with each round."""
        self.state.source()  # copied before anything changes
        self.chosen.zero_()
        self.seen.zero_()
        self.round.fill_(round)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the teacher, and let a few tensors of the student learn from it."""
        source = self.state.source_parameters()
        z_t, u = self._teach(x, source)
        with self.runner.repeatable():  # two losses share the student's graph
            losses = F.cross_entropy(resized(self.predict(x).rows(), x), z_t.argmax(1), reduction="none")
            self._learn(self.world.mean((u < self.uncertain) * losses), self.world.mean((u > self.certain) * losses))
        self.teacher.follow(self.runner.adapted, source)
        self.seen += self.step.total
        return z_t

    def _learn(self, uncertain: Tensor, certain: Tensor) -> None:
        searching = int(self.seen) < self.search
        if searching:
            self._choose(self.gradients(uncertain, retain=True))
            self.step.count(backwards=self.step.size, in_graph=self.step.size)
        gradients = self.gradients(certain)
        if searching:
            self._choose(gradients)
        assert self.optimizer is not None  # noqa: S101
        chosen = zip(gradients, self.chosen.tolist(), strict=True)
        with fresh(self.optimizer, rate=0.5 ** (int(self.round) - 1)):
            self.update(
                gradients=[g if own else None for g, own in chosen], sound=self.sound(gradients), consistency=certain
            )

    @torch.no_grad()
    def _teach(self, x: Tensor, source: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the teacher's logits, and the anchor's mean confidence u."""
        teacher, anchor = self._teacher(), partial(self.logits, parameters=source)
        logits = self.infer(x, teacher)
        confident = [probabilities(anchor, x, ratio).amax(1) for ratio in _ANCHOR_RATIOS]
        views = partial(self.logits, parameters=teacher)
        logits = teach(views, logits, confident[0], x, self.ratios, self.threshold)
        self.refuse_non_finite(x, logits)
        return logits, torch.stack(confident).mean(0)

    def answer(self, x: Tensor) -> Tensor:
        """Return the teacher's logits of one view."""
        return self.infer(x, self._teacher())

    def _teacher(self) -> Mapping[str, Tensor]:
        return self.teacher.of(self.state.source_parameters())

    @torch.no_grad()
    def _choose(self, gradients: Sequence[Tensor]) -> None:
        """Add the tensors with the largest Σ|gradient| to θ'."""
        size = torch.stack([g.abs().sum() for g in gradients]).nan_to_num(0, 0, 0)
        largest = size.topk(max(1, int(self.share * len(size)))).indices
        self.chosen[largest] |= size[largest] > 0
