"""Write every table and figure in README.md and docs/ from result files: `python -m benchmarks.docs_tables [FOLDER]`

A page marks the place of a table with `<!-- table NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. A figure is
written to docs/images if it is a key of `FIGURES`. With a FOLDER, such as paper/cifar10 of `acclimate paper run`, the
recipes' numbers are first copied from there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from acclimate.bench.result import Result
from acclimate.bench.result_folder import read_results
from acclimate.bench.tables import Table, as_markdown, mean_and_deviation, paper_table, passes_per_domain, summary_table
from acclimate.methods import METHODS
from acclimate.paper.numbers import Case, Numbers
from acclimate.paper.published import PaperRow, compare_averages, legend, notes_beside, paper_rows, paper_table_of
from acclimate.paper.recipes import RECIPES
from acclimate.paper.reproduce import whose_settings

from . import (
    bad_luck,
    cameras,
    corruptions,
    efficiency,
    guard,
    loading,
    methods,
    overheads,
    precision,
    segmentation,
    steps,
    subnetworks,
    tuning,
)
from .command import RESULTS, read

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RECIPE_FILES = RESULTS / "paper"
IMAGENET = RESULTS / "imagenet-5k"
DIGITS = RESULTS / "digits"
SINGLE_IMAGES = RESULTS / "digits-single-images"
NETWORKS = {"resnet": "resnet50", "vit": "vit-base"}
"""Our networks, and those of the paper beside them."""


@cache
def numbers(file: Path) -> Numbers:
    """Return the numbers of a recipe."""
    return Numbers.read(file)


def demo(name: str, network: str) -> Table:
    """Return one row per method of `acclimate demo` or `acclimate compare`."""
    stored = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    results = [Result.from_dict(content) for content in stored]
    return summary_table([result for result in results if result.network == network])


def measured(module: Callable[..., Table], name: str, machine: str) -> Table:
    """Return a table of one of the measuring commands."""
    return module(read(name, machine))


def recipe(name: str, part: str = "", folder: Path = RECIPE_FILES) -> str:
    """Return a recipe's own table, and whose settings it shows."""
    cases = numbers(folder / f"{name}.json").cases
    own = [case for case in cases if part == "" or case.column.startswith(part.removesuffix("-clean"))]
    return noted(RECIPES[name].show(cases).tables[part], own)


def noted(table: Table, cases: Sequence[Case]) -> str:
    """Return a table, and below it whose settings it shows."""
    return as_markdown(*table) + f"\n{whose_settings(cases)}\n"


def published(name: str) -> str:
    """Return the paper's own table for a recipe, with what to know about it beside ours."""
    found = paper_table_of(name)
    assert found is not None, name  # noqa: S101
    ours = RECIPES[name].show(numbers(RECIPE_FILES / f"{name}.json").cases).tables[""]
    return as_markdown(*found) + f"\n{notes_beside(name, ours)}\n"


def by_method(file: Path, network: str) -> dict[tuple[str, int | None], list[Result]]:
    """Return the results of a recipe on a network by method and number of images per domain."""
    order = [method.__name__ for method in METHODS.values()]
    found: dict[tuple[str, int | None], list[Result]] = {}
    for case in numbers(file).cases:
        if case.column == network:
            for result in case.results:
                found.setdefault((result.method, case.plan.images), []).append(result)
    return dict(sorted(found.items(), key=lambda each: order.index(each[0][0])))


