"""The page at /, its files, and the events that it listens to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from .assembly import Service
from .errors import Refusal

__all__ = ["routes"]

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {each.name: each.read_bytes() for each in files(__package__).joinpath("page").iterdir() if each.is_file()}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.head("/")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        return _file(name)

    @router.get("/events")
    async def events() -> Response:
        happening = service.feed.events()
        first = await anext(happening)  # raises if there are too many viewers

        async def stream() -> AsyncIterator[str]:
            yield first
            async for event in happening:
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


def _file(name: str) -> Response:
    kind = _KINDS.get(name[name.rfind(".") :])
    if name not in _FILES or kind is None:
        raise Refusal(404, "there is no such file")
    return Response(_FILES[name], media_type=kind, headers={"Cache-Control": "no-cache"})
