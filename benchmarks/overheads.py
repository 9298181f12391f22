"""Costs around a step: `python -m benchmarks.overheads [--device cuda] [--out FOLDER]`

Import of the package and of torch; a snapshot, a restore and a save beside a step. Medians, with the first and third
quartile. And the first batch of EATA and EATA-C with `engine="auto"`, each time in a new process: with an empty cache;
with the cache that this has filled; with an empty cache and a file as `acclimate warm-up` writes it; and answered
eagerly while a thread compiles. Writes `overheads_DEVICE.json`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acclimate import EATA, EATAC, Adapter, Engine
from acclimate.bench.own_networks import SmallResNet, SmallViT
from acclimate.bench.tables import Table, as_markdown
from acclimate.engine import choose

from .command import command, write
from .steps import Share

PARTS = ("imports", "state", "first-batch")
LEARNERS: dict[str, type[Adapter]] = {"EATA": EATA, "EATA-C": EATAC}
KEPT = 0.6


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


def first_batch(
    name: str, method: str, device: str, use: str = "", save: str = "", *, background: bool = False
) -> float:
    """Return the seconds from a network to its first adapted batch; `use` and `save` are files of compiled code."""
    torch.manual_seed(0)
    model, shape = network(name)
    x, model = torch.rand(64, *shape, device=device), model.to(device).eval()
    engine = replace(choose("auto", None, model, torch.device(device)), background=background)
    adapter = LEARNERS[method](model, beta=0, select=Share(KEPT).to(device), engine=engine)
    start = time.perf_counter()
    if use and not adapter.load_compiled(use):
        raise RuntimeError(f"{use} does not fit")
    adapter(x)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if save:
        adapter.save_compiled(save)
    return seconds


def in_a_process(cache: Path, *arguments: object, **options: object) -> float:
    """Return the seconds of a `first_batch` in a fresh process with this folder for compiled code."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    call = f"first_batch(*{arguments!r}, **{options!r})"
    program = f"import os; from benchmarks.overheads import first_batch; print({call}, flush=True); os._exit(0)"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "ignore", "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )  # os._exit: a thread may still be compiling
    return float(done.stdout.split()[-1])


def first_batches(name: str, method: str, device: str) -> dict[str, float]:
    """Return the seconds of the first batch, by what is there before."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        first, second, third, file = (Path(folder) / part for part in ("first", "second", "third", "compiled.bin"))
        what = name, method, device
        return {
            "empty cache": in_a_process(first, *what, save=str(file)),
            "filled cache": in_a_process(first, *what),
            "file": in_a_process(second, *what, use=str(file)),
            "background": in_a_process(third, *what, background=True),
        }


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


FIRST = {
    "empty cache": "first batch, empty cache",
    "filled cache": "first batch, filled cache",
    "file": "first batch, file of `acclimate warm-up`",
    "background": "first batch, compiled in the background",
}


def table(*contents: dict[str, Any]) -> Table:
    """Return one column per network, from one or more result files. Earlier ones have first batches of EATA only."""
    rows: dict[str, dict[str, str]] = {}

    def parts(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for content in contents:
            yield from content.get(kind, {}).items()

    for name, by_method in parts("first_batch"):
        for method, found in by_method.items():
            for what, seconds in found.items():
                rows.setdefault(f"{method}: {FIRST[what]}", {})[name] = f"{seconds:.1f} s"
    for name, times in () if rows else parts("start_up"):
        for what, key in (("empty", "cold_seconds"), ("filled", "cached_seconds")):
            rows.setdefault(f"first call, {what} cache", {})[name] = f"{times[key]:.0f} s"
    for name, state in parts("state"):
        for what, times in state.items():
            rows.setdefault(what, {})[name] = f"{times['milliseconds']:.1f} ms"
        for what, times in parts("imports"):
            rows.setdefault(f"import {what}", {})[name] = f"{times['milliseconds'] / 1e3:.1f} s"
    names = dict.fromkeys(name for cells in rows.values() for name in cells)
    return ["", *names], [[what, *(cells.get(name, "") for name in names)] for what, cells in rows.items()]


def main() -> None:
    """Measure, print and write after each part."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--only", nargs="*", default=[""], help="networks, by a part of their name")
    parser.add_argument("--methods", nargs="*", choices=LEARNERS, default=[*LEARNERS], help="of the first batch")
    arguments = parser.parse_args()
    device = arguments.device
    every = ("ResNet-50", "ViT-Base") if device == "cuda" else ("small ResNet", "small ViT")
    names = [name for name in every if any(part.lower() in name.lower() for part in arguments.only)]
    result: dict[str, Any] = {"cores": os.cpu_count()}
    if "imports" in arguments.parts:
        result["imports"] = imports(5)
    if "state" in arguments.parts:
        result["state"] = {name: state(name, device, arguments.repeats) for name in names}
    for name, method in itertools.product(names, arguments.methods) if "first-batch" in arguments.parts else ():
        found = first_batches(name, method, device)
        result.setdefault("first_batch", {}).setdefault(name, {})[method] = found
        print(name, method, found, flush=True)
        write("overheads", arguments, result, depth=3)
    print(as_markdown(*table(result)))
    write("overheads", arguments, result, depth=3)


if __name__ == "__main__":
    main()
