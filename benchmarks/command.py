"""What the measuring commands share: their options, and where their results go."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from acclimate.bench.provenance import origin
from acclimate.cli.terminal import repeatable
from acclimate.files import write_text

__all__ = ["command", "path", "write"]


def command(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    warnings.simplefilter("ignore", DeprecationWarning)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="a folder")
    return parser


def path(name: str, arguments: argparse.Namespace) -> Path:
    """Of the result file."""
    machine = torch.cuda.get_device_name().split()[-1].lower() if arguments.device == "cuda" else "cpu"
    return Path(arguments.out) / f"{name}_{machine}.json"


def write(name: str, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """The result file, with the command and what it ran on."""
    file = path(name, arguments)
    told = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *repeatable(sys.argv[1:])]),
        "origin": origin(torch.device(arguments.device)),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(told | result, indent=1))
