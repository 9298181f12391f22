"""The sharpest point near θ, by which SAR judges a step (Foret et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.state import copy_all

__all__ = ["ascended"]


@contextmanager
def ascended(parameters: Sequence[Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Inside, θ' = θ + ρ·g/‖g‖, with one norm over all parameters; θ again, bit for bit, after."""
    found = [p.detach().clone() for p in parameters]
    there = [p.detach() for p in parameters]
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
    torch._foreach_add_(there, torch._foreach_mul(list(gradients), radius / (norm + 1e-12)))
    try:
        yield
    finally:
        copy_all(there, found)
