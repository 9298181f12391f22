"""Which statistics BatchNorm layers use inside a `with` block.

    norm = Normalisation(model)
    with norm.batch():
        logits = model(x)      # normalised by the mean and variance of x

Every mode also switches Dropout and DropPath off, and restores flags, buffers and hooks at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .padded_batchnorm import moments_of_first, standardised

__all__ = ["Mode", "Normalisation", "Record", "Statistics", "check_statistics", "flattened"]

Statistics: TypeAlias = tuple[Tensor, Tensor]
"""Mean and variance per channel."""
Record: TypeAlias = dict[nn.Module, list[Statistics]]
"""The statistics of each call of each layer."""
Mode: TypeAlias = Literal["source", "batch", "detached", "recorded", "replayed"] | float
"""How BatchNorm normalises. A number is the share of the batch's statistics, blended with the source's."""


def batch_moments(x: Tensor, correction: int = 0) -> Statistics:
    """Return mean and variance of each channel without a gradient; `correction=1` is the variance in the buffers."""
    values = x.detach() if x.dtype == torch.float64 else x.detach().float()
    if type(values) is Tensor and x.device.type == "cpu" and not _lone(x) and not torch.compiler.is_compiling():
        return _moments_on_cpu(values, correction)
    variance, mean = torch.var_mean(values, [0, *range(2, x.dim())], correction=0 if _lone(x) else correction)
    return mean, variance


def _moments_on_cpu(x: Tensor, correction: int) -> Statistics:
    """Return the same by BatchNorm's own kernel; `var_mean` is slow on a CPU."""
    mean, variance = x.new_zeros(2, x.shape[1]).unbind()
    torch.batch_norm_update_stats(x, mean, variance, 1.0)  # averages with a weight of one, corrected
    count = x.numel() // x.shape[1]
    return mean, variance if correction else variance * ((count - 1) / count)


def _lone(x: Tensor) -> bool:
    """Return whether there is one value per channel, which has no variance."""
    return x.numel() == x.shape[1]


