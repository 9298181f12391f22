"""How parameters learn: which gradients are on, one optimizer step, and an episode that is undone at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..engine.execution import own_gradients
from ..parts.copying import copy_all
from ..parts.optimizers import Undo, can_wait, largest, only_where

__all__ = ["finite", "gradients_on", "optimizer_step", "restored_afterwards", "shortened"]

_LARGEST = 1e18
"""Adam squares gradients: its state would overflow above this."""
_MOST = torch.finfo(torch.float32).max / 10
"""A parameter could overflow above this: momentum adds up to ten gradients."""


@contextmanager
def gradients_on(
    adapted: Sequence[Parameter], frozen: Iterable[Parameter], *, parameters: bool = True
) -> Iterator[None]:
    """Turn gradients on for the adapted parameters only, also inside the caller's no_grad or inference_mode.

    With `parameters=False` not even those have one: a pass is then differentiated with respect to its images only.
    """
    wrong = [p for p in frozen if p.requires_grad] + [p for p in adapted if p.requires_grad != parameters]
    flags = [p.requires_grad for p in wrong]
    with torch.inference_mode(False), torch.enable_grad():
        try:
            for p, flag in zip(wrong, flags, strict=True):
                p.requires_grad_(not flag)
            yield
        finally:
            for p, flag in zip(wrong, flags, strict=True):
                p.requires_grad_(flag)


def finite(gradients: Sequence[Tensor | None], groups: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return whether gradients are small enough for a step of an optimizer's groups, without reading it."""
    rates: float | Tensor = sum(group["lr"] for group in groups if group.get("lr") is not None)
    bound = _LARGEST / (1.0 + rates * _LARGEST / _MOST)
    return largest([g for g in gradients if g is not None]) < bound


def optimizer_step(
    optimizer: Optimizer,
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor | None],
    when: bool | Tensor,
    longest: float | None = None,
) -> bool | Tensor:
    """Make one step with these gradients if the condition holds. A parameter without a gradient does not change.

    Return whether it was made: a step that would leave NaN or infinity in a parameter or in the optimizer is not. One
    that is longer than `longest` is shortened.
    """
    with own_gradients(parameters), nullcontext() if longest is None else shortened(parameters, longest):
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if can_wait(optimizer):
            with only_where(when, optimizer):
                optimizer.step()
            return when
        undo = Undo(optimizer)
        optimizer.step()
        return undo.unless(undo.sound() & when)


@contextmanager
def shortened(parameters: Sequence[Parameter], longest: float) -> Iterator[None]:
    """Shorten the change of the parameters inside to this length, without reading it; shorter ones stay as they are."""
    values = [p.detach() for p in parameters]
    before = [p.clone() for p in values]
    yield
    moved = torch._foreach_sub(values, before)
    length = torch.stack([norm.double() for norm in torch._foreach_norm(moved)]).square().sum().sqrt()
    for p, start, step in zip(values, before, moved, strict=True):
        p.copy_(torch.where(length > longest, start + step * (longest / length).to(p.dtype), p))


@contextmanager
def restored_afterwards(parameters: Sequence[Parameter], optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the parameters and clear the optimizer at the end: nothing learned inside remains."""
    found = [p.detach().clone() for p in parameters]
    try:
        yield
    finally:
        if optimizer is not None:
            optimizer.state.clear()
        copy_all([p.detach() for p in parameters], found)
