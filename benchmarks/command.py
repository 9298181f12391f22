"""What the measuring commands share: their options, and where their results go."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from acclimate.evaluate import origin
from acclimate.files import write_text

__all__ = ["command", "write"]


def command(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    warnings.simplefilter("ignore", DeprecationWarning)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="a folder")
    return parser


def write(name: str, arguments: argparse.Namespace, result: dict[str, Any]) -> Path:
    """The result file, with the command and what it ran on."""
    device = arguments.device
    told = {"command": f"python -m benchmarks.{name} --device {device}", "origin": origin(torch.device(device))}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = Path(arguments.out) / f"{name}_{'h200' if device == 'cuda' else 'cpu'}.json"
    write_text(path, json.dumps(told | result, indent=1))
    return path
