"""The thread that owns the adapter: it forms batches, answers them, learns, writes the state, and is controlled.

Adaptation is ordered, mutable state. So all that touches it runs in one thread, in the order of arrival, from one
bounded queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import DivergenceError
from ..core.snapshot import StateError
from ..functional import entropy
from ..online.cameras import Streams
from ..online.guard import Guard
from ..online.one_by_one import Stream
from ..online.policy import Health
from .errors import Refusal
from .model import Served
from .settings import Settings
from .store import Store

__all__ = ["Answer", "Batch", "Request", "Worker"]

Result = TypeVar("Result")
_log = logging.getLogger("acclimate.service")
_OURS = (DivergenceError, StateError)
"""Errors that are not the client's."""


@dataclass(frozen=True)
class Answer:
    """The predictions for one request's images."""

    probabilities: Tensor
    logits: Tensor
    entropy: Tensor
    learned: list[bool | None]
    """None: the image waits until its batch is full."""
    disagreement: Tensor | None
    """The total variation distance to the source network's prediction, from 0 to 1, if it was asked for."""


@dataclass(frozen=True)
class Request:
    """Images of one client, for one camera."""

    x: Tensor
    stream: str = "default"
    adapt: bool = True
    compare: bool = False
    """Whether to ask the source network as well."""
    arrived: float = field(default_factory=time.monotonic)
    future: Future[Answer] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What requests of one batch have in common."""
        return self.stream, self.adapt, self.compare, self.x.shape[1:], self.x.dtype


@dataclass(frozen=True)
class _Call:
    """A function for the worker's thread."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function. What it raises belongs to the one who asked."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except BaseException as error:
                self.future.set_exception(error)


@dataclass(frozen=True)
class Batch:
    """What happened with a batch, for metrics and the page."""

    stream: str
    x: Tensor
    answer: Answer
    seconds: list[float]
    """From the arrival of each image to its answer."""
    adapt: bool
    """Whether the images were to be learned from."""
    late: list[bool]
    """Of the images that had to wait and are decided now, in the order of arrival: which were learned from."""
    waiting: int
    """How many images of the camera wait after this batch."""
    before: Health | None
    after: Health | None

    @property
    def kept(self) -> list[bool]:
        """Of the images to be learned from that are decided now: which were learned from."""
        return [*(each for each in self.answer.learned if self.adapt and each is not None), *self.late]


