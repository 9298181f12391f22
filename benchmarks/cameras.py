"""Costs of one state per camera and of single images: `python -m benchmarks.cameras [--choose] [--seeds 3]`

Swaps between twenty cameras, in memory and through a folder, beside a step on 64 digits without a swap; with a guard,
after it has kept as many snapshots as it may. Then the
accuracy of EATA on a lifelong stream of six corruptions, severity 5: single images through a `Stream` of size 64,
batches of 64, and the source network. `--choose` first runs several momenta of the stream on other images and the four
corruptions that no table uses, with the ResNet, as the ViT has no BatchNorm. Writes `cameras_cpu.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from acclimate import METHODS, Adapter, Guard
from acclimate.bench.demo import DEMO_NETWORKS, digit_overrides
from acclimate.bench.networks import load_network
from acclimate.bench.scenarios import lifelong
from acclimate.bench.tables import Table, as_markdown
from acclimate.core.snapshot import Snapshot
from acclimate.data import open_suite
from acclimate.data.corruptions import EXTRA, corrupt
from acclimate.data.digits import load_digits
from acclimate.online.cameras import Streams
from acclimate.online.one_by_one import Stream

from .command import command, path, write
from .overheads import timed

SHIFTS = ("gaussian_noise", "motion_blur", "fog", "contrast", "pixelate", "jpeg_compression")
MOMENTA = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
TIE = 0.25
METHODS_TIMED = ("eata", "eata-c")
CAMERAS = 20
SIZE = 64
VISITS = 6  # of each camera, first


def build(method: str, network: str, device: str, seed: int = 0) -> Adapter:
    """Return a method around a network for digits, with the settings of the demo."""
    loaded = load_network(DEMO_NETWORKS[network], device)
    arguments = digit_overrides(network).get(method, {})
    if method in METHODS_TIMED:
        arguments = {**arguments, "source": [*load_digits()[0].x[:1000].to(device).split(SIZE)]}
    return METHODS[method].preset(loaded.family, loaded.model, seed=seed, **arguments)


def swaps(method: str, network: str, device: str, repeats: int, *, guard: bool = False) -> dict[str, Any]:
    """Time a step and swaps of cameras that have learned, and measure their states."""
    adapter: Adapter | Guard = build(method, network, device)
    if guard:
        adapter = Guard(adapter, probe=load_digits()[0].x[1000:1500].to(device), every=1)
    x = corrupt(load_digits()[1].x[:SIZE], "fog", 3, torch.Generator().manual_seed(0)).to(device)
    with tempfile.TemporaryDirectory() as folder:
        memory = Streams(adapter, most=CAMERAS)
        files = Streams(adapter, most=1, folder=folder)
        found = {}
        for name, cameras in (("swap_in_memory", memory), ("swap_through_folder", files)):
            for _, key in itertools.product(range(VISITS), map(str, range(CAMERAS))):
                cameras(key, x)
            found[name] = timed(_next_camera(cameras), device, repeats)
        return {
            "network": network,
            "method": f"{method}, guarded" if guard else method,
            "step": timed(lambda: memory("0", x), device, repeats),
            **found,
            "swaps_per_second_in_memory": 1e3 / found["swap_in_memory"]["milliseconds"],
            "swaps_per_second_through_folder": 1e3 / found["swap_through_folder"]["milliseconds"],
            "bytes_per_camera": size(adapter.snapshot()),
            "bytes_per_file": max(file.stat().st_size for file in Path(folder).glob("*.safetensors")),
        }


def size(state: Snapshot) -> int:
    """Return the bytes of a state: its tensors, and the text that its other values are in a file."""
    return state.nbytes + len(json.dumps(dict(state.settings)))


def _next_camera(cameras: Streams) -> Callable[[], None]:
    """Return a function that swaps to the next camera, and counts its state as changed, so that it is written."""
    keys = itertools.cycle(map(str, range(CAMERAS)))

    def swap() -> None:
        key = next(keys)
        cameras._switch(key)
        cameras._changed.add(key)

    return swap


def batches(data: str, shifts: tuple[str, ...], images: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a lifelong stream, with labels."""
    scenario = lifelong(open_suite(data), severity=5, shifts=shifts, images=images, batch_size=SIZE, seed=seed)
    for domain in scenario.domains:
        yield from domain.on(device)


