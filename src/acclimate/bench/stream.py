"""What arrives, in which order, and when to reset. A scenario is data: anyone can loop over it.

for domain in scenario.domains:
    for x, y in domain.on("cuda"):
        ...
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..data.types import Part, Rows

__all__ = ["Batches", "Domain", "SampledDomain", "Scenario", "Stream"]


class Batches(Protocol):
    """(images, labels) batches that can be iterated again: a list, a DataLoader."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __len__(self) -> int: ...


class Stream(Protocol):
    """A named part of a scenario."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        ...

    @property
    def round(self) -> int:
        """Which visit to this domain this is, counting from 1."""
        ...

    def on(self, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield its batches: floating-point images on a device, and their labels."""
        ...

    def __len__(self) -> int:
        """Return the number of batches."""
        ...


@dataclass(frozen=True)
class Domain:
    """A domain of batches that exist already."""

    name: str
    batches: Batches
    round: int = 1
    """Which visit to this domain this is, counting from 1."""

    @classmethod
    def of(cls, name: str, x: Tensor, y: Tensor, batch_size: int = 64) -> Domain:
        """Return a domain of tensors."""
        return cls(name, [*zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)])

    def on(self, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, with images moved to the device."""
        for x, y in self.batches:
            yield _floating(x.to(device)), y

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class SampledDomain:
    """A domain of images from parts, in a given order. Workers read images; the device receives bytes and changes them.

    The randomness of a change depends only on `seed`, the domain and the batch, so that any batch can be made again.
    """

    name: str
    parts: Sequence[Part]
    picks: Sequence[tuple[int, int]]
    """(part, image) indices, in order."""
    batch_size: int = 64
    seed: int = 0
    workers: int = 0
    round: int = 1
    """Which visit to this domain this is, counting from 1."""

    def on(self, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, read on demand."""
        device = torch.device(device)
        loader = DataLoader(
            _Picked(self.parts, self.picks),
            batch_size=self.batch_size,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            collate_fn=_collate,
        )
        for index, (x, y, chosen) in enumerate(_moved(loader, device)):
            moved = _floating(x)
            for number in sorted(set(chosen)):
                change = self.parts[number].change
                if change is not None:
                    generator = Generator(device).manual_seed(self._seed(index, number))
                    rows = [row for row, own in enumerate(chosen) if own == number]
                    if len(rows) == len(chosen):
                        moved = change(moved, generator)
                    else:
                        moved[rows] = change(moved[rows], generator)
            yield moved, y

    def _seed(self, batch: int, part: int) -> int:
        name = self.name.removesuffix(f", round {self.round}")  # the same images in each round
        return zlib.crc32(f"{self.seed} {name} {batch} {part}".encode())

    def __len__(self) -> int:
        return -(-len(self.picks) // self.batch_size)


class _Picked(Dataset[tuple[Tensor, "int | Tensor", int]]):
    def __init__(self, parts: Sequence[Part], picks: Sequence[tuple[int, int]]) -> None:
        self.parts, self.picks = parts, picks

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor, int]:
        part, image = self.picks[index]
        x, y = self.parts[part].images[image]
        return x, y, part

    def __getitems__(self, indices: Sequence[int]) -> Sequence[tuple[Tensor, int | Tensor, int]] | _Batch:
        """Return a whole batch, read at once where its images are in one array."""
        parts = {self.picks[index][0] for index in indices}
        images = self.parts[min(parts)].images
        if len(parts) > 1 or not isinstance(images, Rows):
            return [self[index] for index in indices]
        return _Batch(*images.rows([self.picks[index][1] for index in indices]), [min(parts)] * len(indices))


class _Batch(NamedTuple):
    """Images, labels and parts."""

    x: Tensor
    y: Tensor
    parts: list[int]


def _collate(samples: Sequence[tuple[Tensor, int | Tensor, int]] | _Batch) -> tuple[Tensor, Tensor, list[int]]:
    if isinstance(samples, _Batch):
        return samples
    images, labels, parts = zip(*samples, strict=True)
    if len({image.shape for image in images}) > 1:
        sizes = " and ".join(sorted({f"{image.shape[-1]}×{image.shape[-2]}" for image in images})[:2])
        raise ValueError(f"images of {sizes} pixels cannot be one batch: give the network a crop (Preprocess)")
    if len({label.shape for label in labels if isinstance(label, Tensor)}) > 1:
        raise ValueError("labels of different sizes cannot be one batch: take one image at a time (batch size 1)")
    y = torch.stack([label if isinstance(label, Tensor) else torch.tensor(label) for label in labels])
    return default_collate([*images]), y, list(parts)  # in a worker, straight into shared memory


def _moved(
    batches: Iterable[tuple[Tensor, Tensor, list[int]]], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield images on the device. A GPU receives the next batch while it works on the current one."""
    if device.type != "cuda":
        yield from ((x.to(device), y, parts) for x, y, parts in batches)
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[Tensor, Tensor, list[int]] | None = None
    for x, y, parts in batches:
        with torch.cuda.stream(copying):
            copied = x.to(device, non_blocking=True)
            there = copying.record_event()
        if waiting is not None:
            yield waiting
        torch.cuda.current_stream(device).wait_event(there)
        copied.record_stream(torch.cuda.current_stream(device))
        waiting = copied, y, parts
    if waiting is not None:
        yield waiting


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float().div_(255)


@dataclass(frozen=True)
class Scenario:
    """Domains in order. Adapters are reset `"never"`, before each `"domain"`, or before each `"batch"`."""

    name: str
    domains: Sequence[Stream]
    resets: Literal["never", "domain", "batch"] = "never"
    clean_between: Stream | None = None
    """Clean images after each domain, adapted to without a reset: the paper's probe of forgetting."""

    def __len__(self) -> int:
        return sum(len(domain) for domain in self.domains)
