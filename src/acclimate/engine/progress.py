"""Say what is being compiled, so that nobody takes a silent process for a dead one."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["say_compiling", "show_with"]


def _on_terminal(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


_show: Callable[[str], None] = _on_terminal


def show_with(show: Callable[[str], None]) -> None:
    """Show messages with this function instead of printing them to stderr, where that is a terminal."""
    global _show
    _show = show


def say_compiling(what: str) -> None:
    """Say that something is being compiled."""
    _show(f"compiling {what}; this takes seconds to minutes")
