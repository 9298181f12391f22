"""A real server on loopback: many clients at once, slow ones, viewers, limits, and errors at the start."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
from clients import MODEL, crowd, unexpected
from serving import CONTROL, Server, as_file, assembled, binary, coded, outputs, soon, white
from typer.testing import CliRunner

from acclimate.cli.main import app
from acclimate.service.server import _Impatient

LIMIT = 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ["--model", "net.py:coded", "--method", "tent", "--no-guard", "--batch-size", "8", "--save-every", "1"]
    limits = ["--timeout", "2", "--body", "1", "--connections", str(LIMIT)]
    with Server(tmp_path_factory.mktemp("server"), *words, *limits) as server:
        yield server


def logits(server: Server, stream: str, side: int = 8) -> np.ndarray:
    body, headers = binary(np.stack([coded(7, side)]), "UINT8")
    return outputs(server.client.post(f"{MODEL}?adapt=false&stream={stream}", content=body, headers=headers))["logits"]


def test_a_crowd(server: Server) -> None:
    body, headers = binary(np.stack([coded(number) for number in range(8)]), "UINT8")
    server.client.post(f"{MODEL}?stream=untouched", content=body, headers=headers)
    before = logits(server, "untouched")
    seen = asyncio.run(crowd(server.port, clients=16, each=30, enemies=12))
    assert seen["wrong"] == 0
    assert seen["honest, 200"] == 16 * 30
    assert not unexpected(seen), seen
    np.testing.assert_array_equal(before, logits(server, "untouched"))
    status = server.client.get("/control/status", headers=CONTROL).json()
    assert status["frozen"] is False
    assert status["streams"] == 7  # the hostile clients' stream was never made
    assert server.client.get("/control/snapshots", headers=CONTROL).json() == {"snapshots": []}
    audit = server.log.parent / "state" / "audit.jsonl"
    codes = {line["code"] for line in map(json.loads, audit.read_text().splitlines())}
    assert codes == {200, 401}
    assert not [line for line in server.lines() if "traceback" in line]


def lasts(server: Server, content: bytes, drip: bytes = b"", most: float = 60) -> float:
    """Return how long a connection lasts that sends something, and then a byte now and then."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(content)
        connection.settimeout(0.2)
        while time.monotonic() - start < most:
            try:
                if not connection.recv(65536):
                    break
            except TimeoutError:
                if drip:
                    connection.sendall(drip)
            except OSError:
                break
    return time.monotonic() - start


