"""Uploaded pictures: decode what a client sends, one at a time, within limits of what waits and what is held."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from torch import Tensor

from ..data.folders import Preprocess, naming_broken_files, prepare_image
from ..data.types import BrokenImageError, DataError
from .errors import BadInputError, Refusal
from .model import as_input
from .turns import Turns

__all__ = ["FORMATS", "Decoder"]

Result = TypeVar("Result")
FORMATS = ("JPEG", "PNG", "WEBP")
_TOGETHER = 2
"""All requests may hold so many times the pixels of one."""


class _NoWarnings:
    """Ignores Pillow's warnings while any thread is inside: what Python ignores holds for all threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._ignoring = Lock(), 0, warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._ignoring = warnings.catch_warnings()
                self._ignoring.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._ignoring.__exit__(None, None, None)


_no_warnings = _NoWarnings()


class Decoder:
    """Decodes the pictures of requests: `async with decoder.decode(request, uploads) as x`.

    EXIF orientation is applied, CMYK and palettes become RGB, 16 bits become 8, and alpha is dropped. Pictures of other
    formats, with several frames, too large or damaged are refused.

    Args:
        preprocess: how the network takes pictures.
        channels: its number of colour channels.
        most_pixels: pixels of one picture, and of all that the network takes from one request.
        queue: pictures that may wait to be decoded.
    """

    def __init__(self, preprocess: Preprocess, channels: int, most_pixels: int, queue: int) -> None:
        self.preprocess, self.channels, self.most_pixels, self.queue = preprocess, channels, most_pixels, queue
        self.waiting = 0
        """Pictures that wait to be decoded."""
        self.held = 0
        """Pixels of requests that are not answered yet, as the network takes them."""
        self._turns = Turns()

    @asynccontextmanager
    async def decode(self, request: Request, uploads: Sequence[tuple[str, bytes]]) -> AsyncIterator[Tensor]:
        """Hold the pictures of a request (B, C, H, W) in [0, 1], as the network takes them, until it is answered."""
        self._check_room(left := len(uploads))
        self.waiting += left
        try:
            sizes, taken = await run_in_threadpool(self._check_sizes, uploads)
            with self.hold(taken):
                x = torch.empty(0)
                for place, (size, (name, content)) in enumerate(zip(sizes, uploads, strict=True)):
                    picture = await self._alone(size, request, self._prepare, name, content)
                    if place == 0:
                        x = picture.new_empty(len(uploads), *picture.shape)
                    _check_alike(picture, name, x[0], uploads[0][0])
                    x[place] = picture
                    left, self.waiting = left - 1, self.waiting - 1
                yield x
        finally:
            self.waiting -= left

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Count pixels that a request has in memory; raise a refusal if there are too many."""
        if pixels > self.most_pixels:
            many = f"the images have {pixels:,} pixels together: send at most {self.most_pixels:,} in a request"
            raise Refusal(413, many)
        if self.held + pixels > _TOGETHER * self.most_pixels:
            raise Refusal(503, "too many large images at a time: try again in a second", {"Retry-After": "1"})
        self.held += pixels
        try:
            yield
        finally:
            self.held -= pixels

    def _check_room(self, count: int) -> None:
        if count > self.queue:
            raise Refusal(413, f"{count} pictures: send at most {self.queue} at once")
        if self.waiting + count > self.queue:
            raise Refusal(503, "too many pictures wait to be decoded: try again in a second", {"Retry-After": "1"})

    async def _alone(self, pixels: int, request: Request, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread while no other is called, unless the client has gone."""
        async with self._turns.take(pixels):
            if await request.is_disconnected():
                raise Refusal(400, "the client has gone")
            return await run_in_threadpool(function, *arguments)

    def _check_sizes(self, uploads: Sequence[tuple[str, bytes]]) -> tuple[list[int], int]:
        """Read the headers of pictures; return the pixels of each, and how many the network takes of all."""
        sizes, taken = [], 0
        for name, content in uploads:
            with self._opened(name, content) as picture:
                width, height = picture.size
                if width * height > self.most_pixels:
                    raise Refusal(413, f"{name} has {width}×{height} pixels: at most {self.most_pixels:,} are taken")
                if _resized_pixels(width, height, self.preprocess) > self.most_pixels:
                    raise Refusal(413, f"{name} has {width}×{height} pixels, and becomes too large when it is resized")
                if getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO":  # cameras add previews
                    raise Refusal(415, f"{name} has several frames: send one of them")
                sizes.append(width * height)
                taken += _taken_pixels(width, height, self.preprocess)
        return sizes, taken

    def _prepare(self, name: str, content: bytes) -> Tensor:
        with self._opened(name, content) as picture:
            return as_input(prepare_image(Path(name), picture, self.preprocess), self.channels)

    @contextmanager
    def _opened(self, name: str, content: bytes) -> Iterator[Any]:
        """Open a picture; raise a refusal for what Pillow does not read."""
        from PIL import Image

        if not content:
            raise Refusal(400, f"{name} is empty: send a JPEG, PNG or WebP file")
        try:
            file = BytesIO(content)
            with _no_warnings, naming_broken_files(Path(name)), Image.open(file, formats=FORMATS) as opened:
                yield opened
        except DataError as error:
            if isinstance(error.__cause__, Refusal):
                raise error.__cause__ from None
            if isinstance(error.__cause__, Image.DecompressionBombError):
                raise Refusal(413, f"{name} has too many pixels: at most {self.most_pixels:,} are taken") from error
            if type(error.__cause__).__name__ == "UnidentifiedImageError":
                what = "is a GIF, which is not read" if content.startswith(b"GIF8") else "is no picture that is read"
                raise Refusal(415, f"{name} {what}: send a JPEG, PNG or WebP file") from error
            if isinstance(error, BrokenImageError):
                raise Refusal(400, f"{name} is damaged or incomplete ({error.reason}): send it again") from error
            raise Refusal(400, str(error)) from error


def _check_alike(picture: Tensor, name: str, first: Tensor, first_name: str) -> None:
    """Raise a refusal if two pictures cannot be in one batch."""
    if picture.shape != first.shape:
        sizes = [f"{each.shape[2]}×{each.shape[1]}" for each in (first, picture)]
        raise BadInputError(
            f"{first_name} has {sizes[0]} pixels, {name} has {sizes[1]}: the pictures of a request must have one size"
        )


def _resized_pixels(width: int, height: int, preprocess: Preprocess) -> float:
    """Return how many pixels a picture has when its shorter side is resized."""
    if preprocess.resize is None or preprocess.squash:
        return 0
    return preprocess.resize**2 * max(width, height) / min(width, height)


def _taken_pixels(width: int, height: int, preprocess: Preprocess) -> int:
    """Return how many pixels the network takes of a picture."""
    if preprocess.crop is not None:
        return preprocess.crop**2
    if preprocess.resize is not None:
        return preprocess.resize**2 if preprocess.squash else int(_resized_pixels(width, height, preprocess))
    return width * height
