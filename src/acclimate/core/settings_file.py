"""Settings that `acclimate tune` has chosen for a network, as a small JSON file.

    {"start": "resnet50", "methods": {"EATAC": {"lr": 8e-5}}, …}

`start` is the preset that they change; methods that the file does not name use it as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .options import NETWORKS

__all__ = ["is_settings_file", "read_settings"]


def is_settings_file(name: str) -> bool:
    """Return whether the name of a preset is that of a file."""
    return name.endswith(".json")


def read_settings(file: str | Path, method: str) -> tuple[str, dict[str, Any]]:
    """Return the preset that a file starts from, and what it changes for a method."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of settings {path}: `acclimate tune` writes one")
    try:
        content = json.loads(path.read_text())
        start, changed = content["start"], content["methods"].get(method, {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no settings: expected what `acclimate tune` writes") from error
    if start not in NETWORKS:
        raise ValueError(f"{path} starts from {start!r}, which is no preset: expected one of {', '.join(NETWORKS)}")
    return start, dict(changed)
