"""Memory where the number of kept samples changes: `python -m benchmarks.counts [--device cuda] [--out FOLDER]`

EATA-C, which runs the kept samples again, on a random ResNet-50 (a small ResNet on a CPU) and batches of 256. A fixed
selector keeps another number of samples at each step. What torch has reserved of the GPU as the numbers add up, and the
time of a step once all have been seen; each engine in a process of its own. Writes `counts_DEVICE.json`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from acclimate import EATAC
from acclimate.bench.tables import Table, as_markdown

from .command import ENGINES, command, write
from .steps import Share, networks

NETWORK = {"cuda": "ResNet-50", "cpu": "small ResNet"}
SEED = 0


def numbers(batch: int, counts: int) -> list[int]:
    """Return different numbers of samples, from one to all of the batch, in random order."""
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(SEED))[:counts]
    return [1 + number for number in order.tolist()]


def measure(engine: str, device: str, batch: int, counts: int) -> dict[str, Any]:
    """Run a step for each number, then time some of them again."""
    make, shape = networks(device)[NETWORK[device]]
    torch.manual_seed(SEED)
    x, cuda = torch.rand(batch, *shape, device=device), device == "cuda"
    others = torch.cuda.memory_reserved() if cuda else 0
    chosen = {"engine": ENGINES[engine], "select": Share().to(device), "source": [x[:8]]}
    adapter = EATAC(make().to(device).eval(), lr=1e-5, **chosen)
    kept, reserved, times = list[int](), list[float | None](), list[float]()
    order = numbers(batch, counts)
    for number in [*order, *order[: counts // 4]]:
        adapter.get_buffer("select.share").fill_(number / batch)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        adapter(x)
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        kept.append(int(adapter.last.kept.sum()))
        reserved.append((torch.cuda.memory_reserved() - others) / 2**20 if cuda else None)
    return {
        "engine": engine,
        "distinct": len({*kept}),
        "reserved_mb": reserved[:counts],
        "peak_mb": (torch.cuda.max_memory_allocated() - others) / 2**20 if cuda else None,
        "milliseconds": statistics.median(times[counts:]),
        "seconds": sum(times[:counts]) / 1e3,
        "ran": adapter.last.engine,
    }


def table(content: dict[str, Any]) -> Table:
    """Return one row per engine: memory after some of the numbers, and time."""
    most = max(row["distinct"] for row in content["rows"])
    marks = [mark for mark in (1, 10, 50, 100) if mark < most] + [most]
    head = ["engine", *(f"MB after {mark}" for mark in marks), "peak MB", "ms per step", "s for the first time"]
    lines = []
    for row in content["rows"]:
        memory = [row["reserved_mb"][mark - 1] for mark in marks] + [row["peak_mb"]]
        shown = ["" if mb is None else f"{mb:,.0f}" for mb in memory]
        lines.append([row["engine"], *shown, f"{row['milliseconds']:.1f}", f"{row['seconds']:.0f}"])
    return head, lines


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--counts", type=int, default=200, help="how many different numbers of kept samples")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, help="eager and auto; on a GPU bf16, too")
    arguments = parser.parse_args()
    device, batch = arguments.device, arguments.batch
    engines = arguments.engines or (["eager", "bf16", "auto"] if device == "cuda" else ["eager", "auto"])
    result: dict[str, Any] = {"network": NETWORK[device], "batch": batch, "seed": SEED, "rows": []}
    for engine in engines:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            result["rows"].append(pool.submit(measure, engine, device, batch, arguments.counts).result())
        write("counts", arguments, result)
        print(as_markdown(*table(result)), flush=True)


if __name__ == "__main__":
    main()
