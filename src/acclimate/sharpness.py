"""The sharpest point near θ, by which SAR judges a step (Foret et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["ascended"]


@contextmanager
def ascended(parameters: Sequence[Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Inside, θ' = θ + ρ·g/‖g‖, with one norm over all parameters; θ again, bit for bit, after."""
    found = [p.detach().clone() for p in parameters]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p.add_(g * (radius / (norm + 1e-12)))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(parameters, found, strict=True):
                p.copy_(before)
