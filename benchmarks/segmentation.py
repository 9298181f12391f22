"""Time and memory of adapting a segmenter: `python -m benchmarks.segmentation [--device cuda] [--out FOLDER]`

SegFormer-B5 with random weights, one image of 960 × 540 at a time (a small one on a CPU), each method with its preset:
milliseconds per image, passes, and peak memory including the weights. `--engines eager bf16 auto` compares plain
PyTorch in single precision and in bfloat16 with the engine. Writes `segmentation_DEVICE.json`.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from typing import Any

import torch
from torch import nn

from acclimate import METHODS
from acclimate.bench.tables import Table, as_markdown

from .command import ENGINES, command, write

SIZES = {
    "SegFormer-B5": {"depths": [3, 6, 40, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768},
    "SegFormer-B0": {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 160, 256], "decoder_hidden_size": 256},
}
MEASURED = ("source", "bn-adapt", "tent", "cotta", "dat", "eata", "eata-c")
COLUMNS = ("method", "ms per image", "spread", "forwards", "backwards", "peak MB")
WARM = {"eager": 2, "bf16": 2, "recorded": 5, "auto": 5}
"""Images that are not timed: the first ones are compiled and recorded."""


def network(name: str) -> nn.Module:
    """Return a random network with nineteen classes."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    made: Any = SegformerForSemanticSegmentation(SegformerConfig(num_labels=19, **SIZES[name]))
    made.decode_head.classifier.weight.data.mul_(300)  # confident of some pixels, as a trained network is
    return made.eval()  # type: ignore[no-any-return]


def measure(
    method: str, name: str, size: tuple[int, int], device: str, images: int, engine: str = "eager"
) -> dict[str, Any]:
    """Time a few images after the first ones."""
    x = torch.rand(1, 3, *size, device=device)
    arguments: dict[str, Any] = {"engine": ENGINES[engine]}
    if method in ("eata", "eata-c"):
        arguments["source"] = [x]
    adapter = METHODS[method].preset("segformer-b5", network(name).to(device), **arguments)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(images + WARM[engine]):
        start = time.perf_counter()
        adapter(x)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(times[WARM[engine] :], n=4)
    return {
        "method": type(adapter).__name__,
        "engine": engine,
        "milliseconds": middle,
        "low": low,
        "high": high,
        "forwards": int(adapter.last.forwards),
        "backwards": int(adapter.last.backwards),
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
    }


def table(content: dict[str, Any]) -> Table:
    """Return one row per method and engine, with the time relative to plain PyTorch where there are several engines."""
    rows = [{"engine": "eager", **row} for row in content["rows"]]
    plain = {row["method"]: row["milliseconds"] for row in rows if row["engine"] == "eager"}
    several = {row["engine"] for row in rows} != {"eager"}
    lines = []
    for row in rows:
        times = [f"{row['milliseconds']:,.0f}", f"{row['low']:,.0f}–{row['high']:,.0f}"]
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}"
        line = [row["method"], *times, str(row["forwards"]), str(row["backwards"]), peak]
        if several:
            engine = "eager bf16" if row["engine"] == "bf16" else row["engine"]
            before = plain.get(row["method"])
            line[1:1] = [engine, "" if before is None else f"{row['milliseconds'] / before:.2f}"]
        lines.append(line)
    return [COLUMNS[0], *(("engine", "× eager") if several else ()), *COLUMNS[1:]], lines


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["eager"])
    parser.add_argument("--methods", nargs="*", choices=MEASURED, default=MEASURED)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    name, size = ("SegFormer-B5", (540, 960)) if cuda else ("SegFormer-B0", (135, 240))
    rows: list[dict[str, Any]] = []
    result = {"network": name, "pixels": list(size), "seed": 0, "rows": rows}
    for engine, method in itertools.product(arguments.engines, arguments.methods):
        rows.append(measure(method, name, size, arguments.device, arguments.images, engine))
        print(rows[-1], flush=True)
        write("segmentation", arguments, result)
    print(as_markdown(*table(result)))


if __name__ == "__main__":
    main()
