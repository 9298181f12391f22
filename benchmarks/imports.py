"""How long an import takes, against torch alone: `python -m benchmarks.imports [--repeats 15] [--out FOLDER]`

New processes import one thing each, in turn. What counts is processor time, which others on the machine change little.
Writes `imports_cpu.json`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median, quantiles
from typing import Any

from acclimate.bench.tables import Table

from .command import command, write

IMPORTS = {
    "nothing": "pass",
    "torch": "import torch",
    "acclimate": "import acclimate",
    "the command line": "import acclimate.cli",
}


def seconds(program: str) -> float:
    """Return the processor time that a new process needs for a program."""
    start = _of_children()
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603
    return _of_children() - start


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return the median and the quartiles of each import, after one round that fills the disk's cache."""
    rounds = [{name: seconds(program) for name, program in IMPORTS.items()} for _ in range(repeats + 1)][1:]
    rows = []
    for name in IMPORTS:
        times = [each[name] for each in rounds]
        low, _, high = quantiles(times, n=4)
        above = median(each[name] - each["torch"] for each in rounds)
        rows.append({"import": name, "seconds": median(times), "low": low, "high": high, "above_torch": above})
    return rows


def table(result: dict[str, Any]) -> Table:
    """Return one row per import."""
    header = ["import", "seconds", "spread", "more than torch"]
    rows = []
    for row in result["rows"]:
        more = "–" if row["import"] in ("nothing", "torch") else f"{row['above_torch']:.2f}"
        rows.append([row["import"], f"{row['seconds']:.2f}", f"{row['low']:.2f}–{row['high']:.2f}", more])
    return header, rows


def main() -> None:
    """Measure, and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    write("imports", arguments, {"rows": measure(arguments.repeats)})


if __name__ == "__main__":
    main()
