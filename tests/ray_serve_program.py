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


class Client:
    def __init__(self, port: int) -> None:
        self.address, self.tries = f"http://127.0.0.1:{port}/v2/models/digits-vit/infer", 0

    def ask(self, camera: str, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        data = {"name": "images", "datatype": "FP32", "shape": [*x.shape], "data": x.flatten().tolist()}
        body, where = {"inputs": [data], "outputs": [{"name": "logits"}]}, {"serve_multiplexed_model_id": camera}
        for attempt in range(20):
            self.tries = max(self.tries, attempt + 1)
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
    return same, replicas


def kill_under_load(client: Client, victim: int, folder: Path) -> dict[str, float]:
    """Send from three threads, and kill a replica meanwhile."""
    answered, stopped = dict.fromkeys(CAMERAS, 0), threading.Event()

    def send(camera: str) -> None:
        while not stopped.is_set():
            client.ask(camera, images(camera, 0))
            answered[camera] += 1

    threads = [threading.Thread(target=send, args=(camera,)) for camera in CAMERAS]
    for thread in threads:
        thread.start()
    time.sleep(3)
    killed, before = time.time(), sum(answered.values())
    ages = [killed - path.stat().st_mtime for path in folder.glob("*.safetensors")]
    os.kill(victim, signal.SIGKILL)
    time.sleep(3)
    stopped.set()
    for thread in threads:
        thread.join()
    return {"before": before, "after": sum(answered.values()) - before, "states": len(ages), "oldest": max(ages)}


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
        print(json.dumps({"same": same, "replicas": len(replicas), "tries": client.tries, **load}))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
