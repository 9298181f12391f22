"""A bounded memory of images that are drawn, worked on, and written back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from .randomness import on_device

__all__ = ["Replay"]


class Replay(nn.Module):
    """`capacity` images, at first uniform in (−1, 1). One takes up memory from the first time it is written.

    Unseen images are all alike, so they need no place yet: a draw that hits one of them gets the next free place.
    """

    images: Tensor | None

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a replay buffer holds at least one image, not {capacity}")
        self.capacity, self.dtype = capacity, dtype
        self.register_buffer("images", None)

    @property
    def nbytes(self) -> int:
        """The memory taken up now."""
        return 0 if self.images is None else self.images.nbytes

    def draw(self, like: Tensor, renewal: float, generator: Generator) -> tuple[Tensor, list[int]]:
        """As many images as `like` has, and their places. One starts anew with the probability `renewal`."""
        held = 0 if self.images is None else len(self.images)
        places: list[int] = []
        seen = held
        for hit in torch.randint(self.capacity, (len(like),), generator=generator).tolist():
            places.append(min(hit, seen))
            seen = max(seen, places[-1] + 1)
        anew = (torch.rand(len(like), generator=generator) < renewal).tolist()
        noise = torch.rand(
            like.shape, dtype=like.dtype, device=like.device, generator=on_device(generator, like.device)
        )
        drawn = 2 * noise - 1
        rows = [row for row, place in enumerate(places) if place < held and not anew[row]]
        if self.images is not None and rows:
            drawn[rows] = self.images[[places[row] for row in rows]].to(drawn)
        return drawn, places

    def write(self, images: Tensor, places: Sequence[int]) -> None:
        """Put images back in their places; of two in one place, the later stays."""
        rows = {place: row for row, place in enumerate(places)}
        kept = images.detach()[list(rows.values())]
        if self.images is None:
            self.images = kept.new_empty(0, *kept.shape[1:], dtype=self.dtype)
        if self.images.shape[1:] != kept.shape[1:]:
            raise ValueError(
                f"the replay buffer holds images of {tuple(self.images.shape[1:])}, and these are of "
                f"{tuple(kept.shape[1:])}: reset(), or resize them"
            )
        new = max(places) + 1 - len(self.images)
        store = torch.cat([self.images, self.images.new_empty(new, *kept.shape[1:])]) if new > 0 else self.images
        store[list(rows)] = kept.to(store.dtype)
        self.images = store
