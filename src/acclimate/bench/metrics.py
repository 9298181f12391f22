"""Streaming metrics: a few numbers per bin for a stream of any length. The device is synchronised only on reading."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.types import IGNORE
from ..parts.multiscale import resized

__all__ = ["BINS", "Confusion", "Meter", "Scores", "calibration_error"]

BINS = 15
"""Bins of the expected calibration error."""

_UNIFORM = 40 * BINS
_EDGES = torch.cat(
    [
        torch.logspace(-5, -3, 200, dtype=torch.float64),
        torch.arange(1, _UNIFORM, dtype=torch.float64) / _UNIFORM,
        1 - torch.logspace(-3, -9, 200, dtype=torch.float64),
    ]
).sort()[0]
"""Edges of fine bins of confidence: uniform ones, which the fifteen bins consist of, and more at both ends."""


def calibration_error(count: Tensor, confident: Tensor, correct: Tensor) -> Tensor:
    """Return ECE = Σ_bins n_b/N · |accuracy_b − confidence_b|, from each bin's count and sums.

    >>> count, confident, correct = torch.tensor([10.0]), torch.tensor([9.0]), torch.tensor([6.0])
    >>> calibration_error(count, confident, correct)  # 90 % sure, 60 % right
    tensor(0.3000)
    """
    return (correct - confident).abs().sum() / count.sum()


class Meter:
    """Accuracy, calibration, likelihood and risk–coverage of all predictions so far.

    ECE is computed over the whole stream, in equal-width bins (lo, hi]. A mean of per-batch errors would be far too
    large even for a calibrated network.

    >>> meter = Meter()
    >>> meter.update(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))  # certain, half right
    >>> meter.accuracy, round(meter.ece, 2)
    (0.5, 0.5)
    """

    def __init__(self) -> None:
        self.fine = torch.zeros(5, len(_EDGES) + 1, dtype=torch.float64)
        """Count, and sums of confidence, of right predictions, of −log p_y and of the Brier score, per fine bin. A CPU
        adds sample by sample, so that the grouping into batches makes no difference."""
        self.edges = _EDGES

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor, ignore: int = -1) -> None:
        """Add a batch of (B, C) logits, or (B, C, H, W) with one label per pixel, without targets equal to `ignore`."""
        self._move(logits.device)
        flat = logits.movedim(1, -1).flatten(0, -2) if logits.dim() > 2 else logits
        y = targets.to(logits.device, non_blocking=True).flatten().long()
        counted = (y != ignore).double()
        y = y.masked_fill(y == ignore, 0)
        log_p = (flat.double() if logits.dim() == 2 else flat.float()).log_softmax(1)  # too many pixels for double
        p = log_p.exp()
        largest, predicted = p.max(1)
        sure = largest.double()
        right = (predicted == y).double()
        own = log_p.gather(1, y[:, None])[:, 0]
        index = torch.bucketize(sure, self.edges)  # right-closed
        brier = p.square().sum(1) - 2 * own.exp() + 1
        for row, values in zip(self.fine, (torch.ones_like(sure), sure, right, -own, brier), strict=True):
            row.index_add_(0, index, counted * values)

    def _move(self, device: torch.device) -> None:
        if self.fine.device != device:
            self.fine, self.edges = self.fine.to(device), self.edges.to(device)

    @property
    def total(self) -> float:
        """Number of predictions so far."""
        return float(self.fine[0].sum())

    @property
    def bins(self) -> Tensor:
        """Counts, sums of confidence and of right predictions in fifteen equal bins: (3, 15)."""
        fine = self.fine[:3].cpu()
        upper = torch.cat([_EDGES, _EDGES.new_ones(1)])
        coarse = torch.bucketize(upper, torch.arange(1, BINS, dtype=torch.float64) / BINS + 1e-12)
        return torch.zeros(3, BINS, dtype=torch.float64).index_add_(1, coarse, fine)

    @property
    def accuracy(self) -> float:
        """Share of right predictions."""
        return float(self.fine[2].sum() / self.fine[0].sum())

    @property
    def ece(self) -> float:
        """Expected calibration error, fifteen equal-width bins."""
        return float(calibration_error(*self.bins))

    @property
    def adaptive_ece(self) -> float:
        """ECE over fifteen bins of equally many predictions; a fine bin across a border is divided."""
        count, confident, correct = self.fine[:3].cpu()
        total = count.sum()
        reached = torch.cat([count.new_zeros(1), count.cumsum(0)])
        borders = torch.arange(BINS + 1, dtype=torch.float64) * total / BINS
        overlap = torch.minimum(reached[1:], borders[1:, None]) - torch.maximum(reached[:-1], borders[:-1, None])
        share = overlap.clamp(min=0) / count.clamp(min=1e-12)
        return float(((share * (correct - confident)).sum(1).abs().sum()) / total)

    @property
    def nll(self) -> float:
        """Mean −log p of the true class."""
        return float(self.fine[3].sum() / self.fine[0].sum())

    @property
    def brier(self) -> float:
        """Mean squared distance between the prediction and the one-hot truth."""
        return float(self.fine[4].sum() / self.fine[0].sum())

    @property
    def aurc(self) -> float:
        """Area under the risk–coverage curve: error rate among the most confident predictions, mean over all coverages.

        Errors are assumed to be spread evenly within a fine bin.
        """
        count, _, correct = self.fine[:3].cpu().flip(1)
        wrong = count - correct
        before, errors = count.cumsum(0) - count, wrong.cumsum(0) - wrong
        rate = wrong / count.clamp(min=1e-12)
        harmonic = torch.digamma(before + count + 1) - torch.digamma(before + 1)  # Σ 1/(before + j)
        area = rate * count + (errors - rate * before) * harmonic
        return float(area.sum() / count.sum())

    def as_dict(self) -> dict[str, float]:
        """All metrics by name."""
        names = ("accuracy", "ece", "adaptive_ece", "nll", "brier", "aurc")
        return {name: getattr(self, name) for name in names}

    def __add__(self, other: Meter) -> Meter:
        both = Meter()
        both.fine = self.fine.cpu() + other.fine.cpu()
        return both


class Confusion:
    """Confusion matrix of pixels: IoU = TP/(TP + FP + FN)."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.pairs = torch.zeros(classes**2 + 2, dtype=torch.int64)
        """Counts per label and prediction, flattened; then of ignored pixels, and of labels without a class."""

    @torch.no_grad()
    def update(self, predicted: Tensor, targets: Tensor, ignore: int = IGNORE) -> None:
        """Add predicted and true labels of the same shape."""
        y = targets.to(predicted.device, non_blocking=True).long()
        nowhere = torch.where(y == ignore, self.classes**2, self.classes**2 + 1)
        pairs = torch.where((y >= 0) & (y < self.classes), y * self.classes + predicted, nowhere).flatten()
        self.pairs = self.pairs.to(pairs.device)
        self.pairs.index_add_(0, pairs, torch.ones_like(pairs))

    @property
    def iou(self) -> Tensor:
        """IoU per class; NaN for a class that was neither present nor predicted."""
        pairs = self.pairs.cpu()
        if pairs[-1]:
            raise ValueError(
                f"{int(pairs[-1]):,} pixels have a label outside the network's {self.classes} classes: is it "
                f"for other data? {IGNORE} marks pixels that do not count"
            )
        counts = pairs[:-2].view(self.classes, self.classes).double()  # one row per label
        hit = counts.diagonal()
        return hit / (counts.sum(0) + counts.sum(1) - hit)

    @property
    def miou(self) -> float:
        """Mean over the classes that were present or predicted."""
        return float(self.iou.nanmean())


