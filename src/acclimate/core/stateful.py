"""What an adapter remembers, and how to copy it, take it back, write it and move it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from . import state
from .state import Snapshot, StateError, restore_optimizer

__all__ = ["Stateful"]

_Slot: TypeAlias = tuple[str, nn.Module, str]  # a name, the module that holds the buffer, and its name there


class Stateful(nn.Module):
    """A network and all that changes as it adapts: parameters, optimizer, the method's buffers, a generator.

    Whatever a method keeps in persistent buffers outside the network is part of the state; non-persistent ones are
    constants that only move with the device.
    """

    model: nn.Module
    names: tuple[str, ...]
    adapted: tuple[Parameter, ...]
    optimizer: Optimizer | None
    generator: Generator
    classes: Tensor | None
    class_list: list[int] | None
    episodic: ClassVar[bool] = False
    """Parameters and optimizer are as before after every call: there is nothing of them to copy or take back."""

    def __init__(self) -> None:
        super().__init__()
        self._source: Snapshot | None = None
        self._fingerprint: str | None = None

    @torch.inference_mode(False)
    def snapshot(self) -> Snapshot:
        """A copy of everything that changes between batches."""
        self.settle()
        self.remember_source()
        return self._copy_state()

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot. What follows is, bit for bit, what followed it before."""
        self.remember_source()
        self.settle(discard=True)
        parts = _parts(snapshot.tensors)
        self._check_fit(parts, snapshot.settings)
        restore_optimizer(self.optimizer, parts["optimizer"], snapshot.settings)
        self._restore_parameters(parts)
        self._restore_slots(parts, self.slots())
        self.generator.set_state(parts["generator"]["state"].cpu())

    def _restore_parameters(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        lasting = dict(self._lasting())
        state.copy_all([p.detach() for p in lasting.values()], [parts["parameter"][name] for name in lasting])

    def _restore_slots(self, parts: Mapping[str, Mapping[str, Tensor]], slots: Iterable[_Slot]) -> None:
        for name, module, key in slots:
            value, now = parts["state"].get(name), getattr(module, key)
            if value is None and now is not None and getattr(module, "zero_is_empty", False):
                now.zero_()
            elif value is None or now is None:
                setattr(module, key, None if value is None else value.to(self.device, copy=True))
            elif (now.shape, now.dtype) == (value.shape, value.dtype):
                now.copy_(value)  # in place: a recorded step reads it there
            else:
                setattr(module, key, value.to(now.device, copy=True))

    def reset(self) -> None:
        """Back to the source: parameters, optimizer, the method's state, counters and generator."""
        self.restore(self.remember_source())

    @torch.no_grad()
    def start_over(self, *state: str, optimizer: bool = True) -> None:
        """Network and optimizer back to the source, and the method's state under these names; the rest goes on."""
        source = self.remember_source()
        parts = _parts(source.tensors)
        self._restore_parameters(parts)
        if optimizer:
            restore_optimizer(self.optimizer, parts["optimizer"], source.settings)
        chosen = (slot for slot in self.slots() if slot[0].split(".")[0] in state)
        self._restore_slots(parts, chosen)

    def source_parameters(self) -> dict[str, Tensor]:
        """θ°, the adapted parameters before the first batch, by name."""
        return _parts(self.remember_source().tensors)["parameter"]

    def save(self, path: str | Path) -> None:
        """Write the state to one safetensors file: what has changed, not the network. Whole or not at all."""
        state.write(path, self.snapshot(), method=type(self).__name__, call=self.call(), model=self.fingerprint())

    def load(self, path: str | Path) -> None:
        """Go on from a saved state. A file of another model, method or version, or a damaged one, changes nothing."""
        snapshot, call = state.read(path, method=type(self).__name__, model=self.fingerprint())
        own = self.call()
        self.restore(snapshot)
        if call != own:
            warnings.warn(
                f"{path} was saved by {call} and goes on as {own}, with the optimizer's settings from the file",
                stacklevel=2,
            )

    def fingerprint(self) -> str:
        """A hash of the network as it was before any adaptation."""
        if self._fingerprint is None:
            before = self.source_parameters()
            source = {id(p): before[name] for name, p in self._lasting()}  # also where tied
            tensors = self.model.state_dict(keep_vars=True).items()
            kept = ((name, source.get(id(t), t)) for name, t in tensors if isinstance(t, Tensor))
            self._fingerprint = state.fingerprint(kept)
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        tensor = next(self.model.parameters(), next(self.model.buffers(), None))
        return torch.device("cpu") if tensor is None else tensor.device

    def remember_source(self) -> Snapshot:
        """The state before the first batch, copied when it is first asked for."""
        if self._source is None:
            self._source = self._copy_state()
        return self._source

    def call(self) -> str:
        """What made it, as text."""
        return repr(self)

    def settle(self, *, discard: bool = False) -> None:
        """Raise for an earlier batch that was refused, where that is told late; or let bygones be bygones."""

    def _copy_state(self) -> Snapshot:
        optimizer, settings = state.optimizer_state(self.optimizer)
        settings["belongs"] = self._belonging()
        tensors: dict[str, Tensor] = {f"parameter/{name}": p for name, p in self._lasting()}
        for name, module, key in self.slots():
            if (value := getattr(module, key)) is not None:
                tensors[f"state/{name}"] = value
        tensors |= {f"optimizer/{name}": t for name, t in optimizer.items()}
        return Snapshot({**state.copies(tensors), "generator/state": self.generator.get_state()}, settings)

    def _lasting(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters whose changes outlast a call."""
        if not self.episodic:
            yield from zip(self.names, self.adapted, strict=True)

    def slots(self) -> Iterator[_Slot]:
        """Where the method keeps its state: the persistent buffers outside the network."""
        for path, module in self.named_modules():
            if path != "model" and not path.startswith("model."):
                for key in module._buffers:
                    if key not in module._non_persistent_buffers_set:
                        yield f"{path}.{key}".lstrip("."), module, key

    def _check_fit(self, parts: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]) -> None:
        if self._belonging() != settings.get("belongs"):
            ours, theirs = self._belonging(), settings.get("belongs") or {}
            what = [key for key, value in ours.items() if value != theirs.get(key)]
            raise StateError(f"the state belongs to an adapter with other {what[0]}: {theirs.get(what[0])}")
        here = {name: p.shape for name, p in self._lasting()}
        there = {n: t.shape for n, t in parts["parameter"].items()}
        if here != there:
            raise StateError(
                f"the state adapts {len(there)} parameters and this adapter {len(here)}, or their shapes differ: it "
                "belongs to another model or another choice of parameters"
            )
        if unknown := parts["state"].keys() - {name for name, _, _ in self.slots()}:
            raise StateError(f"the state belongs to another method: it holds {', '.join(sorted(unknown))}")
        source = _parts(self.remember_source().tensors)
        for name, tensor in source["state"].items():
            if name not in parts["state"] or parts["state"][name].shape != tensor.shape:
                raise StateError(f"the state belongs to a method with other settings: its {name} does not fit")
        if parts["generator"]["state"].shape != source["generator"]["state"].shape:
            raise StateError("the state's random generator is of another kind")

    def _belonging(self) -> dict[str, Any]:
        """What must be equal for a state to fit, besides names and shapes."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            "method": type(self).__name__,
            "optimizer": type(self.optimizer).__name__,
            "settings": [sorted(map(str, group)) for group in groups],
            "classes": self.class_list,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves and casts (`to`, `cuda`, `half`, …) take the optimizer, the source snapshot and the generator along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if self._source is not None:
            moved = {n: t if n.startswith("generator/") else fn(t) for n, t in self._source.tensors.items()}
            self._source = Snapshot(moved, self._source.settings)
        self._fingerprint = None
        return self


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """A snapshot's tensors by kind: parameter, state, optimizer, generator."""
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("parameter", "state", "optimizer", "generator")}
    for name, tensor in tensors.items():
        kind, rest = name.split("/", 1)
        parts[kind][rest] = tensor
    return parts
