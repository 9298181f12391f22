"""Settings that `acclimate tune` has chosen for a network, as a small JSON file.

    {"start": "resnet50", "methods": {"EATAC": {"lr": 8e-5}}, …}

`start` is the preset that they change; methods that the file does not name use it as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .options import NETWORKS

__all__ = ["is_settings_file", "model_of", "read_settings"]


def is_settings_file(name: str) -> bool:
    """Return whether the name of a preset is that of a file."""
    return name.endswith(".json")


def read_settings(file: str | Path, method: str) -> tuple[str, dict[str, Any]]:
    """Return the preset that a file starts from, and what it changes for a method."""
    content = _read(file)
    return content["start"], dict(content["methods"].get(method, {}))


def model_of(file: str | Path) -> str:
    """Return the network that the settings were chosen for."""
    return str(_read(file).get("model", ""))


def _read(file: str | Path) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of settings {path}: `acclimate tune` writes one")
    try:
        content = json.loads(path.read_text())
        start = content["start"]
        content["methods"] = {method: dict(own) for method, own in content["methods"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no settings: expected what `acclimate tune` writes") from error
    if start not in NETWORKS:
        raise ValueError(f"{path} starts from {start!r}, which is not a preset: expected one of {', '.join(NETWORKS)}")
    return dict(content)
