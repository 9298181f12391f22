"""What the OpenAPI document says about each address: bodies, answers and refusals."""

from __future__ import annotations

from typing import Any

__all__ = [
    *("ACTION", "CONTROL", "INFER", "INFO", "LIVE", "LOAD", "METRICS", "MODEL", "MODEL_READY", "PREDICT", "READY"),
]

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_REFUSALS = {
    400: "The request is wrong.",
    401: "The token is missing or wrong.",
    403: "Not allowed.",
    404: "Not found.",
    405: "The address does not have this method.",
    408: "The request came too slowly.",
    409: "Not possible now.",
    413: "Too large.",
    415: "A format that is not read.",
    500: "The server failed.",
    503: "Too busy, or not ready: try again.",
    507: "The disk is full.",
}


def _responses(*codes: int, ok: str, schema: dict[str, Any] | None = None, kind: str = "application/json") -> Any:
    good = {"description": ok, "content": {kind: {"schema": schema or {"type": "object"}}}}
    error = {"application/json": {"schema": _ERROR}}
    return {200: good, **{code: {"description": _REFUSALS[code], "content": error} for code in codes}}


def _route(tag: str, responses: Any, body: dict[str, Any] | None = None, *, token: bool = False) -> dict[str, Any]:
    extra: dict[str, Any] = {} if body is None else {"requestBody": {"content": body, "required": True}}
    if token:
        extra["parameters"] = [
            {
                "name": "Authorization",
                "in": "header",
                "required": False,
                "description": "Bearer TOKEN",
                "schema": {"type": "string"},
            }
        ]
    return {"tags": [tag], "responses": responses, "response_model": None, "openapi_extra": extra}


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string", "enum": ["UINT8", "FP16", "FP32", "FP64"]},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
_INFER = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1},
        "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    },
}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_ARGUMENTS = {
    "type": "object",
    "properties": {
        "stream": {"type": "string", "description": "The camera, `default` without it; not for freeze and unfreeze."},
        "snapshot": {"type": "string", "description": "The name of a snapshot; for snapshot and rollback only."},
    },
    "additionalProperties": False,
}

INFO = _route("open inference protocol", _responses(403, ok="About the server."))
LIVE = _route("health", _responses(403, 503, ok="Alive."))
MODEL = _route("open inference protocol", _responses(400, 403, 404, ok="About the model."))
READY = _route("health", _responses(403, 503, ok="Ready."))
MODEL_READY = _route("open inference protocol", _responses(400, 403, 404, 503, ok="The model is ready."))
INFER = _route(
    "open inference protocol",
    _responses(400, 403, 404, 408, 409, 413, 415, 500, 503, ok="Outputs."),
    {"application/json": {"schema": _INFER}, "application/octet-stream": _BYTES},
)
PREDICT = _route(
    "predict",
    _responses(400, 403, 408, 409, 413, 415, 500, 503, ok="A prediction per image."),
    {
        "multipart/form-data": {"schema": _FORM},
        **dict.fromkeys(("image/jpeg", "image/png", "image/webp"), _BYTES),
    },
)
_ALL = (400, 401, 403, 404, 408, 409, 413, 415, 500, 503, 507)
CONTROL = _route("control", _responses(*_ALL, ok="What was asked for."), token=True)
ACTION = _route("control", _responses(*_ALL, ok="Done."), {"application/json": {"schema": _ARGUMENTS}}, token=True)
LOAD = _route("control", _responses(*_ALL, ok="Done."), {"application/octet-stream": _BYTES}, token=True)
METRICS = _route("health", _responses(403, ok="Numbers for Prometheus.", schema={"type": "string"}, kind="text/plain"))
