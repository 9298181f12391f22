"""Time and memory of each method: `python -m benchmarks.methods [--device cuda] [--out FOLDER]`

Every method of the paper's Table 7 with its preset on random networks (ResNet-50 and ViT-Base on a GPU, small ones
elsewhere), batches of 64, in eager PyTorch and in the engine: milliseconds per batch, seconds for 50,000 images, and
peak memory of a step. `--engines eager bf16 auto` adds eager PyTorch in bfloat16. Selecting methods keep a fixed share
of the samples. MEMO runs on four images, one at a time, and is scaled up.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from acclimate import METHODS, SAR, Adapter
from acclimate.bench.tables import Table
from acclimate.paper.published import paper_table_of

from .command import ENGINES, command, write
from .steps import Share, networks

IMAGES = 50_000
SELECTING = {"eta", "eata", "eta-c", "eata-c", "rdumb"}
KEPT = 0.6


def make(method: str, network: str, x: Tensor, engine: str) -> Adapter:
    """Return the method with its preset for the network, on one of `ENGINES`."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"engine": ENGINES[engine]}
    if method in SELECTING:
        arguments["select"] = Share(KEPT).to(x.device)
    if method in ("eata", "eata-c"):
        arguments["source"] = [x[:8]]
    model = networks(x.device.type)[network][0]().to(x.device).eval()
    adapter = METHODS[method].preset("vit-base" if "ViT" in network else "resnet50", model, **arguments)
    if isinstance(adapter, SAR):  # it has no argument select=
        adapter.reliable = Share(KEPT).to(x.device)  # type: ignore[assignment]
    return adapter


def measure(method: str, network: str, x: Tensor, engine: str, repeats: int) -> dict[str, Any]:
    """Time a few batches after the first ones."""
    cuda = x.is_cuda
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    adapter = make(method, network, x, engine)
    batch = x[:4] if method == "memo" else x
    times: list[float] = []
    for index in range(repeats + 5):
        if cuda and index == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for part in batch.split(1) if method == "memo" else (batch,):
            adapter(part)
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) * len(x) / len(batch))
        if method == "memo" and index >= 4:
            break
    low, middle, high = statistics.quantiles(times[2 if method == "memo" else 5 :], n=4)
    return {
        "network": network,
        "method": type(adapter).__name__,
        "engine": engine,
        "milliseconds": middle,
        "low": low,
        "high": high,
        "seconds": middle * IMAGES / len(x) / 1e3,
        "peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None,
    }


def table(content: dict[str, Any]) -> Table:
    """Return seconds for 50,000 images and peak memory in eager PyTorch, with the paper's, which are on an A100."""
    rows = {(row["network"], row["method"]): row for row in content["rows"] if row["engine"] == "eager"}
    networks, methods = ([*dict.fromkeys(key[place] for key in rows)] for place in (0, 1))
    header, theirs = paper_table_of("efficiency") or ([], [])
    paper = {(line[0], head): value for line in theirs for head, value in zip(header, line, strict=True)}
    lines = []
    for method in methods:
        numbers: list[float | str | None] = []
        for network in networks:
            row = rows.get((network, method), {})
            numbers += [row.get("seconds"), row.get("peak_mb")]
            numbers += [paper.get((method, f"{network} {what}")) for what in ("Time (s)", "Mem. (MB)")]
        lines.append([method, *("–" if n in (None, "–") else f"{float(n):,.0f}" for n in numbers)])
    return ["", *(head for network in networks for head in (f"{network}: s", "MB", "paper: s", "MB"))], lines


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[""], help="networks, by a part of their name")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["eager", "auto"])
    parser.add_argument("--methods", nargs="*", default=[n for n, m in METHODS.items() if m.task != "segmentation"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # about unsupported networks and unrecorded steps
    rows: list[dict[str, Any]] = []
    result = {"batch": arguments.batch, "kept": KEPT, "seed": 0, "rows": rows}
    for network, (_, shape) in networks(arguments.device).items():
        if not any(part.lower() in network.lower() for part in arguments.only):
            continue
        x = torch.rand(arguments.batch, *shape, device=arguments.device)
        for engine in arguments.engines:
            for method in arguments.methods:
                if method == "bn-adapt" and "ViT" in network:
                    continue
                rows.append(measure(method, network, x, engine, arguments.repeats))
                print(
                    *(f"{value:.1f}" if isinstance(value, float) else value for value in rows[-1].values()), flush=True
                )
                write("methods", arguments, result)


if __name__ == "__main__":
    main()
