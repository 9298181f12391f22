"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from threading import get_native_id
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["json_lines", "rounded", "write_bytes", "write_text"]

_HOST = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()
_SUFFIX = ".acclimate-tmp"
_DAY = 86_400


def write_bytes(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, flush it to disk, and move it to `path`.

    Several threads, processes and hosts may write one path: readers find one of the contents, whole. What killed
    writers left is removed first.
    """
    with _clear_errors(path):
        _sweep(path)
        try:
            _write(path, content)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            _write(path, content)  # the temporary file was removed by another writer, to which we looked dead


def write_text(path: Path, text: str) -> None:
    """Write text in the same way, and create the folder if needed."""
    with _clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{_prefix(path)}{_HOST}-{os.getpid()}-{get_native_id()}-{token_hex(4)}{_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            _lock(file)
            if not temporary.exists():  # swept before it was locked
                _write(path, content)
                return
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                temporary.replace(path)  # still locked: nobody takes it for a leftover
        if fcntl is None:  # Windows moves no open file
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _prefix(path: Path) -> str:
    return f".{path.name[-48:]}."  # file names have at most 255 bytes


def _sweep(path: Path) -> None:
    """Remove temporary files of writers that were killed while they wrote `path`."""
    pattern = re.compile(re.escape(_prefix(path)) + r"([0-9a-f]{8})-\d+-\d+-[0-9a-f]{8}" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):
        for found in path.parent.iterdir():
            if (ours := pattern.fullmatch(found.name)) is not None:
                with contextlib.suppress(OSError):
                    _remove_left(found, here=ours[1] == _HOST)


def _remove_left(temporary: Path, *, here: bool) -> None:
    """Remove a temporary file that no living writer has locked. Locks of other hosts may not be seen, so wait a day."""
    if not here and time.time() - temporary.stat().st_mtime < _DAY:
        return
    if fcntl is not None:
        with temporary.open("r+b") as file:
            _lock(file, wait=False)  # raises if its writer lives
            temporary.unlink()
    else:
        temporary.unlink()  # Windows removes no open file


def _lock(file: BinaryIO, *, wait: bool = True) -> None:
    """Lock an open file until it is closed or its process ends. Write even where the file system has no locks."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if not wait:
            raise


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Say which file could not be written, and that an older one is still there."""
    try:
        yield
    except OSError as error:
        kept = "; the file of before is unchanged" if path.is_file() else ""
        raise OSError(error.errno, f"cannot write {path} ({error.strerror or error}){kept}") from error


def rounded(value: Any, digits: int) -> Any:
    """Return plain data with its floats rounded to a number of significant digits; whole ones become integers."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, Mapping):
        return {name: rounded(each, digits) for name, each in value.items()}
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return [rounded(each, digits) for each in value] if listed else value


def json_lines(content: Any, depth: int) -> str:
    """Return JSON with one line per entry down to a depth, and everything deeper on the line of its entry."""
    return _entry(content, depth, "\n") + "\n"


def _entry(value: Any, depth: int, line: str) -> str:
    if not depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    named = {json.dumps(name): each for name, each in value.items()} if isinstance(value, dict) else {}
    entries = [f"{name}: {_entry(each, depth - 1, line + ' ')}" for name, each in named.items()] or [
        _entry(each, depth - 1, line + " ") for each in value
    ]
    first, last = "{}" if named else "[]"
    return first + ",".join(f"{line} {entry}" for entry in entries) + line + last
