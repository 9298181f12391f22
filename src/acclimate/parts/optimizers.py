"""An optimizer's step under a condition that only the device knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["can_wait", "only_where", "start_momentum"]


def can_wait(optimizer: Optimizer | None) -> bool:
    """Whether the condition may stay on the device: so far for plain SGD, which every method here has by default."""
    return type(optimizer) is SGD and all(_plain(group) for group in optimizer.param_groups)


def _plain(group: dict[str, object]) -> bool:
    return not (group["dampening"] or group["differentiable"] or group["foreach"] or isinstance(group["lr"], Tensor))


def start_momentum(optimizer: Optimizer | None) -> None:
    """Momentum starts at nought instead of nothing, which is the same first step: m·0 + g."""
    if type(optimizer) is SGD:
        for group in optimizer.param_groups:
            if group["momentum"] and not group["dampening"]:
                for p in group["params"]:
                    if optimizer.state[p].get("momentum_buffer") is None:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


@contextmanager
def only_where(condition: bool | Tensor, optimizer: Optimizer) -> Iterator[None]:
    """A step inside changes parameters and momentum only where the condition holds; nobody reads it.

    The fused kernel leaves everything as it is where a gradient scaler has `found_inf`: a condition by another name.
    """
    if condition is True:
        yield
        return
    assert isinstance(condition, Tensor)  # noqa: S101
    start_momentum(optimizer)  # a first step that is left out would leave its memory unwritten
    asked = [group["fused"] for group in optimizer.param_groups]
    optimizer.found_inf = 1.0 - condition.float()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["fused"] = True
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        for group, fused in zip(optimizer.param_groups, asked, strict=True):
            group["fused"] = fused
