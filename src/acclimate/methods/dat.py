"""DAT: a segmenter whose few tensors that feel the shift most are tuned (Ni et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from typing_extensions import Unpack

from ..core.adapter import Adapter, Options
from ..parts.multiscale import RATIOS, checked, probabilities, resized, teach
from ..parts.parameters import Parameters
from ..parts.teacher import Teacher

__all__ = ["DAT"]

_UNMIRRORED = (1.0, 1.25, 1.5)  # the anchor's views that its certainty u is a mean of


class DAT(Adapter):
    """min_θ' mean over pixels 1[u > 0.99]·(−log p(ŷ_t)), for a chosen few θ' of the tensors of θ.

    Labels ŷ_t are a teacher's, as CoTTA has them; u is the mean confidence of the anchor, the source network, over
    three sizes. With each of the first images of a domain, those tensors join θ' that have the largest Σ|gradient| of
    the loss on uncertain pixels (u < 0.85), and of that on certain ones (u > 0.99). Each image has an Adam of its own,
    whose learning rate halves with each round. Returns the teacher's logits.

    Args:
        model: a segmenter.
        momentum: of the teacher.
        threshold: of the anchor's confidence in a pixel: above it one view is enough.
        uncertain: u below which a pixel counts as shifted.
        certain: u above which a pixel is learned from.
        share: of the tensors that may join with an image, twice; at least one.
        search: with how many images of a domain (`new_domain` says where one begins).
        ratios: sizes of the teacher's views.
        options: what every adapter takes, such as `lr`: see `Adapter`. All parameters may adapt, unless others are
            named.
    """

    chosen: Tensor
    seen: Tensor
    round: Tensor

    cost = (18, 2)
    task = "segmentation"
    default_lr: ClassVar[float] = 2.5e-4
    default_optimizer: ClassVar[Any] = partial(Adam, betas=(0.9, 0.999))
    default_parameters: ClassVar[Parameters | None] = "all"

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
        self.share, self.search, self.ratios = share, search, checked(ratios, "DAT")
        self.teacher = Teacher(self.names, momentum)
        self.register_buffer("chosen", torch.zeros(len(self.adapted), dtype=torch.bool, device=self.device))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=self.device))
        self.register_buffer("round", torch.ones((), dtype=torch.int64, device=self.device))

    def new_domain(self, *, round: int = 1) -> None:  # noqa: A002
        """Tensors are chosen anew; the learning rate is halved with each round."""
        self.remember_source()  # this is not part of it
        self.chosen.zero_()
        self.seen.zero_()
        self.round.fill_(round)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict with the teacher, and let a few tensors of the student learn from it."""
        source = self.source_parameters()
        z_t, u = self._teach(x, source)
        with self.runner.repeatable():  # two losses share the student's graph
            self._learn(x, z_t.argmax(1), u)
        self.teacher.follow(dict(zip(self.names, self.adapted, strict=True)), source)
        self.seen += len(x)
        return z_t

    def _learn(self, x: Tensor, labels: Tensor, u: Tensor) -> None:
        losses = F.cross_entropy(resized(self.predict(x).rows(), x), labels, reduction="none")
        certain = ((u > self.certain) * losses).mean()
        searching = int(self.seen) < self.search
        if searching:
            self._choose(self.gradients(((u < self.uncertain) * losses).mean(), again=True))
            self.step.backwards, self.step.in_graph = (n + len(x) for n in (self.step.backwards, self.step.in_graph))
        gradients = self.gradients(certain)
        if searching:
            self._choose(gradients)
        self._tune(gradients, certain)

    @torch.no_grad()
    def _teach(self, x: Tensor, source: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The teacher's logits, and the anchor's mean confidence u."""
        teacher, anchor = self.teacher.of(source), partial(self.logits, parameters=source)
        logits = self.infer(x, teacher)
        sure = [probabilities(anchor, x, ratio).amax(1) for ratio in _UNMIRRORED]
        views = partial(self.logits, parameters=teacher)
        return teach(views, logits, sure[0], x, self.ratios, self.threshold), torch.stack(sure).mean(0)

    @torch.no_grad()
    def _choose(self, gradients: Sequence[Tensor]) -> None:
        """The tensors that feel a loss most join."""
        felt = torch.stack([g.abs().sum() for g in gradients])
        most = felt.topk(max(1, int(self.share * len(felt)))).indices
        self.chosen[most] |= felt[most] > 0

    def _tune(self, gradients: Sequence[Tensor], loss: Tensor) -> None:
        """One step of a new optimizer on the chosen tensors."""
        if self.optimizer is None:
            raise TypeError("DAT was built without parameters to adapt")
        groups, halved = self.optimizer.param_groups, 0.5 ** (int(self.round) - 1)
        rates = [group["lr"] for group in groups]
        self.optimizer.state.clear()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * halved
        chosen = zip(gradients, self.chosen.tolist(), strict=True)
        self.descend([g if own else None for g, own in chosen], consistency=loss)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
