"""One state per camera over one network: what a camera teaches stays with it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from ..checks import warn
from ..core.adapter import Statistics
from ..core.snapshot import Snapshot
from ..files import AnyPath, is_file, matching, read_text, remove, to_path, version, write_text
from .folder_lock import FolderLock

__all__ = ["Stateful", "Streams"]


class Stateful(Protocol):
    """What cameras need of an adapter or a guard."""

    @property
    def sharing(self) -> AbstractContextManager[None]:
        """A context in which no other thread runs the network."""
        ...

    @property
    def __call__(self) -> Any:
        """Predict a batch and learn from it."""
        ...

    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return logits without learning."""
        ...

    def snapshot(self) -> Snapshot:
        """Return a copy of the state."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a state."""
        ...

    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write a state to a file."""
        ...

    def read(self, path: str | Path) -> Snapshot:
        """Return the state in a file."""
        ...


class Streams:
    """Cameras that share one network, each with a state of its own: `logits = cameras("north gate", x)`.

    >>> import acclimate
    >>> net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> cameras = Streams(acclimate.Tent(net), most=1000)
    >>> cameras("north gate", torch.rand(8, 4)).shape
    torch.Size([8, 3])

    A call restores the state of its camera, predicts, and learns. Every camera starts from the state that the adapter
    has when the cameras are made: the source, or what the adapter has learned until then. What the adapter learns
    outside, `adapter(x)`, belongs to the camera of the last call, `current`.

    A camera's state in `folder` is one safetensors file, and beside it a text file with the camera's name. A state is
    written when it leaves the memory, by `save()`, and at the end of a `with` block. A kill at any moment loses at most
    what was learned since. States that are in the folder already are read at the camera's first call. One process at a
    time may use a folder: another one gets a RuntimeError, until the first has ended, has left its `with` block, or has
    dropped the cameras.

    Threads may share the cameras: calls take turns.

    Args:
        adapter: an adapter or a guard.
        most: the number of states in memory. The one that was used least recently makes room.
        folder: where the other states are, also in storage (`s3://bucket/states`); None forgets them.
        shared: other processes use the folder, too. Each call looks whether another process has written the camera's
            state since it was last read or written here, which is one request in storage. If so, the file counts: it is
            read again, and what was learned here since is lost.
    """

    def __init__(
        self, adapter: Stateful, *, most: int = 1000, folder: str | Path | None = None, shared: bool = False
    ) -> None:
        if most < 1:
            raise ValueError(f"Streams: most={most} must be at least 1")
        self.adapter, self.most, self.shared = adapter, most, shared
        self.folder = None if folder is None else to_path(folder)
        if isinstance(self.folder, Path):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.current: str | None = None
        """The camera whose state is in the network."""
        self._start = adapter.snapshot()
        self._states: OrderedDict[str, Snapshot] = OrderedDict()  # the current one's is of when it came
        self._changed: set[str] = set()  # differ from their files
        self._stored: dict[str, AnyPath] = {}
        self._versions: dict[str, str | None] = {}  # of the files of states in memory, where they are shared
        self._lock = FolderLock(self.folder) if isinstance(self.folder, Path) and not shared else None
        self._warned = False
        self._hold(look=True)

    def __call__(self, key: str, x: Tensor) -> Tensor:
        """Predict a batch with the state of this camera and learn from it; return logits.

        A batch that is refused leaves the camera as it was, and makes no new one.
        """
        with self.adapter.sharing:
            known = self._known(key)
            self._switch(key)
            try:
                logits: Tensor = self.adapter(x)
            except BaseException:
                if not known:
                    self._forget(key)
                raise
            return logits

    def predict_only(self, key: str, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x with the state of this camera, without learning. This makes no new camera."""
        with self.adapter.sharing:
            known = self._known(key)
            self._switch(key)
            try:
                return self.adapter.predict_only(x, statistics=statistics)
            finally:
                if not known:
                    self._forget(key)

    @contextmanager
    def using(self, key: str) -> Iterator[None]:
        """Hold the network with the state of this camera, for calls on the adapter itself, such as `rollback()`."""
        with self.adapter.sharing:
            self._known(key)
            self._switch(key)
            yield

    def save(self) -> None:
        """Write all states that have changed since they were written."""
        if self.folder is None:
            raise ValueError("Streams: give folder= to save states")
        with self.adapter.sharing:
            self._keep()
            for key in [key for key in self._states if key in self._changed]:
                self._write(key)

    def release(self, key: str) -> None:
        """Write the state of a camera if it has changed, and let it leave the memory."""
        if self.folder is None:
            raise ValueError("Streams: give folder= to release states; reset(key) forgets one")
        with self.adapter.sharing:
            self._keep()
            if key in self._changed:
                self._write(key)
            self._forget(key)

    def reset(self, key: str) -> None:
        """Forget what this camera has learned, also in the folder. It starts anew when it comes again."""
        with self.adapter.sharing:
            self._known(key)
            if key == self.current:
                self.adapter.restore(self._start)
            self._forget(key)
            if (path := self._stored.pop(key, None)) is not None:
                remove(path)
                remove(_name_file(path))

    def has(self, key: str) -> bool:
        """Return whether this camera has a state, also if another process has written it; `in` knows only our own."""
        with self.adapter.sharing:
            return self._known(key)

    def keys(self) -> list[str]:
        """Return the names of all cameras, also of those that are only in the folder."""
        with self.adapter.sharing:
            return [*{**dict.fromkeys(self._stored), **self._states}]

    @property
    def nbytes(self) -> int:
        """The memory of the states in bytes."""
        with self.adapter.sharing:
            kept = {id(state): state for state in (self._start, *self._states.values())}
            return sum(state.nbytes for state in kept.values())

    def __contains__(self, key: object) -> bool:
        return key in self._states or key in self._stored

    def __len__(self) -> int:
        return len(self.keys())

    def __enter__(self) -> Self:
        with self.adapter.sharing:
            self._hold(look=True)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.folder is not None:
                self.save()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _hold(self, *, look: bool = False) -> None:
        """Keep other processes out of the folder. Where they could come in, or to `look`, read again what is there."""
        taken = self._lock is not None and self._lock.hold()
        if self.folder is None or not (taken or look):
            return
        self._keep()
        before, self._stored = self._stored, _stored(self.folder)
        for key in [key for key in self._states if key in before and key not in self._changed]:
            self._forget(key)

    def _known(self, key: str) -> bool:
        """Return whether this camera has a state; raise if it cannot have one."""
        if not isinstance(key, str) or not key:
            raise ValueError(f"the name of a camera is a string with at least one character, got {key!r}")
        key.encode()  # raises for half of a surrogate pair, which no file can have
        self._hold()
        if self.shared and self.folder is not None:
            self._look(key)
        return key in self

    def _look(self, key: str) -> None:
        """Find the file of a camera; forget a state if another process has written or removed its file since."""
        assert self.folder is not None  # noqa: S101
        path = self.folder / f"{_hash(key)}.safetensors"
        found = version(path)
        if found is not None:
            self._stored[key] = path
        else:
            self._stored.pop(key, None)
        if key in self._states and found != self._versions.get(key):
            self._forget(key)

    def _switch(self, key: str) -> None:
        """Bring the state of a camera into the network. If anything raises, no state is lost."""
        if key != self.current:
            state = self._find(key)
            self._keep()
            self._make_room(key)
            self.current = None  # until the network has the state
            self.adapter.restore(state)
            self._states[key] = state
            self.current = key
        self._states.move_to_end(key)

    def _find(self, key: str) -> Snapshot:
        if key in self._states:
            return self._states[key]
        path = self._stored.get(key)
        if path is None:
            return self._start
        if self.shared:
            self._versions[key] = version(path)  # before it is read: a later write is then noticed
        return self.adapter.read(str(path))

    def _keep(self) -> None:
        """Keep the state of the current camera, and note whether it has changed."""
        if self.current is None:
            return
        state = self.adapter.snapshot()
        if self.current not in self._changed and not _same(state, self._states[self.current]):
            self._changed.add(self.current)
        self._states[self.current] = state

    def _make_room(self, key: str) -> None:
        """Move the states that were used least recently to the folder, so that there is room for one more."""
        while key not in self._states and len(self._states) >= self.most:
            oldest = next(iter(self._states))
            if self.folder is None:
                self._warn_of_loss(oldest)
            elif oldest in self._changed:
                self._write(oldest)
            self._forget(oldest)

    def _warn_of_loss(self, key: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"more than {self.most} cameras: what {key!r} has learned is forgotten, and so on. Give folder= to "
                "keep the states in files, or a larger most="
            )

    def _write(self, key: str) -> None:
        """Write a state that has changed: its name first, so that each state has one."""
        assert self.folder is not None  # noqa: S101
        self._hold()
        if self.shared:
            self._look(key)
            if key not in self._states:  # another process was faster
                return
        path = self.folder / f"{_hash(key)}.safetensors"
        if key not in self._stored:
            write_text(_name_file(path), key)
        self.adapter.save(str(path), self._states[key])
        self._stored[key] = path
        self._changed.discard(key)
        if self.shared:
            self._versions[key] = version(path)

    def _forget(self, key: str) -> None:
        """Remove a state from the memory."""
        self._states.pop(key, None)
        self._changed.discard(key)
        self._versions.pop(key, None)
        if key == self.current:
            self.current = None


def _hash(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _name_file(path: AnyPath) -> AnyPath:
    """Return the file with the name of a state's camera."""
    return to_path(str(path).removesuffix(".safetensors") + ".txt")


def _stored(folder: AnyPath) -> dict[str, AnyPath]:
    """Return the states in a folder by the names of their cameras."""
    names = {path: _name_file(path) for path in matching(folder, "*.safetensors")}
    return {read_text(name): path for path, name in names.items() if is_file(name)}


def _same(a: Snapshot, b: Snapshot) -> bool:
    if a.settings != b.settings or a.tensors.keys() != b.tensors.keys():
        return False
    return all(torch.equal(tensor.cpu(), b.tensors[name].cpu()) for name, tensor in a.tensors.items())
