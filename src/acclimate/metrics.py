"""Streaming metrics: a few numbers a bin, however long the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import confidence

__all__ = ["Calibration", "calibration_error"]


def calibration_error(count: Tensor, confident: Tensor, correct: Tensor) -> Tensor:
    """ECE = Σ_bins n_b/N · |accuracy_b − confidence_b|, from each bin's count and sums."""
    return (correct - confident).abs().sum() / count.sum()


class Calibration:
    """Accuracy and expected calibration error over everything seen: equal-width bins (lo, hi] of the confidence.

    Over the whole stream, never a mean of batches' errors: that is far too large even for a calibrated network.
    """

    def __init__(self, bins: int = 15) -> None:
        self.edges = torch.linspace(0, 1, bins + 1)
        self.count, self.confident, self.correct = torch.zeros(3, bins, dtype=torch.float64)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch of (B, C) logits, or (B, C, H, W) with a label a pixel."""
        sure = confidence(logits).flatten().cpu()
        right = (logits.argmax(1).cpu() == targets.cpu()).flatten().double()
        index = torch.bucketize(sure, self.edges[1:-1])  # right-closed bins
        self.count.index_add_(0, index, torch.ones_like(right))
        self.confident.index_add_(0, index, sure.double())
        self.correct.index_add_(0, index, right)

    @property
    def accuracy(self) -> float:
        """Share of right predictions."""
        return float(self.correct.sum() / self.count.sum())

    @property
    def ece(self) -> float:
        """Expected calibration error."""
        return float(calibration_error(self.count, self.confident, self.correct))

    def __add__(self, other: Calibration) -> Calibration:
        total = Calibration(len(self.count))
        total.count, total.confident, total.correct = (
            a + b
            for a, b in zip(
                (self.count, self.confident, self.correct), (other.count, other.confident, other.correct), strict=True
            )
        )
        return total
