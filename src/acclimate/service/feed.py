"""What the page shows: recent predictions, alarms and numbers, sent to everyone who looks, as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from io import BytesIO
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from .collected import Collected
from .errors import Refusal
from .model import Served
from .settings import Settings
from .worker import Batch, Worker

__all__ = ["Feed"]

_SHOWN = 10  # predictions a second
_REMEMBERED = 48  # predictions, as many as the page shows
_VIEWERS = 32
_BINS = 20
_THUMBNAIL = 128  # pixels


class Feed:
    """Collects what happens and sends it to viewers. The worker's thread writes, the event loop reads."""

    def __init__(self, served: Served, settings: Settings, *, control: bool) -> None:
        self.served = served
        self.started = time.time()
        self.hello = {**_hello(served, settings), "control": control, "started": self.started}
        self.images = self.errors = self.requests = self.batches = 0
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._viewers: set[asyncio.Queue[str]] = set()
        self._predictions: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._collected = Collected(_REMEMBERED)
        self._status: deque[dict[str, Any]] = deque(maxlen=300)
        self._alarms: deque[dict[str, Any]] = deque(maxlen=200)
        self._control: deque[dict[str, Any]] = deque(maxlen=200)
        self._confidences: deque[float] = deque(maxlen=1000)
        self._latencies: deque[tuple[float, float]] = deque(maxlen=5000)
        self._recent: deque[tuple[int, int]] = deque([(0, 0)], maxlen=6)  # images and requests, second by second
        self._latest: dict[str, Any] = {}
        self._budget, self._refilled = float(_SHOWN), time.monotonic()

    # From the worker's thread -----------------------------------------------------------------------------------------

    def show(self, batch: Batch) -> None:
        """Add a batch."""
        top = batch.answer.probabilities.max(1)
        now = time.time()
        with self._lock:
            first = self.images
            self.images, self.batches = self.images + len(batch.x), self.batches + 1
            self._confidences.extend(top.values.tolist())
            self._latencies.extend((now, 1000 * seconds) for seconds in batch.seconds)
            self._latest |= {"stream": batch.stream, "entropy": float(batch.answer.entropy.mean())}
            if batch.kept:
                self._latest["kept_share"] = sum(batch.kept) / len(batch.kept)
        shown = [self._prediction(batch, place, first + place, now) for place in range(self._allowed(len(batch.x)))]
        with self._lock:
            decided = [each for each in self._collected.add(batch, shown) if each["id"] < first]
            self._predictions.extend(shown)
        if decided or shown:
            self.publish("predictions", [*decided, *shown])
        if batch.after is not None:
            self._show_health(batch, now)

    def _show_health(self, batch: Batch, now: float) -> None:
        health = batch.after
        if health is None:
            return
        for alarm in health.alarms_since(batch.before):
            about = {"time": now, "stream": batch.stream, "batch": alarm.batch, "signal": alarm.signal}
            about |= {"value": alarm.value, "action": alarm.action}
            self._keep(self._alarms, about)
            self.publish("alarm", about)
        with self._lock:
            self._latest |= {
                "distance": health.signals.distance,
                "doing": "left" if health.left and health.doing == "learning" else health.doing,
                "since_batch": health.since,
                "batches": health.batches,
                "rollbacks": health.rollbacks,
            }

    def _allowed(self, wanted: int) -> int:
        """Return how many predictions may be shown now."""
        now = time.monotonic()
        self._budget = min(float(_SHOWN), self._budget + _SHOWN * (now - self._refilled))
        self._refilled, allowed = now, min(wanted, int(self._budget))
        self._budget -= allowed
        return allowed

    def _prediction(self, batch: Batch, place: int, number: int, now: float) -> dict[str, Any]:
        answer = batch.answer
        best = int(answer.probabilities[place].argmax())
        return {
            "id": number,
            "time": now,
            "stream": batch.stream,
            "label": self.served.labels[best],
            "class": best,
            "confidence": float(answer.probabilities[place, best]),
            "entropy": float(answer.entropy[place]),
            "disagreement": None if answer.disagreement is None else float(answer.disagreement[place]),
            "learned": answer.learned[place],
            "thumbnail": thumbnail(batch.x[place]),
            "milliseconds": round(1000 * batch.seconds[place], 2),
        }

    def note_control(self, action: str, stream: str, by: str) -> None:
        """Add a control call that succeeded."""
        about = {"time": time.time(), "stream": stream, "action": action, "by": by}
        with self._lock:
            if action in ("load", "reset", "rollback"):  # other images wait now
                self._collected.forget(stream)
            self._control.append(about)
        self.publish("control", about)

    def _keep(self, kept: deque[dict[str, Any]], *entries: dict[str, Any]) -> None:
        with self._lock:
            kept.extend(entries)

    def publish(self, event: str, content: Any) -> None:
        """Send an event to all viewers, from any thread."""
        loop = self._loop
        if loop is not None and self._viewers and not loop.is_closed():
            loop.call_soon_threadsafe(self._send, _event(event, content))

    def end(self) -> None:
        """Let all viewers go."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._send, "")

    # From the event loop ----------------------------------------------------------------------------------------------

    async def run(self, worker: Worker) -> None:
        """Publish the status once a second."""
        self._loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1)
            with self._lock:
                self._recent.append((self.images, self.requests))
            status = self.status(worker)
            self._keep(self._status, status)
            self.publish("status", status)

    def status(self, worker: Worker) -> dict[str, Any]:
        """Return how the server is."""
        now = time.time()
        with self._lock:
            while self._latencies and self._latencies[0][0] < now - 60:
                self._latencies.popleft()
            values = sorted(ms for _, ms in self._latencies)
            counts = torch.histc(torch.tensor([*self._confidences]), _BINS, 0, 1).int().tolist()
            (images, requests), seconds = self._recent[0], max(1, len(self._recent) - 1)
            latest = {**self._latest}
        guard = worker.guard
        return {
            "time": now,
            "uptime": now - self.started,
            "images": self.images,
            "images_per_second": (self.images - images) / seconds,
            "requests_per_second": (self.requests - requests) / seconds,
            "errors": self.errors,
            "queue": worker.depth,
            "queue_most": worker.settings.queue,
            "latency_ms": {f"p{q}": round(_percentile(values, q), 2) for q in (50, 95, 99)} if values else None,
            "kept_share": latest.get("kept_share"),
            "entropy": latest.get("entropy"),
            "distance": latest.get("distance"),
            "confidences": counts,
            "state_age": None if worker.saved is None else now - worker.saved,
            "streams": worker.known,
            "stream": latest.get("stream", "default"),
            "frozen": worker.frozen,
            "doing": "frozen" if worker.frozen else latest.get("doing", "learning"),
            "since_batch": latest.get("since_batch", 0),
            "batches": latest.get("batches", self.batches),
            "rollbacks": latest.get("rollbacks", 0),
            "probe": None
            if guard is None or guard.probe is None
            else {
                "disagreement": guard.health.signals.probe,
                "evidence": guard.probe.test.evidence,
                "wealth": min(guard.probe.test.wealth, 1e9),
                "tolerated": guard.probe.test.tolerated,
            },
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield what a new viewer must know, and then what happens. Slow viewers miss some of it."""
        if len(self._viewers) >= _VIEWERS:
            raise Refusal(503, f"{_VIEWERS} pages are open already: close one", {"Retry-After": "60"})
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=64)
        self._viewers.add(queue)
        try:
            yield _event("hello", self.hello)
            past = {"status": self._status, "predictions": self._predictions}
            past |= {"alarms": self._alarms, "control": self._control}
            with self._lock:
                history = {name: [*entries] for name, entries in past.items()}
            yield _event("history", history)
            while event := await _next(queue):
                yield event
        finally:
            self._viewers.discard(queue)

    def _send(self, text: str) -> None:
        for queue in self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(text)


def _hello(served: Served, settings: Settings) -> dict[str, Any]:
    size = served.size
    return {
        "name": served.name,
        "method": repr(served.adapter)[:500],
        "method_name": settings.method,
        "version": __version__,
        "network": served.network,
        "classes": [*served.labels] if len(served.labels) <= 100 else None,
        "guarded": served.guarded,
        "batch_size": settings.batch_size,
        "input": None if size is None else {"channels": served.channels, "height": size[0], "width": size[1]},
    }


async def _next(queue: asyncio.Queue[str]) -> str:
    """Return the next event, or a comment that keeps the connection alive."""
    try:
        return await asyncio.wait_for(queue.get(), 15)
    except asyncio.TimeoutError:
        return ": still here\n\n"


def thumbnail(x: Tensor) -> str:
    """Return a small picture of an image (C, H, W) in [0, 1], as a data address."""
    from PIL import Image

    pixels = (x.detach().cpu().clamp(0, 1) * 255).round().byte()
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(_plain(content), ensure_ascii=False)}\n\n"


def _plain(value: Any) -> Any:
    """Return content that is JSON: NaN and infinity become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _percentile(values: list[float], percent: int) -> float:
    return values[min(len(values) - 1, round(percent / 100 * (len(values) - 1)))]
