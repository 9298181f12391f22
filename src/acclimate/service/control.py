"""Control calls: look, save, undo, freeze. The application checks the token, and writes the audit log."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ..core.snapshot import StateError
from .errors import BadInputError, Refusal
from .store import Store
from .worker import Worker

__all__ = ["ACTIONS", "ARGUMENTS", "Control", "check_arguments"]


class Control:
    """What a control call does. All but `check` run in the worker's thread."""

    def __init__(self, worker: Worker, store: Store, token: str | None) -> None:
        self.worker, self.store, self._token = worker, store, token

    @property
    def on(self) -> bool:
        """Whether there is a token."""
        return self._token is not None

    def check(self, authorization: str | None) -> None:
        """Raise a refusal without the right token."""
        if self._token is None:
            raise Refusal(403, "control is off: start the server with --token-file, or with ACCLIMATE_TOKEN set")
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise Refusal(401, "control needs the header Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def status(self, stream: str | None) -> dict[str, Any]:
        """Return how the model of a camera is; without a name that of `default`, also before its first image."""
        worker = self.worker
        if stream is not None:
            self._check_known(stream)
        stream = stream or "default"
        health = worker.health(stream)
        return {
            "stream": stream,
            "streams": len(worker.streams),
            "method": repr(worker.served.adapter),
            "frozen": worker.frozen,
            "saved": worker.saved,
            "learned": worker.learner.learned if worker.streams.current == stream else None,
            "waiting": worker.learner.waiting if worker.streams.current == stream else None,
            "health": None if health is None else {**health.as_dict(), "history": None},
        }

    def streams(self) -> dict[str, Any]:
        """Return the names of all cameras, and the one whose state is in the network."""
        return {"streams": sorted(self.worker.streams.keys()), "current": self.worker.streams.current}

    def snapshot(self, stream: str, name: str | None = None) -> dict[str, Any]:
        """Write the state of a camera as a snapshot."""
        with self._known(stream):
            return {"snapshot": self.store.new_snapshot(stream, name, self.worker.learner.save)}

    def rollback(self, stream: str, name: str | None = None) -> dict[str, Any]:
        """Restore a snapshot, or what the guard knows as healthy."""
        if name is not None:
            path, owner = self.store.find_snapshot(name)
            if owner not in ("", stream):
                raise Refusal(
                    409,
                    f"the snapshot {name} belongs to the stream {owner}, not {stream}: roll that one back, or send the "
                    "file to /control/load",
                )
            self._restore(stream, path, name)
            return {"restored": "snapshot", "snapshot": name}
        guard = self.worker.guard
        if guard is None:
            raise Refusal(409, "without a guard only a snapshot can be restored: give its name as snapshot")
        with self._known(stream):
            healthy = guard.rollback()
        self._write()
        return {"restored": "healthy" if healthy else "source"}

    def reset(self, stream: str) -> dict[str, Any]:
        """Forget what a camera has learned."""
        self.worker.streams.reset(stream)
        return {}

    def freeze(self, frozen: bool) -> dict[str, Any]:
        """Stop learning for all cameras, or go on; a restart keeps it so."""
        self.store.frozen = frozen
        self.worker.frozen = frozen
        return {"frozen": frozen}

    def load(self, stream: str, content: bytes) -> dict[str, Any]:
        """Restore a state that was uploaded, a file that `save` or a snapshot has written."""
        with NamedTemporaryFile(dir=self.store.snapshots, suffix=".upload") as file:
            file.write(content)
            file.flush()
            self._restore(stream, Path(file.name), "the upload")
        return {"restored": "upload"}

    def _restore(self, stream: str, path: Path, name: str) -> None:
        streams = self.worker.streams
        known = streams.has(stream)
        try:
            state = self.worker.learner.read(path)
            with streams.using(stream):
                self.worker.learner.restore(state)
        except (StateError, OSError) as error:
            if not known:
                streams.reset(stream)
            raise Refusal(409, str(error).replace(str(path), name)) from error
        self._write()

    def _write(self) -> None:
        """Write the state, so that a kill does not undo a call."""
        if not self.worker.save():
            raise Refusal(507, "done, but not written: a restart would undo it. Free some space, and repeat the call")

    def _known(self, stream: str) -> AbstractContextManager[None]:
        self._check_known(stream)
        return self.worker.streams.using(stream)

    def _check_known(self, stream: str) -> None:
        if not self.worker.streams.has(stream):
            raise Refusal(404, f"there is no stream {stream} yet: GET /control/streams lists them")


def _named(content: dict[str, Any]) -> str | None:
    name = content.get("snapshot")
    if name is not None and not isinstance(name, str):
        raise BadInputError("snapshot must be a name")
    return name


ACTIONS: dict[str, Callable[[Control, str, dict[str, Any]], dict[str, Any]]] = {
    "snapshot": lambda control, stream, content: control.snapshot(stream, _named(content)),
    "rollback": lambda control, stream, content: control.rollback(stream, _named(content)),
    "reset": lambda control, stream, _: control.reset(stream),
    "freeze": lambda control, *_: control.freeze(True),
    "unfreeze": lambda control, *_: control.freeze(False),
}
"""Control calls that change something, by name."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "status": ("stream",),
    "streams": (),
    "snapshots": (),
    "snapshot": ("stream", "snapshot"),
    "rollback": ("stream", "snapshot"),
    "reset": ("stream",),
    "freeze": (),
    "unfreeze": (),
    "load": ("stream",),
}
"""What the body of a control call may have; its query may have `stream`, if the body may."""


def check_arguments(action: str, query: Iterable[str], body: Iterable[str] = ()) -> None:
    """Raise a refusal for arguments that a control call does not have: to ignore one would do something else."""
    known = ARGUMENTS[action]
    for place, given, taken in (("query", query, [*{"stream"} & {*known}]), ("body", body, [*known])):
        if unknown := [name for name in given if name not in taken]:
            why = "it concerns all streams" if not known and unknown[0] == "stream" else "leave it out"
            expected = " and ".join(taken) or "nothing"
            raise BadInputError(f"{action} takes {expected} in the {place}, not {unknown[0][:40]!r}: {why}")
