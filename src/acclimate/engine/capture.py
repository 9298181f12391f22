"""CUDA graphs: what is recorded, from which adapter, and where recordings are kept."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from .execution import Execution
from .runner import Runner

__all__ = [
    "LIVE_CALLS",
    "Capture",
    "CaptureCache",
    "Host",
    "NotRecordableError",
    "Slot",
    "Values",
    "read_state",
    "write_back",
]

LIVE_CALLS = 2
"""Calls before one is recorded, so that everything is compiled and all state is allocated."""
_MOST = 8  # recorded shapes per kind

Value = TypeVar("Value")
Slot: TypeAlias = tuple[str, nn.Module, str]
"""A name, the module that holds the buffer, and its name there."""
Values: TypeAlias = dict[str, Tensor | None]
"""The method's state by name."""


class Slots(Protocol):
    """Where a method keeps its state."""

    def slots(self) -> Iterator[Slot]:
        """Yield the buffers that hold the method's state."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the method, without the network."""


class Host(Protocol):
    """What the recorder needs of an adapter."""

    runner: Runner
    optimizer: Optimizer | None
    generator: Generator
    execution: Execution
    step: Any

    @property
    def state(self) -> Slots:
        """The method's state."""

    @property
    def adapted(self) -> Sequence[Parameter]:
        """The parameters that adapt."""

    @property
    def device(self) -> torch.device:
        """Where the network is."""


def read_state(host: Host) -> Values:
    """Return the method's state."""
    return {name: getattr(module, key) for name, module, key in host.state.slots()}


def write_back(host: Host, found: Values) -> None:
    """Copy new state of the same shape back into its original memory, because recorded steps read it there."""
    for name, module, key in host.state.slots():
        old, new = found[name], getattr(module, key)
        if old is not None and new is not None and new is not old and old.shape == new.shape:
            setattr(module, key, old.copy_(new))


class NotRecordableError(RuntimeError):
    """A step reads something back to the host, or does something that a CUDA graph cannot repeat."""


class Capture:
    """One CUDA graph and how it is recorded."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.pool, self.stream = pool, stream
        self._open = ExitStack()

    def begin(self) -> None:
        """Start recording: from here, nothing is executed."""
        self._open.enter_context(_no_garbage_collection())
        self._open.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        self._open.enter_context(
            torch.cuda.graph(self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        )

    def end(self) -> None:
        """Stop recording."""
        try:
            self._open.close()
        except RuntimeError as error:
            raise NotRecordableError(str(error)) from error

    def abort(self, error: BaseException) -> NoReturn:
        """Stop recording after an error, and raise it; as NotRecordableError where the step may still run live."""
        with suppress(NotRecordableError):  # the capture may be invalid because of the error
            self.end()
        if isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, torch.OutOfMemoryError):
            raise NotRecordableError(str(error)) from error
        raise error


class CaptureCache:
    """Recorded steps and functions by key; made after two warm-up calls, dropped when what they read has changed."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, ...], Any] = {}
        self._seen: dict[tuple[Hashable, ...], int] = {}
        self._signatures: dict[Hashable, tuple[tuple[Hashable, ...], tuple[Hashable, ...]]] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def is_warm(self, key: tuple[Hashable, ...]) -> bool:
        """Count a call; return whether it may be recorded."""
        self._seen[key] = self._seen.get(key, 0) + 1
        crowded = key not in self._entries and self.count(key[0]) >= _MOST
        return not crowded and self._seen[key] > LIVE_CALLS

    def check(self, kind: Hashable, settings: tuple[Hashable, ...], addresses: tuple[Hashable, ...]) -> None:
        """Drop the entries of a kind if what they were recorded with has changed; other settings warm up again."""
        before = self._signatures.get(kind)
        if before == (settings, addresses):
            return
        self._signatures[kind] = settings, addresses
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != kind}
        if before is not None and before[0] != settings:
            self._seen = {key: count for key, count in self._seen.items() if key[0] != kind}
        if not self._entries:
            self._pool = None

    def get(self, key: tuple[Hashable, ...]) -> Any:
        """Return the entry, or None."""
        return self._entries.get(key)

    def add(self, key: tuple[Hashable, ...], entry: Value) -> Value:
        """Add an entry and return it."""
        self._entries[key] = entry
        return entry

    def entries(self, kind: Hashable) -> list[Any]:
        """Return the entries of a kind."""
        return [entry for key, entry in self._entries.items() if key[0] == kind]

    def count(self, kind: Hashable) -> int:
        """Return the number of entries of a kind."""
        return len(self.entries(kind))

    def drop(self, key: tuple[Hashable, ...]) -> None:
        """Drop an entry."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pool(self) -> Any:
        """The memory that captures share: no two of them run at once."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream to record on."""
        if self._stream is None:
            if silence := getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None):
                silence(False)  # captures have a stream of their own on purpose
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable it, because destroying an older adapter's CUDA graph would invalidate the one being recorded."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
