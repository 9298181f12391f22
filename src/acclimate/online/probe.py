"""Held-out source images, on which an adapted network should still predict what the source network did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from statistics import pstdev
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..checks import DivergenceError, warn
from ..core.adapter import Adapter
from ..core.state_file import fingerprint
from ..functional import entropy
from ..parts.fisher import Images, image_batches
from .betting import ProbeTest, ShiftGauge
from .novelty import Novelty
from .style import StyleTransfer

__all__ = ["Probe", "parts"]

_DRAW = 32  # images per draw
_DRAWS = 8  # at most, in one check
_VALUES = 64 * 3 * 224 * 224  # of the images that are predicted at once
_RECENT = 4  # checks that are remembered
_ERRORS = 2  # standard errors above what is normal
_HASHED = 4096  # answers that tell held-out images apart


class Probe(nn.Module):
    """Draws held-out images, and bets that the adapted network disagrees with the source more often than is tolerated.

    What is normal before anything is learned, such as what batch statistics cause, is added to what is tolerated.
    """

    images: Tensor
    answers: Tensor

    def __init__(self, adapter: Adapter, images: Images, tolerated: float, risk: float, random: Generator) -> None:
        super().__init__()
        with adapter.world.together():
            batches = [*image_batches(images)]
            if len({(each.shape[1:], each.dtype) for each in batches}) != 1:
                raise ValueError("probe= needs held-out images, all of the same shape and type")
            held_out = torch.cat(batches).detach().to(adapter.device)
            if len(held_out) < _DRAW:
                raise ValueError(f"probe= has {len(held_out)} images, and each check draws {_DRAW}: give a few hundred")
        if adapter.world.size > 1:
            adapter.world.same("probe", fingerprint([("probe", held_out)]))
        answers, entropies = [], []
        for x in parts(held_out):
            logits = adapter.world.spread(adapter.predict_source, x)
            answers.append(logits.argmax(1))
            entropies.append(entropy(logits))
        self.register_buffer("images", held_out, persistent=False)
        self.register_buffer("answers", torch.cat(answers), persistent=False)
        with _as_source(adapter):
            before = [_mean(self.disagreements(adapter, random)) for _ in range(32)]
        self.normal, self.spread = _mean(before), pstdev(before)
        self.recent: list[float] = []
        self.test = ProbeTest(min(0.99, self.normal + tolerated), risk=risk)
        self.fingerprint = self._hash()
        """What the bets are about: the held-out images by their answers, what is tolerated, and the risk."""
        self.gauge = ShiftGauge(torch.cat(entropies))
        self.novelty = Novelty(held_out)
        self.transfer = StyleTransfer(held_out)

    def disagreements(self, adapter: Adapter, random: Generator) -> list[float]:
        """Draw images, and return where adapted and source network disagree.

        With BatchNorm images of a batch depend on each other, so that its mean is one draw.
        """
        drawn = torch.randint(len(self.images), (_DRAW,), generator=random).to(self.images.device)
        try:
            predicted = [adapter.world.spread(adapter.predict_only, x).argmax(1) for x in parts(self.images[drawn])]
        except DivergenceError:
            return [1.0] if adapter.coupled else [1.0] * _DRAW
        differ = torch.cat(predicted) != self.answers[drawn]
        per_image = differ.float().view(_DRAW, -1).mean(1)
        return [float(per_image.mean())] if adapter.coupled else per_image.tolist()

    def check(self, adapter: Adapter, random: Generator) -> tuple[float, int]:
        """Draw images and bet, again as long as they disagree more often than tolerated.

        Return the share of disagreements, and the number of images. Whether to draw again depends on earlier draws
        alone, so that the guarantee of the bets holds.
        """
        found: list[float] = []
        images = 0
        while images < _DRAWS * _DRAW:
            draws = self.disagreements(adapter, random)
            self.test.update(draws)
            found, images = found + draws, images + _DRAW
            if _mean(draws) <= self.test.tolerated:
                break
        self.recent = [*self.recent[1 - _RECENT :], _mean(found)]
        return self.recent[-1], images

    @property
    def forgotten(self) -> bool:
        """Whether the last checks have found clearly more disagreement than there was before anything was learned."""
        count = len(self.recent)
        return count > 0 and _mean(self.recent) > self.normal + _ERRORS * self.spread / count**0.5

    def damaged(self, adapter: Adapter, random: Generator) -> bool:
        """Return whether more images than tolerated are predicted differently, in one draw."""
        return _mean(self.disagreements(adapter, random)) > self.test.tolerated

    def begin(self) -> None:
        """Forget what was found, after the adapted network was changed."""
        self.test.restart()
        self.recent = []

    def restart(self) -> None:
        """Forget also what was found of the stream."""
        self.begin()
        self.gauge = ShiftGauge(self.gauge.entropies)

    def _hash(self) -> str:
        answers = self.answers.flatten()
        some = answers[:: len(answers) // _HASHED + 1]  # a segmenter has one per pixel
        about = sha256(some.cpu().numpy().tobytes())
        about.update(repr((len(self.images), self.test.tolerated, self.test.risk)).encode())
        return about.hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """Return what changes, as plain numbers."""
        return {"test": self.test.state(), "gauge": self.gauge.state(), "recent": self.recent, "of": self.fingerprint}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned; with other images or another tolerance, the bets start anew."""
        if state["of"] != self.fingerprint:
            warn(
                "the state was saved with other held-out images, or another tolerance or risk: what was found about "
                "them is dropped, and the probe test starts anew"
            )
            self.restart()
            return
        self.test.load(state["test"])
        self.gauge.load(state["gauge"])
        self.recent = [*state["recent"]]


def parts(images: Tensor) -> tuple[Tensor, ...]:
    """Divide images into batches that a network can take at once, also where they are large."""
    batches: tuple[Tensor, ...] = torch.split(images, max(1, _VALUES // images[0].numel()))
    return batches


@contextmanager
def _as_source(adapter: Adapter) -> Iterator[None]:
    """Take back inside the block what the adapter has learned."""
    source = adapter.state.source_parameters()
    if all(torch.equal(p, source[name]) for name, p in adapter.state.parameters.items()):
        yield
        return
    learned = adapter.snapshot()
    try:
        adapter.reset()
        yield
    finally:
        adapter.restore(learned)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
