"""Makes timm and torchvision importable beside a CPU build of torch, and nothing slow or random by accident."""

from __future__ import annotations

import contextlib
import os
import tempfile

import pytest
import torch

torch.set_num_threads(1)

# a compiler's cache of one's own: processes that share one may read what another has half written
_cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name


def _declare_torchvision_operators() -> object:
    """torchvision from the registry is a CUDA build: beside a CPU torch its compiled operators are missing.

    Declaring the two that its import asks for makes the pure-Python parts work, which is all that timm needs.
    """
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a matching torchvision has them
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if not torch.cuda.is_available():
    _library = _declare_torchvision_operators()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if config.option.markexpr == "gpu":  # all skipped would look as if they had passed
        raise pytest.UsageError("-m gpu asks for tests that need a CUDA device, and there is none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and runs there by: python -m pytest -m gpu"))
