"""Uploaded pictures: decode what a client sends, within limits."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from threading import Lock

from torch import Tensor

from ..data.folders import Preprocess, naming_broken_files, prepare_image
from ..data.types import BrokenImageError, DataError
from .errors import Refusal
from .model import as_input

__all__ = ["FORMATS", "decode"]

FORMATS = ("JPEG", "PNG", "WEBP")
_one_at_a_time = Lock()
"""What Python ignores of warnings holds for all threads."""


def decode(content: bytes, name: str, preprocess: Preprocess, channels: int, most_pixels: int) -> Tensor:
    """Return a picture (C, H, W) in [0, 1] as the network takes it.

    EXIF orientation is applied, CMYK and palettes become RGB, 16 bits become 8, and alpha is dropped. Pictures of other
    formats, with several frames, too large or damaged are refused.
    """
    from PIL import Image

    if not content:
        raise Refusal(400, f"{name} is empty: send a JPEG, PNG or WebP file")
    path = Path(name)
    try:
        with _one_at_a_time, warnings.catch_warnings(), naming_broken_files(path):
            warnings.simplefilter("ignore")  # Pillow's on bombs: the limit below is lower
            with Image.open(BytesIO(content), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > most_pixels:
                    raise Refusal(
                        413,
                        f"{name} has {width}×{height} pixels, and at most {most_pixels:,} are taken",
                    )
                if _resized_pixels(width, height, preprocess) > most_pixels:
                    raise Refusal(413, f"{name} has {width}×{height} pixels, and becomes too large when it is resized")
                if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":  # cameras add previews
                    raise Refusal(415, f"{name} has several frames: send one of them")
                return as_input(prepare_image(path, opened, preprocess), channels)
    except DataError as error:
        if isinstance(error.__cause__, Refusal):
            raise error.__cause__ from None
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise Refusal(413, f"{name} has too many pixels, and at most {most_pixels:,} are taken") from error
        reason = error.reason if isinstance(error, BrokenImageError) else str(error)
        unknown = type(error.__cause__).__name__ == "UnidentifiedImageError"
        raise Refusal(415 if unknown else 400, f"{name}: {reason}. Send a JPEG, PNG or WebP file") from error


def _resized_pixels(width: int, height: int, preprocess: Preprocess) -> float:
    """Return how many pixels a picture has when its shorter side is resized."""
    if preprocess.resize is None or preprocess.squash:
        return 0
    return preprocess.resize**2 * max(width, height) / min(width, height)
