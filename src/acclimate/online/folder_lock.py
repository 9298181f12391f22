"""One process at a time in a folder: a lock of the operating system, which is freed however the process ends."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock"]

_FILES: dict[tuple[Path, int], Any] = {}  # open files by folder and process: a forked process has none of its own
_HOLDERS: Counter[tuple[Path, int]] = Counter()
_TURN = threading.RLock()  # a lock may be collected while another is taken
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


class FolderLock:
    """The lock of a folder, held by one process; all holders in that process share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.held: tuple[Path, int] | None = None

    def hold(self) -> bool:
        """Take the lock, and return whether it was free until now; raise `RuntimeError` if another process has it."""
        me = self.folder, os.getpid()
        with _TURN:
            if self.held == me:
                return False
            if me not in _FILES:
                _FILES[me] = _locked(self.folder / ".lock")
            _HOLDERS[me] += 1
            self.held = me
            return True

    def release(self) -> None:
        """Free the lock if nobody else in this process holds it."""
        with _TURN:
            if self.held is None:
                return
            _HOLDERS[self.held] -= 1
            if not _HOLDERS[self.held] and (file := _FILES.pop(self.held, None)) is not None:
                file.close()
            self.held = None

    def __del__(self) -> None:
        if self.held is not None and self.held[1] == os.getpid():
            self.release()


def _locked(path: Path) -> Any:
    """Return the file, open and locked, with the number of this process in it."""
    file = path.open("a+b")
    try:
        _lock(file)
    except OSError as error:
        if error.errno in _TAKEN:
            file.seek(1)
            owner = file.read().decode(errors="replace").strip()
            file.close()
            raise RuntimeError(
                f"{path.parent} is in use by process {owner or 'unknown'}: two processes would overwrite each other's "
                "states. Stop that process, or give each a folder of its own"
            ) from None
    else:  # otherwise the file system has no locks: work without
        file.truncate(0)
        file.write(f" {os.getpid()}\n".encode())
        file.flush()
    return file


def _lock(file: Any) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