def comparison(file: Path, network: str) -> str:
    """Return each method's averages over the domains, and the paper's on ImageNet-C, with the meaning of its marks."""
    paper = {
        row.method: row
        for row in paper_rows()
        if (row.data, row.scenario, row.network) == ("imagenet-c", file.stem, NETWORKS[network])
    }
    found = by_method(file, network)
    most = max(map(len, found.values()))
    rows = []
    for (method, images), results in found.items():
        label = method + ("" if images is None else f", {images:,} images")
        label += f", {len(results)} of {most} seeds" if len(results) < most else ""
        rows.append([label, *_scores(results), *passes_per_domain(results), *_published(paper.get(method))])
    ours = ["Acc.", "ECE", "#Forwards", "#Backwards"]
    table = as_markdown(["method", *ours, f"paper: {ours[0]}", *ours[1:]], rows)
    notes = [legend(row[-4] for row in rows)]
    notes.append(whose_settings([case for case in numbers(file).cases if case.column == network]))
    if paper:
        own = [result for (method, _), results in found.items() if method == "Source" for result in results]
        notes.append(compare_averages(own, paper["Source"]))
    return table + "".join(f"\n{note}\n" for note in notes if note)


def _scores(results: Sequence[Result]) -> list[str]:
    return [mean_and_deviation([100 * getattr(result, score) for result in results]) for score in ("accuracy", "ece")]


def _published(row: PaperRow | None) -> list[str]:
    if row is None:
        return ["–"] * 4
    passes = ["–" if count is None else f"{count:,}" for count in (row.forwards, row.backwards)]
    return [f"{row.average[0]:.1f}{row.note}", f"{row.average[1]:.1f}", *passes]


def brief() -> Table:
    """Return accuracy, ECE and the share of samples that methods learn from, on ImageNet, lifelong."""
    rows = []
    for (method, images), results in by_method(IMAGENET / "lifelong.json", "resnet").items():
        learned = sum(result.backward_passes() or 0 for result in results)
        seen = sum(domain.images for result in results for domain in result.domains)
        counted = method not in ("Source", "BNAdapt", "SAR")  # SAR has two passes per sample
        share = f"{100 * learned / seen:.0f} %" if counted else "–"
        if images is None:
            rows.append([method, *_scores(results), share])
    return ["method", "accuracy", "ECE", "samples learned from"], rows


def summary(scenario: str) -> Table:
    """Return accuracy and ECE of the methods that ran on all images on both networks, but for ETA, ETA-C and TEA."""
    shown = ("Source", "BNAdapt", "Tent", "CoTTA", "SAR", "ROID", "RDumb", "EATA", "EATAC")
    found = [by_method(RECIPE_FILES / f"{scenario}.json", network) for network in NETWORKS]
    none = ["–", "–"]
    rows = [
        [method, *(cell for own in found for cell in (_scores(own[method, None]) if (method, None) in own else none))]
        for method in shown
    ]
    return ["method", "ResNet: accuracy", "ECE", "ViT: accuracy", "ECE"], rows


def camvid() -> Table:
    """Return mIoU and ECE of each method on CamVid in adverse weather, and of BN Adapt with its former prior."""
    return paper_table(read_results([RESULTS / "camvid", RESULTS / "camvid" / "prior-64"]))


