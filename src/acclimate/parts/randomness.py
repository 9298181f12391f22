"""Random numbers by explicit generators alone."""

from __future__ import annotations

import torch
from torch import Generator

__all__ = ["on_device"]


def on_device(generator: Generator, device: torch.device) -> Generator:
    """For many numbers at once: `generator` where it is on `device`, else one there, seeded by it.

    Few numbers are drawn from an adapter's own generator, on the CPU, so that a stream is the same on every device;
    noise of the size of images or parameters is not worth the copy.
    """
    if generator.device.type == device.type:
        return generator
    seed = int(torch.randint(1 << 62, (), generator=generator))
    return Generator(device).manual_seed(seed)