def check_statistics(given: Mode | Sequence[Tensor]) -> Mode | Sequence[Tensor]:
    """Return statistics to predict with; raise if they are neither a mode nor a share nor tensors."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1:
        return float(given)
    chosen = isinstance(given, str) and given in ("source", "batch", "detached")
    measured = isinstance(given, (list, tuple)) and all(isinstance(each, Tensor) for each in given)
    if not (chosen or measured):
        raise ValueError(
            f'statistics={given!r}: expected "source", "batch" or "detached", the share of the batch in [0, 1], or the '
            "tensors of measure_statistics"
        )
    return given


def flattened(record: Record) -> tuple[list[Tensor], list[int]]:
    """Return a record as a list of tensors, and the number of calls of each layer."""
    calls = [*record.values()]
    return [t for statistics in calls for pair in statistics for t in pair], [len(statistics) for statistics in calls]


class Normalisation:
    """The ways in which the BatchNorm layers of a model can normalise. The layers are found once.

    >>> net = nn.Sequential(nn.BatchNorm1d(2, affine=False)).eval()
    >>> with Normalisation(net).batch():
    ...     net(torch.tensor([[1.0, 5.0], [3.0, 9.0]])).round()
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(model.modules())
        self.layers = tuple(m for m in self.modules if isinstance(m, _BatchNorm))
        self.counted = True
        """Whether the rows of the current pass count in the statistics; a rank without any runs one that does not."""
        self.calls: list[int] = []
        """The number of calls of each layer in a recorded pass."""

    @contextmanager
    def source(self) -> Iterator[None]:
        """Use the statistics collected in training: evaluation mode."""
        awake = [m for m in self.modules if m.training]
        for module in awake:
            module.training = False
        try:
            yield
        finally:
            for module in awake:
                module.training = True

    @contextmanager
    def batch(self, size: int | None = None) -> Iterator[None]:
        """Use the statistics of the current batch, with gradients through them; source buffers stay as they are.

        With `size=1`, a layer that sees one value per channel, which has no variance, uses its source statistics
        instead of failing.
        """
        hooks = []
        with self.source():
            tracked = [layer for layer in self.layers if layer.track_running_stats]
            for layer in self.layers:
                layer.training = True
                layer.track_running_stats = False  # otherwise torch overwrites the source buffers
            if size == 1:
                hooks = [layer.register_forward_pre_hook(_source_if_lone) for layer in tracked]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for layer in self.layers:
                    layer.training = False
                for layer in tracked:
                    layer.track_running_stats = True

    @contextmanager
    def padded(self, count: Tensor) -> Iterator[None]:
        """Use the statistics of the first `count` rows, with gradients through them; further rows are padding.

        Layers receive a standardised input, and statistics that leave it as it is.
        """
        moments: dict[nn.Module, Statistics] = {}

        def note(layer: _BatchNorm, x: Tensor) -> Statistics:
            mean, variance = moments[layer] = moments_of_first(x, count, (layer.running_mean, layer.running_var))
            return torch.zeros_like(mean), torch.full_like(variance, 1 - layer.eps)

        def standardise(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            assert isinstance(layer, _BatchNorm)  # noqa: S101
            x, *others = inputs
            return (standardised(x, *moments.pop(layer), layer.eps), *others)

        with self._using(note):
            hooks = [layer.register_forward_pre_hook(standardise) for layer in self.layers]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Use the statistics of the current batch, without gradients through them."""
        with self._using(self._source_or_batch):
            yield

    @contextmanager
    def blended(self, share: float) -> Iterator[None]:
        """Use (1 − share) of the source's statistics and `share` of the batch's, without gradients through them."""

        def blend(layer: _BatchNorm, x: Tensor) -> Statistics:
            mean, variance = self._moments(x, correction=1)
            if layer.running_mean is None or layer.running_var is None:
                return mean, variance
            return (
                layer.running_mean.to(mean.dtype).lerp(mean, share),
                layer.running_var.to(variance.dtype).lerp(variance, share),
            )

        with self._using(blend):
            yield

    @contextmanager
    def recorded(self) -> Iterator[Record]:
        """Use the batch's statistics without gradients through them, and record them for `replayed`."""
        record: Record = {layer: [] for layer in self.layers}

        def note(layer: _BatchNorm, x: Tensor) -> Statistics:
            record[layer].append(self._source_or_batch(layer, x))
            return record[layer][-1]

        with self._using(note):
            yield record

    def unflattened(self, tensors: Sequence[Tensor], calls: Sequence[int]) -> Record:
        """Invert `flattened`."""
        if len(tensors) != 2 * sum(calls):
            raise ValueError(
                f"expected {2 * sum(calls)} tensors of statistics, got {len(tensors)}: were they measured on another "
                "network?"
            )
        pairs = iter(zip(tensors[::2], tensors[1::2], strict=True))
        return {layer: [next(pairs) for _ in range(count)] for layer, count in zip(self.layers, calls, strict=True)}

    @contextmanager
    def replayed(self, record: Record) -> Iterator[None]:
        """Use the statistics of an earlier pass, so that some samples of its batch are normalised as before."""
        calls = {layer: iter(statistics) for layer, statistics in record.items()}
        with self._using(lambda layer, _: next(calls[layer])):
            yield

    def _moments(self, x: Tensor, correction: int = 0) -> Statistics:
        return batch_moments(x, correction)

    def _source_or_batch(self, layer: _BatchNorm, x: Tensor) -> Statistics:
        """Return the moments of a batch; the source's where there is one value per channel."""
        mean, variance = layer.running_mean, layer.running_var
        return self._moments(x) if mean is None or variance is None or not _lone(x) else (mean, variance)

    @contextmanager
    def _using(self, statistics: Callable[[_BatchNorm, Tensor], Statistics]) -> Iterator[None]:
        """Use evaluation mode, with `statistics(layer, input)` instead of the running buffers."""
        found = [(layer, layer.running_mean, layer.running_var) for layer in self.layers]
        source = {layer: (mean, variance) for layer, mean, variance in found}

        def use(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, _BatchNorm)  # noqa: S101
            layer.running_mean, layer.running_var = source[layer]
            mean, variance = statistics(layer, inputs[0])
            held = next((t for t in (layer.running_mean, layer.weight) if t is not None), mean)
            layer.running_mean, layer.running_var = mean.to(held.dtype), variance.to(held.dtype)

        with self.source():
            hooks = [layer.register_forward_pre_hook(use) for layer in self.layers]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for layer, mean, variance in found:
                    layer.running_mean, layer.running_var = mean, variance


def _source_if_lone(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    layer.training = not _lone(inputs[0])
