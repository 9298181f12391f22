"""The server's log on standard error: a line of JSON per event, or a line of text on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

__all__ = ["start_logging"]


class _Json(logging.Formatter):
    """One JSON object per line; `extra={"fields": {…}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    """Time, message and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        more = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()} {more}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging(layout: str) -> bool:
    """Send the log to standard error, warnings included; return whether it is text."""
    text = layout == "text" or (layout == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(_Text() if text else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"
    return text
