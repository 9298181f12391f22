"""RDumb: ETA that starts over at regular intervals (Press et al., 2023)."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import Unpack

from ..checks import DivergenceError
from ..parts.counter import Counter
from .eata import ETA, Selecting

__all__ = ["RDumb"]


class RDumb(ETA):
    """min_θ S(x)·H(x) (Eq. 2), with a reset to the source every `every` batches.

    Paper: https://arxiv.org/abs/2306.05401

    >>> import acclimate, torch
    >>> model = acclimate.RDumb(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)), every=100)
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])

    Args:
        model: any module that returns logits.
        every: after this many batches network, optimizer and running mean are reset to the source.
        arguments: those of `ETA`.
    """

    def __init__(self, model: nn.Module, *, every: int = 1000, **arguments: Unpack[Selecting]) -> None:
        super().__init__(model, **arguments)
        if every < 1:
            raise ValueError(f"RDumb: every={every}; expected at least one batch")
        self.every = every
        self.batches = Counter()

    def adapt(self, x: Tensor) -> Tensor:
        """Start over if it is due; then predict and learn as ETA does."""
        found = None
        if self._due:
            self.refuse_non_finite(x)
            found = self.state.copy()
            self.state.start_over("select")
        try:
            logits = super().adapt(x)
        except DivergenceError:
            self.batches.add(1)  # a network that has diverged must still reach its next restart
            raise
        except BaseException:
            if found is not None:
                self.state.restore(found)
            raise
        self.batches.add(1)
        return logits

    def answer(self, x: Tensor) -> Tensor:
        """Return the logits of the source network where a restart is due."""
        return self.infer(x, self.state.source_parameters() if self._due else None)

    @property
    def _due(self) -> bool:
        return not self.frozen and int(self.batches) > 0 and int(self.batches) % self.every == 0
