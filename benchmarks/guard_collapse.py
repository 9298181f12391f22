"""Methods that collapse on CIFAR-10, without and with a guard: `python -m benchmarks.guard_collapse FOLDER`

The ViT, fifteen corruptions at severity 5 in a row: Tent with our settings for ten classes; Tent and ETA at 20 times
their rates. TEA takes too long on a CPU. FOLDER is what `python -m training.cifar10 unpack` wrote. Writes
`guard_collapse_cpu.json`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from acclimate.bench.plan import Job, Plan
from acclimate.bench.run import Run
from acclimate.bench.tables import Table, as_markdown
from acclimate.bench.tune import learning_rate

from .command import command, write

PRESET = "cifar-vit"
ROWS = [("source", 1), ("tent", 1), ("tent", 20), ("eta", 20)]
"""Methods, and multiples of their rates."""


def measure(data: str, method: str, factor: int, images: int, folder: Path, *, guard: bool) -> dict[str, Any]:
    """Return how a method ends, and what the guard did."""
    rate = {} if factor == 1 else {"lr": factor * learning_rate(method, PRESET)}
    plan = Plan(
        methods=(method,),
        model="cifar10-vit",
        data=data,
        preset=PRESET,
        overrides={method: rate} if rate else {},
        images=images,
        guard=guard,
        probe_images=500,
        source_images=512,
    )
    result = Run(plan, folder / f"{method}-{factor}-{guard}").do(Job(method, 0))
    return {
        "method": method if factor == 1 else f"{method}, {factor} × the rate",
        "guard": guard,
        "accuracy": 100 * result.accuracy,
        "last": 100 * result.domains[-1].accuracy,
        "clean": 100 * (result.clean_after or 0.0),
        "rollbacks": (result.health or {}).get("rollbacks"),
        "familiar": (result.health or {}).get("familiar"),
    }


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per method, without and with a guard."""
    head = ["", "guard", "accuracy", "last corruption", "clean afterwards", "rollbacks"]
    return head, [
        [
            row["method"],
            "yes" if row["guard"] else "no",
            *(f"{row[name]:.1f}" for name in ("accuracy", "last", "clean")),
            "–" if row["rollbacks"] is None else str(row["rollbacks"]),
        ]
        for row in result["rows"]
    ]


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("cifar10", type=Path)
    parser.add_argument("--images", type=int, default=512, help="images per corruption")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [(*row, guard) for row in ROWS for guard in (False, True) if row[0] != "source" or not guard]
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        rows = [
            measure(f"cifar10:{arguments.cifar10}", method, factor, arguments.images, Path(folder), guard=guard)
            for method, factor, guard in track(jobs, "methods", console=Console(stderr=True))
        ]
    result = {"images": arguments.images, "rows": rows}
    print(as_markdown(*table(result)))
    arguments.device = "cpu"
    write("guard_collapse", arguments, result)


if __name__ == "__main__":
    main()
