"""Pictures that are decoded: how many may wait, how much memory they may take, and for whom nothing is decoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import application, as_file, binary, folder, held, started

from acclimate.service import pictures
from acclimate.service.app import create_app
from acclimate.service.assembly import Service
from acclimate.service.turns import Turns

__all__ = ["folder"]


def any_size(folder: Path, **fields: Any) -> Service:
    return started(folder, model=f"{folder}/net.py:coded", pixels=1, **{"batch_size": 4, **fields})


def png(width: int, height: int) -> bytes:
    return as_file(Image.new("L", (width, height), 99))


def form(*sizes: tuple[int, int]) -> list[Any]:
    return [("file", (f"{number}.png", png(*size))) for number, size in enumerate(sizes)]


class Spy:
    """Counts the pictures that are decoded, and keeps each until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded, self.go, self.begun = 0, threading.Event(), threading.Event()
        self.go.set()
        own = pictures.prepare_image

        def prepare(*arguments: Any) -> Any:
            self.decoded += 1
            self.begun.set()
            assert self.go.wait(60)
            return own(*arguments)

        monkeypatch.setattr(pictures, "prepare_image", prepare)


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        threading.Event().wait(0.05)
    return False


def test_all_headers_are_read_before_any_picture_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, spy = any_size(folder), Spy(monkeypatch)
    with application(service) as client:
        assert client.post("/predict", files=form((900, 600), (900, 600))).status_code == 413  # together
        assert client.post("/predict", files=form((9, 9), (2000, 600))).status_code == 413
        assert spy.decoded == 0
        assert client.post("/predict", files=form((900, 500), (900, 500))).status_code == 200
        body, headers = binary(np.zeros((2, 1, 900, 600), np.uint8), "UINT8")
        address = "/v2/models/net.py-coded/infer?stream=new"
        assert client.post(address, content=body, headers=headers).status_code == 413
    assert (service.decoder.waiting, service.decoder.held) == (0, 0)


def test_pictures_in_memory_are_limited_together(folder: Path) -> None:
    service = any_size(folder)
    with application(service) as client, ThreadPoolExecutor() as pool:
        go = held(service.worker)
        waiting = [pool.submit(client.post, "/predict", content=png(1000, 900)) for _ in range(2)]
        assert eventually(lambda: service.worker.depth == 2)
        refused = client.post("/predict", content=png(1000, 900))
        go.set()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert [each.result().status_code for each in waiting] == [200, 200]
        assert client.post("/predict", content=png(1000, 900)).status_code == 200
    assert service.decoder.held == 0


def test_pictures_that_wait_to_be_decoded_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, spy = any_size(folder, queue=4), Spy(monkeypatch)
    with application(service) as client, ThreadPoolExecutor() as pool:
        assert client.post("/predict", files=form(*[(8, 8)] * 5)).status_code == 413
        spy.go.clear()
        first = pool.submit(client.post, "/predict", files=form(*[(8, 8)] * 3))
        assert spy.begun.wait(60)
        refused = client.post("/predict", files=form(*[(8, 8)] * 2))
        metrics = client.get("/metrics").text
        spy.go.set()
        assert "acclimate_queue_depth 3.0" in metrics
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert first.result().status_code == 200
    assert (service.decoder.waiting, service.decoder.held) == (0, 0)


def test_nothing_is_decoded_for_a_client_that_has_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, spy = any_size(folder), Spy(monkeypatch)
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    messages = [{"type": "http.request", "body": (head + png(8, 8) + b"\r\n") * 9 + b"--x--\r\n"}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        while spy.decoded < 2:
            await asyncio.sleep(60)  # is cancelled
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
    asyncio.run(create_app(service)(scope, receive, send))
    assert spy.decoded == 2
    assert service.worker.streams.keys() == []
    assert (service.decoder.waiting, service.decoder.held) == (0, 0)


def test_pictures_of_two_sizes_are_refused_as_a_whole(folder: Path) -> None:
    service = any_size(folder, batch_size=2)
    with application(service) as client:
        refused = client.post("/predict", files=form((8, 8), (8, 8), (12, 8)))
        assert refused.status_code == 400
        assert service.worker.streams.keys() == []
        assert client.post("/predict", files=form((12, 8), (12, 8))).status_code == 200


def test_who_has_the_least_to_do_goes_first() -> None:
    async def order() -> list[int]:
        turns, done = Turns(), list[int]()

        async def work(size: int) -> None:
            async with turns.take(size):
                await asyncio.sleep(0)
                done.append(size)

        async def greedy() -> None:
            for _ in range(3):
                await work(25)

        tasks = [asyncio.create_task(each) for each in (greedy(), work(30), work(20), work(1), work(5))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.take(0):
            return done

    assert asyncio.run(order()) == [25, 5, 20, 25, 30, 25]


def test_a_turn_that_nobody_takes_is_passed_on() -> None:
    async def cancel() -> bool:
        turns = Turns()

        async def hold() -> None:
            async with turns.take(1):
                await asyncio.sleep(0)

        first, second, third = (asyncio.create_task(hold()) for _ in range(3))
        first.add_done_callback(lambda _: second.cancel())  # when it has been handed the lock
        await asyncio.wait([first, second, third], timeout=30)
        return second.cancelled() and third.done()

    assert asyncio.run(cancel())
