"""The prediction of one batch: its logits, and the logits of the kept samples with a graph.

A method asks for `batch.kept(keep)` and need not know how the gradient is computed. PyTorch has no gradient per sample,
so there are several strategies:

- `masked` runs the batch once with a graph and masks the loss.
- `sparse` does the same through a compiled network. Its backward runs only on the rows that have a gradient.
- `replay` runs the batch without a graph, then the kept samples again with one. It needs less memory, and less time
  where few are kept. BatchNorm repeats the statistics of the first pass, so the logits are equal; the one difference is
  that no gradient flows through the statistics. LayerNorm and GroupNorm networks get exactly the same gradient.
- `replay-subset` lets BatchNorm use the statistics of the kept samples, with gradients through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..engine import Engine, Execution, Output, Pass
from ..functional import kept_rows
from ..parts.batchnorm import Mode
from ..parts.subnetwork import SubNetworks
from .step import Step

__all__ = ["STRATEGIES", "Kept", "Masked", "Prediction", "Replay", "ReplaySubset", "Strategy"]

Strategy: TypeAlias = Literal["masked", "sparse", "replay", "replay-subset"]


class Predictor(Protocol):
    """What a prediction needs from an adapter."""

    step: Step
    execution: Execution

    @property
    def engine(self) -> Engine:
        """How passes run."""

    @property
    def coupled(self) -> bool:
        """Whether the samples of a batch depend on each other."""

    def mode(self, size: int) -> Mode:
        """How BatchNorm normalises a batch of this size."""

    def _run(self, pass_: Pass, x: Tensor, *, varying: bool = False) -> Output:
        """Run a pass without counting it."""


@dataclass(frozen=True)
class Kept:
    """The logits of the kept samples with a graph, in the layout of the strategy.

    They may include samples that do not count, so that no shape depends on how many are kept. `mean` and `any` handle
    this.
    """

    logits: Tensor
    counts: Tensor | None
    """Which of them count, per sample or pixel; None means all."""
    places: Tensor | None
    """Their rows in the batch; None means that they are the whole batch."""
    any: bool | Tensor
    """Whether there is anything to learn from; a tensor if the value is only on the device."""

    def of(self, values: Tensor) -> Tensor:
        """Return values of the batch for these samples."""
        return values if self.places is None else values[self.places]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over what counts, or zero where nothing does."""
        if self.counts is None:
            return values.sum() / max(values.numel(), 1)
        return torch.where(self.counts, values, 0.0).sum() / self.counts.sum().clamp(min=1)


class Prediction(ABC):
    """The base class of the strategies. `logits` are those of the whole batch, without a graph."""

    logits: Tensor

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        self.adapter = adapter
        self.x = x

    def kept(self, keep: Tensor, subnetworks: SubNetworks | None = None) -> Kept:
        """Return what a mask of samples (B,) or of pixels (B, H, W) keeps, optionally predicted by sub-networks."""
        samples = samples_of(keep)
        self.adapter.step.kept = keep
        kept = self._some(keep, samples, subnetworks)
        self.adapter.step.count(backwards=_count(samples))
        return kept

    def rows(self, keep: Tensor | None = None, subnetworks: SubNetworks | None = None) -> Tensor:
        """Return only the kept logits, (K, C); without a mask, all of them in the shape of `logits`.

        K is read from the device; a method that asks for `kept` need not wait for it.
        """
        if keep is not None:
            kept = self.kept(keep, subnetworks)
            return kept.logits if kept.counts is None else kept_rows(kept.logits, kept.counts)
        self.adapter.step.count(backwards=len(self.x))
        return self._all(subnetworks)

    def again(self, kept: Kept, where: Callable[[Tensor], Tensor]) -> Kept:
        """Run the same samples once more with the current parameters, and keep those with `where(logits) > 0`."""
        again = self._again(kept)
        still = where(again.logits) > 0
        counts = still if again.counts is None else again.counts & still
        samples = samples_of(counts)
        self.adapter.step.count(backwards=_count(samples))
        return Kept(again.logits, counts, again.places, _any(samples))

    @abstractmethod
    def _all(self, subnetworks: SubNetworks | None) -> Tensor: ...

    @abstractmethod
    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None) -> Kept: ...

    @abstractmethod
    def _again(self, kept: Kept) -> Kept: ...

    def _pass(self, x: Tensor, *, varying: bool = False) -> Output:
        """Run the full network in the method's mode."""
        adapter = self.adapter
        adapter.step.count(forwards=len(x))
        return adapter._run(Pass(adapter.mode(len(x))), x, varying=varying)


