"""A rehearsal: which of two networks does better on held-out images that look like the stream?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..checks import DivergenceError
from ..core.adapter import Adapter
from .dressing import class_weights
from .probe import Probe

__all__ = ["Rehearsal"]

_IMAGES = 64  # of a round
_ROUNDS = 4
_ERRORS = 2  # standard errors


class _Round(NamedTuple):
    images: Tensor
    answers: Tensor
    hits: Tensor  # of the source network
    weights: Tensor  # with mean one


class Rehearsal:
    """Adapted and source network on held-out images dressed like a batch, which several ranks may share.

    Right is what the source network has predicted for the images as they were. Images count as their class is common
    in the batch. `stream` has the source's probabilities for the images of the batch.
    """

    def __init__(self, probe: Probe, adapter: Adapter, x: Tensor, stream: Tensor, random: Generator) -> None:
        self.probe, self.adapter, self.stream, self.random = probe, adapter, stream, random
        self.look = probe.wardrobe.look(x, adapter.world)
        self.rounds: list[_Round] = []

    @staticmethod
    def possible(probe: Probe | None, adapter: Adapter, x: Tensor) -> bool:
        """Return whether a batch can be rehearsed.

        With batch statistics it cannot: an even mixture of noise and blur is easier to normalise than a real stream.
        """
        if probe is None or adapter.coupled or adapter.episodic or not adapter.adapted:
            return False
        return probe.wardrobe.takes(x)

    @property
    def images(self) -> int:
        """The number of images so far."""
        return _IMAGES * len(self.rounds)

    def compare(self) -> tuple[float, float]:
        """Return what the adapted network gains over the source, and how much it harms at least.

        Images are added as long as it seems to be worse.
        """
        found: list[Tensor] = []
        while len(found) < _ROUNDS:
            self.rounds.append(self._draw())
            found.append(self._differences(self.rounds[-1]))
            differences = torch.cat(found)
            gain, spread = torch.stack([differences.mean(), differences.std()]).tolist()
            if gain >= 0:
                break
        return gain, max(0.0, -gain - _ERRORS * spread / len(differences) ** 0.5)

    def gain(self) -> float:
        """Return what the adapted network gains as it is now, on the same images."""
        return float(torch.cat([self._differences(each) for each in self.rounds]).mean())

    def _draw(self) -> _Round:
        probe, spread = self.probe, self.adapter.world.spread
        drawn = torch.randint(len(probe.images), (_IMAGES,), generator=self.random).to(probe.images.device)
        images = probe.wardrobe.dress(probe.images[drawn], self.look, self.random)
        answers, logits = probe.answers[drawn], spread(self.adapter.predict_source, images)
        weights = torch.ones(_IMAGES, device=images.device)
        if logits.dim() == 2:
            weights = _IMAGES * class_weights(self.stream, logits.softmax(1))
        return _Round(images, answers, _hits(logits, answers), weights)

    def _differences(self, each: _Round) -> Tensor:
        try:
            logits = self.adapter.world.spread(self.adapter.predict_only, each.images)
        except DivergenceError:
            return -each.weights * each.hits
        return each.weights * (_hits(logits, each.answers) - each.hits)


def _hits(logits: Tensor, answers: Tensor) -> Tensor:
    """Return 1 for each image that is right; for a segmenter, the share of its pixels."""
    return (logits.argmax(1) == answers).float().view(len(logits), -1).mean(1)
