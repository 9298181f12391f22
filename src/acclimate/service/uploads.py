"""Files in a request: a form with one or several, or the body itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .errors import BadInputError

__all__ = ["MOST_FILES", "read_uploads"]

MOST_FILES = 64


async def read_uploads(request: Request, body: bytes) -> list[tuple[str, bytes]]:
    """Return names and contents of the files in a request."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        if not body:
            raise BadInputError("the body is empty: send an image, or a form with files")
        return [("image", body)]

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        parser = MultiPartParser(request.headers, stream(), max_files=MOST_FILES, max_fields=16)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise BadInputError(f"the form cannot be read ({str(error)[:100]})") from error
    try:
        found = [(value.filename or name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
        if not found:
            raise BadInputError("the form has no file: send it as the field `file`, as in curl -F file=@image.jpg")
        return [(_clean(name), await file.read()) for name, file in found]
    finally:
        await form.close()


def _clean(name: str) -> str:
    """Return a short name that can be written."""
    return name[:100].encode(errors="replace").decode()
