"""A counter on the host that is part of an adapter's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Counter"]


class Counter(nn.Module):
    """A number that is saved and reset with the adapter but stays on the CPU, so that reading it never waits."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))

    def add(self, number: int) -> None:
        """Add in place: recorded steps know state by its address."""
        self.value += number

    def __int__(self) -> int:
        return int(self.value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: ARG002
        return self
