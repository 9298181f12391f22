"""Start a server: load the model, take the port, and run until a signal comes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..bench.locks import locked
from ..online.one_by_one import Stream
from .app import create_app
from .assembly import assemble
from .demo import Camera
from .logs import start_logging
from .model import build
from .settings import Settings, SettingsError
from .store import Store

__all__ = ["serve"]

_TOO_MANY = JSONResponse(
    {"error": "too many connections: try again in a second"}, 503, {"Retry-After": "1", "Connection": "close"}
)
_log = logging.getLogger("acclimate.service")


def serve(settings: Settings, say: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM. Then answer what has come, and write the state."""
    with _listening(settings) as listening:
        _ = settings.token  # a wrong one raises before the model is loaded
        if not start_logging(settings.log):
            say = _log.info
        store = Store(settings.state)
        with locked(store.folder, option="--state"):
            say(f"loading {settings.model} with {settings.method} ...")
            served = build(settings)
            for damaged in store.check(Stream(served.adapter)):
                _log.error("%s is damaged, and was set aside: that camera starts from the source", damaged)
            service = assemble(served, settings, store)
            if settings.demo:
                Camera(service.worker).start()
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            say(f"serving {served.name} at http://{shown}:{port}/ (Ctrl-C stops it)")
            _Server(_configuration(create_app(service), settings)).run(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that lets the viewers of its page go when it ends."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Note a signal. A second one does not prevent that the state is written."""
        if not self.should_exit:
            self.config.app.state.feed.end()  # type: ignore[union-attr]
            super().handle_exit(sig, frame)


def _configuration(app: Any, settings: Settings) -> uvicorn.Config:
    class Impatient(_Impatient):
        seconds, most = float(settings.timeout), settings.connections

    return uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # anyone could write them, and the audit log has the client's address
        server_header=False,
        timeout_keep_alive=min(30, settings.timeout),
        timeout_graceful_shutdown=5,
    )


class _Impatient(H11Protocol):
    """A connection that is cut if the head of a request does not arrive in time, or an answer is not read in time.

    Beyond a number of connections, requests are refused.
    """

    seconds, most = 30.0, 256

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request. Beyond twice the limit there is not even a refusal."""
        super().connection_made(transport)
        self._clock = self.loop.call_later(self.seconds, self._late)
        if len(self.connections) > 2 * self.most:
            transport.abort()

    def handle_events(self) -> None:
        """Let the application answer, unless there are too many connections."""
        self.app = _TOO_MANY if len(self.connections) > self.most else self.config.loaded_app
        super().handle_events()

    def on_response_complete(self) -> None:
        """Wait for the next request, and until the answer was read."""
        self._clock.cancel()
        self._clock = self.loop.call_later(self.seconds, self._late)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads on."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that clock."""
        self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._clock.cancel()
        if hasattr(self, "_unread"):
            self._unread.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """Take the port, before anything else takes time."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((settings.host, settings.port))
            listening.listen(2048)  # else two that are loading could have one port
        except OSError as error:
            hint = "choose another with --port, or 0 for a free one" if settings.port else "choose another --host"
            raise SettingsError(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}): {hint}"
            ) from error
        yield listening
