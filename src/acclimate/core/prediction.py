"""The prediction of one batch: its logits, and the logits of the kept samples with a graph.

A method asks for `batch.kept(keep)` and need not know how the gradient is computed. PyTorch has no gradient per sample,
so there are several strategies:

- `masked` runs the batch once with a graph and masks the loss.
- `sparse` does the same through a compiled network. Its backward runs only on the rows that have a gradient.
- `replay-subset` runs the batch without a graph, then the kept samples again with one. It needs less memory, and less
  time where few are kept. BatchNorm normalises the kept samples with their own statistics, with gradients through them.
  Networks without BatchNorm get exactly the same gradient as with `masked`.
- `replay` does the same, but BatchNorm repeats the statistics of the first pass, without gradients through them. With
  batch statistics this is a trap: networks adapt less and forget (docs/engine.md).

`fastest` is a request for one of them, for users who accept other numbers: see `Adapter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..engine import Engine, Execution, Live, Output, Pass
from ..engine.execution import Gathered
from ..functional import kept_rows
from ..parts.batchnorm import Mode
from ..parts.subnetwork import SubNetworks
from ..parts.world import ALONE, Share, World
from .step import Step

__all__ = ["ASKABLE", "STRATEGIES", "Asked", "Kept", "Masked", "Prediction", "Replay", "ReplaySubset", "Strategy"]

Strategy: TypeAlias = Literal["masked", "sparse", "replay", "replay-subset"]
Asked: TypeAlias = Strategy | Literal["fastest"]
"""What a user may ask for."""


class Predictor(Protocol):
    """What a prediction needs from an adapter."""

    step: Step
    execution: Execution

    @property
    def world(self) -> World:
        """The ranks that share the batch."""

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

    >>> kept = Kept(torch.zeros(2, 3), counts=torch.tensor([True, False]), places=None, any=True)
    >>> kept.mean(torch.tensor([1.0, 5.0]))
    tensor(1.)
    """

    logits: Tensor
    counts: Tensor | None
    """Which of them count, per sample or pixel; None means all."""
    places: Tensor | None
    """Their rows in the batch; None means that they are the whole batch."""
    any: bool | Tensor
    """Whether there is anything to learn from, on any rank; a tensor if the value is only on the device."""
    world: World = ALONE
    """The ranks that share the batch."""

    def of(self, values: Tensor) -> Tensor:
        """Return values of the batch for these samples."""
        return values if self.places is None else values[self.places]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over what counts, or zero where nothing does."""
        if self.counts is None:
            return self.world.ratio(values.sum(), values.numel())
        return self.world.ratio(torch.where(self.counts, values, 0.0).sum(), self.counts.sum())


class Prediction(ABC):
    """The base class of the strategies. `logits` are those of the whole batch, without a graph.

    >>> import acclimate
    >>> class Half(acclimate.Adapter):
    ...     def adapt(self, x):
    ...         batch = self.predict(x)
    ...         kept = batch.kept(torch.arange(len(x)) % 2 == 0)
    ...         self.update(when=kept.any, loss=kept.mean(kept.logits.logsumexp(1)))
    ...         return batch.logits
    >>> model = Half(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)))
    >>> model(torch.rand(4, 4)).shape, model.last.kept
    (torch.Size([4, 3]), tensor([ True, False,  True, False]))
    """

    logits: Tensor

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        self.adapter, self.world = adapter, adapter.world
        self.x = x

    def kept(self, keep: Tensor, subnetworks: SubNetworks | None = None, *, again: bool = False) -> Kept:
        """Return what a mask of samples (B,) or of pixels (B, H, W) keeps, optionally predicted by sub-networks.

        `again` says that the method will call `again`, so that a recorded step counts the samples before it learns.
        """
        keep = self.adapter.execution.chosen(keep)
        samples = samples_of(keep)
        self.adapter.step.kept = keep
        kept = self._some(keep, samples, subnetworks, again=again)
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
        return Kept(again.logits, counts, again.places, self.world.any(samples), self.world)

    @abstractmethod
    def _all(self, subnetworks: SubNetworks | None) -> Tensor: ...

    @abstractmethod
    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None, *, again: bool) -> Kept: ...

    @abstractmethod
    def _again(self, kept: Kept) -> Kept: ...

    def _pass(self, x: Tensor, *, varying: bool = False) -> Output:
        """Run the full network in the method's mode."""
        adapter = self.adapter
        adapter.step.count(forwards=len(x))
        return adapter._run(Pass(adapter.mode(adapter.step.overall(len(x)))), x, varying=varying)


