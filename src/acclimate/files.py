"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_bytes", "write_text"]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, flush it to disk, and move it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write text in the same way, and create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())
