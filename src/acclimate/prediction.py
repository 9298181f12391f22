"""One batch's pass: its logits, and the kept samples' logits with a graph.

A method asks for `batch.rows(keep)` and does not know how the gradient is had. PyTorch has no instance-wise gradient,
so there is more than one way:

- `masked` runs the batch once with a graph and slices it: what the released EATA does.
- `replay` runs the batch without a graph, then the kept samples once more with one: less memory, and less time where
  few are kept. BatchNorm repeats the first pass's statistics, so the logits are equal; the one difference is that no
  gradient flows through the statistics. LayerNorm and GroupNorm networks get the very same gradient.
- `replay-subset` lets BatchNorm use the kept samples' own statistics, with gradients through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from .functional import kept_rows

if TYPE_CHECKING:
    from .adapter import Adapter

__all__ = ["STRATEGIES", "Masked", "Prediction", "Replay", "ReplaySubset", "Strategy", "samples_of"]

Strategy: TypeAlias = Literal["masked", "replay", "replay-subset"]


class Prediction(ABC):
    """What the strategies share. `logits`, of the whole batch, carry no graph."""

    logits: Tensor

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        self.adapter = adapter
        self.x = x

    def rows(self, keep: Tensor | None = None) -> Tensor:
        """The kept logits with a graph: `keep` is a mask of samples (B,) or of pixels (B, H, W), which gives (K, C).

        Without a mask, all of them in the shape of `logits`.
        """
        step = self.adapter.step
        step.kept = keep
        if keep is None:
            step.backwards = step.backwards + len(self.x)
            return self._all()
        samples = samples_of(keep)
        rows = self._some(keep, samples)
        step.backwards = step.backwards + (len(rows) if keep.dim() == 1 else samples.sum())
        return rows

    @abstractmethod
    def again(self, keep: Tensor) -> Tensor:
        """The kept logits by one more pass with a graph, of the parameters as they are now; counted a kept sample."""

    @abstractmethod
    def _all(self) -> Tensor: ...

    @abstractmethod
    def _some(self, keep: Tensor, samples: Tensor) -> Tensor: ...


class Masked(Prediction):
    """Slice the full batch's graph."""

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        super().__init__(adapter, x)
        self.graph = adapter.logits(x)
        self.logits = self.graph.detach()

    def _all(self) -> Tensor:
        self.adapter.step.in_graph += len(self.x)
        return self.graph

    def _some(self, keep: Tensor, samples: Tensor) -> Tensor:  # noqa: ARG002
        return kept_rows(self._all(), keep)

    def again(self, keep: Tensor) -> Tensor:
        """The whole batch, where its samples share BatchNorm's statistics; else the kept samples alone."""
        samples = samples_of(keep)
        adapter = self.adapter
        if adapter.statistics == "source" or not adapter.norm.layers:
            kept = self.x[samples]
            adapter.step.in_graph += len(kept)
            logits = adapter.logits(kept)
            return logits if keep.dim() == 1 else kept_rows(logits, keep[samples])
        adapter.step.in_graph += len(self.x)
        rows = kept_rows(adapter.logits(self.x), keep)
        adapter.step.forwards += (len(rows) if keep.dim() == 1 else int(samples.sum())) - len(self.x)
        return rows


class Replay(Prediction):
    """Run the kept samples again, normalised as they were in the first pass."""

    def __init__(self, adapter: Adapter, x: Tensor) -> None:
        super().__init__(adapter, x)
        with torch.no_grad():
            self.logits = self._first()

    def _all(self) -> Tensor:
        return self._again(self.x)

    def _some(self, keep: Tensor, samples: Tensor) -> Tensor:
        kept = self.x[samples]
        if not len(kept):
            return kept_rows(self.logits, keep)
        logits = self._again(kept)
        return logits if keep.dim() == 1 else kept_rows(logits, keep[samples])

    def again(self, keep: Tensor) -> Tensor:
        """The kept samples."""
        return self._some(keep, samples_of(keep))

    def _again(self, kept: Tensor) -> Tensor:
        self.adapter.step.in_graph += len(kept)
        return self._second(kept)

    def _first(self) -> Tensor:
        if self.adapter.statistics == "source":
            return self.adapter.logits(self.x)
        with self.adapter.norm.recorded() as self.record:
            return self.adapter.run(self.x)

    def _second(self, kept: Tensor) -> Tensor:
        if self.adapter.statistics == "source":
            return self.adapter.logits(kept)
        with self.adapter.norm.replayed(self.record):
            return self.adapter.run(kept)


class ReplaySubset(Replay):
    """Run the kept samples again, normalised by their own statistics."""

    def _first(self) -> Tensor:
        return self.adapter.logits(self.x)

    def _second(self, kept: Tensor) -> Tensor:
        return self.adapter.logits(kept)


def samples_of(keep: Tensor) -> Tensor:
    """Which samples a mask of samples or pixels keeps anything of."""
    return keep if keep.dim() == 1 else keep.flatten(1).any(1)


STRATEGIES: dict[str, type[Prediction]] = {"masked": Masked, "replay": Replay, "replay-subset": ReplaySubset}
