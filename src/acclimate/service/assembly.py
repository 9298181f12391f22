"""What a server is made of, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..online.guard import Guard
from .audit import Audit
from .bodies import Bodies
from .control import Control
from .errors import BadInputError
from .feed import Feed
from .metrics import Metrics
from .model import Served
from .pictures import Decoder
from .settings import Settings
from .store import Store
from .worker import Batch, Worker

__all__ = ["Service", "assemble", "check_stream", "choose_stream"]


@dataclass(frozen=True)
class Service:
    """The parts of one server."""

    settings: Settings
    served: Served
    worker: Worker
    store: Store
    control: Control
    audit: Audit
    metrics: Metrics
    feed: Feed
    bodies: Bodies
    states: Bodies
    """Uploaded states, which are larger, and come from those who have the token."""
    decoder: Decoder


def assemble(served: Served, settings: Settings, store: Store) -> Service:
    """Start the worker, and let metrics and the page watch it."""
    policies = served.adapter.policies if isinstance(served.adapter, Guard) else ()
    token, metrics = settings.token, Metrics(policy.signal for policy in policies)
    feed = Feed(served, settings, control=token is not None)

    def watch(batch: Batch) -> None:
        metrics.count(batch)
        feed.show(batch)

    worker = Worker(served, settings, store, watch)
    bodies = Bodies(settings.most_bytes, settings.timeout, 8 * settings.most_bytes)
    states = Bodies(settings.most_state_bytes, 10 * settings.timeout, settings.most_state_bytes)
    decoder = Decoder(served.preprocess, served.channels, settings.most_pixels, settings.queue)
    control, audit = Control(worker, store, token), Audit(store)
    return Service(settings, served, worker, store, control, audit, metrics, feed, bodies, states, decoder)


def check_stream(stream: object) -> str:
    """Return a camera's name; raise a refusal if it is empty, long, or has control characters."""
    if not isinstance(stream, str) or not stream.isprintable() or not 0 < len(stream) <= 128:
        raise BadInputError("the name of a stream has 1 to 128 printable characters")
    return stream


def choose_stream(query: str | None, body: Mapping[str, Any]) -> str:
    """Return the camera that the query or the body names; raise a refusal if they differ."""
    named = check_stream(body.get("stream", "default" if query is None else query))
    if query is not None and named != query:
        raise BadInputError(f"the query names the stream {query!r}, the body {named!r}: name one")
    return named
