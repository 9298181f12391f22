"""A bounded buffer of images that are sampled, changed, and written back: TEA's replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .copying import copy_all
from .counter import Counter
from .randomness import draw, on_device
from .world import ALONE, Share, World

__all__ = ["ImageBuffer"]

_SHELF = 256  # images per allocation


class ImageBuffer(nn.Module):
    """`capacity` images, initially uniform in (−1, 1). Memory is allocated as they are written, a shelf at a time.

    Images that were never written are all noise, so they need no memory yet: a sample that selects one of them gets the
    next free place.
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"the replay buffer must hold at least one image, not {capacity}")
        self.capacity, self.dtype = capacity, dtype
        self.taken = Counter()
        for first in range(0, capacity, _SHELF):
            self.register_buffer(f"from_{first}", None)

    def __len__(self) -> int:
        return int(self.taken)

    def __getitem__(self, place: int) -> Tensor:
        return self._shelf(place)[place % _SHELF]

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return sum(shelf.nbytes for shelf in self.buffers(recurse=False))

    def sample(
        self, like: Tensor, renewal: float, generator: Generator, share: Share | None = None
    ) -> tuple[Tensor, list[int]]:
        """Return as many images as `like` has, and their places. Each is new noise with probability `renewal`.

        If `like` is one rank's `share` of a batch, the places are those of the whole batch.
        """
        share = share or Share(0, len(like), len(like))
        if len(self) and self[0].shape != like.shape[1:]:
            raise ValueError(
                f"the replay buffer holds images of {tuple(self[0].shape)}, and these are of {tuple(like.shape[1:])}: "
                "call reset(), or resize them"
            )
        places: list[int] = []
        seen = len(self)
        for hit in torch.randint(self.capacity, (share.total,), generator=generator).tolist():
            places.append(min(hit, seen))
            seen = max(seen, places[-1] + 1)
        renewed = (torch.rand(share.total, generator=generator) < renewal).tolist()
        images = 2 * draw(torch.rand, like, on_device(generator, like.device), share) - 1
        own = enumerate(places[share.offset : share.offset + share.size])
        stored = [(row, place) for row, place in own if place < len(self) and not renewed[share.offset + row]]
        copy_all([images[row] for row, _ in stored], [self[place] for _, place in stored])
        return images, places

    def write(self, images: Tensor, places: Sequence[int], world: World = ALONE) -> None:
        """Write images of all ranks back to their places; of two with the same place, the later one stays."""
        most = torch.finfo(self.dtype).max
        images = world.gather(images.detach().clamp(-most, most))
        latest = dict(zip(places, images, strict=True))
        for place, image in latest.items():
            name = f"from_{place - place % _SHELF}"
            if self._buffers[name] is None:
                size = min(_SHELF, self.capacity - place + place % _SHELF)
                self._buffers[name] = image.new_zeros(size, *image.shape, dtype=self.dtype)
        copy_all([self[place] for place in latest], list(latest.values()))
        self.taken.add(max(0, max(places) + 1 - len(self)))

    def _shelf(self, place: int) -> Tensor:
        shelf = self._buffers[f"from_{place - place % _SHELF}"]
        if shelf is None:
            raise IndexError(f"no image at {place} yet")
        return shelf

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move to a device, but keep the precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, shelf in self._buffers.items():
            self._buffers[name] = None if shelf is None else shelf.to(self.dtype)
        return self
