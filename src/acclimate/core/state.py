"""Snapshots of an adapter, in memory and as one safetensors file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from .._version import __version__
from ..files import write_bytes

__all__ = ["Snapshot", "StateError"]

_FORMAT = "acclimate-state"
_VERSION = 1


class StateError(ValueError):
    """A state that does not belong to this adapter, or a file that is not whole. Nothing was changed."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that changes between batches: tensors, and the optimizer's settings."""

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]


def optimizer_state(optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state, as named tensors, its own, and what is left, of plain values."""
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


def restore_optimizer(optimizer: Optimizer | None, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """The reverse of `optimizer_state`; in place where it can be, since a recorded step reads it there."""
    if optimizer is None:
        return
    here = {index: optimizer.state.get(p, {}) for index, p in enumerate(_parameters(optimizer))}
    places = {f"{index}/{key}": value for index, state in here.items() for key, value in state.items()}
    if places.keys() == tensors.keys() and all(_alike(places[name], tensors[name]) for name in places):
        copy_all([places[name] for name in tensors], [*tensors.values()])
        for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
            group.update({key: deepcopy(value) for key, value in values.items() if key != "params"})
        return
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*settings["values"].items(), *((n, t.clone()) for n, t in tensors.items())):
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": deepcopy(settings["groups"])})


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _alike(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all tensors, by one copy for each device and type: a copy for each would cost a launch each."""
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
    """Each value to its place, in few launches."""
    if places:
        with _unsafe_preserve_version_counter(tuple(places)):  # recorded steps live through a restore
            torch._foreach_copy_(places, [v.to(p.device) for p, v in zip(places, values, strict=True)])


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors: names, types, shapes and every byte."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: str | Path, snapshot: Snapshot, *, method: str, call: str, model: str) -> None:
    """One file, whole or not at all: written beside its place and moved there."""
    tensors = {name: t.cpu().clone() for name, t in snapshot.tensors.items()}  # views of one copy share its memory
    try:
        settings = json.dumps(snapshot.settings)
    except TypeError as error:
        raise StateError(f"the optimizer's settings cannot be written to a file: {error}") from error
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "method": method,
        "call": call,
        "model": model,
        "settings": settings,
        "acclimate": __version__,
    }
    metadata["checksum"] = _checksum(tensors, metadata)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot save to {path}: {'it is a folder' if path.is_dir() else 'its folder is not there'}"
        )
    write_bytes(path, to_bytes(tensors, metadata))


def read(path: str | Path, *, method: str, model: str) -> tuple[Snapshot, str]:
    """The snapshot in a file and the call of the adapter that wrote it. Refuses any other method's or model's."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no adapter state at {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StateError(f"{path} is damaged or no safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise StateError(f"{path} is a safetensors file, but not one that an adapter saved")
    if metadata.get("version") != str(_VERSION):
        raise StateError(
            f"{path} has state version {metadata.get('version')}, written by acclimate {metadata.get('acclimate')}; "
            f"acclimate {__version__} reads version {_VERSION}"
        )
    if metadata.get("checksum") != _checksum(tensors, metadata):
        raise StateError(f"{path} is damaged: its checksum does not match its content")
    if metadata["method"] != method:
        raise StateError(f"{path} is a state of {metadata['method']}, not of {method}")
    if metadata["model"] != model:
        raise StateError(f"{path} was saved for another model: the source weights differ")
    settings = json.loads(metadata["settings"])
    for group in settings.get("groups", []):  # JSON has no tuples: Adam's betas are one
        group |= {key: tuple(v) for key, v in group.items() if key != "params" and isinstance(v, list)}
    return Snapshot(tensors, settings), metadata["call"]


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    words = sorted((key, value) for key, value in metadata.items() if key != "checksum")
    content = fingerprint(sorted(tensors.items()))
    return hashlib.blake2b(f"{content} {words}".encode(), digest_size=16).hexdigest()
