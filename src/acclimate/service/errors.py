"""Errors that a client sees: a status code and one sentence that says what to do."""

from __future__ import annotations

__all__ = ["BadInputError", "Refusal"]


class Refusal(Exception):  # noqa: N818
    """A request that is not carried out, with its status code and a sentence for the client."""

    def __init__(self, code: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.code, self.why, self.headers = code, why, headers or {}


class BadInputError(Refusal):
    """A request whose content is wrong."""

    def __init__(self, why: str) -> None:
        super().__init__(400, why)
