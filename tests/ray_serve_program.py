"""Two replicas on a local Ray: what they answer, and what is left when one is killed. Prints JSON.

A process of its own, since Ray's warnings and threads do not belong into that of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import ray
import torch
from ray import serve

from acclimate import Stream, Streams
from acclimate.data.digits import load_digits
from acclimate.service.model import build
from acclimate.service.on_ray import REPLICA, application
from acclimate.service.settings import Settings

X = load_digits()[1].x[:32]
CAMERAS = ("north", "south", "east")


def images(camera: str, start: int) -> torch.Tensor:
    batch = X[start : start + 8]
    return 1 - batch if camera == "south" else batch


PATIENCE = 180.0
"""Seconds for what takes some seconds on an idle machine."""


def until(true: Callable[[], bool]) -> bool:
    """Wait for something, and return whether it has happened."""
    end = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


class Client:
    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/v2/models/digits-vit/infer"

    def ask(self, camera: str, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        data = {"name": "images", "datatype": "FP32", "shape": [*x.shape], "data": x.flatten().tolist()}
        body, where = {"inputs": [data], "outputs": [{"name": "logits"}]}, {"serve_multiplexed_model_id": camera}
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                response = httpx.post(self.address, json=body, headers=where, timeout=60)
                if response.status_code == 200:
                    logits = torch.tensor(response.json()["outputs"][0]["data"]).view(len(x), -1)
                    return logits, int(response.headers[REPLICA])
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"no answer for {camera}")


def compare(client: Client, settings: Settings) -> tuple[bool, set[int]]:
    """Let cameras take turns, more than a replica has room for; compare with one process that has them all."""
    alone = Streams(Stream(build(replace(settings, replicas=None)).adapter, size=8, wait=float("inf")))
    same, replicas = True, set()
    for start in range(0, 32, 8):
        for camera in CAMERAS:
            logits, replica = client.ask(camera, images(camera, start))
            same &= torch.equal(logits, alone(camera, images(camera, start)))
            replicas.add(replica)
    end = time.monotonic() + PATIENCE
    while len(replicas) < 2 and time.monotonic() < end:  # Ray may choose one for all cameras for a while
        replicas |= {client.ask(camera, images(camera, 0))[1] for camera in CAMERAS}
    return same, replicas


def kill_under_load(client: Client, victim: int, folder: Path) -> dict[str, bool]:
    """Send from three threads, and kill a replica meanwhile."""
    answered, stopped = dict.fromkeys(CAMERAS, 0), threading.Event()

    def send(camera: str) -> None:
        while not stopped.is_set():
            client.ask(camera, images(camera, 0))
            answered[camera] += 1

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}

    def all_written() -> bool:
        now = written()
        return len(now) == len(CAMERAS) and all(now[name] != before.get(name) for name in now)

    before = written()
    threads = [threading.Thread(target=send, args=(camera,)) for camera in CAMERAS]
    for thread in threads:
        thread.start()
    try:
        saved = until(all_written)
        os.kill(victim, signal.SIGKILL)
        so_far = dict(answered)
        after = until(lambda: all(answered[camera] > so_far[camera] + 1 for camera in CAMERAS))  # one may be under way
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    return {"saved": saved, "after": after}


def main(folder: Path, port: int) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = Settings(
        model="digits-vit", method="eata", state=str(folder), replicas=2, cameras=1, save_every=1, batch_size=8, wait=0
    )
    serve.run(application(settings))
    client = Client(port)
    try:
        same, replicas = compare(client, settings)
        load = kill_under_load(client, min(replicas), folder / "cameras")
        print(json.dumps({"same": same, "replicas": len(replicas), **load}))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
