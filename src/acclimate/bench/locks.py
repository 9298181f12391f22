"""One writer at a time: an operating system's lock on a folder, or on one name in it, and a file that names its owner.

The system releases a lock when its process ends, however it ends, so none is ever stale. Readers need no lock. Object
stores have no locks: there, nothing is held, and of several writers the last one counts.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import AnyPath, RemotePath, write_text

__all__ = ["InUseError", "locked"]


class InUseError(RuntimeError):
    """Another process is writing there."""


@contextmanager
def locked(folder: AnyPath, name: str = "", wait: float = 0, option: str = "--out") -> Iterator[None]:
    """Hold the lock of a folder, or of one name in it; raise `InUseError` if another process holds it.

    `wait` is for how many seconds to try; `option` is that of the command that names a folder. In storage nothing is
    locked.
    """
    if isinstance(folder, RemotePath):
        yield
        return
    place = folder / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    owner, lock = place / f"{name or 'folder'}.json", FileLock(place / f"{name or 'folder'}.lock")
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise InUseError(
            f"{folder} is in use{name and ', for ' + name}, by {_owner(owner)}: wait until it is done, stop it, or "
            f"choose another {option}"
        ) from None
    try:
        write_text(owner, json.dumps(_myself(), indent=1) + "\n")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _myself() -> dict[str, object]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }


def _owner(file: Path) -> str:
    """Describe the owner of a lock."""
    try:
        it = json.loads(file.read_text())
        return f"process {it['process']} on {it['host']} (`{it['command']}`, since {it['since']})"
    except (OSError, ValueError, KeyError):  # it has just started, or is about to end
        return "another process"
