"""Time to the answer: `python -m benchmarks.answers [--device cuda] [--out FOLDER]`

From the call until the logits are on the host, learning not counted: EATA and EATA-C on the engine `auto`, without and
with `overlap`, against inference on the same engine, with batches of 1 and 64. Rows take turns, and each waits until
its learning has ended before the next call. Then batches come at 80 % of what a step takes on average: how long each
waits for its answer, and what the same batches wait that are only predicted. Random networks, 60 % kept. On a CPU there
is no overlap. Writes `answers_DEVICE.json`.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acclimate import EATA, EATAC, Adapter, BNAdapt, Engine, Source
from acclimate.bench.tables import Table, as_markdown

from .command import command, write
from .steps import Share, networks

KEPT, LOAD = 0.6, 0.8
METHODS = {"EATA": EATA, "EATA-C": EATAC}


def build(network: str, x: Tensor, engine: Engine) -> dict[str, Adapter]:
    """Return inference and the learning methods by name, each over a network of its own."""
    make = networks(x.device.type)[network][0]
    options: dict[str, Any] = {"engine": engine}

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        return make().to(x.device).eval()

    infer = Source(net(), **options) if "ViT" in network else BNAdapt(net(), prior=0, **options)
    found: dict[str, Adapter] = {"inference": infer}
    for name, method in METHODS.items():
        learning = {"source": [x[:8]], "select": Share(KEPT).to(x.device), "lr": 1e-6}
        found[name] = method(net(), **learning, **options)
        if engine.graphs:
            found[f"{name}, overlap"] = method(net(), **learning, engine=replace(engine, overlap=True))
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alone(adapters: dict[str, Adapter], x: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds until the logits are on the host, and until all is done: medians."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in adapters}
    with quiet():
        for turn in range(repeats + 5):
            for name in (*adapters, *adapters)[turn % len(adapters) :][: len(adapters)]:
                start = time.perf_counter()
                adapters[name](x).cpu()
                answered = time.perf_counter()
                adapters[name].settle()
                if turn > 4:
                    taken[name].append((1e3 * (answered - start), 1e3 * (time.perf_counter() - start)))
    columns = {
        name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in taken.items()
    }
    return {name: dict(zip(("answer", "step"), medians, strict=True)) for name, medians in columns.items()}


def stream(adapter: Adapter, x: Tensor, every: float, count: int) -> dict[str, float]:
    """Return how long batches wait for their answers that come every so many milliseconds."""
    waited = []
    with quiet():
        begin = time.perf_counter() + 0.01
        for number in range(count):
            due = begin + number * every / 1e3
            while (now := time.perf_counter()) < due:
                time.sleep(max(0.0, due - now - 2e-4))
            adapter(x).cpu()
            waited.append(1e3 * (time.perf_counter() - due))
    adapter.settle()
    cuts = statistics.quantiles(waited[count // 10 :], n=20)
    return {"median": cuts[9], "p95": cuts[18], "largest": max(waited[count // 10 :])}


def measure(network: str, batch: int, device: str, repeats: int, engine: Engine) -> list[dict[str, Any]]:
    """Return a row per method."""
    x = torch.rand(batch, *networks(device)[network][1], device=device)
    adapters = build(network, x, engine)
    times = alone(adapters, x, repeats)
    rows = []
    for name, adapter in adapters.items():
        every = times[name]["step"] / LOAD
        under_load = stream(adapter, x, every, repeats)
        adapter.frozen = True
        predicted = stream(adapter, x, every, repeats)
        rows.append(
            {
                "network": network,
                "batch": batch,
                "method": name,
                **times[name],
                "ratio": times[name]["answer"] / times["inference"]["answer"],
                "every": every,
                "under_load": under_load,
                "only_predicted": predicted,
            }
        )
    return rows


def table(result: dict[str, Any]) -> Table:
    """Return one row per network, batch size and method."""
    head = [
        "network",
        "batch",
        "method",
        "answer, ms",
        "× inference",
        "step, ms",
        "80 % load: median",
        "95 %",
        "frozen",
    ]
    return head, [
        [
            row["network"],
            str(row["batch"]),
            row["method"],
            f"{row['answer']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['step']:.2f}",
            f"{row['under_load']['median']:.2f}",
            f"{row['under_load']['p95']:.2f}",
            f"{row['only_predicted']['median']:.2f}",
        ]
        for row in result["rows"]
    ]


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--networks", nargs="+", help="some of the networks of `benchmarks.steps`")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    engine = Engine("bf16", channels_last=True, compiled=True, graphs=True) if cuda else Engine()
    warnings.simplefilter("ignore")
    rows = [
        row
        for network in arguments.networks or networks(arguments.device)
        for batch in arguments.batches
        for row in measure(network, batch, arguments.device, arguments.repeats, engine)
    ]
    result = {"kept": KEPT, "load": LOAD, "repeats": arguments.repeats, "rows": rows}
    print(as_markdown(*table(result)))
    write("answers", arguments, result)


if __name__ == "__main__":
    main()
