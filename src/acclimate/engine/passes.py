"""One pass of a network: how BatchNorm normalises, which sub-network runs, and with which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..checks import read_logits
from ..parts.batchnorm import Mode, Normalisation, Record, flattened
from ..parts.ranks import RankError
from ..parts.subnetwork import Sample, SubNetworks
from ..parts.world import Share

__all__ = ["Body", "Pass"]


@dataclass(frozen=True)
class Pass:
    """What a pass does. Equal passes run the same operations, so a pass is the key of its own compiled code.

    Tensors are inputs of the code and do not take part in the comparison.
    """

    statistics: Mode
    subnetworks: SubNetworks | None = None
    parameters: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Used instead of the network's own."""
    replayed: Sequence[Tensor] = field(default=(), compare=False)
    """The statistics of an earlier pass, for `statistics="replayed"`."""
    sample: Sample | None = field(default=None, compare=False)
    """The sub-network that was sampled."""
    share: Share | None = field(default=None, compare=False)
    """How many rows are samples, and their places in those of all ranks; further rows are padding. None: all."""
    count: Tensor | None = field(default=None, compare=False)
    """How many of the first rows count in the batch's statistics, for code that serves any number. None: all."""

    @property
    def couples(self) -> bool:
        """Whether a gradient flows between the samples of a batch, in a network with BatchNorm."""
        return self.statistics == "batch"

    @property
    def counted(self) -> bool:
        """Whether any row is a sample. A rank without samples runs a row of padding, to take part in messages."""
        return self.share is None or self.share.size > 0

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The tensors besides images and weights; the first `batched` of them have one row per image."""
        scales = () if self.sample is None or self.sample.scales is None else (self.sample.scales,)
        return (*scales, *self.replayed, *([] if self.count is None else [self.count]))

    @property
    def batched(self) -> int:
        """How many of the given tensors have one row per image."""
        return len(self.given) - len(self.replayed) - (self.count is not None)

    @contextmanager
    def entered(self, normalisation: Normalisation, size: int, given: Sequence[Tensor]) -> Iterator[Record | None]:
        """Put the network into the state that this pass needs; yield the record of the statistics, if there is one."""
        scales, replayed = given[: self.batched], given[self.batched :]
        with ExitStack() as stack:
            if self.subnetworks is not None and self.sample is not None:
                sample = replace(self.sample, scales=scales[0]) if scales else self.sample
                stack.enter_context(self.subnetworks.attached(lambda: sample))
            if self.statistics == "recorded":
                yield stack.enter_context(normalisation.recorded())
                return
            if self.statistics == "replayed":
                context = normalisation.replayed(normalisation.unflattened(replayed, normalisation.calls))
            elif self.statistics == "batch":
                context = normalisation.batch(size) if self.count is None else normalisation.padded(given[-1])
            elif self.statistics == "detached":
                context = normalisation.detached()
            elif self.statistics == "source":
                context = normalisation.source()
            else:
                context = normalisation.blended(self.statistics)
            stack.enter_context(context)
            yield None


class Body(nn.Module):
    """A pass as a module, so that `functional_call` can give its network other tensors."""

    def __init__(self, network: nn.Module, normalisation: Normalisation, pass_: Pass) -> None:
        super().__init__()
        self.network, self.normalisation, self.pass_ = network, normalisation, pass_

    def forward(self, x: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the logits, and the statistics where they are recorded."""
        size = x.shape[0]  # len(x) would fix a symbolic batch size
        with self.pass_.entered(self.normalisation, size, given) as record:
            logits = _logits(self.network, x)
        if record is None:
            return (logits,)
        statistics, self.normalisation.calls = flattened(record)
        return (logits, *statistics)

    def run(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run eagerly, with `tensors` instead of the network's own."""
        if not tensors:
            return self.forward(x, self.pass_.given)
        named = {f"network.{name}": tensor for name, tensor in tensors.items()}
        output: tuple[Tensor, ...] = functional_call(self, named, (x, self.pass_.given))
        return output


def _logits(network: nn.Module, x: Tensor) -> Tensor:
    try:
        output = network(x)
    except (torch.OutOfMemoryError, RankError):
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the model failed on a batch of shape {tuple(x.shape)} ({x.dtype}): {error}") from error
    return read_logits(output, x)
