"""Something to look at: corrupted digits that the server sends to itself, as a camera would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from ..data.demo_digits import DemoDigits
from .errors import Refusal
from .worker import Request, Worker

__all__ = ["Camera"]

_AT_ONCE = 8
_SECONDS = 0.25
_EACH = 512  # images of a corruption


class Camera(threading.Thread):
    """Sends a few digits several times a second; the weather changes every few seconds."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(name="acclimate.demo", daemon=True)
        self.worker = worker

    def run(self) -> None:
        """Send until the server ends."""
        for x in _digits():
            try:
                self.worker.submit(Request(x, stream="demo"))
            except Refusal:
                if not self.worker.ready:
                    return
            time.sleep(_SECONDS)


def _digits() -> Iterator[Tensor]:
    """Yield batches of digits, one corruption after another, for ever."""
    suite = DemoDigits(_EACH, 0)
    for shift in cycle(suite.shifts):
        images = suite.part(shift, 4).images
        for start in range(0, _EACH, _AT_ONCE):
            yield torch.stack([images[place][0].float() for place in range(start, start + _AT_ONCE)])
