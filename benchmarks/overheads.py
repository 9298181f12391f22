"""Costs around a step: `python -m benchmarks.overheads [--device cuda] [--out FOLDER]`

Import of the package and of torch; the first call of a compiled adapter with an empty and with a filled cache, in
separate processes; a snapshot, a restore and a save beside a step. Medians, with the first and third quartile. Writes
`overheads_DEVICE.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from acclimate import EATA, Engine
from acclimate.bench.own_networks import SmallResNet, SmallViT
from acclimate.bench.tables import Table

from .command import command, write


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a network and its input shape by the name in the table."""
    if name.startswith("small"):
        return (SmallResNet() if name == "small ResNet" else SmallViT(width=128, depth=6)), (1, 32, 32)
    import timm

    return timm.create_model({"ResNet-50": "resnet50", "ViT-Base": "vit_base_patch16_224"}[name]), (3, 224, 224)


def timed(what: Callable[[], object], device: str, repeats: int) -> dict[str, float]:
    """Time a function in milliseconds."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        what()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(times[1:], n=4)
    return {"milliseconds": middle, "low": low, "high": high}


def imports(repeats: int) -> dict[str, dict[str, float]]:
    """Time imports, each in a fresh interpreter, alternating."""
    found: dict[str, list[float]] = {"torch": [], "acclimate": []}
    for _ in range(repeats + 1):
        for name, times in found.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True)  # noqa: S603
            times.append(1e3 * (time.perf_counter() - start))
    quartiles = {name: statistics.quantiles(times[1:], n=4) for name, times in found.items()}
    return {name: dict(zip(("low", "milliseconds", "high"), q, strict=True)) for name, q in quartiles.items()}


def first_call(name: str, device: str) -> float:
    """Return the seconds from a network to its first adapted batch."""
    torch.manual_seed(0)
    model, shape = network(name)
    x = torch.rand(64, *shape, device=device)
    adapter = EATA(model.to(device).eval(), beta=0, engine="auto")
    start = time.perf_counter()
    adapter(x)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def start_up(name: str, device: str) -> dict[str, float]:
    """Return the seconds with an empty cache, then with the cache that the first process filled."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        program = f"from benchmarks.overheads import first_call; print(first_call({name!r}, {device!r}))"
        seconds = []
        for _ in range(2):
            done = subprocess.run(  # noqa: S603
                [sys.executable, "-W", "ignore", "-c", program],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            seconds.append(float(done.stdout.split()[-1]))
    return {"cold_seconds": seconds[0], "cached_seconds": seconds[1]}


def state(name: str, device: str, repeats: int) -> dict[str, dict[str, float]]:
    """Time a step, a snapshot, a restore and a save of one adapter."""
    model, shape = network(name)
    adapter = EATA(model.to(device).eval(), beta=0, engine=Engine(graphs=device == "cuda"))
    x = torch.rand(64, *shape, device=device)
    for _ in range(4):
        adapter(x)
    snapshot = adapter.snapshot()
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(f"{folder}/state.safetensors")  # computes the fingerprint, which is cached
        return {
            "step": timed(lambda: adapter(x), device, repeats),
            "snapshot": timed(adapter.snapshot, device, repeats),
            "restore": timed(lambda: adapter.restore(snapshot), device, repeats),
            "save": timed(lambda: adapter.save(f"{folder}/state.safetensors"), device, repeats),
        }


def table(content: dict[str, Any]) -> Table:
    """Return one column per network."""
    state, starts = content["state"], content["start_up"].values()
    imports = {name: times["milliseconds"] / 1e3 for name, times in content["imports"].items()}
    rows = {
        "first call, empty cache": [f"{s['cold_seconds']:.0f} s" for s in starts],
        "first call, filled cache": [f"{s['cached_seconds']:.0f} s" for s in starts],
        **{
            what: [f"{times[what]['milliseconds']:.1f} ms" for times in state.values()]
            for what in ("step", "snapshot", "restore", "save")
        },
        **{f"import {name}": [f"{seconds:.1f} s"] * len(state) for name, seconds in imports.items()},
    }
    return ["", *state], [[name, *cells] for name, cells in rows.items()]


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    device = arguments.device
    names = ("ResNet-50", "ViT-Base") if device == "cuda" else ("small ResNet", "small ViT")
    result = {
        "cores": os.cpu_count(),
        "imports": imports(5),
        "state": {name: state(name, device, arguments.repeats) for name in names},
        "start_up": {name: start_up(name, device) for name in names},
    }
    print(json.dumps(result, indent=1))
    write("overheads", arguments, result, depth=3)


if __name__ == "__main__":
    main()
