"""Random numbers come from explicit generators only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from .world import Share

__all__ = ["draw", "on_device"]


def on_device(generator: Generator, device: torch.device) -> Generator:
    """Return a generator on `device` for large samples: `generator` itself, or a new one seeded by it.

    Small samples use the adapter's own generator on the CPU, so that a stream is the same on every device. Noise of the
    size of images or parameters is not worth the copy.
    """
    if generator.device.type == device.type:
        return generator
    seed = int(torch.randint(1 << 62, (), generator=generator))
    return Generator(device).manual_seed(seed)


def draw(sample: Callable[..., Tensor], like: Tensor, generator: Generator, share: Share | None = None) -> Tensor:
    """Return random numbers such as those of `torch.rand`, shaped like a tensor.

    If that is one rank's `share` of a batch, they are its rows of the numbers for the whole batch, so that the number
    of ranks makes no difference.
    """
    share = share or Share(0, len(like), len(like))
    numbers = sample((share.total, *like.shape[1:]), generator=generator, device=like.device, dtype=like.dtype)
    return share.of(numbers)