class Worker:
    """Answers requests in batches: `answer = worker.submit(Request(x)).result()`.

    Args:
        served: the network and its method.
        settings: batch size, waiting time, queue, memory.
        store: where states are.
        watch: a function of every batch.
    """

    def __init__(self, served: Served, settings: Settings, store: Store, watch: Callable[[Batch], None]) -> None:
        self.served, self.settings, self.store, self.watch = served, settings, store, watch
        self.learner = Stream(served.adapter, size=settings.batch_size, wait=float("inf"), least=1)
        self.streams = Streams(
            self.learner, most=settings.cameras, folder=store.cameras, shared=settings.replicas is not None
        )
        self._frozen = store.frozen
        self.saved: float | None = None
        """When the state was last written, in seconds since 1970."""
        self.known = len(self.streams)
        """The number of cameras."""
        self.failed: BaseException | None = None
        """What has ended the thread."""
        self._queue: deque[Request | _Call] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._due = time.monotonic() + settings.save_every
        self._thread = threading.Thread(target=self._work, name="acclimate.worker", daemon=True)
        self._thread.start()

    @property
    def frozen(self) -> bool:
        """Whether nothing is learned. Of several replicas, each follows what any of them was asked to do."""
        if self.settings.replicas is not None:
            with suppress(StateError):  # a damaged file changes nothing
                self._frozen = self.store.frozen
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = frozen

    # For requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Future[Answer]:
        """Put images into the queue; raise a refusal if it is full."""
        with self._changed:
            self._check_open()
            if len(request.x) > self.settings.queue:
                raise Refusal(413, f"{len(request.x)} images: send at most {self.settings.queue} at once")
            if self.depth + len(request.x) > self.settings.queue:
                raise Refusal(503, "the queue is full: try again in a second", {"Retry-After": "1"})
            self._queue.append(request)
            self._changed.notify()
        return request.future

    def ask(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function in the worker's thread, after all that came before."""
        call = _Call(function)
        with self._changed:
            self._check_open()
            self._queue.append(call)
            self._changed.notify()
        return call.future

    @property
    def depth(self) -> int:
        """The number of images that wait."""
        with self._changed:
            return sum(len(each.x) for each in self._queue if isinstance(each, Request))

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    def close(self, timeout: float = 60.0) -> None:
        """Answer what has come, write the state, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _check_open(self) -> None:
        if not self.ready:
            raise Refusal(503, "the server is shutting down: try again in a minute", {"Retry-After": "60"})

    # The thread -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (todo := self._next()) is not None:
                if isinstance(todo, _Call):
                    todo.run()
                elif todo:
                    self._answer(todo)
                if time.monotonic() >= self._due:
                    self.save()
            if self.save():
                _log.info("the state is saved")
        except BaseException as error:
            self.failed = error
            _log.exception("the worker has stopped")
            raise
        finally:
            with self._changed:
                self._closing = True
                left = [*self._queue]
                self._queue.clear()
            for each in left:
                if each.future.set_running_or_notify_cancel():
                    each.future.set_exception(Refusal(503, "the server has stopped", {"Retry-After": "60"}))

    def _next(self) -> _Call | list[Request] | None:
        """Wait for what is next: a function, the requests of a batch, none if the state is due, or None at the end."""
        with self._changed:
            while not self._queue:
                if self._closing:
                    return None
                if not self._changed.wait(max(0.0, self._due - time.monotonic())):
                    return []
            first = self._queue[0]
            if not isinstance(first, Request):
                self._queue.popleft()
                return first
            until = first.arrived + self.settings.wait / 1000
            while not self._full(first) and not self._closing and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            batch = [*self._alike(first)]
            chosen = {id(each) for each in batch}
            self._queue = deque(each for each in self._queue if id(each) not in chosen)
        return [request for request in batch if request.future.set_running_or_notify_cancel()]

    def _full(self, first: Request) -> bool:
        return sum(len(each.x) for each in self._alike(first)) >= self.settings.batch_size

    def _alike(self, first: Request) -> Iterator[Request]:
        """Yield the requests that share a batch with the first one: none overtakes a function."""
        images = 0
        for each in self._queue:
            if not isinstance(each, Request):
                return
            if each.kind == first.kind:
                if images and images + len(each.x) > self.settings.batch_size:
                    return
                images += len(each.x)
                yield each

    def _answer(self, requests: list[Request]) -> None:
        first = requests[0]
        sizes = [len(request.x) for request in requests]
        x = first.x if len(requests) == 1 else torch.cat([request.x for request in requests])
        try:
            before = self.health(first.stream)
            answer, late = self._predict(x, first)
            after = self.health(first.stream)
        except Exception as error:
            _log.exception("a batch of %d images could not be predicted", sum(sizes))
            for request in requests:
                request.future.set_exception(_refusal(error, x, self.served))
            return
        done, start = time.monotonic(), 0
        for request, size in zip(requests, sizes, strict=True):
            request.future.set_result(_rows(answer, slice(start, start + size)))
            start += size
        self.known = len(self.streams)
        seconds = [done - request.arrived for request, size in zip(requests, sizes, strict=True) for _ in range(size)]
        try:
            waiting = self.learner.waiting
            self.watch(Batch(first.stream, x, answer, seconds, first.adapt, late, waiting, before, after))
        except Exception:
            _log.exception("a batch could not be shown")

    def _predict(self, x: Tensor, like: Request) -> tuple[Answer, list[bool]]:
        """Predict images in batches, and learn from them unless the request or the server is frozen.

        Return the answer, and which of the images that had waited were learned from.
        """
        logits: list[Tensor] = []
        learned: list[bool | None] = []
        late: list[bool] = []
        adapt = like.adapt and not self.frozen
        images = x.to(self.served.adapter.device)
        for part in torch.split(images, self.settings.batch_size):
            if adapt:
                logits.append(self.streams(like.stream, part))
                kept, filled = self.learner.kept, self.learner.batch_kept
                learned += [None] * len(part) if kept is None else kept.tolist()
                late += filled.tolist() if kept is None and filled is not None else []
            else:
                logits.append(self.streams.predict_only(like.stream, part))
                learned += [False] * len(part)
        z = torch.cat(logits).float()
        p = z.softmax(1)
        apart = None
        if like.compare:
            source = torch.cat([self.served.adapter.predict_source(part) for part in torch.split(images, 256)])
            apart = (p - source.float().softmax(1)).abs().sum(1).cpu() / 2
        return Answer(p.cpu(), z.cpu(), entropy(z).cpu(), learned, apart), late

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def guard(self) -> Guard | None:
        """The guard, if there is one."""
        return self.served.adapter if isinstance(self.served.adapter, Guard) else None

    def health(self, stream: str) -> Health | None:
        """Return how the model of a camera is, if a guard watches it. Only for the worker's thread."""
        if self.guard is None or (stream != self.streams.current and not self.streams.has(stream)):
            return None
        with self.streams.using(stream):
            return self.guard.health

    def save(self) -> bool:
        """Write the states that have changed, and return whether that worked.

        A full disk stops nothing: the previous state is still there.
        """
        self._due = time.monotonic() + self.settings.save_every
        try:
            self.streams.save()
        except Exception as error:
            _log.error("the state could not be written: %s", error)
            return False
        self.saved = time.time()
        return True


def _rows(answer: Answer, rows: slice) -> Answer:
    apart = None if answer.disagreement is None else answer.disagreement[rows]
    return Answer(answer.probabilities[rows], answer.logits[rows], answer.entropy[rows], answer.learned[rows], apart)


def _refusal(error: Exception, x: Tensor, served: Served) -> Exception:
    """Return the error that a client receives for a batch that could not be predicted."""
    if isinstance(error, OSError):
        why = "the state of another stream could not be written, so that there is no room: try again"
        return Refusal(503, why, {"Retry-After": "60"})
    if served.size is None and isinstance(error, (ValueError, RuntimeError)) and not isinstance(error, _OURS):
        return Refusal(400, f"images of {[*x.shape[1:]]} cannot be predicted: {' '.join(str(error).split())[:200]}")
    return error
