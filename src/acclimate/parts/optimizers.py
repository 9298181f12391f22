"""Optimizer steps under a condition that stays on the device, and optimizers that start fresh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["can_wait", "capturable", "fresh", "only_where", "start_momentum"]


def can_wait(optimizer: Optimizer | None) -> bool:
    """Return whether the condition of a step may stay on the device. Plain SGD, the default of most methods, can."""
    return type(optimizer) is SGD and all(_plain(group) for group in optimizer.param_groups)


def _plain(group: dict[str, object]) -> bool:
    return not (group["dampening"] or group["differentiable"] or group["foreach"] or isinstance(group["lr"], Tensor))


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
    """Let a step inside change parameters and momentum only where the condition holds, without reading it.

    The fused kernel of SGD leaves everything as it is where a gradient scaler has `found_inf`, so the condition is
    passed under that name. The step of another optimizer is undone.
    """
    if condition is True:
        yield
        return
    assert isinstance(condition, Tensor)  # noqa: S101
    if not can_wait(optimizer):
        found = {key: tensor.clone() for key, tensor in _tensors(optimizer).items()}
        yield
        with torch.no_grad():
            for key, tensor in _tensors(optimizer).items():
                tensor.copy_(torch.where(condition, tensor, found.get(key, torch.zeros_like(tensor))))
        return
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


def _tensors(optimizer: Optimizer) -> dict[tuple[int, str], Tensor]:
    """Return parameters and state by place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        (place, name): value
        for place, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    return {**{(place, ""): p.detach() for place, p in enumerate(parameters)}, **state}


@contextmanager
def fresh(optimizer: Optimizer, rate: float = 1.0) -> Iterator[None]:
    """Use an optimizer as if it were new inside the block, with its learning rates times `rate`."""
    optimizer.state.clear()
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * rate
        yield
    finally:
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
