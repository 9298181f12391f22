"""Bodies of requests: read within limits of size and time, and those in memory within a limit together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from .errors import Refusal

__all__ = ["Bodies"]


@dataclass
class Bodies:
    """Reads bodies: `async with bodies.read(request) as body`."""

    most: int
    """Bytes of one body."""
    timeout: float
    """Seconds until it has arrived."""
    together: int
    """Bytes of all bodies that are in memory at a time."""
    held: int = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Hold the whole body of a request; raise a refusal for one that is too large, too slow or compressed."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            why = f"the body is encoded as {encoding[:40]!r}, which is not read: send it without Content-Encoding"
            raise Refusal(415, why, {"Connection": "close"})
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and (len(declared) > 12 or int(declared) > self.most):
            raise self._too_large()
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        try:
            with anyio.fail_after(self.timeout):
                async for chunk in request.stream():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > self.most:
                        raise self._too_large()
                    if self.held > self.together:
                        again = {"Retry-After": "1", "Connection": "close"}
                        raise Refusal(503, "too many large requests at a time: try again", again)
        except TimeoutError:
            raise Refusal(
                408, f"the request did not arrive within {self.timeout:g} s", {"Connection": "close"}
            ) from None
        except ClientDisconnect:
            raise Refusal(400, "the client has gone") from None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the request is larger than {self.most:,} bytes: send less", {"Connection": "close"})
