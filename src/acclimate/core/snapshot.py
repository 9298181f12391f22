"""Snapshots: copies of everything that changes as an adapter learns."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..parts.copying import copy_all

__all__ = [
    "DamagedStateError",
    "Snapshot",
    "StateError",
    "alike",
    "keeps_settings",
    "optimizer_state",
    "restore_optimizer",
]


class StateError(ValueError):
    """A state does not fit this adapter, or a file is damaged. Nothing was changed.

    >>> issubclass(StateError, ValueError)
    True
    """


class DamagedStateError(StateError):
    """A file of a state cannot be read, or was changed after it was written."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that changes between batches: tensors, and the optimizer's settings.

    >>> Snapshot({"parameter/norm.weight": torch.ones(3)}, {}).tensors["parameter/norm.weight"]
    tensor([1., 1., 1.])
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by kind: parameter, state, optimizer, generator."""
        parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("parameter", "state", "optimizer", "generator")}
        for name, tensor in self.tensors.items():
            kind, _, rest = name.partition("/")
            if kind not in parts:
                raise StateError(f"the state has {name}, which this adapter does not know: was it saved by a Guard?")
            parts[kind][rest] = tensor
        return parts

    @property
    def nbytes(self) -> int:
        """The memory of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def optimizer_state(optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: its tensors by name, and the rest, which is plain values."""
    if optimizer is None:
        return {}, {}
    packed = optimizer.state_dict()
    tensors, values = {}, {}
    for index, entry in packed["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{key}"] = value
            else:
                values[f"{index}/{key}"] = value
    return tensors, {"groups": deepcopy(packed["param_groups"]), "values": values}


def restore_optimizer(
    optimizer: Optimizer | None,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    when: bool | Tensor = True,
) -> None:
    """Invert `optimizer_state`, in place where possible, because recorded steps read that memory.

    A condition `when` may stay on the device if `keeps_settings` holds.
    """
    if optimizer is None:
        return
    if (places := _places(optimizer, tensors)) is not None:
        copy_all(places, [*tensors.values()], when)
        for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
            group.update({key: deepcopy(value) for key, value in values.items() if key != "params"})
        return
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*settings["values"].items(), *((n, t.clone()) for n, t in tensors.items())):
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": deepcopy(settings["groups"])})


def keeps_settings(optimizer: Optimizer | None, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> bool:
    """Return whether `restore_optimizer` would change nothing but the values of tensors, in place."""
    if optimizer is None:
        return True
    now, then = ([{**group, "params": None} for group in g] for g in (optimizer.param_groups, settings["groups"]))
    return now == then and _places(optimizer, tensors) is not None


def _places(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
    """Return the tensors of an optimizer's state that these belong to; None if its state has others."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    here = {index: optimizer.state.get(p, {}) for index, p in enumerate(parameters)}
    places = {f"{index}/{key}": value for index, state in here.items() for key, value in state.items()}
    if places.keys() == tensors.keys() and all(alike(places[name], tensors[name]) for name in places):
        return [places[name] for name in tensors]
    return None


def alike(a: Any, b: Any) -> bool:
    """Return whether both are tensors of the same shape and type."""
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
