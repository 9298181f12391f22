"""A lock for work of very different size: those who have the least to do go first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

__all__ = ["Turns"]


class Turns:
    """A lock of an event loop: `async with turns.take(work)`. Of equal work, the first to come goes first."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = count()

    @asynccontextmanager
    async def take(self, work: int) -> AsyncIterator[None]:
        """Hold the lock."""
        if self._busy:
            turn = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (work, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Hand the lock over, so that the one who had it cannot be first again."""
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
