"""The application: what every request goes through, health, metrics, and the routes of the other files."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._version import __version__
from . import control_routes, inference_routes, openapi, page_routes
from .assembly import Service
from .audit import client
from .errors import Refusal
from .metrics import CONTENT_TYPE
from .settings import Settings

__all__ = ["create_app"]

_log = logging.getLogger("acclimate.service")
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; frame-ancestors 'none'; "
        b"base-uri 'none'; form-action 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?", re.IGNORECASE)
_QUIET = ("/metrics", "/livez", "/readyz", "/v2/health")


def create_app(service: Service) -> FastAPI:
    """Return the application. When it ends, the worker answers what has come, and writes the state."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        status = asyncio.create_task(service.feed.run(service.worker))
        try:
            yield
        finally:
            status.cancel()
            await run_in_threadpool(service.worker.close)
            await service.audit.close()

    app = FastAPI(
        title="acclimate",
        version=__version__,
        summary="A model that adapts while it predicts.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return _refused(request.scope, refusal)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"}, 400)

    for routes in (inference_routes.routes, _health_routes, control_routes.routes, page_routes.routes):
        app.include_router(routes(service))
    app.add_middleware(_Observed, service=service)
    app.state.feed = service.feed
    return app


class _Observed:
    """What every request goes through: a check of its origin, the token for control, metrics, the log, an answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, begun, request = time.perf_counter(), False, Request(scope)
        if control := re.match("/control(/|$)", scope["path"]):
            scope["audit"] = self.service.audit.open(request)

        async def observed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                self._note(scope, message["status"], time.perf_counter() - start)
                if control:
                    await self.service.audit.end(scope["audit"], message["status"], reads=request.method == "GET")
            await send(message)

        try:
            check_origin(request, self.service.settings)
            if control:
                self.service.control.check(request.headers.get("authorization"))
            await self.app(scope, receive, observed)
        except Refusal as refusal:
            await _refused(scope, refusal)(scope, receive, observed)
        except Exception as error:
            scope.get("audit", {})["why"] = repr(error)[:200]
            _log.exception("%s %s failed", scope["method"], quote(scope["path"][:200]))
            if begun:
                raise
            failed = JSONResponse({"error": "the server failed; its log has the reason"}, 500)
            await failed(scope, receive, observed)

    def _note(self, scope: Scope, code: int, seconds: float) -> None:
        metrics, feed = self.service.metrics, self.service.feed
        metrics.requests.labels(str(code)).inc()
        metrics.durations.observe(seconds)
        feed.requests += 1
        feed.errors += code >= 400
        if not scope["path"].startswith(_QUIET):
            about = {"code": code, "ms": round(1000 * seconds, 2), "client": client(Request(scope))}
            _log.info("%s %s", scope["method"], quote(scope["path"][:200]), extra={"fields": about})


def _health_routes(service: Service) -> APIRouter:
    router, worker = APIRouter(), service.worker

    @router.get("/v2/health/live", **openapi.LIVE)
    @router.get("/livez", **openapi.LIVE)
    @router.head("/v2/health/live", include_in_schema=False)
    @router.head("/livez", include_in_schema=False)
    async def live() -> Response:
        return JSONResponse({"live": worker.failed is None}, 200 if worker.failed is None else 503)

    @router.get("/v2/health/ready", **openapi.READY)
    @router.get("/readyz", **openapi.READY)
    @router.head("/v2/health/ready", include_in_schema=False)
    @router.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        return JSONResponse({"ready": worker.ready}, 200 if worker.ready else 503)

    @router.get("/metrics", **openapi.METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.expose(worker, service.decoder.waiting), media_type=CONTENT_TYPE)

    return router


def check_origin(request: Request, settings: Settings) -> None:
    """Refuse what another site's page sends, and host names that were rebound to this machine."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if settings.checks_host and not _LOCAL.fullmatch(host) and not settings.allows(host):
        raise Refusal(403, "the server does not have this name: use 127.0.0.1, or start it with --allow-host NAME")
    site = (origin or "").partition("://")[2]
    if request.method == "POST" and origin is not None and site != host and not settings.allows(site):
        raise Refusal(403, "requests from pages of other sites are refused: --allow-host NAME allows one")


def _refused(scope: Scope, refusal: Refusal) -> Response:
    scope.get("audit", {})["why"] = refusal.why
    return JSONResponse({"error": refusal.why}, refusal.code, headers=refusal.headers)
