"""Compiled code in one file, to ship with a network: torch's portable compiler artifacts, and the libraries of a CPU.

A file fits one version of torch and Python, one kind of device and one network. Passes are still traced; their code is
found in the file. Torch's artifacts hold Triton kernels, but only the source of C++ kernels: the libraries that were
built from it are added. The file is code: load only one that you trust.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from .host_compiler import settle_compiler

__all__ = ["ForeignError", "compiled_code", "pack", "purpose", "unpack", "use_compiled_code"]

_ABOUT, _ARTIFACTS = "about.json", "artifacts"
_LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]+\.main\.so")
"""The path of a library in the compiler's cache."""


class ForeignError(ValueError):
    """A file of compiled code is damaged, or for something else."""


def purpose(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Return what compiled code is for: versions, device, and the network's class and tensors without their values."""
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items() if hasattr(t, "shape")]
    return {
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": _device(device),
        "network": f"{type(model).__name__} {_hash(repr(tensors))}",
    }


def compiled_code() -> dict[str, bytes]:
    """Return what this process has compiled so far, as files."""
    _refuse_old_torch()
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        raise ValueError('nothing was compiled yet: build with engine="auto", and call warm_up first')
    return {_ARTIFACTS: found[0], **{name: path.read_bytes() for name, path in _libraries()}}


def _refuse_old_torch() -> None:
    if not hasattr(torch.compiler, "save_cache_artifacts"):
        raise ForeignError(f"torch {torch.__version__} keeps no compiled code in files: it needs torch 2.7")


def use_compiled_code(files: Mapping[str, bytes]) -> None:
    """Put compiled code where the compiler looks for it."""
    _refuse_old_torch()
    settle_compiler()
    for name, content in files.items():
        path = _cache() / name
        if _LIBRARY.fullmatch(name) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(path)
    if torch.compiler.load_cache_artifacts(files[_ARTIFACTS]) is None:
        raise ForeignError("torch cannot read it")


def pack(files: Mapping[str, bytes], made_for: Mapping[str, str]) -> bytes:
    """Return the content of one file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, each in {_ABOUT: json.dumps(made_for).encode(), **files}.items():
            archive.writestr(name, each)
    return content.getvalue()


def unpack(content: bytes, wanted: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files in one; raise with the reason if it is damaged, or for something else.

    >>> unpack(pack({"artifacts": b"code"}, {"torch": "2.13"}), {"torch": "2.13"})
    {'artifacts': b'code'}
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        made_for = dict(json.loads(files.pop(_ABOUT)))
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise ForeignError("it is damaged, or no file of compiled code") from error
    if _ARTIFACTS not in files:
        raise ForeignError("it is damaged, or no file of compiled code")
    for what, value in wanted.items():
        if made_for.get(what) != value:
            raise ForeignError(f"it is for {what} {made_for.get(what)}, and this is {value}")
    return files


def _cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _libraries() -> Iterator[tuple[str, Path]]:
    """Yield name and path of each library that this process has built or loaded for a CPU."""
    from torch._inductor import codecache

    for name in ("CppCodeCache", "CppPythonBindingsCodeCache", "CppWrapperCodeCache"):
        for key in getattr(getattr(codecache, name, None), "cache", ()):
            path = _cache() / key[1:3] / f"{key}.main.so"
            if path.exists():
                yield f"{key[1:3]}/{path.name}", path


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        return f"{about.name}, CUDA {torch.version.cuda}"
    return f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {_instructions()}"


def _instructions() -> str:
    """Return a hash of the processor's instruction sets: code may use all of them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return _hash(next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), ""))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
