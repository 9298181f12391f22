"""Options and result files that all measuring commands share."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from acclimate import Engine
from acclimate.bench.provenance import origin
from acclimate.cli.terminal import repeatable
from acclimate.files import json_lines, rounded, write_text

__all__ = ["ENGINES", "RESULTS", "command", "name_of", "path", "read", "write"]

RESULTS = Path(__file__).parent / "results"

ENGINES: dict[str, Engine | Literal["recorded", "auto"]] = {
    "eager": Engine(),
    "bf16": Engine("bf16"),
    "recorded": "recorded",
    "auto": "auto",
}
"""Engines by their name in options and result files: plain PyTorch in single precision and in bfloat16, and ours."""


def command(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    warnings.simplefilter("ignore", DeprecationWarning)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    parser.add_argument("--part", default="", help="added to the name of the result file, to keep the usual one")
    return parser


def path(name: str, arguments: argparse.Namespace) -> Path:
    """Return the path of the result file."""
    machine = torch.cuda.get_device_name().split()[-1].lower() if arguments.device == "cuda" else "cpu"
    return Path(arguments.out) / f"{'_'.join(filter(None, (name, arguments.part)))}_{machine}.json"


def name_of(model: str) -> str:
    """Return the name of a network without its file, as it stands in names of files.

    >>> name_of("keras-resnet50=resnet50.safetensors"), name_of("timm:resnet50")
    ('keras-resnet50', 'timm-resnet50')
    """
    return re.sub(r"[^\w.-]+", "-", model.partition("=")[0])


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
