"""Predictions whose images wait for their batch: which of them are decided when it is full."""

from __future__ import annotations

from collections import deque
from typing import Any

from .worker import Batch

__all__ = ["Collected"]


class Collected:
    """Remembers the predictions that are shown and wait, by camera and by their place among those that had to wait."""

    def __init__(self, most: int) -> None:
        self._shown: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=most)
        self._arrived: dict[str, int] = {}
        self._waiting: dict[str, int] = {}

    def add(self, batch: Batch, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Remember what is shown of a batch, its first images; return the predictions that are decided now, corrected.

        An image that has to wait comes after all that wait already, and the oldest are decided first.
        """
        stream, learned, late = batch.stream, batch.answer.learned, batch.late
        new = learned.count(None)
        if not new and not late:
            return []
        if self._waiting.get(stream, 0) + new != len(late) + batch.waiting:  # the state was restored meanwhile
            self.forget(stream)
        first = self._arrived.get(stream, 0) - (len(learned) - new)  # those that wait are the last of a batch
        self._shown.extend((stream, first + place, each) for place, each in enumerate(shown) if learned[place] is None)
        self._arrived[stream], self._waiting[stream] = first + len(learned), batch.waiting
        start = self._arrived[stream] - batch.waiting - len(late)
        decided = [each for each in self._shown if each[0] == stream and start <= each[1] < start + len(late)]
        for entry in decided:
            _, number, prediction = entry
            prediction["learned"] = late[number - start]
            self._shown.remove(entry)
        return [prediction for *_, prediction in decided]

    def forget(self, stream: str) -> None:
        """Forget what waits of a camera."""
        for entry in [each for each in self._shown if each[0] == stream]:
            self._shown.remove(entry)
        self._waiting.pop(stream, None)
