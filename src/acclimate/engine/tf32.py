"""TF32 in matrix products: a setting of the whole process, which several adapters may need at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["convolves_in_tf32", "tf32"]

_GUARD = threading.Lock()
_USERS: list[Any] = []
"""What the first of the present users has found, once per user."""


@contextmanager
def tf32() -> Iterator[None]:
    """Allow TF32 inside the block. The first to enter notes the setting, the last to leave restores it."""
    matmul: Any = torch.backends.cuda.matmul
    setting, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    with _GUARD:
        _USERS.append(_USERS[0] if _USERS else getattr(matmul, setting))
    try:
        setattr(matmul, setting, value)
        yield
    finally:
        with _GUARD:
            found = _USERS.pop()
            if not _USERS:
                setattr(matmul, setting, found)


def convolves_in_tf32(device: torch.device) -> bool:
    """Return whether convolutions in single precision use TF32: on a GPU torch allows it by default."""
    cudnn: Any = torch.backends.cudnn
    settings = [getattr(where, "fp32_precision", None) for where in (getattr(cudnn, "conv", None), cudnn)]
    allowed: bool = "tf32" in settings if any(settings) else cudnn.allow_tf32  # older versions have the latter alone
    return device.type == "cuda" and allowed
