"""What the compiler needs on a CPU: a C++ compiler, and no long test of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache

import torch

__all__ = ["MissingCompilerError", "has_fast_bfloat16", "require_compiler", "settle_compiler"]

_RECENT = 9
"""The first version of GCC that is known to build for every instruction set that torch uses."""


class MissingCompilerError(RuntimeError):
    """There is no C++ compiler on this machine."""


def require_compiler() -> None:
    """Raise if torch.compile has no C++ compiler, which it needs for code on a CPU."""
    if _compiler() is None:
        wanted = _wanted()
        raise MissingCompilerError(
            f"compiling for a CPU needs a C++ compiler, and {wanted} is not on the PATH: install one (Debian, Ubuntu: "
            'apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx), or use engine="eager"'
        )


@cache
def settle_compiler() -> bool:
    """Skip torch's test of the compiler where that is safe; return whether it is skipped.

    Before the first compilation torch builds and runs a program for each instruction set of the processor, which takes
    seconds. On Linux with GCC 9 or later the outcome is known. `TORCHINDUCTOR_VEC_ISA_OK` decides otherwise.
    """
    if "TORCHINDUCTOR_VEC_ISA_OK" in os.environ or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    if _gcc() < _RECENT:
        return False
    import torch._inductor.config as inductor  # takes a second to import

    inductor.cpp.vec_isa_ok = True
    return True


def has_fast_bfloat16() -> bool:
    """Return whether this processor multiplies in bfloat16; others convert to single precision and back."""
    try:
        if platform.machine().lower() in ("arm64", "aarch64"):
            return bool(torch.cpu.get_capabilities().get("bf16", False))
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    except (AttributeError, RuntimeError):  # a torch that does not know
        return True


def _wanted() -> str:
    usual = {"Darwin": "clang++", "Windows": "cl"}
    return os.environ.get("CXX", usual.get(platform.system(), "g++"))


def _compiler() -> str | None:
    return shutil.which(_wanted())


def _gcc() -> int:
    """Return the major version of GCC; zero for another compiler, or none."""
    if (compiler := _compiler()) is None:
        return 0
    try:
        said = [
            subprocess.run([compiler, option], capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S603
            for option in ("--version", "-dumpversion")
        ]
    except (OSError, subprocess.SubprocessError):
        return 0
    major = said[1].strip().partition(".")[0]
    return int(major) if "Free Software Foundation" in said[0] and major.isdigit() else 0
