"""What arrives, in which order, and when to reset. A scenario is data: anyone can loop over it.

for domain in scenario.domains:
    for x, y in domain.on("cuda"):
        ...
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..checks import no_such
from ..data.types import BrokenImageError, DataError, Part, Rows, Suite
from ..parts.world import Share

__all__ = [
    "Batches",
    "Domain",
    "SampledDomain",
    "Scenario",
    "Stream",
    "choose_shifts",
    "label_of",
    "sample_domain",
    "sample_shifts",
]


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
            yield floating(x.to(device)), y

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
    broken: dict[Path, str] | None = None
    """Where broken files are noted with the reason, and left out of their batch; None raises an error instead."""
    part: tuple[int, int] = (0, 1)
    """Which part of each batch to read, and how many parts there are."""

    def on(self, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, read on demand."""
        device = torch.device(device)
        if self.part != (0, 1):
            yield from self._part_on(device)
            return
        loader = DataLoader(
            _Picked(self.parts, self.picks, skip_broken=self.broken is not None),
            batch_size=self.batch_size,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is,
        )
        for index, (x, y, chosen) in enumerate(_moved(self._readable(loader), device)):
            yield self._changed(floating(x), index, chosen), y

    def _part_on(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a part of each batch, and only read that. An empty one reads an image for its shape.

        A batch with a change is read and changed whole: the change may depend on the other images.
        """
        starts = range(0, len(self.picks), self.batch_size)
        chosen = [[part for part, _ in self.picks[start : start + self.batch_size]] for start in starts]
        shares = [Share.even(len(parts), *self.part) for parts in chosen]
        whole = [any(self.parts[number].change is not None for number in {*parts}) for parts in chosen]
        needed = [Share.even(share.total, 0, 1) if all_ else share for share, all_ in zip(shares, whole, strict=True)]
        rows = [
            [start + share.offset + row for row in range(share.size)] or [start]
            for start, share in zip(starts, needed, strict=True)
        ]
        loader = DataLoader(
            _Picked(self.parts, self.picks),
            batch_sampler=rows,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is,
        )
        for index, (x, y, parts) in enumerate(_moved(self._readable(loader), device)):
            share = shares[index]
            if whole[index]:
                yield share.of(self._changed(floating(x), index, parts)), share.of(y)
            else:
                yield floating(x)[: share.size], y[: share.size]

    def _changed(self, moved: Tensor, index: int, chosen: list[int]) -> Tensor:
        """Return a batch with the changes of its parts."""
        for number in sorted(set(chosen)):
            change = self.parts[number].change
            if change is not None:
                generator = Generator(moved.device).manual_seed(self._seed(index, number))
                rows = [row for row, own in enumerate(chosen) if own == number]
                if len(rows) == len(chosen):
                    moved = change(moved, generator)
                else:
                    moved[rows] = change(moved[rows], generator)
        return moved

    def left_out(self, read: int) -> int | None:
        """Return how many images were left out if `read` were read; None if broken ones are not left out."""
        return None if self.broken is None else len(self.picks) - read

    def _readable(self, batches: Iterable[_Batch | DataError]) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Yield what was read. Raise an error of a worker here, where it has no traceback of the worker."""
        empty = True
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            if self.broken is not None:
                self.broken.update(batch.broken)
            if batch.parts:
                empty = False
                yield batch.x, batch.y, batch.parts
        if empty and self.broken:
            path, reason = next(iter(self.broken.items()))
            raise DataError(f"{self.name}: no image can be read, such as {path} ({reason})")

    def _seed(self, batch: int, part: int) -> int:
        name = self.name.removesuffix(f", round {self.round}")  # the same images in each round
        return zlib.crc32(f"{self.seed} {name} {batch} {part}".encode())

    def __len__(self) -> int:
        return -(-len(self.picks) // self.batch_size)


class _Batch(NamedTuple):
    """Images, labels and parts; and the broken files that were left out, with the reason."""

    x: Tensor
    y: Tensor
    parts: list[int]
    broken: dict[Path, str]


class _Picked(Dataset["_Batch | DataError"]):
    def __init__(self, parts: Sequence[Part], picks: Sequence[tuple[int, int]], *, skip_broken: bool = False) -> None:
        self.parts, self.picks, self.skip_broken = parts, picks, skip_broken

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, index: int) -> _Batch | DataError:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> _Batch | DataError:
        """Return a whole batch, or why there is none. A raised error would bring the traceback of its worker."""
        picked = [self.picks[index] for index in indices]
        try:
            return self._rows(picked) or self._one_by_one(picked)
        except DataError as error:
            return error

    def _rows(self, picked: Sequence[tuple[int, int]]) -> _Batch | None:
        """Return a batch that is read at once: its images are in one array, and none is broken."""
        parts = [part for part, _ in picked]
        images = self.parts[parts[0]].images
        if len({*parts}) > 1 or not isinstance(images, Rows):
            return None
        try:
            return _Batch(*images.rows([image for _, image in picked]), parts, {})
        except BrokenImageError:
            return None

    def _one_by_one(self, picked: Sequence[tuple[int, int]]) -> _Batch:
        samples: list[_Sample] = []
        broken: dict[Path, str] = {}
        for part, image in picked:
            try:
                samples.append((*self.parts[part].images[image], part))
            except BrokenImageError as error:  # noqa: PERF203
                if not self.skip_broken:
                    raise
                broken[error.path] = error.reason
        return _collate(samples, broken) if samples else _Batch(torch.empty(0), torch.empty(0), [], broken)


_Sample: TypeAlias = "tuple[Tensor, int | Tensor, int]"
"""An image, its label or labels, and its part."""


def _collate(samples: Sequence[_Sample], broken: dict[Path, str]) -> _Batch:
    images, labels, parts = zip(*samples, strict=True)
    if len({image.shape for image in images}) > 1:
        sizes = " and ".join(sorted({f"{image.shape[-1]}×{image.shape[-2]}" for image in images})[:2])
        raise DataError(f"images of {sizes} pixels cannot be one batch: give the network a crop (Preprocess)")
    if len({label.shape for label in labels if isinstance(label, Tensor)}) > 1:
        raise DataError("labels of different sizes cannot be one batch: take one image at a time (batch size 1)")
    y = torch.stack([label if isinstance(label, Tensor) else torch.tensor(label) for label in labels])
    return _Batch(default_collate([*images]), y, list(parts), broken)  # in a worker, straight into shared memory


def _as_it_is(batch: Any) -> Any:
    return batch


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


def floating(x: Tensor) -> Tensor:
    """Return images in [0, 1]; bytes are divided by 255."""
    return x if x.is_floating_point() else x.float().div_(255)


@dataclass(frozen=True)
class Scenario:
    """Domains in order. Adapters are reset `"never"`, before each `"domain"`, or before each `"batch"`."""

    name: str
    domains: Sequence[Stream]
    resets: Literal["never", "domain", "batch"] = "never"
    clean_between: Stream | None = None
    """Clean images after each domain, adapted to without a reset: the paper's probe of forgetting."""
    tolerant: bool = False
    """A batch that the adapter rejects counts as answered with a uniform prediction."""

    def __len__(self) -> int:
        return sum(len(domain) for domain in self.domains)


def sample_domain(
    name: str,
    part: Part,
    *,
    batch_size: int = 64,
    images: int | None = None,
    seed: int = 0,
    workers: int = 0,
    broken: dict[Path, str] | None = None,
) -> SampledDomain:
    """Return a domain of one part, shuffled by `seed` unless the part is ordered; `images` cuts it short.

    With a dict `broken`, broken files are left out and noted there.
    """
    shuffled = torch.randperm(len(part.images), generator=Generator().manual_seed(seed)).tolist()
    order = range(len(part.images)) if part.ordered else shuffled
    picks = [(0, index) for index in order[:images]]
    return SampledDomain(name, [part], picks, batch_size, seed, workers, broken=broken)


def sample_shifts(
    suite: Suite, *, severity: int = 5, shifts: Sequence[str] | None = None, **options: Any
) -> list[SampledDomain]:
    """Return one domain for each shift, all by default; `options` are those of `sample_domain`."""
    return [sample_domain(shift, suite.part(shift, severity), **options) for shift in choose_shifts(suite, shifts)]


def choose_shifts(suite: Suite, shifts: Sequence[str] | None) -> Sequence[str]:
    """Return the shifts, all by default; raise for one that the suite does not have."""
    known = [*suite.shifts, *suite.extra]
    if unknown := [shift for shift in shifts or () if shift not in known]:
        raise ValueError(f"{suite.name}: {no_such('shift', unknown[0], known)}")
    return shifts or suite.shifts


def label_of(part: Part, index: int) -> int:
    """Return the label of an image, without reading the image where that is possible."""
    labels = getattr(part.images, "labels", None)
    if labels is not None:
        return int(labels[index])
    label = part.images[index][1]
    if isinstance(label, Tensor) and label.dim():
        raise ValueError("the scenario needs one label per image, and these have one per pixel")
    return int(label)
