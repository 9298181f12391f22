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
    return dict(zip(tensors, _joined([*tensors.values()]), strict=True))


def copy_all(places: list[Tensor], values: list[Tensor], when: bool | Tensor = True) -> None:
    """Copy each value into its place, if a condition holds, which may stay on the device."""
    if places:
        values = [v.to(p.device) for p, v in zip(places, values, strict=True)]
        with versions_kept(places):  # recorded steps survive a restore
            torch._foreach_copy_(places, values if when is True else _joined(values, torch.as_tensor(when), places))


def _joined(tensors: Sequence[Tensor], when: Tensor | None = None, others: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return copies of tensors, or of the others if a condition does not hold, in few launches per device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    copied: dict[int, Tensor] = {}
    for places in kinds.values():
        flat = torch.cat([tensors[place].detach().flatten() for place in places])
        if when is not None:
            instead = torch.cat([others[place].detach().flatten() for place in places])
            flat = torch.where(when.to(flat.device), flat, instead)
        parts = torch.split(flat, [tensors[place].numel() for place in places])
        copied |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [copied[place] for place in range(len(tensors))]
