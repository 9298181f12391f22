"""How to install a missing extra, in the way in which the package was installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution

__all__ = ["extra", "install_command"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Let a failed import inside the block say how to install the extra that brings the package."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: {install_command(name)}", name=error.name) from error


def install_command(extra: str) -> str:
    """Return the command that adds an extra: from the package index, an address, or the repository it came from."""
    try:
        text = distribution("acclimate").read_text("direct_url.json")  # PEP 610: absent if it came from an index
    except PackageNotFoundError:  # a checkout on the path
        return _in_repository(extra)
    origin = json.loads(text) if text else {}
    if not origin:
        return f"pip install 'acclimate[{extra}]'"
    if "dir_info" in origin:
        return _in_repository(extra, "-e " if origin["dir_info"].get("editable") else "")
    tool = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"pip install 'acclimate[{extra}] @ {tool}{origin['url']}'"


def _in_repository(extra: str, editable: str = "") -> str:
    return f"in the repository, pip install -c constraints.txt {editable}'.[{extra}]'"
