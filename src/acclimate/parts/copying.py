"""Copies of many tensors in few launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

__all__ = ["copies", "copy_all", "versions_kept"]

_ONE_BY_ONE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
"""Whether this torch keeps the version of one tensor at a time."""


@contextmanager
def versions_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let autograd not notice that tensors change inside."""
    with ExitStack() as stack:
        for some in tensors if _ONE_BY_ONE else [tuple(tensors)]:
            stack.enter_context(_unsafe_preserve_version_counter(some))
        yield


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
        with versions_kept(places):  # recorded steps survive a restore
            torch._foreach_copy_(places, [v.to(p.device) for p, v in zip(places, values, strict=True)])
