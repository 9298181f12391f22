"""Everything that changes as an adapter learns: copied, restored, saved, and moved between devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..checks import warn
from ..engine import Execution
from ..engine.capture import Slot
from ..parts.copying import copies, copy_all
from ..parts.sharing import is_noted, original
from ..parts.wrappers import plain_names
from . import state_file
from .snapshot import Snapshot, StateError, alike, keeps_settings, optimizer_state, restore_optimizer

__all__ = ["State"]


class State:
    """Adapted parameters, optimizer, generator, and the persistent buffers of an adapter outside its network.

    Non-persistent buffers are constants that only move with the device.
    """

    def __init__(self, adapter: nn.Module, parameters: Mapping[str, Parameter]) -> None:
        self.adapter, self.parameters = adapter, parameters
        """`parameters` are those whose changes outlast a call."""
        self.before = copies(parameters)
        """Those parameters as they were when the adapter was built."""
        self.method = type(adapter).__name__
        self._network = {*adapter.get_submodule("model").modules()}
        self._source: Snapshot | None = None
        own = set(map(id, parameters.values()))
        others = (p for p in adapter.get_submodule("model").parameters() if id(p) not in own)
        self._as_found = any(map(is_noted, others))
        """Whether another adapter had changed the network before: what it had changed is this adapter's source."""
        self._fingerprint = self._hash(lambda tensor: tensor) if self._as_found else None

    @property
    def _optimizer(self) -> Optimizer | None:
        return cast("Optimizer | None", self.adapter.optimizer)

    @property
    def _generator(self) -> Generator:
        return cast("Generator", self.adapter.generator)

    @property
    def belongs(self) -> dict[str, Any]:
        """What must be equal for a state to fit, besides names and shapes."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {
            "method": self.method,
            "optimizer": type(self._optimizer).__name__,
            "settings": [sorted(map(str, group)) for group in groups],
            "classes": self.adapter._class_list,
        }

    def source(self) -> Snapshot:
        """Return the state before the first batch, with the parameters of the time when the adapter was built."""
        if self._source is None:
            now = (p.detach() for p in self.parameters.values())
            if not all(torch.equal(p, before) for p, before in zip(now, self.before.values(), strict=True)):
                warn(
                    f"the network has changed since {self.method} was built: reset() returns to the parameters of that "
                    "time. Load weights before you build an adapter, and give each adapter its own copy of the network"
                )
            self._source = self._copy(self.before)
        return self._source

    def source_parameters(self) -> dict[str, Tensor]:
        """Return θ°, the adapted parameters before the first batch, by name."""
        return self.source().parts()["parameter"]

    def copy(self, *, light: bool = False) -> Snapshot:
        """Return a copy of the current state; a light one without parts larger than the network, such as TEA's images.

        `completed` fills in what a light copy lacks.
        """
        return self._copy(copies(self.parameters), light=light)

    def completed(self, light: Snapshot) -> Snapshot:
        """Return a light copy with the source's state in place of what it lacks."""
        source, there = self.source().tensors, {_part(name) for name in light.tensors}
        missing = {name: tensor for name, tensor in source.items() if _part(name) not in there}
        return Snapshot({**missing, **light.tensors}, light.settings)

    def _copy(self, parameters: Mapping[str, Tensor], *, light: bool = False) -> Snapshot:
        optimizer, settings = optimizer_state(self._optimizer)
        settings["belongs"] = self.belongs
        copied = {f"parameter/{name}": p for name, p in parameters.items()}
        tensors: dict[str, Tensor] = {}
        for name, module, key in self.slots():
            if (value := getattr(module, key)) is not None:
                tensors[f"state/{name}"] = value
        if light:
            tensors = _without_large(tensors, sum(p.nbytes for p in self.adapter.parameters()))
        tensors |= {f"optimizer/{name}": t for name, t in optimizer.items()}
        return Snapshot({**copied, **copies(tensors), "generator/state": self._generator.get_state()}, settings)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot; raise and change nothing if it does not fit."""
        parts = snapshot.parts()
        self._check_fit(parts, snapshot.settings)
        restore_optimizer(self._optimizer, parts["optimizer"], snapshot.settings)
        self._restore_parameters(parts)
        self._restore_slots(parts, self.slots())
        self._generator.set_state(parts["generator"]["state"].cpu())

    @torch.no_grad()
    def start_over(self, *names: str, optimizer: bool = True, when: bool | Tensor = True) -> None:
        """Restore network and optimizer from the source, and the method's state under these names only.

        It does so if `when` holds, which stays on the device where nothing but values of tensors would change.
        """
        source, slots = self.source(), [slot for slot in self.slots() if slot[0].split(".")[0] in names]
        parts = source.parts()
        momentum = self._optimizer if optimizer else None
        values = all(alike(getattr(module, key), parts["state"].get(name)) for name, module, key in slots)
        values = values and keeps_settings(momentum, parts["optimizer"], source.settings)
        execution = cast("Execution", self.adapter.execution)
        if (when := execution.condition(when, can_wait=values)) is False:
            return
        self._restore_parameters(parts, when)
        restore_optimizer(momentum, parts["optimizer"], source.settings, when)
        self._restore_slots(parts, slots, when)

    def save(self, path: str | Path, snapshot: Snapshot, call: str) -> None:
        """Write a snapshot to a file, with the call that builds the adapter."""
        self._refuse_non_finite(snapshot, f"not saved to {path}")
        state_file.write(path, snapshot, method=self.method, call=call, model=self.fingerprint())

    def read(self, path: str | Path) -> tuple[Snapshot, str]:
        """Return the snapshot in a file, and the call that makes the adapter that saved it."""
        snapshot, call = state_file.read(path, method=self.method, model=self.fingerprint())
        self._refuse_non_finite(snapshot, f"{path} was not loaded")
        return snapshot, call

    def fingerprint(self) -> str:
        """Return a hash of the network as it was before any adaptation."""
        if self._fingerprint is None:
            self._fingerprint = self._hash((lambda tensor: tensor) if self._as_found else original)
        return self._fingerprint

    def digest(self) -> str:
        """Return a hash of the current state, without parts larger than the network, to compare processes."""
        return state_file.fingerprint(self.copy(light=True).tensors.items())

    def _hash(self, source_of: Callable[[Tensor], Tensor]) -> str:
        """Return a hash of the network, with this value of each tensor that does not adapt."""
        source = {id(p): self.before[name] for name, p in self.parameters.items()}  # also for tied parameters
        network = self.adapter.get_submodule("model")
        tensors, plain = network.state_dict(keep_vars=True), plain_names(network)
        found = ((name, t) for name, t in tensors.items() if isinstance(t, Tensor))
        return state_file.fingerprint((plain(n), source[id(t)] if id(t) in source else source_of(t)) for n, t in found)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the adapter and the modules in it that belong to the method, and not to the network."""
        yield "", self.adapter
        for name, child in self.adapter.named_children():
            if name != "model":
                yield from ((path, m) for path, m in child.named_modules(prefix=name) if m not in self._network)

    def slots(self) -> Iterator[Slot]:
        """Yield the buffers that hold the method's state: the persistent ones outside the network."""
        for path, module in self.modules():
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    yield f"{path}.{key}".lstrip("."), module, key

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move or a cast to the optimizer's state and the source."""
        self._fingerprint = None
        if self._optimizer is not None:
            self._optimizer.load_state_dict(self._optimizer.state_dict())
        self.before = {name: fn(value) for name, value in self.before.items()}
        if self._source is not None:
            moved = {n: t if n.startswith("generator/") else fn(t) for n, t in self._source.tensors.items()}
            moved |= {f"parameter/{name}": value for name, value in self.before.items()}
            self._source = Snapshot(moved, self._source.settings)

    def _restore_parameters(self, parts: Mapping[str, Mapping[str, Tensor]], when: bool | Tensor = True) -> None:
        values = [parts["parameter"][name] for name in self.parameters]
        copy_all([p.detach() for p in self.parameters.values()], values, when)

    def _restore_slots(
        self, parts: Mapping[str, Mapping[str, Tensor]], slots: Iterable[Slot], when: bool | Tensor = True
    ) -> None:
        for name, module, key in slots:
            value, now = parts["state"].get(name), getattr(module, key)
            if value is None and now is not None and getattr(module, "zero_is_empty", False):
                now.zero_()
            elif value is None or now is None:
                like = next(iter(self.adapter.parameters()), torch.empty(0))
                setattr(module, key, None if value is None else value.to(like.device, copy=True))
            elif alike(now, value):  # in place, because recorded steps read this memory
                now.copy_(torch.where(when, value, now) if isinstance(when, Tensor) else value)
            else:
                setattr(module, key, value.to(now.device, copy=True))

    def _check_fit(self, parts: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]) -> None:
        theirs = settings.get("belongs") or {}
        if theirs != self.belongs:
            what = next(key for key, value in self.belongs.items() if value != theirs.get(key))
            raise StateError(f"the state belongs to an adapter with other {what}: {theirs.get(what)}")
        here = {name: p.shape for name, p in self.parameters.items()}
        there = {name: t.shape for name, t in parts["parameter"].items()}
        if here != there:
            raise StateError(
                f"the state adapts {len(there)} parameters and this adapter {len(here)}, or their shapes differ: it "
                "belongs to another model or another choice of parameters"
            )
        if unknown := parts["state"].keys() - {name for name, _, _ in self.slots()}:
            raise StateError(f"the state belongs to another method: it holds {', '.join(sorted(unknown))}")
        source = self.source().parts()
        for name, tensor in source["state"].items():
            if name not in parts["state"] or parts["state"][name].shape != tensor.shape:
                raise StateError(f"the state belongs to a method with other settings: its {name} does not fit")
        if parts["generator"]["state"].shape != source["generator"]["state"].shape:
            raise StateError("the state's random generator is of another kind")

    def _refuse_non_finite(self, snapshot: Snapshot, outcome: str) -> None:
        """Raise if a state has NaN, or an infinity that the source network does not have."""
        source = self.source().tensors
        for name, tensor in snapshot.tensors.items():
            if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
                continue
            before = next((t for known, t in source.items() if f"/{name}".endswith(f"/{known}")), None)
            new = before is None or before.shape != tensor.shape or tensor != before.to(tensor.device)
            if bool((~tensor.isfinite() & new).any()):
                raise StateError(
                    f"{outcome}: the state's {name} has NaN or infinity. reset() restores the source network"
                )
        for group in snapshot.settings.get("groups", ()):
            for name, value in group.items():
                if isinstance(value, float) and (math.isnan(value) or (name == "lr" and math.isinf(value))):
                    raise StateError(f"{outcome}: the optimizer's {name} is {value}")


def _part(name: str) -> str:
    """Return which part of a state a tensor belongs to, such as `state/replay`."""
    return name.split(".")[0]


def _without_large(tensors: Mapping[str, Tensor], most: int) -> dict[str, Tensor]:
    """Return the tensors of those parts that have at most so many bytes."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[_part(name)] = sizes.get(_part(name), 0) + tensor.nbytes
    return {name: tensor for name, tensor in tensors.items() if sizes[_part(name)] <= most}
