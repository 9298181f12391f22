"""What the adapters of one network share: locks, so that calls take turns, and a record of who has changed it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Sharing", "changed_by", "claim", "exclusive", "is_noted", "original", "release"]

Call = TypeVar("Call", bound=Callable[..., Any])
Result = TypeVar("Result")


class Lock:
    """One of the locks of a network, numbered so that all threads take several in the same order."""

    numbers = count()

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.changes = 0
        self.busy: torch.cuda.Stream | None = None
        self.renew()
        _LOCKS.add(self)

    def renew(self) -> None:
        """Start with a free lock."""
        self.own = threading.RLock()

    def join(self) -> None:
        """Let what is enqueued from now on wait for the stream on which the network still learns."""
        if self.busy is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.busy.device).wait_stream(self.busy)


_LOCKS: WeakSet[Lock] = WeakSet()
_OF_MODULES: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
_CHANGES: MutableMapping[Any, tuple[str, Tensor]] = WeakIdKeyDictionary()
"""Per parameter, the method that has changed it, and its value before."""
_GUARD = threading.Lock()


class Sharing:
    """The locks of a network.

    Each module with parameters belongs to one lock. So a network and any wrapper around it have a lock in common, also
    if the wrapper has parameters of its own.
    """

    def __init__(self, network: nn.Module) -> None:
        owners = [module for module in network.modules() if module._parameters] or [network]
        with _GUARD:
            unknown = [module for module in owners if module not in _OF_MODULES]
            _OF_MODULES.update(dict.fromkeys(unknown, Lock()) if unknown else {})
            self._locks = sorted({_OF_MODULES[module] for module in owners}, key=lambda lock: lock.number)

    def run(self, call: Callable[[], Result]) -> Result:
        """Call a function while no other thread runs the network. An interrupt at any time leaves the locks free.

        Python handles no interrupt between taking a lock by `with` and the block, or between the block and freeing it.
        """
        gradients = torch.is_grad_enabled()
        try:
            return _within(self._locks, call)
        except BaseException:
            torch._C._set_grad_enabled(gradients)  # an interrupt may have left one of torch's own contexts open
            raise

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread runs the network.

        After an interrupt on the way in or out, the locks are freed together with the context.
        """
        return _holding(self._locks)

    def join(self) -> None:
        """Let what is enqueued from now on wait for the stream on which the network still learns, if there is one."""
        for lock in self._locks:
            lock.join()

    def learns_on(self, stream: torch.cuda.Stream) -> None:
        """Note that the network learns on a stream of its own."""
        for lock in self._locks:
            lock.busy = stream

    @property
    def changes(self) -> int:
        """A counter that changes whenever an adapter begins to change the network, or restores it."""
        return sum(lock.changes for lock in self._locks)

    def note_change(self) -> None:
        """Count a change."""
        for lock in self._locks:
            lock.changes += 1


def _within(locks: Sequence[Lock], call: Callable[[], Result]) -> Result:
    if not locks:
        return call()
    with locks[0].own:
        locks[0].join()
        return _within(locks[1:], call)


@contextmanager
def _holding(locks: Sequence[Lock]) -> Iterator[None]:
    if not locks:
        yield
        return
    with locks[0].own:
        locks[0].join()
        with _holding(locks[1:]):
            yield


def exclusive(call: Call) -> Call:
    """Let one thread at a time run a method of any adapter over the same network."""

    @wraps(call)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.runner.sharing.run(partial(call, self, *arguments, **named))

    return cast("Call", run)


def claim(method: str, parameters: Iterable[Parameter], before: Iterable[Tensor]) -> None:
    """Note that a method is about to change parameters; a change that was noted earlier stays."""
    with _GUARD:
        for p, value in zip(parameters, before, strict=True):
            _CHANGES.setdefault(p, (method, value))


def release(parameters: Iterable[Parameter]) -> None:
    """Forget the changes of parameters that are as they were."""
    with _GUARD:
        for p in parameters:
            if p in _CHANGES and not _differs(p):
                del _CHANGES[p]


def changed_by(parameters: Iterable[Parameter]) -> str:
    """Return the method that has changed one of these parameters; empty if none has."""
    with _GUARD:
        return next((_CHANGES[p][0] for p in parameters if p in _CHANGES and _differs(p)), "")


def original(tensor: Tensor) -> Tensor:
    """Return a parameter's value before any adapter has changed it; other tensors as they are."""
    with _GUARD:
        return _CHANGES[tensor][1].to(tensor.device, tensor.dtype) if tensor in _CHANGES else tensor


def is_noted(tensor: Tensor) -> bool:
    """Return whether an adapter has changed a parameter, or is about to."""
    with _GUARD:
        return tensor in _CHANGES


def _differs(p: Parameter) -> bool:
    return not torch.equal(p.detach(), _CHANGES[p][1].to(p.device, p.dtype))


def _after_fork() -> None:
    """Free the locks of threads that a new process does not have."""
    global _GUARD
    _GUARD = threading.Lock()
    for lock in _LOCKS:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