def score(predict: Callable[[Tensor], Tensor], stream: list[tuple[Tensor, Tensor]], each: int) -> dict[str, float]:
    """Return the accuracy in per cent, and milliseconds per image, of a stream that comes `each` images at a time."""
    start = time.perf_counter()
    right = [predict(part).argmax(1).cpu() for x, _ in stream for part in x.split(each)]
    seconds = time.perf_counter() - start
    labels = torch.cat([y for _, y in stream])
    accuracy = (torch.cat(right) == labels).float().mean().item()
    return {"accuracy": 100 * accuracy, "milliseconds_per_image": 1e3 * seconds / len(labels)}


def single_images(network: str, device: str, images: int, seeds: int) -> dict[str, Any]:
    """Compare single images with batches and with the source network; means over seeds."""
    found: dict[str, list[dict[str, float]]] = {"source": [], "single images": [], "batches of 64": []}
    for seed in range(seeds):
        stream = [*batches("digits:judge", SHIFTS, images, seed, device)]
        adapter = build("eata", network, device, seed)
        found["source"].append(score(adapter.predict_source, stream, SIZE))
        found["single images"].append(score(Stream(adapter, size=SIZE, wait=math.inf), stream, 1))
        adapter.reset()
        found["batches of 64"].append(score(adapter, stream, SIZE))
        print(network, seed, {name: entries[-1] for name, entries in found.items()}, flush=True)
    return {
        name: {
            "accuracy": mean(entry["accuracy"] for entry in entries),
            "accuracies": [entry["accuracy"] for entry in entries],
            "milliseconds_per_image": mean(entry["milliseconds_per_image"] for entry in entries),
        }
        for name, entries in found.items()
    }


def choose(device: str, images: int, seeds: int) -> dict[str, Any]:
    """Return the accuracy of each momentum on images and corruptions that are not judged, and the chosen one.

    It is the smallest that is at most `TIE` points below the best: it averages over the most images.
    """
    accuracies = {momentum: [] for momentum in MOMENTA}
    for seed in range(seeds):
        stream = [*batches("digits:tune", EXTRA, images, seed, device)]
        adapter = build("eata", "resnet", device, seed)
        for momentum, own in accuracies.items():
            adapter.reset()
            own.append(score(Stream(adapter, size=SIZE, wait=math.inf, momentum=momentum), stream, 1)["accuracy"])
    means = {f"{momentum:g}": mean(own) for momentum, own in accuracies.items()}
    print(means, flush=True)
    chosen = next(float(name) for name, accuracy in means.items() if accuracy >= max(means.values()) - TIE)
    return {"shifts": EXTRA, "accuracy": means, "tie": TIE, "chosen": chosen}


def table(content: dict[str, Any]) -> Table:
    """Return one row per network and method: a step, swaps and the state."""
    rows = [
        [
            entry["network"],
            entry["method"],
            "–" if "guarded" in entry["method"] else f"{entry['step']['milliseconds']:.1f}",  # that one has a check
            *(f"{entry[f'swaps_per_second_{how}']:,.0f}" for how in ("in_memory", "through_folder")),
            f"{entry['bytes_per_camera'] / 1024:.0f}",
        ]
        for entry in content["swaps"]
    ]
    return ["network", "method", "step, ms", "swaps per second", "through a folder", "state, KiB"], rows


def accuracy_table(content: dict[str, Any]) -> Table:
    """Return one row per network: accuracies in per cent."""
    rows = {name: [f"{entry['accuracy']:.1f}" for entry in own.values()] for name, own in content["stream"].items()}
    return ["network", *next(iter(content["stream"].values()))], [[name, *cells] for name, cells in rows.items()]


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--images", type=int, default=512, help="images per corruption")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--choose", action="store_true", help="run several momenta first; else keep the earlier choice")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    earlier = path("cameras", arguments)
    momenta = json.loads(earlier.read_text())["momentum"] if earlier.is_file() else None
    if arguments.choose:
        momenta = choose(device, arguments.images, arguments.seeds)
    result = {
        "cores": os.cpu_count(),
        "cameras": CAMERAS,
        "images": arguments.images,
        "seeds": arguments.seeds,
        "shifts": SHIFTS,
        "momentum": momenta,
        "swaps": [
            swaps(method, network, device, arguments.repeats, guard=guard)
            for network, guard, method in itertools.product(DEMO_NETWORKS, (False, True), METHODS_TIMED)
        ],
        "stream": {n: single_images(n, device, arguments.images, arguments.seeds) for n in DEMO_NETWORKS},
    }
    print(as_markdown(*table(result)))
    print(as_markdown(*accuracy_table(result)))
    write("cameras", arguments, result, depth=3)


if __name__ == "__main__":
    main()
