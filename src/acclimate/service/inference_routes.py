"""Addresses for predictions: pictures at /predict, tensors by the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from . import openapi
from .assembly import Service, check_stream, choose_stream
from .errors import Refusal
from .model import Served
from .protocol import HEADER, VERSION, as_bool, model_metadata, read_request, server_metadata, write_response
from .uploads import read_uploads
from .worker import Answer, Request

__all__ = ["routes"]

Result = TypeVar("Result")
_MOST_STREAMS = 10_000
_SMALL = 32_768
"""Bytes for which a thread costs more than it saves."""


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router, worker, served, decoder = APIRouter(), service.worker, service.served, service.decoder

    async def answer(request: Request) -> Answer:
        if request.adapt and request.stream not in worker.streams and worker.known >= _MOST_STREAMS:
            raise Refusal(409, f"there are {_MOST_STREAMS:,} streams: reset some, or use one of them")
        return await asyncio.wrap_future(worker.submit(request))

    async def beside(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function; in a thread if it may take long."""
        return function(*arguments) if size <= _SMALL else await run_in_threadpool(function, *arguments)

    @router.post("/predict", **openapi.PREDICT)
    async def predict(
        request: HTTPRequest, stream: str = "default", adapt: str = "true", disagreement: str = "true"
    ) -> Response:
        """Classify pictures, and learn from them."""
        start = time.perf_counter()
        how = check_stream(stream), as_bool(adapt, "adapt"), as_bool(disagreement, "disagreement")
        async with service.bodies.read(request) as body:
            uploads = await read_uploads(request, body)
            async with decoder.decode(request, uploads) as x:
                predicted = await answer(Request(x, *how))
        predictions = [{"name": name, **_describe(predicted, row, served)} for row, (name, _) in enumerate(uploads)]
        taken = round(1000 * (time.perf_counter() - start), 2)
        return JSONResponse({"predictions": predictions, "stream": stream, "milliseconds": taken})

    def check_model(name: str, version: str) -> None:
        if name != served.name or version != VERSION:
            raise Refusal(404, f"there is no such model: expected {served.name}, version {VERSION}")

    @router.get("/v2", **openapi.INFO)
    async def server() -> Response:
        return JSONResponse(server_metadata())

    @router.get("/v2/models/{name}", **openapi.MODEL)
    @router.get("/v2/models/{name}/versions/{version}", **openapi.MODEL)
    async def model(name: str, version: str = VERSION) -> Response:
        check_model(name, version)
        return JSONResponse(model_metadata(served))

    @router.get("/v2/models/{name}/ready", **openapi.MODEL_READY)
    @router.get("/v2/models/{name}/versions/{version}/ready", **openapi.MODEL_READY)
    async def ready(name: str, version: str = VERSION) -> Response:
        check_model(name, version)
        return JSONResponse({"name": served.name, "ready": worker.ready}, 200 if worker.ready else 503)

    @router.post("/v2/models/{name}/infer", **openapi.INFER)
    @router.post("/v2/models/{name}/versions/{version}/infer", **openapi.INFER)
    async def infer(request: HTTPRequest, name: str, version: str = VERSION) -> Response:
        """Predict tensors, and learn from them."""
        check_model(name, version)
        async with service.bodies.read(request) as body:
            asked = await beside(len(body), read_request, body, request.headers.get(HEADER), served)
        query = request.query_params
        stream = choose_stream(query.get("stream"), asked.parameters)
        adapt = as_bool(query.get("adapt", asked.parameters.get("adapt", True)), "adapt")
        with decoder.hold(asked.x.shape[0] * asked.x.shape[2:].numel()):
            predicted = await answer(Request(asked.x, stream, adapt))
        content, headers = await beside(16 * predicted.logits.numel(), write_response, asked, predicted, served)
        return Response(content, headers=headers)

    return router


def _describe(answer: Answer, row: int, served: Served) -> dict[str, Any]:
    """Return one prediction as plain data."""
    p = answer.probabilities[row]
    top = p.topk(min(5, len(p)))
    best = [
        {"label": served.labels[index], "class": index, "confidence": value}
        for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    return {
        **best[0],
        "entropy": float(answer.entropy[row]),
        "disagreement": None if answer.disagreement is None else float(answer.disagreement[row]),
        "learned": answer.learned[row],
        "top": best,
    }
