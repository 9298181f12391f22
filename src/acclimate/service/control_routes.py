"""Addresses for control: each call needs the token, and is written to the audit log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from . import openapi
from .assembly import Service, check_stream, client
from .control import ACTIONS
from .errors import BadInputError, Refusal
from .protocol import read_json

__all__ = ["routes"]

_log = logging.getLogger("acclimate.service")


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router, control, store = APIRouter(), service.control, service.store

    @asynccontextmanager
    async def audited(request: Request, action: str) -> AsyncIterator[dict[str, Any]]:
        """Check the token, and write to the audit log what comes of a call."""
        entry: dict[str, Any] = {"action": action, "client": client(request)}
        try:
            control.check(request.headers.get("authorization"))
            yield entry
        except Refusal as refusal:
            await note({**entry, "code": refusal.code, "why": refusal.why})
            raise
        except OSError as error:
            await note({**entry, "code": 507, "why": str(error)})
            raise Refusal(507, f"nothing was changed: the folder cannot be written ({error.strerror})") from error
        except Exception as error:
            await note({**entry, "code": 500, "why": repr(error)[:200]})
            raise
        await note({**entry, "code": 200})

    async def note(entry: dict[str, Any]) -> None:
        """Write a line to the audit log; where the disk is full, to the server's log."""
        try:
            await run_in_threadpool(store.audit, entry)
        except OSError as error:
            _log.error("the audit log cannot be written: %s", error, extra={"fields": entry})

    async def ask(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return await asyncio.wrap_future(service.worker.ask(call))

    def done(entry: dict[str, Any]) -> Response:
        """Show everyone what was done, and tell the caller."""
        action, by = entry.pop("action"), entry.pop("client")
        service.feed.note_control(action, entry["stream"], by)
        return JSONResponse({"done": action, **entry})

    @router.get("/control/status", **openapi.CONTROL)
    async def status(request: Request, stream: str = "default") -> Response:
        async with audited(request, "status") as entry:
            entry["stream"] = check_stream(stream)
            found = await ask(lambda: control.status(stream))
            return JSONResponse({**found, "server": service.feed.status(service.worker)})

    @router.get("/control/snapshots", **openapi.CONTROL)
    async def snapshots(request: Request) -> Response:
        async with audited(request, "list"):
            return JSONResponse({"snapshots": await run_in_threadpool(store.list_snapshots)})

    @router.post("/control/load", **openapi.LOAD)
    async def load(request: Request, stream: str = "default") -> Response:
        """Restore a state that is uploaded."""
        async with audited(request, "load") as entry, service.bodies.read(request) as body:
            entry["stream"] = check_stream(stream)
            entry |= await ask(lambda: control.load(stream, body))
        return done(entry)

    @router.post("/control/{action}", **openapi.ACTION)
    async def act(request: Request, action: str, stream: str | None = None) -> Response:
        """Take a snapshot, roll back, reset, freeze or unfreeze."""
        if action not in ACTIONS:
            raise Refusal(404, f"there is no such action: expected {', '.join(ACTIONS)} or load")
        async with audited(request, action) as entry, service.bodies.read(request) as body:
            content = read_json(body) if body else {}
            entry["stream"] = camera = _camera(stream, content)
            entry |= await ask(lambda: ACTIONS[action](control, camera, content))
        if action == "rollback":
            service.metrics.rollbacks.inc()
        return done(entry)

    return router


def _camera(asked: str | None, content: dict[str, Any]) -> str:
    """Return the camera that the query or the body names; raise a refusal if they differ."""
    named = check_stream(content.get("stream", "default" if asked is None else asked))
    if asked is not None and named != asked:
        raise BadInputError(f"the query names the stream {asked!r}, the body {named!r}: name one")
    return named
