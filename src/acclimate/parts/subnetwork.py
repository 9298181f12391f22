"""Stochastic depth anywhere: sub-networks of a residual network, also of one that was built without drop path.

    with subnetwork(model, drop=0.2, generator=g):
        logits = model(x)          # some residual branches left out

Each forward pass in the block draws anew. A branch that stays is scaled by 1/(1 − r), so that the expected output is
the full branch. `per="sample"` masks each sample's branch; `per="batch"` leaves branches out for the whole batch and
does not run them, which saves their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from .branches import Branch, Names, find_branches

__all__ = ["Draw", "StochasticDepth", "subnetwork"]


@contextmanager
def subnetwork(
    model: nn.Module,
    drop: float,
    *,
    schedule: Literal["linear", "uniform"] = "linear",
    per: Literal["sample", "batch"] = "sample",
    generator: Generator | None = None,
    branches: Names | None = None,
    blocks: Names | None = None,
) -> Iterator[None]:
    """Sub-networks of `model` by stochastic depth, for the length of a `with` block.

    Args:
        model: a residual network. timm's, torchvision's and transformers' usual families are known.
        drop: the largest drop rate, in [0, 1).
        schedule: `"linear"`, from 0 at the first block to `drop` at the last, or `"uniform"`.
        per: `"sample"`, or `"batch"`, which really skips what it drops.
        generator: on any device: on the CPU, every device draws the same; torch's own where it is None.
        branches: for a network that is not known: names of modules whose output is added to the identity.
        blocks: or names of modules that return x + f(x).
    """
    with StochasticDepth(model, branches, blocks).sampled(drop, schedule=schedule, per=per, generator=generator):
        yield


class StochasticDepth:
    """A model's residual branches, looked up once, and the ways to leave them out."""

    def __init__(self, model: nn.Module, branches: Names | None = None, blocks: Names | None = None) -> None:
        self.model = model
        self.branches = find_branches(model, branches, blocks)
        self._known = [_Known() for _ in self.branches]

    def rates(self, drop: float, schedule: Literal["linear", "uniform"] = "linear") -> list[float]:
        """The drop rate of each branch; branches of one block share it."""
        if not 0 <= drop < 1:
            raise ValueError(f"drop={drop}: expected a rate in [0, 1)")
        if schedule not in ("linear", "uniform"):
            raise ValueError(f'schedule={schedule!r}: expected "linear" or "uniform"')
        last = max(branch.block for branch in self.branches)
        if schedule == "uniform" or last == 0:
            return [drop] * len(self.branches)
        return [drop * branch.block / last for branch in self.branches]

    @contextmanager
    def sampled(
        self,
        drop: float,
        *,
        schedule: Literal["linear", "uniform"] = "linear",
        per: Literal["sample", "batch"] = "sample",
        generator: Generator | None = None,
    ) -> Iterator[Draw]:
        """See `subnetwork`."""
        if per not in ("sample", "batch"):
            raise ValueError(f'per={per!r}: expected "sample" or "batch"')
        rates = self.rates(drop, schedule)
        draw = Draw([rate for rate in rates if rate], per, generator)
        acting: list[_Mask | _Skip] = []
        for branch, rate, known in zip(self.branches, rates, self._known, strict=True):
            if rate:
                index = len(acting)
                acting.append(_Mask(branch, draw, index) if per == "sample" else _Skip(branch, draw, index, known))
        start = self.model.register_forward_pre_hook(draw, with_kwargs=True)
        try:
            for act in acting:
                act.attach()
            yield draw
        finally:
            start.remove()
            for act in acting:
                act.detach()


