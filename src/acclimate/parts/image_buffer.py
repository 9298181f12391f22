"""A bounded memory of images that are drawn, worked on, and written back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..core.record import Count
from ..core.state import copy_all
from .randomness import on_device

__all__ = ["Replay"]

_SHELF = 256  # images that memory is taken up for at a time


class Replay(nn.Module):
    """`capacity` images, at first uniform in (−1, 1). They take up memory as they are written, a shelf at a time.

    Unseen images are all alike, so they need no place yet: a draw that hits one of them gets the next free place.
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a replay buffer holds at least one image, not {capacity}")
        self.capacity, self.dtype = capacity, dtype
        self.taken = Count()
        for first in range(0, capacity, _SHELF):
            self.register_buffer(f"from_{first}", None)

    def __len__(self) -> int:
        return int(self.taken)

    def __getitem__(self, place: int) -> Tensor:
        return self._shelf(place)[place % _SHELF]

    @property
    def nbytes(self) -> int:
        """The memory taken up now."""
        return sum(shelf.nbytes for shelf in self.buffers(recurse=False))

    def draw(self, like: Tensor, renewal: float, generator: Generator) -> tuple[Tensor, list[int]]:
        """As many images as `like` has, and their places. One starts anew with the probability `renewal`."""
        if len(self) and self[0].shape != like.shape[1:]:
            raise ValueError(
                f"the replay buffer holds images of {tuple(self[0].shape)}, and these are of {tuple(like.shape[1:])}: "
                "reset(), or resize them"
            )
        places: list[int] = []
        seen = len(self)
        for hit in torch.randint(self.capacity, (len(like),), generator=generator).tolist():
            places.append(min(hit, seen))
            seen = max(seen, places[-1] + 1)
        anew = (torch.rand(len(like), generator=generator) < renewal).tolist()
        many = on_device(generator, like.device)
        drawn = 2 * torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=many) - 1
        seen_before = [row for row, place in enumerate(places) if place < len(self) and not anew[row]]
        copy_all([drawn[row] for row in seen_before], [self[places[row]] for row in seen_before])
        return drawn, places

    def write(self, images: Tensor, places: Sequence[int]) -> None:
        """Put images back in their places; of two in one place, the later stays."""
        most = torch.finfo(self.dtype).max
        latest = dict(zip(places, images.detach().clamp(-most, most), strict=True))
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
        """Moves to a device, but keeps its own precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, shelf in self._buffers.items():
            self._buffers[name] = None if shelf is None else shelf.to(self.dtype)
        return self
