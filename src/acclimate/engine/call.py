"""One pass of a network: its Python, and the tensors that it is a function of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["Body", "Call", "Pass"]

Body: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]
"""A pass: of a batch and whatever other tensors it needs; the logits come first in what it returns."""


class Pass(nn.Module):
    """A body as a module, so that `functional_call` can give its network other tensors."""

    def __init__(self, network: nn.Module, body: Body) -> None:
        super().__init__()
        self.network = network
        self.body = body

    def forward(self, x: Tensor, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The body."""
        return self.body(x, given)


@dataclass(frozen=True)
class Call:
    """One pass: what it runs on what."""

    kind: str
    body: Body
    x: Tensor
    tensors: Mapping[str, Tensor]
    """In the place of the network's own."""
    given: Sequence[Tensor]
    batched: int
    """How many of those given have the batch as their first dimension."""
    fresh: bool
    """The batch size is a new one at each call."""
    selective: bool

    @property
    def dynamic(self) -> bool:
        """It is compiled for any batch size."""
        return self.fresh or self.selective

    def key(self) -> Hashable:
        """What a compiled pass is found by."""
        x, kind = self.x, (self.kind, self.batched, self.selective, torch.is_grad_enabled())
        return kind, len(x) == 1, x.requires_grad, x.shape[1:], x.dtype, len(self.tensors)

    def run(self, network: nn.Module) -> Sequence[Tensor]:
        """Eagerly."""
        if not self.tensors:
            return self.body(self.x, self.given)
        named = {f"network.{name}": tensor for name, tensor in self.tensors.items()}
        answer: Sequence[Tensor] = functional_call(Pass(network, self.body), named, (self.x, self.given))
        return answer
