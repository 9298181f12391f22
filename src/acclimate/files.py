"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_bytes", "write_text"]


def write_bytes(path: Path, content: bytes) -> None:
    """Written beside its place, flushed to the disk, and moved there."""
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
    """The same for text; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())
