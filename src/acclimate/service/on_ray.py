"""The service as a deployment of Ray Serve: several replicas, and each camera on one of them.

Each replica owns a network. A request with the header `serve_multiplexed_model_id: CAMERA` goes to the replica that has
the camera's state. A camera that is named otherwise would have a state on each replica, so the request is refused.
States are in one folder that all replicas see. They are written every `save_every` seconds and before they leave a
replica, so that a replica that dies loses at most that much. If a busy replica makes the router choose another one,
both have the camera for a while; a replica whose copy is older than the file reads it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message

from .app import create_app
from .assembly import assemble
from .bodies import Bodies
from .control import ARGUMENTS
from .errors import BadInputError, Refusal
from .logs import start_logging
from .model import build
from .protocol import HEADER as LENGTH
from .settings import Settings
from .store import Store

__all__ = ["Replica", "application", "run"]

ROUTING = "serve_multiplexed_model_id"
"""The header that names the camera. Ray Serve routes by it, and reads no query and no body."""
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


class CheckedBodies(Bodies):
    """Refuses a body that names another camera than the query, into which the header's was put."""

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Hold the whole body of a request."""
        async with super().read(request) as body:
            if b'"stream"' in body:  # few have one, and it is read twice
                named = await run_in_threadpool(_camera_in, body, request.headers.get(LENGTH, ""))
                if named not in (None, camera := request.query_params.get("stream")):
                    raise BadInputError(_other(f"the body names the stream {str(named)[:128]!r}", camera or ""))
            yield body


class Replica:
    """One replica: the application around a network of its own."""

    def __init__(self, content: dict[str, Any]) -> None:
        settings = Settings(**content)
        start_logging("json")
        service = assemble(build(settings), settings, Store(settings.state))
        self.service = replace(service, bodies=CheckedBodies(**asdict(service.bodies)))
        self.app = create_app(self.service)

        async def bring(key: str) -> Camera:
            return Camera(key, self._release)

        self.camera = serve.multiplexed(max_num_models_per_replica=settings.cameras)(bring)

    async def __call__(self, request: Request) -> Response:
        """Answer a request with the state of its camera."""
        camera = serve.get_multiplexed_model_id()
        asked = [value for name, value in request.query_params.multi_items() if name == "stream"]
        others = [(name, value) for name, value in request.query_params.multi_items() if name != "stream"]
        response: Response
        if wrong := [each for each in asked if each != camera]:
            response = JSONResponse({"error": _other(f"the query names the stream {wrong[0][:128]!r}", camera)}, 400)
        elif not camera and request.method == "POST" and _takes_stream(request):
            response = JSONResponse({"error": _other("the request names no camera", camera)}, 400)
        else:
            if camera:
                await self.camera(camera)
            query = urlencode([*others, *([("stream", camera)] if camera and _takes_stream(request) else [])])
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


def _other(what: str, camera: str) -> str:
    """Return the error for a camera that is not named by the header."""
    header = f", the header {camera!r}" if camera else ""
    return f"{what}{header}: name the camera by the header {ROUTING} alone, since replicas are chosen by it"


def _camera_in(body: bytes, length: str) -> Any:
    """Return the camera that a JSON body names, or None. What is wrong with a body is for the application to say."""
    try:
        content = json.loads(body[: int(length)] if length.isdecimal() else body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    parameters = content.get("parameters")
    return content.get("stream", parameters.get("stream") if isinstance(parameters, dict) else None)


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
