"""Addresses for control. The application has checked the token, and writes to the audit log what comes of each call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from . import openapi
from .assembly import Service, check_stream, choose_stream
from .control import ACTIONS, ARGUMENTS, check_arguments
from .errors import Refusal
from .protocol import read_json

__all__ = ["routes"]


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router, control, store = APIRouter(), service.control, service.store

    async def ask(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return await asyncio.wrap_future(service.worker.ask(call))

    async def change(
        request: Request, action: str, about: dict[str, str], call: Callable[[], dict[str, Any]]
    ) -> Response:
        """Carry out a call that changes something, with a line in the audit log before; show everyone what was done."""
        entry: dict[str, Any] = request.scope["audit"]
        entry |= about
        await service.audit.begin(entry)
        try:
            done = await ask(call)
        except OSError as error:
            raise Refusal(507, f"nothing was changed: the folder cannot be written ({error.strerror})") from error
        entry |= done
        service.feed.note_control(action, about.get("stream", ""), entry["client"])
        return JSONResponse({"done": action, **about, **done})

    @router.get("/control/status", **openapi.CONTROL)
    async def status(request: Request, stream: str | None = None) -> Response:
        check_arguments("status", request.query_params)
        if stream is not None:
            request.scope["audit"]["stream"] = check_stream(stream)
        found = await ask(lambda: control.status(stream))
        return JSONResponse({**found, "server": service.feed.status(service.worker)})

    @router.get("/control/streams", **openapi.CONTROL)
    async def streams(request: Request) -> Response:
        check_arguments("streams", request.query_params)
        return JSONResponse(await ask(control.streams))

    @router.get("/control/snapshots", **openapi.CONTROL)
    async def snapshots(request: Request) -> Response:
        check_arguments("snapshots", request.query_params)
        return JSONResponse({"snapshots": await run_in_threadpool(store.list_snapshots)})

    @router.post("/control/load", **openapi.LOAD)
    async def load(request: Request, stream: str = "default") -> Response:
        """Restore a state that is uploaded."""
        check_arguments("load", request.query_params)
        check_stream(stream)
        async with service.states.read(request) as body:
            return await change(request, "load", {"stream": stream}, lambda: control.load(stream, body))

    @router.post("/control/{action}", **openapi.ACTION)
    async def act(request: Request, action: str, stream: str | None = None) -> Response:
        """Take a snapshot, roll back, reset, freeze or unfreeze. Arguments of other actions are refused."""
        if action not in ACTIONS:
            raise Refusal(404, f"there is no such action: expected {', '.join(ACTIONS)} or load")
        async with service.bodies.read(request) as body:
            content = read_json(body) if body else {}
        check_arguments(action, request.query_params, content)
        camera = choose_stream(stream, content)
        about = {"stream": camera} if "stream" in ARGUMENTS[action] else {}
        answer = await change(request, action, about, lambda: ACTIONS[action](control, camera, content))
        if action == "rollback":
            service.metrics.rollbacks.inc()
        return answer

    return router
