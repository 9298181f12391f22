"""One batch's pass: its logits, and the kept samples' logits with a graph.

A method asks for `batch.kept(keep)` and does not know how the gradient is had. PyTorch has no instance-wise gradient,
so there is more than one way:

- `masked` runs the batch once with a graph and leaves out of the loss what is not kept.
- `sparse` does the same through a compiled network, whose backward runs only on the rows that have a gradient.
- `replay` runs the batch without a graph, then the kept samples once more with one: less memory, and less time where
  few are kept. BatchNorm repeats the first pass's statistics, so the logits are equal; the one difference is that no
  gradient flows through the statistics. LayerNorm and GroupNorm networks get the very same gradient.
- `replay-subset` lets BatchNorm use the kept samples' own statistics, with gradients through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from ..functional import kept_rows
from ..parts.batchnorm import flattened

if TYPE_CHECKING:
    from .adapter import Adapter

__all__ = ["STRATEGIES", "Kept", "Masked", "Prediction", "Replay", "ReplaySubset", "Strategy", "rows_first"]

Strategy: TypeAlias = Literal["masked", "sparse", "replay", "replay-subset"]


@dataclass(frozen=True)
class Kept:
    """The kept samples' logits with a graph, in the layout that a strategy has them in.

    Samples that do not count may lie among them, so that no shape depends on how many are kept: `mean` and `any` know.
    """

    logits: Tensor
    counts: Tensor | None
    """Which of them count, a sample or a pixel; None: all."""
    places: Tensor | None
    """Where in the batch they are; None: they are the batch."""
    any: bool | Tensor
    """Whether there is anything to learn from; a tensor where only the device knows."""

    def of(self, values: Tensor) -> Tensor:
        """A batch's values, for these samples."""
        return values if self.places is None else values[self.places]

    def mean(self, values: Tensor) -> Tensor:
        """Over what counts; nought where nothing does."""
        if self.counts is None:
            return values.sum() / max(values.numel(), 1)
        return torch.where(self.counts, values, 0.0).sum() / self.counts.sum().clamp(min=1)

    def where(self, condition: Tensor) -> Kept:
        """Those of them for which it holds."""
        counts = condition if self.counts is None else self.counts & condition
        return Kept(self.logits, counts, self.places, _any(samples_of(counts)))

    @property
    def samples(self) -> int | Tensor:
        """How many samples count."""
        return len(self.logits) if self.counts is None else _count(samples_of(self.counts))


class Prediction(ABC):
    """What the strategies share. `logits`, of the whole batch, carry no graph."""

    logits: Tensor

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        self.adapter = adapter
        self.x = x

    def kept(self, keep: Tensor) -> Kept:
        """What a mask of samples (B,) or of pixels (B, H, W) keeps."""
        step, samples = self.adapter.step, samples_of(keep)
        step.kept = keep
        kept = self._some(keep, samples)
        step.backwards = step.backwards + _count(samples)
        return kept

    def rows(self, keep: Tensor | None = None) -> Tensor:
        """The kept logits alone, (K, C); without a mask, all of them in the shape of `logits`.

        K is read from the device: a method that asks for `kept` need not wait for it.
        """
        if keep is not None:
            kept = self.kept(keep)
            return kept.logits if kept.counts is None else kept_rows(kept.logits, kept.counts)
        self.adapter.step.backwards = self.adapter.step.backwards + len(self.x)
        return self._all()

    @abstractmethod
    def again(self, kept: Kept) -> Kept:
        """The same samples by one more pass with a graph, of the parameters as they are now; counted a kept sample."""

    @abstractmethod
    def _all(self) -> Tensor: ...

    @abstractmethod
    def _some(self, keep: Tensor, samples: Tensor) -> Kept: ...


class Masked(Prediction):
    """One graph of the whole batch."""

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        super().__init__(adapter, x)
        self.graph = adapter.logits(x)
        self.by_rows = adapter.runner.compiler.was_selective
        """Whether its backward runs on some rows."""
        self.logits = self.graph.detach()

    def _all(self) -> Tensor:
        self.adapter.step.in_graph += len(self.x)
        return self.graph

    def _some(self, keep: Tensor, samples: Tensor) -> Kept:
        if self.adapter.part is not None and self.by_rows:
            self.adapter.part.count(samples)
        return Kept(self._all(), keep, None, _any(samples))

    def again(self, kept: Kept) -> Kept:
        """The whole batch, where its samples share BatchNorm's statistics; else the kept samples alone."""
        adapter = self.adapter
        assert kept.counts is not None  # noqa: S101
        samples = samples_of(kept.counts)
        if adapter.coupled:
            adapter.step.in_graph += len(self.x)
            logits = adapter.logits(self.x)
            adapter.step.forwards = adapter.step.forwards - len(self.x) + _count(samples)
            return Kept(logits, kept.counts, None, kept.any)
        places = samples.nonzero().squeeze(1)
        adapter.step.in_graph += len(places)
        logits = adapter.logits(self.x[places], fresh=True)
        return Kept(logits, None if kept.counts.dim() == 1 else kept.counts[places], places, kept.any)


