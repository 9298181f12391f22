"""The service on Ray Serve: cameras move between replicas bit for bit, and a killed replica loses little."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "fastapi", "httpx")),
    reason="needs ray[serve] and the extra `serve`",
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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


@pytest.mark.slow
def test_cameras_move_between_replicas_and_outlive_one(tmp_path: Path) -> None:
    program = Path(__file__).with_name("ray_serve_program.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(free_port())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))  # Ray prints, too
    assert found["replicas"] == 2
    assert found["same"], "logits differ from those of one process that has all cameras"
    assert found["after"] > 0, "nothing was answered after the kill"
    assert found["tries"] < 20
    assert found["states"] == 3
    assert found["oldest"] < 1 + 5, "a state is older than `save_every` and some seconds of a busy machine"
