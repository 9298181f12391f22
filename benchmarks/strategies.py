"""What gradients through BatchNorm's statistics are worth: `python -m benchmarks.strategies --model M --data D`

EATA and EATA-C with each strategy, on a network with BatchNorm and a lifelong stream of fifteen corruptions at severity
5; accuracy, calibration, and clean accuracy afterwards. With `detach_statistics` and `replay` no gradient flows through
the statistics. `--engine` and `--precision` are those of `acclimate run`. Writes `strategies_MODEL_DEVICE.json`, with
the engine in the name unless it is plain PyTorch. Results are kept in the folder `--work`: a stopped run continues.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from acclimate.bench.plan import Plan, combine
from acclimate.bench.run import Run
from acclimate.bench.tables import Table, as_markdown

from .command import command, name_of, write

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("source", "", {}),
    ("bn-adapt", "", {}),
    ("eata", "masked", {}),
    ("eata", "replay-subset", {"strategy": "replay-subset"}),
    ("eata", "detach_statistics", {"detach_statistics": True}),
    ("eata", "replay", {"strategy": "replay"}),
    ("eata-c", "replay-subset", {}),
    ("eata-c", "replay", {"strategy": "replay"}),
]
"""Method, strategy, and the arguments for it."""


def plans(methods: list[str] | None, processes: int, **fields: Any) -> Iterator[tuple[str, Plan]]:
    """Yield strategy and plan of each row; processes that run at a time share the cores that read images."""
    if fields["device"] == "cuda":
        fields["workers"] = max(1, (os.cpu_count() or 2) // processes - 1)
    for method, strategy, settings in ROWS:
        if methods is None or method in methods:
            overrides = {method: settings} if settings else {}
            yield strategy, combine({}, {**fields, "methods": (method,), "overrides": overrides})


def engine_of(plan: Plan) -> str:
    """Return the engine of a plan as the table shows it."""
    return f"{plan.engine} {plan.precision}"


def measure(plan: Plan, strategy: str, work: Path) -> list[dict[str, Any]]:
    """Return a row per seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some of the strategies warn that they are traps
    names = (name_of(plan.model), *plan.methods, strategy or "plain", *engine_of(plan).split())
    run = Run(plan, work / "-".join(names))
    results = {job: run.do(job) for job in plan.jobs()}
    return [
        {
            "method": job.method,
            "strategy": strategy,
            "engine": engine_of(plan),
            "seed": job.seed,
            "accuracy": 100 * result.accuracy,
            "ece": 100 * result.ece,
            "clean": [100 * (each or 0.0) for each in (result.clean_before, result.clean_after)],
            "backwards": result.backwards,
        }
        for job, result in results.items()
    ]


def table(*results: Mapping[str, Any]) -> Table:
    """Return one row per method, strategy and engine, means over seeds; results of several engines are joined."""
    head = ["method", "strategy", "engine", "accuracy", "ECE", "clean before", "clean afterwards"]
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    for row in (row for result in results for row in result["rows"]):
        place = row["method"], row["strategy"], row["engine"]
        found.setdefault(place, []).append([row["accuracy"], row["ece"], *row["clean"]])
    order = [(method, strategy) for method, strategy, _ in ROWS]
    rows = []
    for place in sorted(found, key=lambda each: order.index(each[:2])):
        means = [f"{statistics.mean(column):.1f}" for column in zip(*found[place], strict=True)]
        rows.append([place[0], place[1] or "–", place[2], *means])
    return head, rows


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--model", required=True, help="a network with BatchNorm, as `acclimate run` takes it")
    parser.add_argument("--data", required=True, help="a data set, as `acclimate run` takes it")
    parser.add_argument("--preset", default="resnet50")
    parser.add_argument("--images", type=int, default=1000, help="images per corruption")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=sorted({method for method, *_ in ROWS}), help="all by default")
    parser.add_argument("--engine", default="eager", choices=("eager", "recorded", "auto"))
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="fp32; bf16 with engine auto on a GPU")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(gettempdir()) / "acclimate-strategies")
    arguments = parser.parse_args()
    shared = ("model", "data", "preset", "images", "seeds", "engine", "device")
    fields = {name: getattr(arguments, name) for name in shared}
    if arguments.precision is not None:
        fields["precision"] = arguments.precision
    jobs = [*plans(arguments.methods, arguments.processes, **fields)]
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:  # CUDA cannot fork
        waiting = [pool.submit(measure, plan, strategy, arguments.work) for strategy, plan in jobs]
        rows = [row for each in track(waiting, "strategies", console=Console(stderr=True)) for row in each.result()]
    name, engine = name_of(arguments.model), engine_of(jobs[0][1])
    result = {"model": name, "images": arguments.images, "engine": engine, "rows": rows}
    print(as_markdown(*table(result)))
    part = name if engine == "eager fp32" else f"{name}_{engine.replace(' ', '_')}"
    write("strategies", arguments, result, part=f"_{part}")


if __name__ == "__main__":
    main()
