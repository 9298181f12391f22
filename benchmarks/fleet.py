"""What a fleet needs, from committed measurements: `python -m benchmarks.fleet [--out FOLDER]`

Reads the step costs, overheads, reading rates and method costs of an H200 (`steps`, `overheads`, `loading`, `methods`)
and the steps of two ranks (`parallel`), and measures only the size of a camera's state. Cameras are a simulated queue:
each one sends a batch when it is full, and each GPU serves its own cameras in turn. A sweep is a simulated schedule,
the longest job first. Writes `fleet_cpu.json`.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from acclimate import EATA
from acclimate.bench.tables import Table, as_markdown

from .command import command, path, read, write

CAMERAS, FRAMES, BATCH = 1000, 30, 64
MOST_DELAY = 0.1
IMAGES = 750_000
SEEDS = 3
SECONDS = 60
GPUS = (1, 2, 4, 8, 16)
STRATEGY = {"ResNet-50": "masked", "ViT-Base": "sparse"}
NETWORK_BYTES, HOP = 25e9 / 8, 50e-6
"""Assumed, not measured: a link of 25 Gb/s, and 50 µs for each of the 2 (N − 1) hops of an all-reduce in a ring."""


def step(
    network: str, method: str, strategy: str, kept: float | None, engine: tuple[str, str] = ("compiled", "bf16")
) -> float:
    """Return the seconds of a step on 64 images."""
    rows = read("steps", "h200")["networks"][network]["rows"]
    named = dict(zip(("engine", "precision"), engine, strict=True))
    wanted = {"method": method, "strategy": strategy, **named, "kept": kept}
    (found,) = (row for row in rows if wanted.items() <= row.items())
    return median(found["milliseconds"]) / 1e3


class NormLayers(nn.Module):
    """The norm layers of a network, and 1,000 classes: all that the size of a state depends on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        stages = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, and the width inside of one
        resnet = [64, *(each for n, w in stages for each in (*(w, w, 4 * w) * n, 4 * w))]
        self.norms = nn.ModuleList(
            map(nn.BatchNorm2d, resnet) if name == "ResNet-50" else [nn.LayerNorm(768) for _ in range(25)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        mean = x.mean((1, 2, 3))
        images = (mean[:, None, None, None].expand(-1, len(norm.weight), 1, 1) for norm in self.norms)
        tokens = (mean[:, None].expand(-1, len(norm.weight)) for norm in self.norms)
        inputs = images if isinstance(self.norms[0], nn.BatchNorm2d) else tokens
        out = torch.stack([norm(given).flatten(1).sum(1) for norm, given in zip(self.norms, inputs, strict=True)])
        return out.sum(0)[:, None] * torch.linspace(-1, 1, 1000)


def state(name: str) -> dict[str, int]:
    """Measure the state of a camera: EATA and its optimizer on the norm layers of a network."""
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    adapter = EATA(NormLayers(name).eval(), source=[x])
    adapter(x)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(file := Path(folder) / "state.safetensors")
        size = file.stat().st_size
    return {"memory": adapter.snapshot().nbytes, "file": size, "gradient": 4 * sum(p.numel() for p in adapter.adapted)}


def queue(service: float, streams: int, period: float, seed: int = 0) -> float:
    """Simulate a GPU that serves streams, each of which sends a batch per period; return the delay of 99 in 100."""
    chance = random.Random(seed)  # noqa: S311
    arrivals = [chance.uniform(0, period) for _ in range(streams)]
    heapq.heapify(arrivals)
    free, delays = 0.0, []
    while arrivals[0] < SECONDS:
        now = arrivals[0]
        heapq.heapreplace(arrivals, now + period)
        free = max(free, now) + service
        delays.append(free - now)
    return sorted(delays)[int(0.99 * len(delays))]


def fleet(service: float, *, own: bool) -> dict[str, Any]:
    """Return how many GPUs serve all cameras in time, with a state per camera (`own`) or per GPU."""
    busy = CAMERAS * FRAMES / BATCH * service
    gpus = math.ceil(busy)
    while True:
        share = CAMERAS / gpus
        streams, period = (math.ceil(share), BATCH / FRAMES) if own else (1, BATCH / FRAMES / share)
        if (delay := queue(service, streams, period)) <= MOST_DELAY:
            return {"milliseconds": 1e3 * service, "busy": busy, "gpus": gpus, "fill": period, "delay": delay}
        gpus += 1


def cameras() -> list[dict[str, Any]]:
    """Return what each way to serve the cameras needs."""
    rows = []
    for name, strategy in STRATEGY.items():
        over = read("overheads", "h200")["state"][name]
        restore, snapshot = (over[what]["milliseconds"] / 1e3 for what in ("restore", "snapshot"))
        predict = step(name, *(("BNAdapt", "", None) if name == "ResNet-50" else ("Source", "", None)))
        for method, how in (("EATA", strategy), ("EATAC", "replay-subset")):
            learn = step(name, method, how, 0.6)
            ways = {
                "one per GPU": (learn, False),
                "one per camera": (learn + restore + snapshot, True),
                "one per camera, learns from one batch in ten": (
                    0.9 * (predict + restore) + 0.1 * (learn + restore + snapshot),
                    True,
                ),
            }
            for way, (service, own) in ways.items():
                rows.append({"network": name, "method": method, "state": way, **fleet(service, own=own)})
    return rows


def sent(network: str, method: str) -> tuple[int, int]:
    """Return the messages of a rank's step, and the passes, forward and backward, in which BatchNorm layers send some.

    They are counted on small networks (`parallel_cpu.json`). The first layer sends none in the backward pass.
    """
    counts = {(point["network"], point["method"]): point["messages"] for point in read("parallel", "cpu")["points"]}
    layers = counts["resnet", "bn-adapt"] - counts["resnet", "source"]
    passes = round((counts["resnet", method] - counts["vit", method]) / layers) if network == "ResNet-50" else 0
    return counts["vit", method] + max(0, passes * len(NormLayers(network).norms) - 1), passes


def mixed(states: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Return the seconds that the mixed ImageNet-C takes on one machine with some GPUs, and what limits it.

    One GPU is compiled. Several run eagerly, as the library does today, or are assumed to be compiled as well.
    """
    reading = IMAGES / rates()["224×224, noisy"]["read"]
    rows = []
    for name, strategy in STRATEGY.items():
        for method, how in (("EATA", strategy), ("EATAC", "replay-subset")):
            compiled = step(name, method, how, 0.6)
            eager = step(name, method, "masked" if method == "EATA" else how, 0.6, ("eager", "fp32"))
            messages, passes = sent(name, {"EATA": "eata", "EATAC": "eata-c"}[method])
            size = states[name]["gradient"] * (1 + 2 * passes)  # statistics are two doubles per channel
            for ranks, each in (("eager", eager), ("compiled", compiled)):
                for gpus in GPUS:
                    steps, hops = IMAGES / BATCH / gpus, 2 * (gpus - 1)
                    moved = hops / gpus * size / NETWORK_BYTES + hops * messages * HOP
                    rows.append(
                        {
                            "network": name,
                            "method": method,
                            "ranks": ranks,
                            "gpus": gpus,
                            "computing": steps * ((compiled if gpus == 1 else each) + moved),
                            "messages": steps * moved,
                            "reading": reading,
                        }
                    )
    return rows


def rates() -> dict[str, dict[str, float]]:
    """Return images per second that 15 workers on 16 cores read, and the bytes of a file, by kind."""
    rows = [row for row in read("loading", "h200")["rows"] if row["workers"] == 15]
    return {row["files"]: {"read": median(row["read"]), "bytes": row["bytes"]} for row in rows}


def makespan(jobs: Sequence[float], machines: int) -> float:
    """Return when the last job ends, if the longest ones start first."""
    free = [0.0] * machines
    for job in sorted(jobs, reverse=True):
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def sweeps() -> list[dict[str, Any]]:
    """Return the hours of the lifelong table of ImageNet-C, with three seeds, in eager PyTorch."""
    rows = []
    for name in STRATEGY:
        costs = {row["method"]: row["seconds"] for row in read("methods", "h200")["rows"] if row["network"] == name}
        for left_out in ((), ("MEMO",)):
            jobs = [15 * cost for method, cost in costs.items() if method not in left_out for _ in range(SEEDS)]
            hours = {str(gpus): makespan(jobs, gpus) / 3600 for gpus in (*GPUS, 32)}
            rows.append({"network": name, "left_out": left_out, "longest": max(jobs) / 3600, "hours": hours})
    return rows


def check() -> list[dict[str, Any]]:
    """Return the rate that the model expects where images are read while a GPU works, beside the measured one."""
    stored = read("loading", "h200")
    memory = median(stored["memory"])
    return [
        {
            "files": row["files"],
            "workers": row["workers"],
            "expected": min(median(row["read"]), memory),
            "measured": median(row["fed"]),
        }
        for row in stored["rows"]
    ]


def ranks() -> list[dict[str, Any]]:
    """Return the processor time of one of two ranks that the terms of its step add up to, beside the measured.

    All are shares of the step of one process (`parallel_cpu.json`).
    """
    rows = []
    for point in read("parallel", "cpu")["points"]:
        half, whole = (point[f"processor_{what}"]["median"] for what in ("of_half", "without_messages"))
        terms = {
            "half": half,
            "pooling": whole - half,
            "messages": point["messages"] * point["processor_of_a_message"]["median"],
        }
        named = {"network": point["network"], "method": point["method"]}
        rows.append({**named, **terms, "expected": sum(terms.values()), "measured": point["processor"]["median"]})
    return rows


def cameras_table(content: dict[str, Any]) -> Table:
    """Return one row per way to serve the cameras."""
    rows = [
        [
            f"{row['network']}, {row['method']}",
            row["state"],
            f"{row['milliseconds']:.1f}",
            f"{row['busy']:.1f}",
            str(row["gpus"]),
            f"{row['fill']:.2f}" if row["fill"] > 0.1 else f"{row['fill']:.3f}",
            f"{1e3 * row['delay']:.0f}",
        ]
        for row in content["cameras"]
    ]
    return ["", "state", "ms per batch", "GPUs, at least", "GPUs, simulated", "s to fill a batch", "delay, ms"], rows


def limits_table(content: dict[str, Any]) -> Table:
    """Return what the cameras need apart from GPUs."""
    frames = CAMERAS * FRAMES
    rows = []
    for kind, rate in content["rates"].items():
        if "smooth" not in kind:
            need = f"{frames:,} JPEGs a second, {kind}"
            rows.append([need, "decode", f"{frames / rate['read']:.1f} machines of 16 cores"])
            rows.append([need, "network", f"{8 * frames * rate['bytes'] / 1e9:.0f} Gb/s"])
    for name, size in content["states"].items():
        need = f"{CAMERAS:,} states, {name}"
        rows.append([need, "memory", f"{CAMERAS * size['memory'] / 1e9:.2f} GB"])
        rows.append([need, "written once a minute", f"{CAMERAS * size['file'] / 60e6:.0f} MB/s"])
    return ["what", "", "need"], rows


def mixed_table(content: dict[str, Any]) -> Table:
    """Return one row per network and method: minutes by GPUs, with images in memory and with reading."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content["mixed"]:
        found.setdefault((f"{row['network']}, {row['method']}", row["ranks"]), []).append(row)
    rows = []
    for (name, ranks), own in found.items():
        rows.append([name, ranks, "in memory", *(f"{row['computing'] / 60:.1f}" for row in own)])
        rows.append([name, ranks, "from files", *(f"{max(row['computing'], row['reading']) / 60:.1f}" for row in own)])
    return ["", "several GPUs", "images", *(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)], rows


def sweep_table(content: dict[str, Any]) -> Table:
    """Return one row per network: hours by GPUs."""
    rows = [
        [
            row["network"] + (f", without {', '.join(row['left_out'])}" if row["left_out"] else ""),
            *(f"{hours:.1f}" for hours in row["hours"].values()),
            f"{row['longest']:.1f}",
        ]
        for row in content["sweeps"]
    ]
    counts = [*content["sweeps"][0]["hours"]]
    return ["", *(f"{gpus} GPU{'s' * (gpus != '1')}" for gpus in counts), "longest run"], rows


def check_table(content: dict[str, Any]) -> Table:
    """Return expected and measured rates."""
    rows = [
        [
            f"{row['files']}, {row['workers']} workers",
            f"{row['expected']:,.0f}",
            f"{row['measured']:,.0f}",
            f"{100 * (row['expected'] / row['measured'] - 1):.0f}",
        ]
        for row in content["check"]
    ]
    return ["files", "expected images/s", "measured images/s", "error, %"], rows


def ranks_table(content: dict[str, Any]) -> Table:
    """Return the terms of a step, and expected and measured shares."""
    rows = [
        [
            row["network"],
            row["method"],
            *(f"{row[term]:.2f}" for term in ("half", "pooling", "messages")),
            f"{row['expected']:.2f}",
            f"{row['measured']:.2f}",
            f"{100 * (row['expected'] / row['measured'] - 1):.0f}",
        ]
        for row in content["ranks"]
    ]
    terms = ["half of the batch", "what ranks add", "messages"]
    return ["network", "method", *terms, "expected", "measured", "error, %"], rows


TABLES = {
    "cameras": cameras_table,
    "limits": limits_table,
    "mixed": mixed_table,
    "sweeps": sweep_table,
    "check": check_table,
    "ranks": ranks_table,
}
"""Every table by its name in the pages."""


def main() -> None:
    """Work everything out, print the tables and write the result file."""
    arguments = command(__doc__).parse_args()
    arguments.device = "cpu"
    states = {name: state(name) for name in STRATEGY}
    assumed = {"bytes_per_second": NETWORK_BYTES, "hop_seconds": HOP, "most_delay": MOST_DELAY, "seed": 0}
    inputs = {name: read(name, "h200")["origin"]["commit"] for name in ("steps", "overheads", "loading", "methods")}
    inputs["parallel"] = read("parallel", "cpu")["origin"]["commit"]
    result = {
        "inputs": inputs,
        "assumed": assumed,
        "states": states,
        "rates": rates(),
        "cameras": cameras(),
        "mixed": mixed(states),
        "sweeps": sweeps(),
        "check": check(),
        "ranks": ranks(),
    }
    write("fleet", arguments, result)
    print(path("fleet", arguments))
    for table in TABLES.values():
        print(as_markdown(*table(result)))


if __name__ == "__main__":
    main()
