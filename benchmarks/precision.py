"""Accuracy of faster engines: `python -m benchmarks.precision [--device cuda] [--out FOLDER]`

The demo's stream of digits under twelve corruptions, for methods, engines and seeds (of the corruptions and the
sub-networks): accuracy and ECE, as mean over the seeds, with the range of the accuracy. Writes `precision_DEVICE.json`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from acclimate.bench.demo import demo_plans
from acclimate.bench.run import Run
from acclimate.bench.tables import Table

from .command import command, write

ENGINES: dict[str, dict[str, Any]] = {
    "eager fp32": {},
    "eager bf16": {"precision": "bf16"},
    "auto fp32": {"engine": "auto", "precision": "fp32"},
    "auto tf32": {"engine": "auto", "precision": "tf32"},
    "auto bf16": {"engine": "auto", "precision": "bf16"},
}


def measure(job: tuple[int, str, str]) -> tuple[int, list[tuple[str, str, str, float, float]]]:
    """Measure each network and method for a seed, an engine and a device."""
    seed, engine, device = job
    warnings.simplefilter("ignore", DeprecationWarning)  # from torch's compiler
    torch.set_num_threads(2)
    fields = {"severity": 4, "images": 384, "seed": seed, "device": device, "probe": "none", **ENGINES[engine]}
    found = []
    with TemporaryDirectory() as folder:
        for plan in demo_plans(("source", "tent", "eata", "eata-c"), **fields):
            run = Run(plan, Path(folder) / plan.model)
            for result in map(run.do, plan.jobs()):
                names = (result.network, result.method, engine)
                print(*names, seed, f"{100 * result.accuracy:.2f} {100 * result.ece:.2f}", flush=True)
                found.append((*names, result.accuracy, result.ece))
    return seed, found


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--processes", type=int, default=1, help="jobs at a time; nothing is timed")
    arguments = parser.parse_args()
    jobs = [(seed, engine, arguments.device) for engine in arguments.engines for seed in range(arguments.seeds)]
    found: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for seed, measured in pool.imap_unordered(measure, jobs):  # written after every job
            for network, method, engine, accuracy, ece in measured:
                found.setdefault((network, method, engine), {})[seed] = accuracy, ece
            rows = [
                {"network": network, "method": method, "engine": engine, "seeds": sorted(of)}
                | {"accuracy": [of[s][0] for s in sorted(of)], "ece": [of[s][1] for s in sorted(of)]}
                for (network, method, engine), of in sorted(found.items())
            ]
            write("precision", arguments, {"rows": rows})


def table(content: dict[str, Any]) -> Table:
    """Return mean accuracy, its range over the seeds, and mean ECE, one column per engine."""
    rows = content["rows"]
    engines = [engine for engine in ENGINES if any(row["engine"] == engine for row in rows)]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        low, high, mean = (100 * f(row["accuracy"]) for f in (min, max, statistics.fmean))
        shown = f"{mean:.1f} ({low:.1f}–{high:.1f}), {100 * statistics.fmean(row['ece']):.1f}"
        cells.setdefault(f"{row['network']}, {row['method']}", {})[row["engine"]] = shown
    return ["", *engines], [[name, *(of[engine] for engine in engines)] for name, of in cells.items()]


if __name__ == "__main__":
    main()
