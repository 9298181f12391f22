"""Kill a server, and see whether it comes back as it was: `python -m benchmarks.serving kills` does so for longer."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from serving import CONTROL, Forked, Server, binary, outputs

from acclimate.data.digits import load_digits
from acclimate.online.one_by_one import Stream
from acclimate.service.model import build
from acclimate.service.settings import Settings

BATCH = 16
WORDS = ("--source-images", "64", "--batch-size", str(BATCH), "--save-every", "1", "--wait", "0")
INFER = "/v2/models/digits-resnet/infer"
STREAMS = ("north", "south")
X = load_digits()[1].x[:512].numpy()


def ask(client: httpx.Client, x: np.ndarray[Any, Any], stream: str) -> np.ndarray[Any, Any]:
    body, headers = binary(x)
    response = client.post(f"{INFER}?stream={stream}", content=body, headers=headers)
    return outputs(response)["logits"]


class Twin:
    """The library beside the server: continues from the files of the server's streams."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state" / "cameras"
        self.stream = Stream(
            build(Settings(source_images=64, batch_size=BATCH)).adapter, size=BATCH, wait=float("inf"), least=1
        )
        self.start = self.stream.snapshot()

    def load(self, stream: str) -> int:
        """Restore a stream from its file, if there is one; return how many images it has seen."""
        names = {path.read_text(): path.with_suffix(".safetensors") for path in self.folder.glob("*.txt")}
        state = self.start
        if stream in names and names[stream].is_file():
            state = self.stream.read(names[stream])
        self.stream.restore(state)
        return self.stream.learned + self.stream.skipped + self.stream.waiting

    def __call__(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.stream(torch.from_numpy(x)).float().numpy()


class Life:
    """One life of a server: send images to both streams until it is killed at a random moment."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng, self.dead = server, rng, False
        self.seen: dict[str, int] = {}
        self.acknowledged: list[tuple[float, str, int]] = []
        """Time, stream and how many images it has seen."""
        self.saved = 0.0

    def live(self, seconds: float) -> None:
        """Send images, look when the state was saved, and kill."""
        threads = [threading.Thread(target=self._send), threading.Thread(target=self._look)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self.dead = True
        self.server.process.kill()
        for thread in threads:
            thread.join()
        self.server.kill()

    def _send(self) -> None:
        rng = random.Random(self.rng.random())
        with httpx.Client(base_url=self.server.address, timeout=30) as client:
            while not self.dead:
                stream, size, start = rng.choice(STREAMS), rng.choice((1, 3, BATCH)), rng.randrange(480)
                try:
                    ask(client, X[start : start + size], stream)
                except httpx.HTTPError:
                    return
                self.seen[stream] = self.seen.get(stream, 0) + size
                self.acknowledged.append((time.time(), stream, self.seen[stream]))

    def _look(self) -> None:
        with httpx.Client(base_url=self.server.address, timeout=30, headers=CONTROL) as client:
            while not self.dead:
                try:
                    self.saved = client.get("/control/status").json()["saved"] or 0.0
                except (httpx.HTTPError, json.JSONDecodeError):
                    return
                time.sleep(0.1)

    def least(self, stream: str, write: float) -> int:
        """Return how many images the file of a stream must have seen: those answered before the last save began."""
        counts = [count for when, key, count in self.acknowledged if key == stream and when < self.saved - write]
        return max(counts, default=0)


def check(server: Server, twin: Twin, rng: random.Random, lost: list[str]) -> dict[str, int]:
    """Compare a server that has come back with the library, image by image; return what its streams have seen."""
    seen = {}
    for stream in STREAMS:
        seen[stream] = twin.load(stream)
        for size in (1, BATCH, 5, BATCH, BATCH, 1):
            start = rng.randrange(480)
            x = X[start : start + size]
            if not np.array_equal(ask(server.client, x, stream), twin(x)):
                lost.append(f"{stream} differs after {seen[stream]} images")
                break
            seen[stream] += size
    return seen


def kill_and_restart(folder: Path, times: int, seed: int = 0, *, longest: float = 2.5) -> dict[str, Any]:
    """Kill a server so often; return what was lost, and how many kills struck a write."""
    rng, twin = random.Random(seed), Twin(folder)
    lost: list[str] = []
    writes, images, restarts = 0, 0, []
    least: dict[str, int] = {}
    for turn in range(times + 1):
        start = time.monotonic()
        server = Forked(folder, *WORDS)
        restarts.append(time.monotonic() - start)
        try:
            found = {stream: twin.load(stream) for stream in STREAMS}
            lost += [f"{key}: {found[key]} of at least {count}" for key, count in least.items() if found[key] < count]
            lost += [line["message"] for line in server.lines() if line["level"] == "error"]
            seen = check(server, twin, rng, lost)
            if turn < times:
                life = Life(server, rng)
                life.seen = seen
                life.live(rng.uniform(0.1, longest))
                least = {stream: max(found[stream], life.least(stream, write=1.5)) for stream in STREAMS}
                writes += any((folder / "state" / "cameras").glob(".*tmp"))
                images += len(life.acknowledged)
        finally:
            server.kill()
    return {
        "kills": times,
        "during_a_write": writes,
        "requests": images,
        "lost": lost,
        "restart_seconds": sorted(restarts)[len(restarts) // 2],
    }
