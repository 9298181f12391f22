"""Time and memory as in the paper's Table 7: `python -m benchmarks.efficiency [--device cuda] [--out FOLDER]`

Eager, in single precision, batch 64, on random networks with a fixed share of kept samples. EATA runs with all samples
in one graph, and with its selected samples run again with a graph. Then the memory that the Fisher regulariser adds.
Writes `efficiency_DEVICE.json`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from acclimate import Engine
from acclimate.bench.stream import Domain
from acclimate.bench.tables import Table
from acclimate.paper import studies

from .command import command, write
from .steps import SHARES, Line, Row, build, measure, networks

LINES = [
    Line("Source", Engine()),
    Line("Tent", Engine()),
    Line("EATA", Engine(), "masked"),
    Line("EATA", Engine(), "replay-subset"),
    Line("EATAC", Engine(), "replay-subset"),
]
IMAGES = 50_000


def table(content: dict[str, Any]) -> Table:
    """Return seconds for 50,000 images and peak memory, absolute and relative to Tent."""
    header = ["network", "method", "strategy", "kept", "s per 50,000", "× Tent", "Mem. (MB)", "× Tent"]
    rows = [Row(**row) for row in content["rows"]]
    tent = {row.network: row for row in rows if row.method == "Tent"}
    lines = []
    for row in rows:
        whole = row.median * IMAGES / row.batch / 1e3
        cells = [f"{whole:.1f}", f"{row.median / tent[row.network].median:.2f}", *_memory(row, tent[row.network])]
        lines.append([row.network, row.method, row.strategy, "" if row.kept is None else f"{row.kept:.0%}", *cells])
    for network, megabytes in content["regulariser"].items():
        lines.append([network, "Fisher regulariser", "", "", "", "", f"{megabytes:.1f}", ""])
    return header, lines


def _memory(row: Row, tent: Row) -> list[str]:
    if row.peak_mb is None or tent.peak_mb is None:
        return ["–", "–"]
    return [f"{row.peak_mb:,.0f}", f"{row.peak_mb / tent.peak_mb:.2f}"]


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed together in each repeat")
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    rows, regulariser = [], {}
    for network, (make, shape) in networks(arguments.device).items():
        x = torch.rand(arguments.batch, *shape, device=arguments.device)
        entries = [entry for line in LINES for entry in build(network, make, x, line, SHARES)]
        measure(entries, arguments.repeats, arguments.steps)
        rows += [asdict(entry.row) for entry in entries]
        masked = next(entry for entry in entries if entry.row.strategy == "masked")
        masked.keep()
        domain: Any = Domain("random", [(x, torch.zeros(len(x)))])
        regulariser[network] = studies.regulariser(masked.adapter, domain, print)["memory"]
        entries.clear()
    content = {"rows": rows, "regulariser": regulariser}
    for line in table(content)[1]:
        print("  ".join(line))
    write("efficiency", arguments, content)


if __name__ == "__main__":
    main()
