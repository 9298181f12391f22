"""What gradients through BatchNorm's statistics are worth: `python -m benchmarks.strategies --model M --data D`

EATA and EATA-C with each strategy, on a network with BatchNorm and a lifelong stream of fifteen corruptions at severity
5; accuracy, calibration, and clean accuracy afterwards. With `detach_statistics` and `replay` no gradient flows through
the statistics. Writes `strategies_MODEL_cpu.json`. Results are kept in the folder `--work`: a stopped run continues.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from acclimate.bench.plan import Plan
from acclimate.bench.run import Run
from acclimate.bench.tables import Table, as_markdown

from .command import command, write

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


def measure(plan: Plan, strategy: str, folder: Path) -> list[dict[str, Any]]:
    """Return a row per seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some of the strategies warn that they are traps
    run = Run(plan, folder)
    results = {job: run.do(job) for job in plan.jobs()}
    return [
        {
            "method": job.method,
            "strategy": strategy,
            "seed": job.seed,
            "accuracy": 100 * result.accuracy,
            "ece": 100 * result.ece,
            "clean": [100 * (each or 0.0) for each in (result.clean_before, result.clean_after)],
            "backwards": result.backwards,
        }
        for job, result in results.items()
    ]


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per method and strategy, means over seeds."""
    head = ["method", "strategy", "accuracy", "ECE", "clean before", "clean afterwards"]
    rows = []
    for method, strategy in dict.fromkeys((row["method"], row["strategy"]) for row in result["rows"]):
        own = [row for row in result["rows"] if (row["method"], row["strategy"]) == (method, strategy)]
        values = [[row["accuracy"], row["ece"], *row["clean"]] for row in own]
        means = [f"{statistics.mean(column):.1f}" for column in zip(*values, strict=True)]
        rows.append([method, strategy or "–", *means])
    return head, rows


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--model", required=True, help="a network with BatchNorm, as `acclimate run` takes it")
    parser.add_argument("--data", required=True, help="a data set, as `acclimate run` takes it")
    parser.add_argument("--preset", default="resnet50")
    parser.add_argument("--images", type=int, default=1000, help="images per corruption")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(gettempdir()) / "acclimate-strategies")
    arguments = parser.parse_args()
    name = arguments.model.partition("=")[0]
    with ProcessPoolExecutor(arguments.processes) as pool:
        waiting = []
        for method, strategy, settings in ROWS:
            plan = Plan(
                methods=(method,),
                model=arguments.model,
                data=arguments.data,
                preset=arguments.preset,
                overrides={method: settings} if settings else {},
                images=arguments.images,
                seeds=arguments.seeds,
                device=arguments.device,
            )
            folder = arguments.work / f"{name}-{method}-{strategy or 'plain'}"
            waiting.append(pool.submit(measure, plan, strategy, folder))
        rows = [row for each in track(waiting, "strategies", console=Console(stderr=True)) for row in each.result()]
    result = {"model": name, "images": arguments.images, "rows": rows}
    print(as_markdown(*table(result)))
    write("strategies", arguments, result, part=f"_{name}")


if __name__ == "__main__":
    main()
