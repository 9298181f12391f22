"""Single images: predict each at once, and learn when a batch has gathered."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from ..core.adapter import Statistics
from ..core.snapshot import Snapshot
from ..core.step import Step
from .cameras import Stateful
from .guard import Guard
from .judge import SMALL

__all__ = ["Learner", "Stream"]

_PATIENCE = 0.01
"""Seconds for which a caller lets the worker go first."""


class Learner(Stateful, Protocol):
    """What a stream needs of an adapter or a guard."""

    @property
    def coupled(self) -> bool:
        """Whether the logits of a sample depend on the rest of its batch."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether it only predicts."""
        ...

    @property
    def last(self) -> Step:
        """The record of the last batch."""
        ...

    def measure_statistics(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and the means and variances of the BatchNorm layers."""
        ...


class Stream:
    """A stream of single images: `logits = stream(x)` predicts x at once; the adapter learns when a batch has gathered.

    >>> import acclimate
    >>> net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> stream = Stream(acclimate.Tent(net), size=64, wait=0.05)
    >>> stream(torch.rand(1, 4)).shape  # one image or a few
    torch.Size([1, 3])

    A prediction may lack what the last `size` images would have taught; in the background, the last 2 · `size` images,
    or those of the last `wait` seconds and one step. Calls take turns on the adapter's lock, so in the background a
    prediction waits for at most one step.

    A network whose BatchNorm layers use batch statistics predicts from moving statistics instead: those of the source
    until the first batch was learned, then an exponential average over the learned batches. One more forward pass per
    batch measures them. All images of a stream have the same shape and type.

    A call with `size` images, while none wait, predicts and learns in one pass, as the adapter itself does.

    What waits and the moving statistics are part of `snapshot` and `save`, so `Streams(Stream(adapter))` has one stream
    per camera.

    Many threads may call one stream. A batch whose learning raises is dropped and counted in `skipped`.

    Args:
        adapter: an adapter or a guard.
        size: learn when so many images have gathered; the size of a batch, at most.
        wait: learn when the oldest image has waited so many seconds. Without `background`, the time is only checked
            during calls.
        least: the fewest images to learn from when the time is over; 8 for a network that uses batch statistics, or
            with a guard, else 1. From fewer than 8, a guard learns when 48 have gathered, and `learned` lacks those.
        momentum: the share of a full batch in the moving statistics. A smaller batch has a smaller share.
        background: learn in a thread of the stream's own. At most 2 · `size` images gather; further ones are predicted
            but not learned from, and counted in `skipped`. Close the stream to end the thread.
    """

    def __init__(
        self,
        adapter: Learner,
        *,
        size: int = 64,
        wait: float = 1.0,
        least: int | None = None,
        momentum: float = 0.7,
        background: bool = False,
    ) -> None:
        if size < 1 or not wait >= 0:
            raise ValueError(f"Stream: size={size} must be at least 1, and wait={wait} at least 0")
        if not 0 < momentum <= 1:
            raise ValueError(f"Stream: momentum={momentum} must be in (0, 1]")
        gathers = adapter.coupled or isinstance(adapter, Guard)
        least = min(SMALL if gathers else 1, size) if least is None else least
        if not 1 <= least <= size:
            raise ValueError(f"Stream: least={least} must be from 1 to size={size}")
        self.adapter, self.size, self.wait, self.least, self.momentum = adapter, size, wait, least, momentum
        self.background = background
        self.learned = 0
        """Images learned from: those that the method has selected, of batches that have changed the network."""
        self.skipped = 0
        """Images predicted but never learned from."""
        self.kept: Tensor | None = None
        """Which images of the last call were learned from; None if they wait for a batch."""
        self.batch_kept: Tensor | None = None
        """Which images of the batch were learned from that the last call has filled; None if it has filled none."""
        self._gathered: deque[tuple[float, Tensor]] = deque()  # the time of arrival, and images
        self._statistics: list[Tensor] | None = None
        self._measured = False  # whether this adapter has measured statistics, and so knows whose they are
        self._kind: tuple[torch.Size, torch.dtype] | None = None
        self._error: Exception | None = None
        self._closed = False
        self._noted = threading.Condition()  # held for moments only, and never while asking for the adapter's lock
        self._asking = self._answered = 0  # callers that wait for their prediction, and predictions so far
        self._idle = False  # whether the worker waits for a batch
        self._next = False  # whether the worker is to have the adapter next
        if background:
            self._worker = threading.Thread(target=self._work, name="acclimate.Stream", daemon=True)
            self._worker.start()
            atexit.register(self._stop)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of x, and learn if a batch has gathered or waited. Images that are refused do not gather.

        Raises the error of an earlier batch that could not be learned from in the background.
        """
        self._raise_kept()
        if self._closed:
            raise RuntimeError("the stream is closed: make another one")
        self._check_kind(x)
        self.kept = self.batch_kept = None
        if not self.background and isinstance(x, Tensor) and len(x) == self.size and not self.waiting:
            with self.adapter.sharing:
                logits = self._learn_from(x)
                self.kept = self.batch_kept
                return logits
        logits = self.predict_only(x)
        self._gather(x)
        while not self.background and self._learn():
            pass
        return logits

    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x without learning; BatchNorm uses the moving statistics, or those that are given."""
        with self._noted:
            self._noted.wait_for(lambda: not self._next, _PATIENCE)
            self._asking += 1
        try:
            with self.adapter.sharing:
                if statistics is None and self.adapter.coupled:
                    if self._statistics is not None and not self._measured:  # they are from a file
                        self._measure(x)
                    statistics = self._statistics or "source"
                return self.adapter.predict_only(x, statistics=statistics)
        finally:
            with self._noted:
                self._asking, self._answered = self._asking - 1, self._answered + 1
                self._noted.notify_all()

    def flush(self) -> None:
        """Learn from all images that have gathered, also from fewer than `least`."""
        while self._learn(all_of_them=True):
            pass
        self._raise_kept()

    def close(self) -> None:
        """Learn from the images that have gathered if they are at least `least`, and refuse further ones."""
        try:
            with self.adapter.sharing:  # no step is under way
                with self._noted:
                    self._closed = True
                while self.waiting >= self.least:
                    self._learn(all_of_them=True)
        finally:
            self._stop()
        self._raise_kept()

    @property
    def sharing(self) -> AbstractContextManager[None]:
        """A context in which no other thread runs the network."""
        return self.adapter.sharing

    def snapshot(self) -> Snapshot:
        """Return a copy of the adapter's state, with the images that wait and the moving statistics."""
        with self.adapter.sharing:
            own = self.adapter.snapshot()
            with self._noted:
                gathered = [*self._gathered]
            waiting = {f"stream/waiting/{i}": x for i, (_, x) in enumerate(gathered)}
            moving = {f"stream/statistics/{i}": t for i, t in enumerate(self._statistics or [])}
            return Snapshot(
                {**own.tensors, **waiting, **moving}, {**own.settings, "stream": [self.learned, self.skipped]}
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. Images that wait in it count as new."""
        mine = {name: t for name, t in snapshot.tensors.items() if name.startswith("stream/")}
        settings = {name: value for name, value in snapshot.settings.items() if name != "stream"}
        device, now = self.adapter.device, time.monotonic()
        with self.adapter.sharing:
            self.adapter.restore(Snapshot({n: t for n, t in snapshot.tensors.items() if n not in mine}, settings))
            with self._noted:
                self._gathered = deque((now, t.to(device)) for t in _numbered("stream/waiting/", mine))
                self._statistics = [t.to(device) for t in _numbered("stream/statistics/", mine)] or None
                self.learned, self.skipped = snapshot.settings.get("stream", (0, 0))
                self._kind = next(((x.shape[1:], x.dtype) for _, x in self._gathered), None)

    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write the state to one safetensors file, completely or not at all."""
        self.adapter.save(path, snapshot or self.snapshot())

    def read(self, path: str | Path) -> Snapshot:
        """Return the state in a file, for `restore`."""
        return self.adapter.read(path)

    @property
    def waiting(self) -> int:
        """The number of images that have gathered."""
        with self._noted:
            return sum(len(x) for _, x in self._gathered)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Predict ----------------------------------------------------------------------------------------------------------

    def _check_kind(self, x: Tensor) -> None:
        """Refuse images that cannot be in one batch with earlier ones."""
        if self._kind is not None and isinstance(x, Tensor) and (x.shape[1:], x.dtype) != self._kind:
            shape, dtype = self._kind
            raise ValueError(
                f"the images of this stream have shape {tuple(shape)} and type {dtype}, got {tuple(x.shape[1:])} and "
                f"{x.dtype}: use one stream per kind of image"
            )

    def _gather(self, x: Tensor) -> None:
        with self._noted:
            if self._closed:  # since the prediction
                self.skipped += len(x)
                return
            self._kind = x.shape[1:], x.dtype
            room = max(0, 2 * self.size - self.waiting) if self.background else len(x)
            self.skipped += max(0, len(x) - room)
            if room:
                self._gathered.append((time.monotonic(), x[:room].detach().clone()))
                self._next |= self._idle and self.waiting >= self.size
                self._noted.notify_all()

    # Learn ------------------------------------------------------------------------------------------------------------

    def _learn(self, *, all_of_them: bool = False) -> bool:
        """Learn from the next batch if it is due; return whether it was."""
        with self.adapter.sharing:
            batch = self._take(all_of_them=all_of_them)
            if batch is None:
                return False
            self._learn_from(batch)
        return True

    def _learn_from(self, batch: Tensor) -> Tensor:
        """Let the adapter predict a batch and learn from it; return the logits."""
        frozen = self.adapter.frozen
        try:
            logits: Tensor = self.adapter(batch)
        except BaseException:
            with self._noted:
                self.skipped += len(batch)
            raise
        self._kind = batch.shape[1:], batch.dtype
        self.batch_kept = torch.zeros(len(batch), dtype=torch.bool) if frozen else _kept(self.adapter.last)
        self.learned += int(self.batch_kept.sum())
        if self.adapter.coupled:
            self._follow(batch)
        return logits

    @torch.no_grad()
    def _follow(self, batch: Tensor) -> None:
        """Move the statistics towards those of a batch, of its finite images."""
        batch = batch[batch.isfinite().flatten(1).all(1)]
        new = self._measure(batch) if len(batch) else []
        if not new or not all(bool(each.isfinite().all()) for each in new):  # squares of huge values are infinite
            return
        share = 1 - (1 - self.momentum) ** (len(batch) / self.size)
        old = self._statistics
        self._statistics = new if old is None else [a.lerp(b, share) for a, b in zip(old, new, strict=True)]

    def _measure(self, x: Tensor) -> list[Tensor]:
        statistics = self.adapter.measure_statistics(x)[1]
        self._measured = True
        return statistics

    def _take(self, *, all_of_them: bool) -> Tensor | None:
        """Take the oldest images out, at most `size`; None if no batch is due."""
        with self._noted:
            self._next = False
            self._noted.notify_all()
            due = all_of_them or (not self._closed and self._time_left() == 0)
            if not self._gathered or not due:
                return None
            taken: list[Tensor] = []
            missing = self.size
            while self._gathered and missing:
                arrived, x = self._gathered.popleft()
                if len(x) > missing:
                    self._gathered.appendleft((arrived, x[missing:]))
                taken.append(x[:missing])
                missing -= len(taken[-1])
            return torch.cat(taken)

    def _time_left(self) -> float | None:
        """Return the seconds until a batch is due; None if that needs more images."""
        if self.waiting >= self.size:
            return 0
        if self.waiting < self.least:
            return None
        return max(0, self._gathered[0][0] + self.wait - time.monotonic())

    # In the background ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._await_batch():
            with self.adapter.sharing:  # until an error is kept
                try:
                    if not self._closed:
                        self._learn()
                except Exception as error:
                    self._error = self._error or error

    def _await_batch(self) -> bool:
        """Wait until a batch is due, and let callers go first that have waited during the last step."""
        with self._noted:
            self._idle = True
            while not self._closed and (left := self._time_left()) != 0:
                self._noted.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
            turn = self._answered + self._asking
            self._noted.wait_for(lambda: self._answered >= turn or self._closed)
            self._idle, self._next = False, not self._closed
            return not self._closed

    def _stop(self) -> None:
        """End the worker, and drop what has gathered."""
        with self._noted:
            self._closed, self._next = True, False
            self.skipped += self.waiting
            self._gathered.clear()
            self._noted.notify_all()
        if self.background:
            atexit.unregister(self._stop)
            self._worker.join(timeout=1)  # it may wait for a lock that the caller holds

    def _raise_kept(self) -> None:
        with self._noted:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _kept(step: Step) -> Tensor:
    """Return which images of a batch were learned from; a segmenter's counts if any of its pixels was."""
    if step.kept is None:
        return torch.full((step.size,), step.updated)
    return step.kept.view(step.size, -1).any(1) & step.updated


def _numbered(prefix: str, tensors: dict[str, Tensor]) -> list[Tensor]:
    found = {int(name.removeprefix(prefix)): t for name, t in tensors.items() if name.startswith(prefix)}
    return [found[index] for index in sorted(found)]
