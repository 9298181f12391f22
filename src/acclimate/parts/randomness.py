"""Random numbers come from explicit generators only."""

from __future__ import annotations

import torch
from torch import Generator

__all__ = ["on_device"]


def on_device(generator: Generator, device: torch.device) -> Generator:
    """Return a generator on `device` for large samples: `generator` itself, or a new one seeded by it.

    Small samples use the adapter's own generator on the CPU, so that a stream is the same on every device. Noise of the
    size of images or parameters is not worth the copy.
    """
    if generator.device.type == device.type:
        return generator
    seed = int(torch.randint(1 << 62, (), generator=generator))
    return Generator(device).manual_seed(seed)
