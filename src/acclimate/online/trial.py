"""A trial: which of two networks does better on held-out images in the style of the stream?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..checks import DivergenceError
from ..core.adapter import Adapter
from ..parts.multiscale import resized
from ..parts.world import Share
from .probe import Probe, parts
from .style import Style, class_weights

__all__ = ["Trial"]

_FEWEST = 16  # images that show a style
_IMAGES = 64  # of a round
_ROUNDS = 4
_ERRORS = 2  # standard errors
_DOUBT = 1e-6  # harm
_UNEVEN = 2.0  # mean square of the weights: half of the images count
_LEAST = 0.05  # chance of an image, against the mean


class _Round(NamedTuple):
    drawn: Tensor
    images: Tensor
    answers: Tensor
    hits: Tensor  # of the source network
    weights: Tensor  # with mean one


class Trial:
    """Adapted and source network on held-out images in the style of a batch, which several ranks may share.

    Right is what the source network has predicted for the images as they were. Images count as their class is common
    in the batch; where few of them count, others are drawn that do.

    Args:
        probe: the held-out images.
        adapter: the adapter.
        style: the style of the batch.
        stream: the source's probabilities for the images of the batch.
        random: draws images and noise.
        size: the number of images in the batch of all ranks.
    """

    def __init__(
        self, probe: Probe, adapter: Adapter, style: Style, stream: Tensor, random: Generator, size: int = _IMAGES
    ) -> None:
        self.probe, self.adapter, self.style, self.stream, self.random = probe, adapter, style, stream, random
        self.size = size
        self.passes = 0
        """Samples that have run through the network."""
        self.chances = self.left = torch.ones(len(probe.images))  # of each held-out image; drawn ones are not left
        self.rounds = [self._draw()]
        if float(self.rounds[0].weights.square().mean()) > _UNEVEN:
            self.chances = self.left = self._by_class(self.rounds.pop())

    @classmethod
    def on(
        cls, probe: Probe | None, adapter: Adapter, x: Tensor, share: Share, stream: Tensor, random: Generator
    ) -> Trial | None:
        """Return a trial in the style of a batch, or None where there can be none.

        With batch statistics there cannot: an even mixture of noise and blur is easier to normalise than a real stream.
        """
        if probe is None or adapter.coupled or adapter.episodic or not adapter.adapted or share.total < _FEWEST:
            return None
        world = adapter.world
        if not bool(world.all(torch.tensor(probe.transfer.takes(x), device=x.device))):
            return None
        style = probe.transfer.style(x, world)
        return cls(probe, adapter, style, stream, random, share.total) if style.finite else None

    def compare(self) -> tuple[float, float]:
        """Return what the adapted network gains over the source, and how much it harms at least.

        Images are added as long as it seems to be worse. Where a method answers with views, or after its update, its
        answers on the stream may be worse than in a trial: without a gain, that counts as a little harm.
        """
        found: list[Tensor] = []
        while len(found) < _ROUNDS:
            if len(found) == len(self.rounds):
                self.rounds.append(self._draw())
            found.append(self._gains(self.rounds[len(found)]))
            gains = torch.cat(found)
            gain, spread = torch.stack([gains.mean(), gains.std()]).tolist()
            if gain >= 0:
                break
        least = 0.0 if gain > 0 or self.adapter.answers_first else _DOUBT
        different = len(torch.unique(torch.cat([each.drawn for each in self.rounds])))
        return gain, max(least, -gain - _ERRORS * spread / different**0.5)

    def gain(self) -> float:
        """Return what the adapted network gains as it is now, on the same images."""
        return float(torch.cat([self._gains(each) for each in self.rounds]).mean())

    def _draw(self) -> _Round:
        """Draw held-out images, none twice as long as there are enough."""
        probe, adapter = self.probe, self.adapter
        if int((self.left > 0).sum()) < _IMAGES:
            self.left = self.chances
        repeat = int((self.left > 0).sum()) < _IMAGES
        drawn = self.left.multinomial(_IMAGES, replacement=repeat, generator=self.random)
        self.left = self.left.index_fill(0, drawn, 0.0)
        there = drawn.to(probe.images.device)
        images = probe.transfer(probe.images[there], self.style, self.random)
        answers, logits = probe.answers[there], self._predicted(adapter.predict_source, images, _IMAGES)
        self.passes += _IMAGES
        weights = torch.ones(_IMAGES, device=images.device)
        if logits.dim() == 2:
            common = class_weights(self.stream, logits.softmax(1)) / self.chances[drawn].to(images.device)
            weights = torch.where(common.sum() > 0, _IMAGES * common / common.sum(), weights)
        return _Round(drawn, images, answers, _hits(logits, answers), weights)

    def _by_class(self, seen: _Round) -> Tensor:
        """Return chances in proportion to how much images of the same class have counted; unseen ones are average."""
        answers, classes = seen.answers.cpu(), int(self.probe.answers.max()) + 1
        totals = torch.zeros(classes).index_add_(0, answers, seen.weights.cpu().float())
        counts = torch.zeros(classes).index_add_(0, answers, torch.ones(len(answers)))
        return (totals / counts).nan_to_num(1.0)[self.probe.answers.cpu()].clamp(min=_LEAST)

    def _gains(self, each: _Round) -> Tensor:
        """Return for each image by how much the adapted network is better."""
        adapter = self.adapter
        self.passes += _IMAGES * (1 if adapter.answers_first else adapter.cost[0])
        most = _IMAGES if adapter.answers_first else self.size  # a step needs more memory
        try:
            logits = self._predicted(adapter.preview, each.images, most)
        except DivergenceError:
            return -each.weights * each.hits
        return each.weights * (_hits(logits, each.answers) - each.hits)

    def _predicted(self, predict: Callable[[Tensor], Tensor], images: Tensor, most: int) -> Tensor:
        spread = self.adapter.world.spread
        return torch.cat([spread(predict, x) for some in torch.split(images, most) for x in parts(some)])


def _hits(logits: Tensor, answers: Tensor) -> Tensor:
    """Return 1 for each image that is right; for a segmenter, the share of its pixels."""
    if logits.dim() > 2:
        logits = resized(logits, answers)
    return (logits.argmax(1) == answers).float().view(len(logits), -1).mean(1)
