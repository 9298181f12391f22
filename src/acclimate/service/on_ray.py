"""The service as a deployment of Ray Serve: several replicas, and each camera on one of them.

Each replica owns a network. A request with the header `serve_multiplexed_model_id: CAMERA` goes to the replica that has
the camera's state. States are in one folder that all replicas see. They are written every `save_every` seconds and
before they leave a replica, so that a replica that dies loses at most that much. If a busy replica makes the router
choose another one, both have the camera for a while; a replica whose copy is older than the file reads it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message

from .app import create_app
from .assembly import assemble
from .control import ARGUMENTS
from .errors import Refusal
from .logs import start_logging
from .model import build
from .settings import Settings
from .store import Store

__all__ = ["Replica", "application", "run"]

REPLICA = "x-acclimate-replica"
"""The header of an answer that names the process which gave it."""


class Camera:
    """A camera that is on this replica. Ray Serve calls `__del__` before another one takes its place."""

    def __init__(self, key: str, release: Callable[[str], None]) -> None:
        self.key, self._release = key, release

    def __del__(self) -> None:
        key, self.key = self.key, ""
        if key:
            self._release(key)


class Replica:
    """One replica: the application around a network of its own."""

    def __init__(self, content: dict[str, Any]) -> None:
        settings = Settings(**content)
        start_logging("json")
        self.service = assemble(build(settings), settings, Store(settings.state))
        self.app = create_app(self.service)

        async def bring(key: str) -> Camera:
            return Camera(key, self._release)

        self.camera = serve.multiplexed(max_num_models_per_replica=settings.cameras)(bring)

    async def __call__(self, request: Request) -> Response:
        """Answer a request with the state of its camera."""
        named = serve.get_multiplexed_model_id() or request.query_params.get("stream")
        await self.camera(named or "default")
        query = request.url.query
        if named is not None and _takes_stream(request):  # otherwise a body may name it
            others = [(name, value) for name, value in request.query_params.multi_items() if name != "stream"]
            query = urlencode([*others, ("stream", named)])
        response = await call(self.app, request, query)
        response.headers[REPLICA] = str(os.getpid())
        return response

    def _release(self, key: str) -> None:
        """Write a camera's state, and let another replica have it."""
        try:
            self.service.worker.ask(lambda: self.service.worker.streams.release(key)).result(60)
        except Refusal:  # the replica ends, and writes all states
            return

    def check_health(self) -> None:
        """Raise if the worker has stopped, so that Ray starts another replica."""
        if not self.service.worker.ready:
            raise RuntimeError(f"the worker has stopped: {self.service.worker.failed!r}")

    def __del__(self) -> None:
        if hasattr(self, "service"):
            self.service.worker.close()


def _takes_stream(request: Request) -> bool:
    return "stream" in ARGUMENTS.get(request.url.path.removeprefix("/control/"), ("stream",))


async def call(app: ASGIApp, request: Request, query: str) -> Response:
    """Return an application's answer to a request with another query. The application reads the body, in its limits."""
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**request.scope, "query_string": query.encode()}, request.receive, send)
    response = Response(b"".join(each.get("body", b"") for each in sent[1:]), sent[0]["status"])
    response.raw_headers = [*sent[0]["headers"]]
    return response


def application(settings: Settings) -> Application:
    """Return the application for `ray.serve.run`."""
    content = {**asdict(settings), "state": str(Path(settings.state).absolute())}
    how: dict[str, Any] = {"num_replicas": settings.replicas or 1, "max_ongoing_requests": settings.queue}
    return serve.deployment(name=settings.name or "acclimate", **how)(Replica).bind(content)


def run(settings: Settings, say: Callable[[str], None] = print) -> None:
    """Serve on Ray until Ctrl-C."""
    say(f"starting {settings.replicas} replicas of {settings.model} on Ray ...")
    serve.start(http_options={"host": settings.host, "port": settings.port})
    say(f"the address will be http://{settings.host}:{settings.port}/predict (Ctrl-C stops it)")
    try:
        serve.run(application(settings), blocking=True)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
