"""What the adapters of one network share: a lock, so that calls take turns, and who has changed the network."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["Sharing", "exclusive", "sharing"]

Call = TypeVar("Call", bound=Callable[..., Any])


class Sharing:
    """The adapters of one network, whichever wrapper of it each was given."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed_by = ""
        """The method that changes the network; empty if it has been reset."""
        self._before: dict[int, Tensor] = {}
        """The parameters before that change, by id."""

    def claim(self, method: str, parameters: Iterable[Parameter], before: Iterable[Tensor]) -> None:
        """Note that a method is about to change the network, unless another one has changed it already."""
        if not self.changed_by:
            self.changed_by, self._before = method, dict(zip(map(id, parameters), before, strict=True))

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Note that parameters were reset: the network is unchanged if they all are as before the first change."""
        if not self._changed(parameters):
            self.changed_by = ""

    def warn_if_changed(self, method: str, parameters: Iterable[Parameter]) -> None:
        """Warn if a method is built on a network that another adapter has changed."""
        if self.changed_by and self._changed(parameters):
            warnings.warn(
                f"{self.changed_by} has changed this network: {method} starts from the changed parameters, and its "
                "reset() returns to those. Call reset() of the other adapter first, or give each a copy of the network",
                stacklevel=4,
            )

    def _changed(self, parameters: Iterable[Parameter]) -> bool:
        known = ((p.detach(), self._before[id(p)]) for p in parameters if id(p) in self._before)
        return any(not torch.equal(now, before.to(now.device, now.dtype)) for now, before in known)


_NETWORKS: WeakKeyDictionary[nn.Module, Sharing] = WeakKeyDictionary()
_GUARD = threading.Lock()


def sharing(network: nn.Module) -> Sharing:
    """Return what the adapters of a network share.

    The first module with parameters stands for the network: all wrappers have it in common.
    """
    key = next((module for module in network.modules() if module._parameters), network)
    found = _NETWORKS.get(key)
    if found is None:
        with _GUARD:
            found = _NETWORKS.setdefault(key, Sharing())
    return found


def exclusive(call: Call) -> Call:
    """Let one thread at a time run a method of any adapter over the same network."""

    @wraps(call)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        with self.sharing.lock:
            return call(self, *arguments, **named)

    return cast("Call", run)
