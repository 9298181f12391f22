"""The sharpest point near θ, used by SAR (Foret et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from .copying import copy_all

__all__ = ["ascended"]


@contextmanager
def ascended(parameters: Sequence[Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Set θ' = θ + ρ·g/‖g‖ inside the block, with one norm over all parameters, and restore θ bit for bit."""
    found = [p.detach().clone() for p in parameters]
    there = [p.detach() for p in parameters]
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
    try:
        torch._foreach_add_(there, torch._foreach_mul(list(gradients), radius / (norm + 1e-12)))
        yield
    finally:
        copy_all(there, found)