TABLES: dict[str, Callable[[], Table | str]] = {
    **{
        f"{name}-{kind}": partial(demo, name, network)
        for name in ("demo", "compare")
        for kind, network in (("resnet", "SmallResNet"), ("vit", "SmallViT"))
    },
    "summary": partial(summary, "lifelong"),
    "imagenet": brief,
    "imagenet-lifelong": partial(comparison, IMAGENET / "lifelong.json", "resnet"),
    "imagenet-lifelong-domains": partial(recipe, "lifelong", "resnet", IMAGENET),
    **{
        f"imagenet-{name}": partial(recipe, name, folder=IMAGENET)
        for name in ("indicator", "held-out", "components", "directions", "calibration", "uncertain")
    },
    "summary-single-domain": partial(summary, "single-domain"),
    "speed": partial(measured, steps.speed, "steps", "h200"),
    "gains-h200": partial(measured, steps.gains, "steps", "h200"),
    **{
        f"{name}-{machine}": partial(measured, module.table, name, machine)
        for name, module in (
            ("steps", steps),
            ("overheads", overheads),
            ("precision", precision),
            ("loading", loading),
        )
        for machine in ("h200", "cpu")
    },
    "methods-h200": partial(measured, methods.table, "methods", "h200"),
    "segmentation-h200": partial(measured, segmentation.table, "segmentation", "h200"),
    "subnetworks-h200": partial(measured, subnetworks.table, "subnetworks", "h200"),
    "corruptions": lambda: corruptions.table(read("corruptions", "h200"), read("corruptions", "cpu")),
    "camvid": camvid,
    "bad-luck": partial(measured, bad_luck.table, "bad_luck", "cpu"),
    "guard-cpu": partial(measured, guard.table, "guard", "cpu"),
    "cameras": partial(measured, cameras.table, "cameras", "cpu"),
    "one-by-one": partial(measured, cameras.accuracy_table, "cameras", "cpu"),
    **{
        f"hostile-{part}": partial(recipe, "hostile", part, DIGITS)
        for part in ("resnet", "vit", "resnet-clean", "vit-clean")
    },
    **{f"hostile-single-{part}": partial(recipe, "hostile", part, SINGLE_IMAGES) for part in ("vit", "vit-clean")},
    "tuning-cpu": partial(measured, tuning.table, "tuning", "cpu"),
    "efficiency-h200": partial(measured, efficiency.table, "efficiency", "h200"),
    **{
        f"{name}-{network}": partial(comparison, RECIPE_FILES / f"{name}.json", network)
        for name in ("lifelong", "single-domain")
        for network in NETWORKS
    },
    **{
        f"{name}-{network}-domains": partial(recipe, name, network)
        for name in ("lifelong", "single-domain")
        for network in NETWORKS
    },
    **{
        name: partial(recipe, name)
        for name in ("ablation", "mixed", "forgetting", "calibration", "rates", "drop-rates", "slow-rates")
    },
    **{f"sweep-{name}": partial(recipe, f"sweep-{name}") for name in ("e0", "epsilon", "alpha", "beta", "drop")},
    **{f"{name}-paper": partial(published, name) for name in ("ablation", "mixed")},
}
"""Every table by its name in the pages."""


def recipe_figure(name: str, column: str = "", folder: Path = RECIPE_FILES, part: str = "") -> Figure:
    """Return a recipe's figure, of columns that begin with `column`."""
    cases = numbers(folder / f"{name}.json").cases
    return RECIPES[name].show([case for case in cases if case.column.startswith(column)]).figures[part]


FIGURES: dict[str, Callable[[], Figure]] = {
    "steps-h200": lambda: steps.draw(read("steps", "h200")),
    "steps-cpu": lambda: steps.draw(read("steps", "cpu")),
    "forgetting": partial(recipe_figure, "forgetting", "level 5"),
    "calibration": partial(recipe_figure, "calibration"),
    "drop-rates": partial(recipe_figure, "drop-rates"),
    "hostile-resnet": partial(recipe_figure, "hostile", "resnet", DIGITS, "resnet"),
}
"""Every figure by the name of its file in docs/images."""

BLOCK = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> Iterator[Path]:
    """Yield the pages that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def filled(page: str) -> str:
    """Return a page with current tables."""

    def block(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"there is no table {found[1]!r}: choose from {', '.join(TABLES)}")
        table = TABLES[found[1]]()
        text = table if isinstance(table, str) else as_markdown(*table)
        return f"<!-- table {found[1]} -->\n{text}<!-- end -->"

    return BLOCK.sub(block, page)


def main() -> None:
    """Copy numbers where a folder is given, then write tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="numbers of recipes to copy first, such as paper/cifar10")
    folder = parser.parse_args().folder
    if folder is not None:
        found = [file for file in sorted(folder.glob("*.json")) if file.stem in RECIPES]
        if not found:
            raise SystemExit(f"{folder} has no numbers of a recipe: name the folder of a scale, such as paper/cifar10")
        for file in found:
            shutil.copy(file, RECIPE_FILES)
    for page in pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))
    for name, draw in FIGURES.items():
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            draw().savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
