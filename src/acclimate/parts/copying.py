"""Copies of many tensors in few launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

__all__ = ["copies", "copy_all"]


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of all tensors, with one launch per device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(name)
    copied: dict[str, Tensor] = {}
    for names in kinds.values():
        flat = torch.cat([tensors[name].detach().flatten() for name in names])
        parts = torch.split(flat, [tensors[name].numel() for name in names])
        copied |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: copied[name] for name in tensors}


def copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its place."""
    if places:
        with _unsafe_preserve_version_counter(tuple(places)):  # recorded steps survive a restore
            torch._foreach_copy_(places, [v.to(p.device) for p, v in zip(places, values, strict=True)])
