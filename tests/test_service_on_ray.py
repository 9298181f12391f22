"""The service on Ray Serve: cameras move between replicas bit for bit, and a killed replica loses little."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import free_port, only_ray_cluster

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "fastapi", "httpx")),
    reason="needs ray[serve] and the extra `serve`",
)


@pytest.mark.filterwarnings("ignore")  # of Ray, while it is imported
def test_a_body_is_read_by_the_application_within_its_limits() -> None:
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    from acclimate.service.on_ray import call

    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += 1
        assert read < 10, "the body is held in memory before the application can refuse it"
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await PlainTextResponse(scope["query_string"], 413)(scope, receive, send)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"a=b"}
    answer = asyncio.run(call(app, Request(scope, endless), "stream=north"))
    assert (answer.status_code, answer.body, read) == (413, b"stream=north", 1)


@pytest.mark.filterwarnings("ignore")
def test_only_the_header_names_a_camera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray routes by nothing else: a camera that is named otherwise would have a state on every replica."""
    from starlette.requests import Request

    from acclimate.service import on_ray
    from acclimate.service.settings import Settings

    header, brought = "", []

    async def bring(key: str) -> None:
        brought.append(key)

    ray = SimpleNamespace(get_multiplexed_model_id=lambda: header, multiplexed=lambda **_: lambda _: bring)
    monkeypatch.setattr(on_ray, "serve", ray)
    monkeypatch.setattr(on_ray, "start_logging", lambda _: None)
    monkeypatch.setenv("ACCLIMATE_TOKEN", token := "0123456789abcdef")
    settings = Settings(model="digits-vit", method="tent", guard=False, state=str(tmp_path), replicas=2, wait=0)
    replica = on_ray.Replica(asdict(settings))

    def ask(camera: str, path: str = "/v2/models/digits-vit/infer", query: str = "", **body: Any) -> tuple[int, str]:
        nonlocal header
        header = camera
        shape = [1, *replica.service.served.shape[1:]]
        images = {"name": "images", "datatype": "FP32", "shape": shape, "data": [0.5] * math.prod(shape)}
        given = {"inputs": [images], **body} if "infer" in path else body
        content = json.dumps(given).encode() if given else b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        scope = {"type": "http", "method": "POST" if content else "GET", "path": path, "query_string": query.encode()}
        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "http_version": "1.1"}
        answer = asyncio.run(replica(Request(scope, receive)))
        return answer.status_code, bytes(answer.body).decode()

    try:
        assert ask("north")[0] == 200
        assert ask("north", query="stream=north", parameters={"stream": "north"})[0] == 200
        for camera, query, body in (
            ("", "", {}),
            ("", "stream=south", {}),
            ("", "", {"parameters": {"stream": "south"}}),
            ("north", "stream=south", {}),
            ("north", "stream=north&stream=south", {}),
            ("north", "", {"parameters": {"stream": "south"}}),
        ):
            code, said = ask(camera, query=query, **body)
            assert (code, on_ray.ROUTING in said) == (400, True), (camera, query, body, said)
        for camera, code in (("north", 400), ("south", 200)):
            assert ask(camera, "/control/reset", stream="south")[0] == code
        assert {*brought} == {"north", "south"}
        brought.clear()
        assert ask("", "/metrics")[0] == 200
        assert brought == [], "a look at metrics makes no camera leave the memory"
        assert replica.service.worker.streams.keys() == ["north"]
    finally:
        replica.service.worker.close()


@pytest.mark.slow
def test_cameras_move_between_replicas_and_outlive_one(tmp_path: Path) -> None:
    program = Path(__file__).with_name("ray_serve_program.py")
    deadline = "RAY_SERVE_{}QUEUE_LENGTH_RESPONSE_DEADLINE_S"  # a replica that is slow to answer keeps its cameras
    patient = {deadline.format(""): "10", deadline.format("MAX_"): "10", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    with only_ray_cluster():
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path), str(free_port())],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env={**os.environ, **patient},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))  # Ray prints, too
    assert found["replicas"] == 2
    assert found["same"], "logits differ from those of one process that has all cameras"
    assert found["saved"], "a camera's state was not written under load"
    assert found["after"], "a camera was not answered after the kill"