def test_slow_clients_are_cut_off(server: Server) -> None:
    get = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    slow = {
        "nothing": (b"", b""),
        "head": (b"POST /predict HTTP/1.1\r\n", b"a"),
        "second head": (get + b"GET /livez HTTP/1.1\r\n", b"b"),
        "body": (b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000\r\n\r\n", b"c"),
        "body of a control call": (b"POST /control/freeze HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n", b"d"),
        "body that is not wanted": (b"POST /no HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000\r\n\r\n", b"e"),
    }

    async def together() -> list[float]:
        waits = [asyncio.to_thread(lasts, server, *content) for content in slow.values()]
        return await asyncio.gather(*waits)

    for name, seconds in zip(slow, asyncio.run(together()), strict=True):
        assert 1 < seconds < 60, (name, seconds)


def test_an_answer_that_is_not_read_ends() -> None:
    async def stall(*, reads: bool) -> bool:
        protocol = _Impatient.__new__(_Impatient)
        protocol.loop, protocol.seconds = asyncio.get_running_loop(), 0.05
        protocol.transport, protocol.flow = Mock(), Mock()
        protocol.pause_writing()
        if reads:
            protocol.resume_writing()
        await asyncio.sleep(0.2)
        return bool(protocol.transport.abort.called)

    assert asyncio.run(stall(reads=False))
    assert not asyncio.run(stall(reads=True))


def test_connections_are_limited(server: Server) -> None:
    crowd: list[socket.socket] = []

    def refused() -> httpx.Response | None:
        """Fill all places, since the server closes connections that stay silent."""
        crowd.extend(socket.create_connection(("127.0.0.1", server.port)) for _ in range(LIMIT))
        answer = httpx.get(f"{server.address}/livez", timeout=60)
        return answer if answer.status_code == 503 else None

    try:
        answer = soon(refused)
        assert answer.headers["Retry-After"] == "1"
        assert answer.json().keys() == {"error"}
    finally:
        for connection in crowd:
            connection.close()
    assert soon(lambda: httpx.get(f"{server.address}/livez", timeout=60).status_code == 200)


def test_viewers(server: Server) -> None:
    with server.client.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        events = []
        server_images = as_file(coded(3))
        httpx.post(f"{server.address}/predict?stream=seen", content=server_images)
        while not {"status", "predictions"} <= {*events}:
            line = next(lines)
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
        assert events[:2] == ["hello", "history"]

    def codes() -> list[int]:
        """Open one page more than there are places for, and close them all."""
        viewers = [httpx.Client(base_url=server.address, timeout=60) for _ in range(33)]
        try:
            requests = [viewer.build_request("GET", "/events") for viewer in viewers]
            return [v.send(request, stream=True).status_code for v, request in zip(viewers, requests, strict=True)]
        finally:
            for viewer in viewers:
                viewer.close()

    for _ in range(2):  # places are free again when viewers have gone
        assert soon(lambda: codes() == [200] * 32 + [503])


def test_triton_client(server: Server) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    client = triton.InferenceServerClient(server.address.removeprefix("http://"), network_timeout=30)
    name = "net.py-coded"
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(name)
    assert client.is_model_ready(name, "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "acclimate"
    assert client.get_model_metadata(name, "1")["inputs"][0]["shape"] == [-1, 1, -1, -1]
    images = np.stack([coded(number) for number in (1, 2, 3)])
    for kind, x in {
        "UINT8": images,
        "FP16": (images / 255).astype(np.float16),
        "FP32": (images / 255).astype(np.float32),
        "FP64": images / 255,
    }.items():
        for sent, wanted in ((True, True), (False, False), (True, False), (False, True)):
            if kind == "FP16" and not sent:
                continue  # the client sends it as bytes only
            given = triton.InferInput("images", [*x.shape], kind)
            given.set_data_from_numpy(x, binary_data=sent)
            asked = [triton.InferRequestedOutput(each, binary_data=wanted) for each in ("logits", "label", "learned")]
            found = client.infer(name, [given], model_version="1", outputs=asked, request_id=kind)
            assert found.get_response()["id"] == kind
            assert [{*np.flatnonzero(row > 0)} for row in found.as_numpy("logits")] == [white(each) for each in images]
            assert found.as_numpy("label").dtype == np.int64
            assert found.as_numpy("learned").tolist() in ([-1, -1, -1], [0, 0, 0], [1, 1, 1])
    given = triton.InferInput("images", [1, 1, 2, 2], "FP32")
    given.set_data_from_numpy(np.zeros((1, 1, 2, 2), np.float32))
    with pytest.raises(triton.InferenceServerException):
        client.infer(name, [given])
    client.close()


def test_the_log_is_json(server: Server) -> None:
    server.client.get("/no%0Aline?token=secret")

    def noted() -> bool:
        return any(line.get("code") == 404 and line["message"] == "GET /no%0Aline" for line in server.lines())

    assert soon(noted)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in server.lines())
    assert "secret" not in server.log.read_text()


def test_a_client_cannot_forge_its_address(server: Server) -> None:
    server.client.post("/control/nothing", headers={**CONTROL, "X-Forwarded-For": "6.6.6.6"})
    lines = (server.log.parent / "state" / "audit.jsonl").read_text().splitlines()
    (line,) = [line for line in map(json.loads, lines) if line["action"] == "nothing"]
    assert line["client"].startswith("127.0.0.1:")


# Errors at the start --------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    root = logging.getLogger()
    before, level = [*root.handlers], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def fails(*words: str) -> str:
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--log", "text", *words])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    lines = [line for line in done.stderr.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.usefixtures("quiet")
def test_errors_at_the_start(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = str(tmp_path / "state")
    assert str(server.port) in fails("--port", str(server.port), "--state", state)
    assert "nothing.py" in fails("--model", "nothing.py:net", "--state", state)
    assert "resnet" in fails("--model", "digits-rsnet", "--state", state)
    assert "timm" in fails("--model", "timm:no_such_network", "--state", state)
    used = fails("--state", str(server.log.parent / "state"))
    assert str(server.process.pid) in used
    assert "--state" in used
    assert "--out" not in used
    assert "b.org:1" in fails("--allow-host", "a.org", "--allow-host", "b.org:1")
    assert "queue" in fails("--queue", "8", "--batch-size", "64")
    monkeypatch.setenv("ACCLIMATE_TOKEN", "short")
    assert "16" in fails("--state", state)


@pytest.mark.usefixtures("quiet")
def test_errors_name_the_file(tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state"), "--method", "tent", "--no-guard"]
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    for name in ("labels.json", "plain", "bad.toml", "bad.json"):
        (tmp_path / name).write_text("[1, ")
    for option, name in (
        ("--labels", "labels.json"),
        ("--labels", "latin.txt"),
        ("--labels", "none.txt"),
        ("--config", "bad.toml"),
        ("--config", "bad.json"),
        ("--token-file", "."),
        ("--token-file", "none"),
        ("--state", "plain"),
    ):
        said = fails(*state, option, str(tmp_path / name))
        assert str(tmp_path / name) in said, said
    assert "folder" in fails(*state, "--token-file", str(tmp_path))
    assert "s3://bucket/states" in fails("--state", "s3://bucket/states")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken.png").write_text("no image")
    said = fails(*state, "--source", str(tmp_path / "source"))
    assert "broken.png" in said
    assert "--skip-broken" not in said


@pytest.mark.usefixtures("quiet")
def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    service = assembled(tmp_path)
    service.worker.ask(lambda: service.worker.streams("default", torch.zeros(3, 1, 32, 32))).result()
    service.worker.close()
    whole = [path.read_bytes() for path in sorted(service.store.cameras.iterdir())]
    for words in (
        ["--model", "digits-vit", "--method", "tent", "--no-guard"],
        ["--method", "eata", "--no-guard", "--source-images", "64"],
        ["--method", "tent", "--guard", "--source-images", "128"],
    ):
        assert "--state" in fails("--state", str(tmp_path / "state"), *words)
    assert whole == [path.read_bytes() for path in sorted(service.store.cameras.iterdir())]
    (tmp_path / "state" / "control.json").write_text("{")
    assert "control.json" in fails("--state", str(tmp_path / "state"), "--method", "tent", "--no-guard")
