"""Options and result files that all measuring commands share."""

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
from acclimate.files import json_lines, rounded, write_text

__all__ = ["RESULTS", "command", "path", "read", "write"]

RESULTS = Path(__file__).parent / "results"


def command(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    warnings.simplefilter("ignore", DeprecationWarning)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    return parser


def path(name: str, arguments: argparse.Namespace) -> Path:
    """Return the path of the result file."""
    machine = torch.cuda.get_device_name().split()[-1].lower() if arguments.device == "cuda" else "cpu"
    return Path(arguments.out) / f"{name}_{machine}.json"


def read(name: str, machine: str) -> dict[str, Any]:
    """Return a committed result file, such as that of `steps` on `h200`."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}_{machine}.json").read_text())
    return content


def write(name: str, arguments: argparse.Namespace, result: dict[str, Any], depth: int = 2, part: str = "") -> None:
    """Write the result file, with the command and the origin; one line per entry down to a depth.

    `part` is added to the file's name where a command measures its parts one by one.
    """
    head = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *repeatable(sys.argv[1:])]),
        "origin": origin(torch.device(arguments.device)),
    }
    write_text(path(name + part, arguments), json_lines(rounded(head | result, digits=8), depth))
