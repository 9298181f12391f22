"""Compile ahead of time: before the first batch, from a file, or in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from ..checks import warn
from ..engine import (
    LIVE_CALLS,
    Compiler,
    ForeignError,
    Rehearsal,
    compiled_code,
    pack,
    purpose,
    unpack,
    use_compiled_code,
)
from ..files import read_bytes, to_path, write_bytes

__all__ = ["compile_copy", "load_compiled", "save_compiled", "warm_up"]


def warm_up(adapter: Any, batch: Tensor | Sequence[int]) -> None:
    """Rehearse steps of batches like this one, or of this shape, and undo what they have changed."""
    x = batch if isinstance(batch, Tensor) else _random_images(batch, adapter.device)
    x, share = adapter.admit(x)
    adapter.settle()
    adapter.runner.compile_at_once()
    adapter.state.source()
    before, trusted, warned = adapter.state.copy(), adapter._trusted, adapter.notices.single
    adapter.notices.single = True
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), adapter._aside(share), adapter.learning(), adapter.runner.tf32():
            with adapter.recorder.running(Rehearsal()):
                adapter.adapt(x.detach())
            for _ in range(LIVE_CALLS + 1 if adapter.engine.graphs else 0):
                adapter.adapt(x.detach())
            adapter.recorder.prepare()
    finally:
        adapter.settle(discard=True)
        with torch.no_grad():
            adapter.state.restore(before)
        for name, module, key in () if adapter.engine.graphs else adapter.state.slots():
            if f"state/{name}" not in before.tensors:
                setattr(module, key, None)  # a recorded step reads zeros there instead
        adapter._trusted, adapter.notices.single = trusted, warned


def save_compiled(adapter: Any, path: str | Path) -> None:
    """Write what this process has compiled to a file."""
    write_bytes(to_path(path), pack(compiled_code(), purpose(adapter.model, adapter.device)))


def load_compiled(adapter: Any, path: str | Path) -> bool:
    """Use code from a file; return whether it fits, and warn if not."""
    try:
        use_compiled_code(unpack(read_bytes(to_path(path)), purpose(adapter.model, adapter.device)))
    except (OSError, ForeignError) as error:
        warn(f"{path} is not used, and passes are compiled here: {error}")
        return False
    return True


def compile_copy(adapter: Any, x: Tensor) -> Callable[[], Compiler]:
    """Copy an adapter; return a function that compiles the passes of the copy, in a thread of its own."""
    copied, x = deepcopy(adapter), x.clone()
    copied.engine = replace(adapter.runner.asked, graphs=False, background=False)

    def compiled() -> Compiler:
        copied.warm_up(x)
        compiler: Compiler = copied.runner.compiler
        return compiler

    return compiled


def _random_images(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return images in [0, 1], the same for every call, without a change of torch's generators."""
    return torch.rand(tuple(shape), generator=Generator().manual_seed(0)).to(device)