class Masked(Prediction):
    """One graph of the whole batch."""

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        super().__init__(adapter, x)
        self.graph, _, self.by_rows = self._pass(x)
        self.logits = self.graph.detach()

    def _all(self, subnetworks: SubNetworks | None) -> Tensor:
        if subnetworks is not None:
            raise ValueError('a sub-network needs a pass of its own: strategy="replay-subset" or "replay"')
        self.adapter.step.count(in_graph=len(self.x))
        return self.graph

    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None) -> Kept:
        graph = self._all(subnetworks)
        if self.by_rows:
            self.adapter.execution.count(samples)
        return Kept(graph, keep, None, _any(samples))

    def _again(self, kept: Kept) -> Kept:
        """Run the whole batch where its samples share BatchNorm's statistics, otherwise only the kept samples."""
        adapter = self.adapter
        assert kept.counts is not None  # noqa: S101
        samples = samples_of(kept.counts)
        if adapter.coupled:
            adapter.step.count(forwards=_count(samples), in_graph=len(self.x))
            logits = adapter._run(Pass(adapter.mode(len(self.x))), self.x).logits
            return Kept(logits, kept.counts, None, kept.any)
        places = samples.nonzero().squeeze(1)
        adapter.step.count(in_graph=len(places))
        logits = self._pass(self.x[places], varying=True).logits
        return Kept(logits, None if kept.counts.dim() == 1 else kept.counts[places], places, kept.any)


class Replay(Prediction):
    """Run the kept samples again, normalised as they were in the first pass."""

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        super().__init__(adapter, x)
        with torch.no_grad():
            self.logits, self.statistics, _ = self._first()

    def _all(self, subnetworks: SubNetworks | None) -> Tensor:
        return self._second(self.x, subnetworks)

    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None) -> Kept:
        adapter = self.adapter
        at_least = 2 if adapter.engine.compiled and not adapter.coupled else 1  # one row would be compiled separately
        places, padded, count = adapter.execution.gather(samples, at_least=at_least, exact=self._exact)
        if padded:
            logits = self._second(self.x[places], subnetworks, count, _count(samples))
            return Kept(logits, keep[places], places, samples.any())
        counts = None if keep.dim() == 1 else keep[places]
        if not len(places):
            return Kept(self.logits[:0], counts, places, any=False)
        return Kept(self._second(self.x[places], subnetworks), counts, places, any=True)

    def _again(self, kept: Kept) -> Kept:
        return Kept(self._second(kept.of(self.x)), kept.counts, kept.places, kept.any)

    @property
    def _exact(self) -> bool:
        """Whether padding would change the logits of the kept samples."""
        return False

    def _first(self) -> Output:
        if not self.adapter.coupled:
            return self._pass(self.x)
        self.adapter.step.count(forwards=len(self.x))
        return self.adapter._run(Pass("recorded"), self.x)

    def _mode(self, size: int) -> Mode:
        return "replayed" if self.adapter.coupled else self.adapter.mode(size)

    def _second(
        self,
        x: Tensor,
        subnetworks: SubNetworks | None = None,
        count: int | None = None,
        samples: int | Tensor | None = None,
    ) -> Tensor:
        """Run rows again with a graph; of padded rows, only the samples count."""
        number = len(x) if samples is None else samples
        self.adapter.step.count(forwards=number, in_graph=number)
        pass_ = Pass(self._mode(len(x)), subnetworks, replayed=tuple(self.statistics), count=count)
        return self.adapter._run(pass_, x, varying=True).logits


class ReplaySubset(Replay):
    """Run the kept samples again, normalised by their own statistics."""

    @property
    def _exact(self) -> bool:
        return self.adapter.coupled

    def _first(self) -> Output:
        return self._pass(self.x)

    def _mode(self, size: int) -> Mode:
        return self.adapter.mode(size)


def samples_of(keep: Tensor) -> Tensor:
    """Return which samples are kept: those with at least one kept pixel, if the mask is of pixels."""
    return keep if keep.dim() == 1 else keep.flatten(1).any(1)


def _any(samples: Tensor) -> bool | Tensor:
    """Return whether any sample is kept; a bool if reading it needs no synchronisation."""
    return bool(samples.any()) if samples.device.type == "cpu" else samples.any()


def _count(samples: Tensor) -> int | Tensor:
    return int(samples.sum()) if samples.device.type == "cpu" else samples.sum()


STRATEGIES: dict[str, type[Prediction]] = {
    "masked": Masked,
    "sparse": Masked,
    "replay": Replay,
    "replay-subset": ReplaySubset,
}