class Replay(Prediction):
    """Run the kept samples again, normalised as they were in the first pass."""

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        super().__init__(adapter, x)
        with torch.no_grad():
            self.logits = self._first()

    def _all(self) -> Tensor:
        return self._again(self.x)

    def _some(self, keep: Tensor, samples: Tensor) -> Kept:
        if self.adapter.part is not None:
            return self._padded(keep, samples, self.adapter.part.count(samples))
        places = samples.nonzero().squeeze(1)
        if len(places) == 1 < len(samples) and self.adapter.engine.compiled and not self.adapter.coupled:
            return self._padded(keep, samples, 2)  # a pass of one row would be compiled by itself
        counts = None if keep.dim() == 1 else keep[places]
        if not len(places):
            return Kept(self.logits[:0], counts, places, any=False)
        return Kept(self._again(self.x[places]), counts, places, any=True)

    def _padded(self, keep: Tensor, samples: Tensor, rows: int) -> Kept:
        """The kept samples, and others up to a fixed number, which do not count."""
        step, draw, places = self.adapter.step, self.adapter.draw, rows_first(samples, rows)
        if draw is not None and self.adapter.part is None:
            draw.real = int(samples.sum())
        logits = self._again(self.x[places])
        more = _count(samples) - rows
        step.forwards, step.in_graph = step.forwards + more, step.in_graph + more
        return Kept(logits, keep[places], places, samples.any())

    def again(self, kept: Kept) -> Kept:
        """The kept samples."""
        return Kept(self._again(kept.of(self.x)), kept.counts, kept.places, kept.any)

    def _again(self, kept: Tensor) -> Tensor:
        self.adapter.step.in_graph += len(kept)
        return self._second(kept)

    def _first(self) -> Tensor:
        adapter = self.adapter
        if not adapter.coupled:
            return adapter.logits(self.x)

        def body(x: Tensor, _: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with adapter.norm.recorded() as record:
                logits = adapter.network(x)
            statistics, adapter.norm.calls = flattened(record)
            return (logits, *statistics)

        logits, *self.statistics = adapter.runner("recorded", body, self.x)
        return adapter.counted(logits)

    def _second(self, kept: Tensor) -> Tensor:
        adapter = self.adapter
        if not adapter.coupled:
            return adapter.logits(kept, fresh=True)

        def body(x: Tensor, given: Sequence[Tensor]) -> tuple[Tensor]:
            with adapter.norm.replayed(adapter.norm.unflattened(given, adapter.norm.calls)):
                return (adapter.network(x),)

        return adapter.counted(adapter.runner("replayed", body, kept, given=self.statistics, fresh=True)[0])


class ReplaySubset(Replay):
    """Run the kept samples again, normalised by their own statistics."""

    def _first(self) -> Tensor:
        return self.adapter.logits(self.x)

    def _second(self, kept: Tensor) -> Tensor:
        return self.adapter.logits(kept, fresh=True)


def samples_of(keep: Tensor) -> Tensor:
    """Which samples a mask of samples or pixels keeps anything of."""
    return keep if keep.dim() == 1 else keep.flatten(1).any(1)


def rows_first(mask: Tensor, count: int) -> Tensor:
    """Places of `count` rows: those in the mask in their order, then others."""
    return torch.argsort(mask.logical_not().to(torch.uint8), stable=True)[:count]


def _any(samples: Tensor) -> bool | Tensor:
    """Read where that costs nothing."""
    return bool(samples.any()) if samples.device.type == "cpu" else samples.any()


def _count(samples: Tensor) -> int | Tensor:
    return int(samples.sum()) if samples.device.type == "cpu" else samples.sum()


STRATEGIES: dict[str, type[Prediction]] = {
    "masked": Masked,
    "sparse": Masked,
    "replay": Replay,
    "replay-subset": ReplaySubset,
}
