"""Where a number comes from: versions, device, commit, memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from .._version import __version__

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["origin", "process_memory"]


def origin(device: torch.device, ranks: int = 1) -> dict[str, str | None]:
    """Return what a number depends on in addition to its arguments: versions, device and how many of it, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "acclimate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        **({"ranks": str(ranks)} if ranks > 1 else {}),
        "commit": _commit(),
    }


def process_memory() -> float | None:
    """Return the peak memory of this process in MB; None on Windows."""
    if resource is None:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _commit() -> str | None:
    """Return the commit that is checked out, marked if files differ from it; None if the package is installed.

    `ACCLIMATE_COMMIT` names the commit on a machine that has the files without their history.
    """
    if given := os.environ.get("ACCLIMATE_COMMIT"):
        return given
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603
            ["git", *arguments],  # noqa: S607
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        tracked = git("ls-files", "__init__.py")
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "") if tracked else None
    except (OSError, subprocess.CalledProcessError):
        return None
