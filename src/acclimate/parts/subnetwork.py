"""Stochastic depth on any residual network, also on one that was built without drop path.

    with subnetwork(model, drop=0.2, generator=g):
        logits = model(x)          # some residual branches are dropped

Each forward pass in the block samples a new sub-network. A branch that stays is scaled by 1/(1 − r), so that its
expected output is the full branch. `per="sample"` masks the branch of each sample; `per="batch"` drops branches for the
whole batch and does not run them, which saves their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from .branches import Branch, Names, find_branches
from .world import Share

__all__ = ["Sample", "StochasticDepth", "SubNetworks", "subnetwork"]

Schedule: TypeAlias = Literal["linear", "uniform"]
Per: TypeAlias = Literal["sample", "batch"]


@contextmanager
def subnetwork(
    model: nn.Module,
    drop: float,
    *,
    schedule: Schedule = "linear",
    per: Per = "sample",
    generator: Generator | None = None,
    branches: Names | None = None,
    blocks: Names | None = None,
) -> Iterator[None]:
    """Run sub-networks of `model` inside a `with` block, sampled by stochastic depth.

    >>> from acclimate.bench.own_networks import SmallResNet
    >>> net = SmallResNet().eval()
    >>> with subnetwork(net, drop=0.2, generator=Generator().manual_seed(0)):
    ...     logits = net(torch.rand(4, 1, 32, 32))

    Args:
        model: a residual network. The usual families of timm, torchvision and transformers are known.
        drop: the largest drop rate, in [0, 1).
        schedule: `"linear"`, from 0 at the first block to `drop` at the last, or `"uniform"`.
        per: `"sample"`, or `"batch"`, which skips the computation of dropped branches.
        generator: on any device. On the CPU, every device samples the same sub-networks. None uses torch's own.
        branches: for an unknown network: names of the modules whose output is added to the identity.
        blocks: or names of the modules that return x + f(x).
    """
    with StochasticDepth(model, branches, blocks).sampled(drop, schedule=schedule, per=per, generator=generator):
        yield


class StochasticDepth:
    """The residual branches of a model, found once.

    >>> from acclimate.bench.own_networks import SmallViT
    >>> StochasticDepth(SmallViT(depth=3)).rates(0.2)
    [0.0, 0.0, 0.1, 0.1, 0.2, 0.2]
    """

    def __init__(self, model: nn.Module, branches: Names | None = None, blocks: Names | None = None) -> None:
        self.model = model
        self.branches = find_branches(model, branches, blocks)
        self._outputs = [_Outputs() for _ in self.branches]

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same branches, perhaps in copies of one network."""
        return isinstance(other, StochasticDepth) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    @property
    def _names(self) -> tuple[tuple[str, int, int, bool], ...]:
        return tuple((branch.name, branch.block, len(branch.modules), branch.whole) for branch in self.branches)

    def rates(self, drop: float, schedule: Schedule = "linear") -> list[float]:
        """Return the drop rate of each branch; branches of one block share it."""
        if not 0 <= drop < 1:
            raise ValueError(f"drop={drop}: expected a rate in [0, 1)")
        if schedule not in ("linear", "uniform"):
            raise ValueError(f'schedule={schedule!r}: expected "linear" or "uniform"')
        last = max(branch.block for branch in self.branches)
        if schedule == "uniform" or last == 0:
            return [drop] * len(self.branches)
        return [drop * branch.block / last for branch in self.branches]

    def subnetworks(self, drop: float, *, schedule: Schedule = "linear", per: Per = "sample") -> SubNetworks:
        """Return the distribution of sub-networks with this drop ratio."""
        if per not in ("sample", "batch"):
            raise ValueError(f'per={per!r}: expected "sample" or "batch"')
        return SubNetworks(self, tuple(self.rates(drop, schedule)), per)

    @contextmanager
    def sampled(
        self,
        drop: float,
        *,
        schedule: Schedule = "linear",
        per: Per = "sample",
        generator: Generator | None = None,
    ) -> Iterator[None]:
        """See `subnetwork`."""
        subnetworks = self.subnetworks(drop, schedule=schedule, per=per)
        latest = Sample()

        def sample_again(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            nonlocal latest
            x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            latest = subnetworks.sample(x, generator)

        hook = self.model.register_forward_pre_hook(sample_again, with_kwargs=True)
        try:
            with subnetworks.attached(lambda: latest):
                yield
        finally:
            hook.remove()


@dataclass
class Sample:
    """One sampled sub-network, or one per sample of a batch."""

    scales: Tensor | None = None
    """(B, branches): 0 where a sample drops the branch, else 1/(1 − r)."""
    stays: tuple[bool, ...] = ()
    """Which branches stay, with `per="batch"`."""
    skipped: dict[int, bool] = field(default_factory=dict)
    """Which branches were not run. An activation checkpoint that runs again must skip the same ones."""


@dataclass(frozen=True)
class SubNetworks:
    """A distribution of sub-networks: the drop rate of each branch. Equal ones run the same operations."""

    depth: StochasticDepth
    rates: tuple[float, ...]
    per: Per

    @property
    def droppable(self) -> list[float]:
        """Rates above zero; only these branches take part in a sample."""
        return [rate for rate in self.rates if rate]

    def sample(self, x: Tensor, generator: Generator | None, share: Share | None = None) -> Sample:
        """Sample for a batch, on its device; rows that are not in its share are padding and keep all branches."""
        if self.per == "batch":
            chance = torch.rand(len(self.droppable), generator=generator, device=_device(generator))
            return Sample(stays=tuple(c >= rate for c, rate in zip(chance.tolist(), self.droppable, strict=True)))
        share = share or Share(0, len(x), len(x))
        scales = share.of(self.scales(share.total, generator))
        if len(scales) < len(x):
            scales = torch.cat([scales, scales.new_ones(len(x) - len(scales), len(self.droppable))])
        return Sample(scales.to(x.device, scale_type(x), non_blocking=True))

    def scales(self, count: int, generator: Generator | None) -> Tensor:
        """Sample the scales of `count` samples: (count, branches)."""
        device = _device(generator)
        rates = torch.tensor(self.droppable, device=device, dtype=torch.float64).unsqueeze(1)
        chance = torch.rand(len(rates), count, generator=generator, device=device)
        scales = ((chance >= rates) / (1 - rates)).T
        return scales.clone(memory_format=torch.contiguous_format)  # the same strides for one branch: no recompilation

    @contextmanager
    def attached(self, current: Callable[[], Sample]) -> Iterator[None]:
        """Drop branches as the current sample says, inside a `with` block."""
        act = _mask if self.per == "sample" else _skip
        index = 0
        with ExitStack() as stack:
            for branch, rate, outputs in zip(self.depth.branches, self.rates, self.depth._outputs, strict=True):
                if rate:
                    stack.enter_context(act(branch, index, rate, current, outputs))
                    index += 1
            yield


def scale_type(x: Tensor) -> torch.dtype:
    """Return the type that scales have for a batch."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _device(generator: Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


@contextmanager
def _mask(branch: Branch, index: int, _: float, current: Callable[[], Sample], __: _Outputs) -> Iterator[None]:
    """Drop a branch sample by sample: a forward hook on its last module."""

    def scaled(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        y, scales = _tensor_of(output), current().scales
        if scales is None or y.shape[0] != scales.shape[0]:
            raise ValueError(
                f"branch {branch.name!r} gave {len(y)} rows for a batch of {0 if scales is None else len(scales)}: "
                "call the model itself inside subnetwork(), and name branches whose first dimension is the batch"
            )
        scale = scales[:, index].to(y.dtype).view(-1, *[1] * (y.dim() - 1))
        if not branch.whole:
            return _with_tensor(output, y * scale)
        x = _tensor_of(args)
        return _with_tensor(output, x + scale * (y - x)) if x.shape == y.shape else output

    hook = branch.last.register_forward_hook(scaled)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class _Zeros:
    """Zeros shaped like the output of a module, for when it is not run."""

    shape: torch.Size
    dtype: torch.dtype
    memory: torch.memory_format
    others: int | None
    """How many more values there are, where the module returns a tuple."""

    @classmethod
    def like(cls, output: Any) -> _Zeros:
        y = _tensor_of(output)
        last = y.dim() == 4 and y.shape[1] > 1 and y.stride(1) == 1
        memory = torch.channels_last if last else torch.contiguous_format
        return cls(y.shape[1:], y.dtype, memory, len(output) - 1 if isinstance(output, tuple) else None)

    def instead_of(self, x: Tensor, *, fresh: bool) -> Any:
        """Return zeros for an input x; x itself if it is such zeros already and need not be `fresh`."""
        y = x
        if fresh or x.shape[1:] != self.shape or x.dtype != self.dtype:
            y = torch.empty((len(x), *self.shape), dtype=self.dtype, device=x.device, memory_format=self.memory).zero_()
        return y if self.others is None else (y, *[None] * self.others)


Kind: TypeAlias = tuple[torch.Size, torch.dtype, bool]
"""The kind of an input: shape of a sample, type, and whether autocast is on."""


@dataclass
class _Outputs:
    """What the modules of a branch have returned so far, by position and kind of input."""

    zeros: dict[tuple[int, Kind], _Zeros] = field(default_factory=dict)
    through: dict[Kind, torch.Size] = field(default_factory=dict)
    """The output shape of the whole branch."""


@contextmanager
def _skip(branch: Branch, index: int, rate: float, current: Callable[[], Sample], outputs: _Outputs) -> Iterator[None]:
    """Drop a branch for the whole batch without running it.

    A hook cannot keep a module from running, so `forward` of the modules is replaced inside the block: each returns
    zeros instead of its output. Their shape is known once the branch has run on such an input; until then it runs and
    is multiplied by zero.
    """
    skip = _Skip(branch, index, rate, current, outputs)
    found = [(module, module.forward, "forward" in vars(module)) for module in branch.modules]
    try:
        for position, (module, forward, _) in enumerate(found):
            module.forward = partial(skip, position, forward)
        yield
    finally:
        for module, forward, own in found:
            if own:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


class _Skip:
    """The replaced `forward` of a branch's modules."""

    def __init__(
        self, branch: Branch, index: int, rate: float, current: Callable[[], Sample], outputs: _Outputs
    ) -> None:
        self.branch, self.index, self.rate, self.current, self.outputs = branch, index, rate, current, outputs
        self.x = torch.empty(0)
        self.kind: Kind = (torch.Size(), torch.float32, False)

    def __call__(self, position: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, sample = _tensor_of((*args, *kwargs.values())), self.current()
        stays, last = sample.stays[self.index], position == len(self.branch.modules) - 1
        kind = (x.shape[1:], x.dtype, torch.is_autocast_enabled(x.device.type))
        if position == 0:
            self.x, self.kind = x, kind
            if self.index not in sample.skipped:
                sample.skipped[self.index] = not stays and kind in self.outputs.through and self._droppable()
        if sample.skipped[self.index]:
            if self.branch.whole:
                return x.clone()  # the next module may work in place
            return self.outputs.zeros[position, kind].instead_of(x, fresh=last or position == 0)
        output = forward(*args, **kwargs)
        if (position, kind) not in self.outputs.zeros:
            self.outputs.zeros[position, kind] = _Zeros.like(output)
        if not last:
            return output
        y = _tensor_of(output)
        self.outputs.through[self.kind] = y.shape[1:]
        if not self._droppable():
            return output
        scale = 1 / (1 - self.rate) if stays else 0.0
        return _with_tensor(output, self.x + scale * (y - self.x) if self.branch.whole else scale * y)

    def _droppable(self) -> bool:
        """Whether the branch keeps the shape; a whole block that does not cannot be dropped."""
        return not self.branch.whole or self.outputs.through[self.kind] == self.x.shape[1:]


def _tensor_of(values: Any) -> Tensor:
    """Return the tensor, or the first one in a tuple."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, tuple):
        for value in values:
            if isinstance(value, Tensor):
                return value
    raise TypeError(f"a residual branch takes and returns a tensor, or a tuple with one in front; got {type(values)}")


def _with_tensor(output: Any, y: Tensor) -> Any:
    """Return the output with its tensor replaced."""
    return (y, *output[1:]) if isinstance(output, tuple) else y