class Draw:
    """Which branches stay, drawn anew at each forward pass of the model."""

    def __init__(self, rates: list[float], per: Literal["sample", "batch"], generator: Generator | None) -> None:
        self.rates, self.per, self.generator = rates, per, generator
        self.batch = 0
        self.count = 0
        self.scales: Tensor | None = None  # (B, branches): 0 where a sample's branch is left out, else 1/(1 − r)
        self.given = False
        self.real: int | None = None  # how many samples of the next batch count, where not all do
        self.stays: list[bool] = []

    def __call__(self, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Before a pass of the model."""
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.batch = x.shape[0]
        self.count += 1
        if self.per == "batch":
            chance = torch.rand(len(self.rates), generator=self.generator, device=self._device)
            self.stays = [c >= rate for c, rate in zip(chance.tolist(), self.rates, strict=True)]
        elif not self.given:
            self.scales = self.scales_for(x)

    def scales_for(self, x: Tensor) -> Tensor:
        """A draw for a batch, on its device."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        scales = self.scales_of(len(x) if self.real is None else self.real)
        if self.real is not None:  # what was added to fill up a batch draws nothing
            scales = torch.cat([scales, scales.new_ones(len(x) - self.real, len(self.rates))])
            self.real = None
        return scales.to(x.device, dtype, non_blocking=True)

    def scales_of(self, count: int) -> Tensor:
        """A draw for so many samples."""
        rates = torch.tensor(self.rates, device=self._device, dtype=torch.float64).unsqueeze(1)
        chance = torch.rand(len(self.rates), count, generator=self.generator, device=self._device)
        return ((chance >= rates) / (1 - rates)).T.contiguous()

    @contextmanager
    def using(self, scales: Tensor) -> Iterator[None]:
        """Passes inside take this draw."""
        self.scales, self.given = scales, True
        try:
            yield
        finally:
            self.given = False  # the scales stay: activation checkpoints run branches again, in the backward

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.generator is None else self.generator.device


class _Mask:
    """Leaves a branch out sample by sample: a forward hook on its last module."""

    def __init__(self, branch: Branch, draw: Draw, index: int) -> None:
        self.branch, self.draw, self.index = branch, draw, index
        self.hook: RemovableHandle | None = None

    def attach(self) -> None:
        self.hook = self.branch.last.register_forward_hook(self)

    def detach(self) -> None:
        if self.hook is not None:
            self.hook.remove()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        y = _tensor_of(output)
        if self.draw.scales is None or y.shape[0] != self.draw.batch:
            raise ValueError(
                f"branch {self.branch.name!r} gave {len(y)} rows for a batch of {self.draw.batch}: call the model "
                "itself inside subnetwork(), and name branches whose first dimension is the batch"
            )
        scale = self.draw.scales[:, self.index].to(y.dtype).view(-1, *[1] * (y.dim() - 1))
        if not self.branch.whole:
            return _with_tensor(output, y * scale)
        x = _tensor_of(args)
        return _with_tensor(output, x + scale * (y - x)) if x.shape == y.shape else output


@dataclass(frozen=True)
class _Zeros:
    """Zeros like what a module of a branch gives, for when it is not run."""

    shape: torch.Size
    dtype: torch.dtype
    memory: torch.memory_format
    others: int | None  # how much more there is in the tuple, where it gives one

    @classmethod
    def like(cls, output: Any) -> _Zeros:
        y = _tensor_of(output)
        last = y.dim() == 4 and y.shape[1] > 1 and y.stride(1) == 1
        memory = torch.channels_last if last else torch.contiguous_format
        return cls(y.shape[1:], y.dtype, memory, len(output) - 1 if isinstance(output, tuple) else None)

    def instead_of(self, x: Tensor, *, fresh: bool) -> Any:
        """For an input x; where x is zeros of the right kind already, and need not be `fresh`, it will do."""
        y = x
        if fresh or x.shape[1:] != self.shape or x.dtype != self.dtype:
            y = torch.empty((len(x), *self.shape), dtype=self.dtype, device=x.device, memory_format=self.memory).zero_()
        return y if self.others is None else (y, *[None] * self.others)


Kind: TypeAlias = tuple[torch.Size, torch.dtype, bool]  # of an input sample: shape, type, and whether under autocast


@dataclass
class _Known:
    """What the modules of a branch have been seen to give, by position and kind of input."""

    zeros: dict[tuple[int, Kind], _Zeros] = field(default_factory=dict)
    through: dict[Kind, torch.Size] = field(default_factory=dict)
    """The shape that came out of the whole branch."""


class _Skip:
    """Leaves a branch out for the whole batch, without running it.

    A hook cannot keep a module from running, so the modules' `forward` is taken over inside the `with` block: each
    gives zeros in the place of its output. A branch has to run once on a shape of input before it is known what these
    look like; until then it is run and multiplied by zero.
    """

    def __init__(self, branch: Branch, draw: Draw, index: int, known: _Known) -> None:
        self.branch, self.draw, self.index, self.known = branch, draw, index, known
        self.forwards: list[tuple[Callable[..., Any], bool]] = []  # and whether it was the instance's own
        self.x = torch.empty(0)
        self.kind: Kind = (torch.Size(), torch.float32, False)
        self.skipping = False
        self.decided = 0

    def attach(self) -> None:
        for position, module in enumerate(self.branch.modules):
            self.forwards.append((module.forward, "forward" in vars(module)))
            module.forward = partial(self._forward, position)

    def detach(self) -> None:
        for module, (forward, own) in zip(self.branch.modules, self.forwards, strict=False):
            if own:
                module.forward = forward
            else:
                del module.forward

    def _forward(self, position: int, *args: Any, **kwargs: Any) -> Any:
        x = _tensor_of((*args, *kwargs.values()))
        stays, last = self.draw.stays[self.index], position == len(self.forwards) - 1
        kind = (x.shape[1:], x.dtype, torch.is_autocast_enabled(x.device.type))
        if position == 0:
            self.x, self.kind = x, kind
            if self.decided != self.draw.count:  # an activation checkpoint that runs again must do as the first did
                self.skipping = not stays and kind in self.known.through and self._droppable()
                self.decided = self.draw.count
        if self.skipping:
            if self.branch.whole:
                return x.clone()  # what follows may work in place
            return self.known.zeros[position, kind].instead_of(x, fresh=last or position == 0)
        output = self.forwards[position][0](*args, **kwargs)
        if (position, kind) not in self.known.zeros:
            self.known.zeros[position, kind] = _Zeros.like(output)
        if not last:
            return output
        y = _tensor_of(output)
        self.known.through[self.kind] = y.shape[1:]
        if not self._droppable():
            return output
        scale = 1 / (1 - self.draw.rates[self.index]) if stays else 0.0
        return _with_tensor(output, self.x + scale * (y - self.x) if self.branch.whole else scale * y)

    def _droppable(self) -> bool:
        """A whole block that changes the shape cannot be left out."""
        return not self.branch.whole or self.known.through[self.kind] == self.x.shape[1:]


def _tensor_of(values: Any) -> Tensor:
    """The tensor, or the first one in a tuple."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, tuple):
        for value in values:
            if isinstance(value, Tensor):
                return value
    raise TypeError(f"a residual branch takes and gives a tensor, or a tuple that starts with one; got {type(values)}")


def _with_tensor(output: Any, y: Tensor) -> Any:
    """The output with its tensor replaced."""
    return (y, *output[1:]) if isinstance(output, tuple) else y
