"""An adapter's state as one safetensors file, written completely or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from .._version import __version__
from ..files import is_file, read_bytes, to_path, write_bytes
from .snapshot import DamagedStateError, Snapshot, StateError

__all__ = ["fingerprint", "read", "write"]

_FORMAT = "acclimate-state"
_VERSION = 2


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of named tensors: names, types, shapes and every byte."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: str | Path, snapshot: Snapshot, *, method: str, call: str, model: str) -> None:
    """Write a snapshot completely or not at all. The path may be an address in storage, such as `s3://bucket/a`."""
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
    place = to_path(path)
    if isinstance(place, Path) and place.is_dir():
        raise IsADirectoryError(f"cannot save to {place}: it is a folder")
    if isinstance(place, Path) and not place.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {place}: its folder does not exist")
    write_bytes(place, to_bytes(tensors, metadata))


def read(path: str | Path, *, method: str, model: str) -> tuple[Snapshot, str]:
    """Return the snapshot in a file, and the call of the adapter that wrote it.

    Raises StateError for a damaged file, or one of another method, model or version.
    """
    if not is_file(place := to_path(path)):
        raise FileNotFoundError(f"no adapter state at {path}")
    try:
        content = read_bytes(place)  # once: `safe_open` opens a path twice and may mix two states
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
    except SafetensorError as error:
        raise DamagedStateError(f"{path} is damaged or no safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise StateError(f"{path} is a safetensors file, but not one that an adapter saved")
    if metadata.get("version") != str(_VERSION):
        raise StateError(
            f"{path} has state version {metadata.get('version')}, written by acclimate {metadata.get('acclimate')}; "
            f"acclimate {__version__} reads version {_VERSION}"
        )
    if metadata.get("checksum") != _checksum(tensors, metadata):
        raise DamagedStateError(f"{path} is damaged: its checksum does not match its content")
    if metadata["method"] != method:
        raise StateError(f"{path} is a state of {metadata['method']}, not of {method}")
    if metadata["model"] != model:
        raise StateError(f"{path} was saved for another model: the source weights differ")
    settings = json.loads(metadata["settings"])
    for group in settings.get("groups", []):  # JSON has no tuples, such as Adam's betas
        group |= {key: tuple(v) for key, v in group.items() if key != "params" and isinstance(v, list)}
    return Snapshot(tensors, settings), metadata["call"]


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    words = sorted((key, value) for key, value in metadata.items() if key != "checksum")
    content = fingerprint(sorted(tensors.items()))
    return hashlib.blake2b(f"{content} {words}".encode(), digest_size=16).hexdigest()
