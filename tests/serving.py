"""Servers for tests: in this process, or in one of their own, and a network whose logits say which image it saw."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from torch import Tensor

from acclimate.cli.main import app as command_line
from acclimate.data.digits import load_digits
from acclimate.service.app import create_app
from acclimate.service.assembly import Service, assemble
from acclimate.service.model import build
from acclimate.service.settings import Settings
from acclimate.service.store import Store
from acclimate.service.worker import Answer, Request, Worker

TOKEN = "a-token-of-the-tests"
OPTIONS = ("serve", "--port", "0", "--log", "json")
CONTROL = {"Authorization": f"Bearer {TOKEN}"}
BITS = 20
CODED = f"""
import torch
from torch import nn

class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.channels = nn.Conv2d(1, 1, 1)  # says that there is one
        self.norm = nn.LayerNorm({BITS})

    def forward(self, x):
        bits = x[:, 0].flatten(1)[:, :{BITS}]
        return 16 * (bits - 0.5) + torch.tanh(self.norm(bits)) / 4

def coded():
    return Coded()
"""
"""A network that adapts a little, and whose logits are positive where the first pixels are white."""


def coded(number: int, side: int = 8) -> np.ndarray[Any, Any]:
    """Return an image (1, side, side) of bytes that carries a number: five of its first pixels are white."""
    rng = np.random.default_rng(number)
    image = rng.integers(0, 256, (1, side, side), np.uint8)
    image.flat[:BITS] = 0
    image.flat[rng.choice(BITS, 5, replace=False)] = 255
    return image


def white(image: np.ndarray[Any, Any]) -> set[int]:
    return {*np.flatnonzero(image.flat[:BITS] == 255).tolist()}


def as_file(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image[0])
    picture.save(file, kind, **options)
    return file.getvalue()


def tensor(x: np.ndarray[Any, Any], datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    """Return the JSON of an inference request."""
    about = {"name": "images", "shape": [*x.shape], "datatype": datatype, "data": x.flatten().tolist()}
    return {"inputs": [about], **more}


def binary(x: np.ndarray[Any, Any], datatype: str = "FP32", **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request in the binary extension."""
    about = {"name": "images", "shape": [*x.shape], "datatype": datatype}
    about["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [about], "parameters": {"binary_data_output": True}, **more}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def outputs(response: httpx.Response) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a response, of either kind."""
    assert response.status_code == 200, response.text
    length = int(response.headers.get("Inference-Header-Content-Length", len(response.content)))
    start, found = length, {}
    for each in json.loads(response.content[:length])["outputs"]:
        kind = {"FP32": "<f4", "INT64": "<i8", "INT8": "i1"}[each["datatype"]]
        if "data" in each:
            array = np.array(each["data"], kind)
        else:
            size = each["parameters"]["binary_data_size"]
            array = np.frombuffer(response.content[start : start + size], kind)
            start += size
        found[each["name"]] = array.reshape(each["shape"])
    assert start == len(response.content)
    return found


# In this process ------------------------------------------------------------------------------------------------------


def assembled(folder: Path, **fields: Any) -> Service:
    """Return a service around the digits' ResNet with Tent, or what the fields say."""
    usual = {"method": "tent", "guard": False, "wait": 0, "state": str(folder / "state")}
    settings = Settings(**{**usual, **fields})
    return assemble(build(settings), settings, Store(settings.state))


@contextmanager
def application(service: Service) -> Iterator[TestClient]:
    with TestClient(create_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


X = load_digits()[1].x[:256]
STARTED: list[Service] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for servers in this process, with a token and the coded network; at the end they are closed."""
    monkeypatch.setenv("ACCLIMATE_TOKEN", TOKEN)
    (tmp_path / "net.py").write_text(CODED)
    yield tmp_path
    while STARTED:
        STARTED.pop().worker.close()


def started(folder: Path, **fields: Any) -> Service:
    STARTED.append(assembled(folder, **fields))
    return STARTED[-1]


def ask(service: Service, x: Tensor, stream: str = "default", **how: Any) -> Answer:
    answer = service.worker.submit(Request(x, stream, **how)).result(timeout=30)
    service.worker.ask(lambda: None).result(timeout=30)  # what watches comes after the answer
    return answer


def held(worker: Worker) -> threading.Event:
    """Keep the worker busy until the event is set."""
    going, go = threading.Event(), threading.Event()
    worker.ask(lambda: (going.set(), go.wait(30)))
    assert going.wait(30)
    return go


def state(service: Service) -> dict[str, Tensor]:
    return {**service.worker.ask(service.worker.learner.snapshot).result().tensors}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# In a process of its own ----------------------------------------------------------------------------------------------


Found = TypeVar("Found")


def soon(found: Callable[[], Found | None], seconds: float = 60) -> Found:
    """Return what a function returns as soon as that is true; a loaded machine may need a while."""
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "not yet, and not in time"
        time.sleep(0.05)
    return value


class Server:
    """A server on a free port of this machine, by `acclimate serve`."""

    process: Any

    def __init__(self, folder: Path, *words: str, state: str = "state") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "net.py").write_text(CODED)
        self.log = folder / f"log-{time.monotonic_ns()}"
        environment = {**os.environ, "ACCLIMATE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.log.touch()
        self.process = self._start([*OPTIONS, "--state", state, *words], environment)
        self.address = self._wait()
        self.port = int(self.address.rpartition(":")[2])
        self.client = httpx.Client(base_url=self.address, timeout=60)

    def _start(self, words: list[str], environment: dict[str, str]) -> Any:
        command = [sys.executable, "-m", "acclimate", *words]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, cwd=self.log.parent, env=environment, stderr=log, stdout=log)

    @property
    def _ended(self) -> bool:
        return self.process.poll() is not None

    def _wait(self) -> str:
        for _ in range(3600):
            if found := re.search(r"at (http://\S+)/ ", self.log.read_text()):
                return found[1]
            if self._ended:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server has not started: {self.log.read_text()}")

    def lines(self) -> list[dict[str, Any]]:
        """Return the log, without a line that is still being written."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def control(self, action: str, **content: Any) -> httpx.Response:
        return self.client.post(f"/control/{action}", json=content, headers=CONTROL)

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self._join()

    def _join(self) -> None:
        self.process.wait()

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Forked(Server):
    """A server in a fork of a process that has torch already, so that it starts in a second; its disk is slow."""

    def _start(self, words: list[str], environment: dict[str, str]) -> Any:
        context = multiprocessing.get_context("forkserver")
        here = str(Path(__file__).parent)
        if here not in os.environ.get("PYTHONPATH", "").split(":"):  # where the first process looks for modules
            os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
        context.set_forkserver_preload(["acclimate.service.server", "acclimate.cli.main", "serving"])
        process = context.Process(target=_serve, args=(words, str(self.log)), daemon=True)
        process.start()
        return process

    @property
    def _ended(self) -> bool:
        return not self.process.is_alive()

    def _join(self) -> None:
        self.process.join()


def _serve(words: list[str], log: str) -> None:
    """Run the command in a new process. A write takes long, so that kills strike it."""
    quick = os.fsync
    os.fsync = lambda file: (time.sleep(0.2), quick(file))[1]
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(Path(log).parent)
    os.environ["ACCLIMATE_TOKEN"] = TOKEN
    torch.set_num_threads(1)
    command_line(words)
