"""The tables of docs/results.md, out of what `acclimate paper run` wrote: `python -m benchmarks.paper [OUT/SCALE]`.

What is in that folder is taken over first, numbers, tables and figures, without the runs that they are made of.
A block of the page between `<!-- lifelong: resnet -->` and `<!-- end -->` is that recipe's table for that network, our
averages with the paper's beside; between `<!-- ablation.md -->` and `<!-- end -->` it is that file; and
`<!-- methods_h200 -->` begins what `benchmarks.methods` measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from acclimate.methods import METHODS
from acclimate.paper.published import PaperRow, legend, paper_rows

from . import methods

RESULTS = Path(__file__).parent / "results" / "paper"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
NETWORKS = {"resnet": "resnet50", "vit": "vit-base"}
ORDER = [method.__name__ for method in METHODS.values()]
HEADER = ("method", "Acc.", "ECE", "#Forwards", "#Backwards", "paper: Acc.", "ECE", "#Forwards", "#Backwards")


def comparison(file: Path, network: str) -> str:
    """Averages over domains, mean and deviation over seeds, of each method on a network; the paper's on ImageNet-C."""
    content = json.loads(file.read_text())
    scenario = content["recipe"]
    paper = {
        row.method: row
        for row in paper_rows()
        if (row.data, row.scenario, row.network) == ("imagenet-c", scenario, NETWORKS[network])
    }
    methods: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for case in content["cases"]:
        if case["column"] == network:
            for result in case["results"]:
                methods.setdefault((result["method"], case["plan"].get("images")), []).append(result)
    most = max(map(len, methods.values()))
    lines = [
        _ours(_label(name, images, results, most), results) + _theirs(paper.get(name))
        for (name, images), results in sorted(methods.items(), key=lambda each: ORDER.index(each[0][0]))
    ]
    notes = legend(line[-4] for line in lines)
    table = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 1), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table) + (f"\n\n{notes}" if notes else "")


def _label(name: str, images: int | None, results: Sequence[Any], most: int) -> str:
    few = "" if images is None else f", {images:,} images"
    return name + few + (f", {len(results)} of {most} seeds" if len(results) < most else "")


def _ours(name: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    domains = len(results[0]["domains"])
    counts = [f"{mean(r[count] for r in results) / domains:,.0f}" for count in ("forwards", "backwards")]
    return [name, *(_over([100 * r[score] for r in results]) for score in ("accuracy", "ece")), *counts]


def _theirs(row: PaperRow | None) -> list[str]:
    if row is None:
        return ["–"] * 4
    counts = ["–" if count is None else f"{count:,}" for count in (row.forwards, row.backwards)]
    return [f"{row.average[0]:.1f}{row.note}", f"{row.average[1]:.1f}", *counts]


def _over(values: Sequence[float]) -> str:
    """Mean and deviation over seeds."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with its blocks as the results have them."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        recipe, _, network = name.partition(": ")
        if name.startswith("methods_"):
            made = methods.markdown(results.parent / f"{name}.json")
        else:
            made = comparison(results / f"{recipe}.json", network) if network else (results / name).read_text().strip()
        return f"<!-- {name} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- (methods_\w+|\w[\w-]*(?:: \w+|\.md)) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def take_over(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Copy what a table or a figure of the page is made from."""
    found = sorted(file for kind in ("json", "md", "svg") for file in folder.glob(f"*.{kind}"))
    if not found:
        raise SystemExit(f"{folder} has no result: it is the folder of a scale, such as paper/cifar10")
    results.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(file, results)) for file in found]


def main() -> None:
    """Write the page anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of a scale, such as paper/cifar10: taken over first")
    folder = parser.parse_args().folder
    if folder is not None:
        take_over(folder)
    if not PAGE.is_file():
        raise SystemExit(f"there is no {PAGE.name} to fill: write it with blocks as above, after `acclimate paper run`")
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
