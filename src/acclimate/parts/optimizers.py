"""Optimizer steps under a condition that stays on the device, and optimizers that start fresh."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["Undo", "can_wait", "capturable", "fresh", "largest", "only_where", "refuse_closure", "start_momentum"]


def can_wait(optimizer: Optimizer | None) -> bool:
    """Return whether the condition of a step may stay on the device. Plain SGD, the default of most methods, can."""
    return type(optimizer) is SGD and all(_plain(group) for group in optimizer.param_groups)


def _plain(group: dict[str, Any]) -> bool:
    if group["dampening"] or group["differentiable"] or group["foreach"] or isinstance(group["lr"], Tensor):
        return False
    return bool(group["momentum"] < 1 and group["lr"] * group["weight_decay"] < 1)  # nothing grows by itself


def refuse_closure(method: str, optimizer: Optimizer | None) -> None:
    """Raise for an optimizer that evaluates the loss several times per step, such as LBFGS."""
    closure = None if optimizer is None else inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{method}: {type(optimizer).__name__} evaluates the loss several times per step, and an adapter does so "
            "once: use SGD or Adam"
        )


def largest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude in some tensors, without reading it; NaN where one has NaN.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor(2.0)])
    tensor(3.)
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.numel() and values.is_floating_point():
            kinds.setdefault((values.device, values.dtype), []).append(values)
    found = [torch.stack(torch._foreach_norm(values, torch.inf)).amax() for values in kinds.values()]
    if len(found) < 2:
        return found[0] if found else torch.zeros(())
    return torch.stack([each.to(found[0].device, torch.float32) for each in found]).amax()


def start_momentum(optimizer: Optimizer | None) -> None:
    """Initialise momentum to zero, so the first step is unchanged: m·0 + g."""
    if type(optimizer) is SGD:
        for group in optimizer.param_groups:
            if group["momentum"] and not group["dampening"]:
                for p in group["params"]:
                    if optimizer.state[p].get("momentum_buffer") is None:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


@contextmanager
def only_where(condition: bool | Tensor, optimizer: Optimizer) -> Iterator[None]:
    """Let a step of plain SGD inside change parameters and momentum only where the condition holds, without reading it.

    The fused kernel leaves everything as it is where a gradient scaler has `found_inf`, so the condition is passed
    under that name.
    """
    if condition is True:
        yield
        return
    assert isinstance(condition, Tensor)  # noqa: S101
    start_momentum(optimizer)  # a skipped first step would leave momentum uninitialised
    asked = [group["fused"] for group in optimizer.param_groups]
    optimizer.found_inf = 1.0 - condition.float()  # type: ignore[attr-defined]
    try:
        for group in optimizer.param_groups:
            group["fused"] = True
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        for group, fused in zip(optimizer.param_groups, asked, strict=True):
            group["fused"] = fused


class Undo:
    """The parameters and the state of an optimizer before a step, so that any optimizer's step can be undone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._before = {key: tensor.clone() for key, tensor in self._tensors().items()}

    def sound(self) -> Tensor:
        """Return whether everything is finite now, without reading it."""
        return largest(self._tensors().values()).isfinite()

    @torch.no_grad()
    def unless(self, condition: bool | Tensor) -> bool | Tensor:
        """Undo the step unless the condition holds. Return the condition: read, except in a recording."""
        if isinstance(condition, Tensor) and not (condition.is_cuda and torch.cuda.is_current_stream_capturing()):
            condition = bool(condition)
        if condition is True:
            return True
        for (place, name), tensor in self._tensors().items():
            before = self._before.get((place, name))
            if isinstance(condition, Tensor):
                tensor.copy_(torch.where(condition, tensor, torch.zeros_like(tensor) if before is None else before))
            elif before is None:
                del self.optimizer.state[self._parameters[place]][name]
            else:
                tensor.copy_(before)
        return condition

    def _tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return parameters and state by place."""
        found = {(place, ""): p.detach() for place, p in enumerate(self._parameters)}
        for place, p in enumerate(self._parameters):
            state = self.optimizer.state.get(p, {})
            found |= {(place, name): value for name, value in state.items() if isinstance(value, Tensor)}
        return found


@contextmanager
def fresh(optimizer: Optimizer, rate: float = 1.0) -> Iterator[None]:
    """Use an optimizer as if it were new inside the block, with its learning rates times `rate`; forget its state."""
    optimizer.state.clear()
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * rate
        yield
    finally:
        optimizer.state.clear()
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr


@contextmanager
def capturable(optimizer: Optimizer | None) -> Iterator[None]:
    """Let Adam count its steps on the device inside the block, as a recorded step needs it."""
    groups = [] if optimizer is None else [group for group in optimizer.param_groups if "capturable" in group]
    asked = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, before in zip(groups, asked, strict=True):
            group["capturable"] = before
