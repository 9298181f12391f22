"""The audit log: a line for every control call, with who asked and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from .store import Store

__all__ = ["Audit", "client"]

_log = logging.getLogger("acclimate.service")
_UNKNOWN = (401, 403)
"""Codes for callers without the token, or from another site."""


@dataclass(frozen=True)
class _Group:
    """Calls of which only the first `most` in so many seconds are written, and then how many more there were."""

    action: str
    code: int
    client: str
    most: int
    seconds: float


class Audit:
    """Writes the log. An entry is a dict that grows while its call is carried out; `scope["audit"]` has it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[_Group, int] = {}

    def open(self, request: Request) -> dict[str, Any]:
        """Return the entry of a call that has come."""
        action = quote(request.scope["path"].removeprefix("/control").strip("/")[:64])
        return {"id": token_hex(4), "action": action, "client": client(request)}

    async def begin(self, entry: Mapping[str, Any]) -> None:
        """Write that a call is about to change something: its code is null."""
        await run_in_threadpool(self._write, {**entry, "code": None})

    async def end(self, entry: Mapping[str, Any], code: int, *, reads: bool) -> None:
        """Write what came of a call, or count it: refused callers and open pages must not fill the disk."""
        if code in _UNKNOWN:
            group = _Group("refused", code, "", most=30, seconds=60)
        elif reads:
            group = _Group(entry["action"], code, entry["client"].rpartition(":")[0], most=1, seconds=3600)
        else:
            await run_in_threadpool(self._write, {**entry, "code": code})
            return
        seen = self._seen[group] = self._seen.get(group, 0) + 1
        if seen == 1:
            asyncio.get_running_loop().call_later(group.seconds, self._tell, group)
        if seen <= group.most:
            await run_in_threadpool(self._write, {**entry, "code": code})

    async def close(self) -> None:
        """Write what was only counted so far."""
        for group in [*self._seen]:
            if line := self._take(group):
                await run_in_threadpool(self._write, line)

    def _tell(self, group: _Group) -> None:
        if line := self._take(group):
            asyncio.get_running_loop().run_in_executor(None, self._write, line)

    def _take(self, group: _Group) -> dict[str, Any] | None:
        """Start to count again; return the line about calls that were not written."""
        more = self._seen.pop(group, 0) - group.most
        about = {"action": group.action, "client": group.client, "code": group.code}
        return {**about, "more": more, "seconds": group.seconds} if more > 0 else None

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Write a line; where the disk is full, to the server's log."""
        try:
            self._store.audit(entry)
        except OSError as error:
            _log.error("the audit log cannot be written: %s", error, extra={"fields": {**entry}})


def client(request: Request) -> str:
    """Return the address of a client."""
    return "" if request.client is None else f"{request.client.host}:{request.client.port}"