class Scores:
    """Scores of a stream of predictions: of a classifier, or of a segmenter at the resolution of its labels.

    A classifier's predictions are scored in groups of `MOST` batches. One by one they would cost more kernel launches
    than many adaptation steps.
    """

    MOST = 16

    def __init__(self) -> None:
        self._meter = Meter()
        self._confusion: Confusion | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def due(self, logits: Tensor) -> bool:
        """Return whether adding this batch will trigger scoring."""
        return len(self._waiting) >= self.MOST - 1 or logits.dim() > 2

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        due = self.due(logits)
        self._waiting.append((logits, targets))
        if due:
            self._score()

    def _score(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        logits, targets = (torch.cat(each) for each in zip(*waiting, strict=True))
        if logits.dim() == 2:
            self._meter.update(logits, targets)
            return
        z = resized(logits, targets)
        if self._confusion is None:
            self._confusion = Confusion(z.shape[1])
        self._confusion.update(z.argmax(1), targets)
        known = targets.to(z.device, non_blocking=True).long()
        self._meter.update(z, known.masked_fill((known < 0) | (known >= z.shape[1]), IGNORE), ignore=IGNORE)

    def merged(self, total: Callable[[Tensor], Tensor]) -> Scores:
        """Return the scores of several processes, whose counts and sums `total` adds up."""
        merged = Scores()
        merged._meter.fine, merged._meter.edges = total(self.meter.fine), self.meter.edges
        if self.confusion is not None:
            merged._confusion = Confusion(self.confusion.classes)
            merged._confusion.pairs = total(self.confusion.pairs)
        return merged

    @property
    def meter(self) -> Meter:
        """Metrics of all predictions so far."""
        self._score()
        return self._meter

    @property
    def confusion(self) -> Confusion | None:
        """Confusion matrix so far; None for a classifier."""
        self._score()
        return self._confusion

    @property
    def score(self) -> float:
        """Main metric: accuracy, or mIoU."""
        confusion = self.confusion
        return self._meter.accuracy if confusion is None else confusion.miou

    def as_dict(self) -> dict[str, Any]:
        """All numbers by name."""
        numbers: dict[str, Any] = dict(self.meter.as_dict())
        if self.confusion is not None:
            numbers["miou"] = self.confusion.miou
            numbers["iou"] = [None if math.isnan(iou) else iou for iou in self.confusion.iou.tolist()]
        return numbers