class Masked(Prediction):
    """One graph of the whole batch."""

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        super().__init__(adapter, x)
        self.graph, _, self.by_rows = self._pass(x)
        self.logits = self.graph.detach()
        self.gathered: Gathered | None = None
        """The rows to run again, if the method has said that it will."""

    def _all(self, subnetworks: SubNetworks | None) -> Tensor:
        if subnetworks is not None:
            raise ValueError('a sub-network needs a pass of its own: strategy="replay-subset" or "replay"')
        self.adapter.step.count(in_graph=len(self.x))
        return self.graph

    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None, *, again: bool) -> Kept:
        graph, apart = self._all(subnetworks), again and not self.adapter.coupled
        if self.by_rows or apart:
            self.adapter.execution.count(samples)
        if apart:
            self.gathered = self.adapter.execution.gather(samples)
        return Kept(graph, keep, None, self.world.any(samples), self.world)

    def _again(self, kept: Kept) -> Kept:
        """Run the whole batch where its samples share BatchNorm's statistics, otherwise only the kept samples."""
        adapter = self.adapter
        assert kept.counts is not None  # noqa: S101
        samples = samples_of(kept.counts)
        if adapter.coupled:
            adapter.step.count(forwards=_count(samples), in_graph=len(self.x))
            logits = adapter._run(Pass(adapter.mode(adapter.step.total)), self.x).logits
            return Kept(logits, kept.counts, None, kept.any, self.world)
        places, padded, _ = self.gathered or Live().gather(samples)
        number = _count(samples) if padded else len(places)
        adapter.step.count(forwards=number, in_graph=number)
        mode = adapter.mode(adapter.step.overall(len(places)))
        logits = adapter._run(Pass(mode), self.x[places], varying=True).logits
        counts = kept.counts[places] if padded or kept.counts.dim() > 1 else None
        return Kept(logits, counts, places, kept.any, self.world)


class Replay(Prediction):
    """Run the kept samples again, normalised as they were in the first pass."""

    def __init__(self, adapter: Predictor, x: Tensor) -> None:
        super().__init__(adapter, x)
        with torch.no_grad():
            self.logits, self.statistics, _ = self._first()

    def _all(self, subnetworks: SubNetworks | None) -> Tensor:
        return self._second(self.x, subnetworks, self.adapter.step.share)

    def _some(self, keep: Tensor, samples: Tensor, subnetworks: SubNetworks | None, *, again: bool) -> Kept:  # noqa: ARG002
        adapter, exact = self.adapter, self._exact(subnetworks)
        at_least = 2 if adapter.engine.compiled and not exact else 1  # one row would be compiled separately
        places, padded, count = adapter.execution.gather(samples, at_least=at_least, exact=exact)
        if padded:
            share = None if count is None else Share(0, count, count)
            logits = self._second(self.x[places], subnetworks, share, samples)
            return Kept(logits, keep[places], places, samples.any(), self.world)
        counts = None if keep.dim() == 1 else keep[places]
        share = self.world.share(len(places))
        if not share.total:
            return Kept(self.logits[:0], counts, places, any=False, world=self.world)
        logits = self._second(self.x[places], subnetworks, share, samples)
        return Kept(logits, counts, places, any=True, world=self.world)

    def _again(self, kept: Kept) -> Kept:
        rows = kept.of(self.x)
        samples = rows.new_ones(len(rows), dtype=torch.bool) if kept.counts is None else samples_of(kept.counts)
        return Kept(self._second(rows, samples=samples), kept.counts, kept.places, kept.any, self.world)

    def _counted(self, subnetworks: SubNetworks | None) -> bool:  # noqa: ARG002
        """Return whether the number of samples is an input of the second pass."""
        return False

    def _exact(self, subnetworks: SubNetworks | None) -> bool:  # noqa: ARG002
        """Return whether padding would change the logits of the kept samples."""
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
        share: Share | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Run rows again with a graph; of padded rows, only the samples count, which come first."""
        number = len(x) if samples is None else _count(samples)
        self.adapter.step.count(forwards=number, in_graph=number)
        mode = self._mode(len(x) if share is None else share.total)
        count = None if samples is None or not self._counted(subnetworks) else samples.sum()
        pass_ = Pass(mode, subnetworks, replayed=tuple(self.statistics), share=share, count=count)
        return self.adapter._run(pass_, x, varying=True).logits


class ReplaySubset(Replay):
    """Run the kept samples again, normalised by their own statistics.

    Compiled and recorded passes take the number of samples as an input, so that rows may be padding.
    """

    def _counted(self, subnetworks: SubNetworks | None) -> bool:
        adapter, skips = self.adapter, subnetworks is not None and subnetworks.per == "batch"
        if not adapter.coupled or skips or adapter.mode(len(self.x)) != "batch":
            return False
        return adapter.engine.compiled or adapter.engine.graphs

    def _exact(self, subnetworks: SubNetworks | None) -> bool:
        return self.adapter.coupled and not self._counted(subnetworks)

    def _first(self) -> Output:
        return self._pass(self.x)

    def _mode(self, size: int) -> Mode:
        return self.adapter.mode(size)


def samples_of(keep: Tensor) -> Tensor:
    """Return which samples are kept: those with at least one kept pixel, if the mask is of pixels."""
    return keep if keep.dim() == 1 else keep.flatten(1).any(1)


def _count(samples: Tensor) -> int | Tensor:
    return int(samples.sum()) if samples.device.type == "cpu" else samples.sum()


STRATEGIES: dict[str, type[Prediction]] = {
    "masked": Masked,
    "sparse": Masked,
    "replay": Replay,
    "replay-subset": ReplaySubset,
}
ASKABLE = (*STRATEGIES, "fastest")
