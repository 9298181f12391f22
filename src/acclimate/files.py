"""Files of results and states, on this machine or in storage that fsspec reaches: `s3://bucket/run`, `gs://…`.

Every file is written completely or not at all. Paths of this machine need no fsspec.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from secrets import token_hex
from threading import get_native_id
from typing import Any, BinaryIO, TypeAlias

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    *("AnyPath", "RemotePath", "is_file", "json_lines", "matching", "read_bytes", "read_text", "remove", "rounded"),
    *("to_path", "version", "write_bytes", "write_text"),
]

_HOST = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()
_SUFFIX = ".acclimate-tmp"
_MINUTE, _DAY = 60, 86_400
_MANY = 1000
_LIST_AGAIN: dict[Path, float] = {}
"""When a folder of many files may be listed again: that takes a millisecond per thousand files."""
_ATOMIC = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"}
"""Storage where a file appears when all of it has arrived."""
_VERSIONED = (
    *("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created", "size"),
)
"""What storage says about a file that changes when it is written, and not when it is read."""


@dataclass(frozen=True)
class RemotePath:
    """A path in storage, such as `s3://bucket/run`."""

    url: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's ending, such as `.json`."""
        return Path(self.name).suffix

    @property
    def place(self) -> tuple[Any, str]:
        """The file system, which sees what others have written, and the path in it."""
        try:
            import fsspec
        except ImportError as error:
            from .extras import install_command

            raise ImportError(f"{self} needs fsspec: {install_command('storage')}") from error
        system, inner = fsspec.core.url_to_fs(self.url)
        system.invalidate_cache()
        return system, inner


AnyPath: TypeAlias = Path | RemotePath


def to_path(name: str | AnyPath) -> AnyPath:
    """Return a path of this machine, or of storage if the name is an address."""
    if not isinstance(name, str) or not (address := re.fullmatch(r"([a-z][a-z0-9+.-]+)://(.*)", name)):
        return Path(name) if isinstance(name, str) else name
    return Path(address[2]) if address[1] in ("file", "local") else RemotePath(name)


def read_bytes(path: AnyPath) -> bytes:
    """Return the content of a file."""
    if isinstance(path, Path):
        return path.read_bytes()
    with _storage_errors(path, "read"):
        system, inner = path.place
        content: bytes = system.cat_file(inner)
        return content


def read_text(path: AnyPath) -> str:
    """Return the text of a file."""
    return read_bytes(path).decode()


def is_file(path: AnyPath) -> bool:
    """Return whether there is a file."""
    if isinstance(path, Path):
        return path.is_file()
    with _storage_errors(path, "read"):
        system, inner = path.place
        return bool(system.isfile(inner))


def version(path: AnyPath) -> str | None:
    """Return what differs after each write of a file; None if there is no file."""
    try:
        if isinstance(path, Path):
            with path.open("rb") as file:  # `stat` of an NFS client may be some seconds old
                found = os.fstat(file.fileno())
            return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"  # each write makes another file
        with _storage_errors(path, "read"):
            system, inner = path.place
            about = system.info(inner)
    except FileNotFoundError:
        return None
    return " ".join(f"{name}={about[name]}" for name in _VERSIONED if about.get(name) is not None)


def matching(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """Return the files in a folder whose names match a pattern, in order; none if there is no such folder."""
    if isinstance(folder, Path):
        return [*sorted(folder.glob(pattern))]
    with _storage_errors(folder, "read"):
        system, inner = folder.place
        try:
            names = sorted(entry.rstrip("/").rpartition("/")[2] for entry in system.ls(inner, detail=False))
        except FileNotFoundError:
            return []
    return [folder / name for name in names if fnmatchcase(name, pattern)]


def remove(path: AnyPath) -> None:
    """Remove a file, if it is there."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
        return
    with _storage_errors(path, "remove"), contextlib.suppress(FileNotFoundError):
        system, inner = path.place
        system.rm_file(inner)


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Write a file so that readers find the old content or the new one, whole. Of several writers the last one counts.

    On this machine, a temporary file in the same folder is flushed to disk and moved to `path`. Several threads,
    processes and hosts may write one path. What killed writers left is removed first. Object stores show a file when
    all of it has arrived; in other storage a temporary file is moved.
    """
    if isinstance(path, RemotePath):
        with _storage_errors(path, "write"):
            _upload(path, content)
        return
    with _clear_errors(path):
        _sweep(path)
        try:
            _write(path, content)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            _write(path, content)  # the temporary file was removed by another writer, to which we looked dead


def write_text(path: AnyPath, text: str) -> None:
    """Write text in the same way, and create the folder if needed."""
    if isinstance(path, Path):
        with _clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def _upload(path: RemotePath, content: bytes) -> None:
    system, inner = path.place
    if path.url.partition("://")[0] in _ATOMIC:
        system.pipe_file(inner, content)
        return
    folder, _, name = inner.rpartition("/")
    temporary = f"{folder}/.{name}.{_HOST}-{os.getpid()}-{token_hex(4)}{_SUFFIX}"
    try:
        system.makedirs(folder, exist_ok=True)
        system.pipe_file(temporary, content)
        system.mv(temporary, inner)
    except BaseException:
        with contextlib.suppress(Exception):
            system.rm_file(temporary)
        raise


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
    """Remove temporary files of writers that were killed while they wrote `path`.

    A folder of many files is listed once a minute, and what was left of any of them is removed.
    """
    folder = path.parent
    if time.monotonic() < _LIST_AGAIN.get(folder, 0.0):
        return
    with contextlib.suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 -- twice as fast as iterdir
        many = len(names) > _MANY
        if many:
            _LIST_AGAIN[folder] = time.monotonic() + _MINUTE
        prefix = r"\..*\." if many else re.escape(_prefix(path))
        pattern = re.compile(prefix + r"([0-9a-f]{8})-\d+-\d+-[0-9a-f]{8}" + re.escape(_SUFFIX), re.DOTALL)
        for name in names:
            if name.endswith(_SUFFIX) and (ours := pattern.fullmatch(name)) is not None:
                with contextlib.suppress(OSError):
                    _remove_left(folder / name, here=ours[1] == _HOST)


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
        kept = "; the previous file is unchanged" if path.is_file() else ""
        raise OSError(error.errno, f"cannot write {path} ({error.strerror or error}){kept}") from error


@contextlib.contextmanager
def _storage_errors(path: RemotePath, what: str) -> Iterator[None]:
    """Raise `OSError` for the errors that storage has of its own; a missing file or package speaks for itself."""
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:
        raise OSError(f"cannot {what} {path} ({str(error) or repr(error)})") from error


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
