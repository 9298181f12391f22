"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["json_lines", "rounded", "write_bytes", "write_text"]


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
