"""Write every table and figure in README.md and docs/ from result files: `python -m benchmarks.docs_tables [FOLDER]`

A page marks the place of a table with `<!-- table NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. A figure is
written to docs/images if it is a key of `FIGURES`. With a FOLDER, such as paper/cifar10 of `acclimate paper run`, the
recipes' numbers are first copied from there to benchmarks/results/paper, or the folder beside it that `--to` names.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean

import matplotlib as mpl
from matplotlib.figure import Figure

from acclimate.bench.figures import along, reliability
from acclimate.bench.result import Result
from acclimate.bench.result_folder import read_results
from acclimate.bench.tables import Table, as_markdown, mean_and_deviation, paper_table, passes_per_domain, summary_table
from acclimate.bench.tune import learning_rate
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
    fleet,
    guard,
    guard_collapse,
    guard_hostile,
    guard_thresholds,
    imports,
    loading,
    methods,
    overheads,
    parallel,
    precision,
    segmentation,
    serving,
    shared_learning,
    steps,
    steps_stream,
    subnetworks,
    tuning,
)
from .command import RESULTS, read

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RECIPE_FILES = RESULTS / "paper"
IMAGENET = RESULTS / "imagenet-5k"
IMAGENET_BF16 = RESULTS / "imagenet-5k-bf16"
TINY = RESULTS / "tiny-imagenet"
TINY_CPU = RESULTS / "tiny-imagenet-cpu"
SEVERE = RESULTS / "tiny-imagenet-severe"
CPU = RESULTS / "cifar10-cpu"
DIGITS = RESULTS / "digits"
SINGLE_IMAGES = RESULTS / "digits-single-images"
GUARDED = RESULTS / "digits-guard"
GUARDED_FOURTH = RESULTS / "digits-guard-fourth"
GUARDED_ROID = RESULTS / "digits-guard-fourth-roid"
GUARDED_FIFTH = RESULTS / "digits-guard-fifth"
GUARDED_THIRD = RESULTS / "digits-guard-third"
GUARDED_SECOND = RESULTS / "digits-guard-second"
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


def guarded(part: str, folder: Path = GUARDED) -> str:
    """Return hostile streams with a guard, beside the first measurements without one."""
    first, now = (numbers(each / "hostile.json").cases for each in (DIGITS, folder))
    rows = {case.row.removesuffix(", guarded") for case in now}
    first = [case for case in first if case.row in rows or case.row.startswith("Source")]
    cases = guard_hostile.beside_first(first, now)
    own = [case for case in cases if case.column.startswith(part.removesuffix("-clean"))]
    return noted(RECIPES["hostile"].show(cases).tables[part], own)


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
    """Return accuracy and ECE of methods that ran on all images, lifelong, and the share they learn from."""
    tiny = [by_method(TINY / "lifelong.json", network) for network in NETWORKS]
    rows = []
    for (method, images), results in by_method(IMAGENET / "lifelong.json", "resnet").items():
        learned = sum(result.backward_passes() or 0 for result in results)
        seen = sum(domain.images for result in results for domain in result.domains)
        counted = method not in ("Source", "BNAdapt", "SAR", "ROID")  # the last two pass a sample twice
        share = f"{100 * learned / seen:.0f} %" if counted else "–"
        others = [_means(next((own[key] for key in own if key[0] == method), [])) for own in tiny]
        if images is None and method != "RDumb":
            rows.append([method, *_means(results), share, *(cell for cells in others for cell in cells)])
    names = ("ImageNet, ResNet-50: accuracy", "ECE", "learns from", "Tiny, ResNet: accuracy", "ECE")
    return ["method", *names, "Tiny, ViT: accuracy", "ECE"], rows


def _means(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["–", "–"]
    return [f"{100 * mean(getattr(result, score) for result in results):.1f}" for score in ("accuracy", "ece")]


def engines() -> Table:
    """Return accuracy and ECE on ImageNet, lifelong, of the eager and of the compiled engine."""
    eager, compiled = (by_method(folder / "lifelong.json", "resnet") for folder in (IMAGENET, IMAGENET_BF16))
    rows = [
        [method, *_scores(eager[method, images]), *_scores(results), str(len(results))]
        for (method, images), results in compiled.items()
    ]
    return ["method", "eager, TF32: Acc.", "ECE", "compiled, bfloat16: Acc.", "ECE", "seeds"], rows


_CIFAR10 = ("Source", "BNAdapt", "Tent", "CoTTA", "SAR", "ROID", "RDumb", "EATA", "EATAC")
"""Methods that ran on all images, but for ETA, ETA-C and TEA."""


def summary(scenario: str, shown: Sequence[str] = _CIFAR10, folder: Path = RECIPE_FILES) -> Table:
    """Return accuracy and ECE of some methods on both networks, where they ran on as many images as Source."""
    found = [by_method(folder / f"{scenario}.json", network) for network in NETWORKS]
    images = next(iter(found[0]))[1]
    none = ["–", "–"]
    rows = [
        [name, *(cell for own in found for cell in (_scores(own[name, images]) if (name, images) in own else none))]
        for name in shown
    ]
    return ["method", "ResNet: accuracy", "ECE", "ViT: accuracy", "ECE"], rows


def on_both(name: str, folder: Path = CPU) -> str:
    """Return a recipe's tables on two networks, one below the other."""
    rows, cases, header = [], [], [""]
    for network in NETWORKS:
        own = numbers(folder / network / f"{name}.json").cases
        header, found = RECIPES[name].show(own).tables[""]
        rows += [[network, *row] for row in found]
        cases += own
    return noted((["", *header], rows), cases)


def held_out(folder: Path = CPU) -> str:
    """Return accuracy and ECE on held-out images before and after the adaptation, on two networks."""
    files = [numbers(folder / network / "held-out.json") for network in NETWORKS]
    rows = []
    for case in (case for file in files for case in file.cases):
        measured = [result.measured or {} for result in case.results]
        cells = [
            mean_and_deviation([100 * each[score][look] for each in measured])
            for score in ("accuracy", "ece")
            for look in (0, -1)
        ]
        rows.append([case.plan.model, case.row, *cells])
    header = ["", "", "Acc. before", "after", "ECE before", "after"]
    return noted((header, rows), [case for file in files for case in file.cases])


def side_by_side(name: str) -> str:
    """Return one table of a recipe that has the network in its columns."""
    cases = [case for network in NETWORKS for case in numbers(CPU / network / f"{name}.json").cases]
    return noted(RECIPES[name].show(cases).tables[""], cases)


def tuned(network: str, settings_file: Path, folder: Path) -> Table:
    """Return each method with the preset's learning rate and with the one that `tune` chose, lifelong, same seeds."""
    settings = json.loads(settings_file.read_text())
    before, after = (by_method(folder / part / "lifelong.json", network) for part in ("", "tuned"))
    names = {method.__name__: name for name, method in METHODS.items()}
    seeds = {result.seed for results in after.values() for result in results}
    rows = []
    for key, found in before.items():
        method, results = key[0], [result for result in found if result.seed in seeds]
        cells = ["", *_scores(results), "", "", ""]
        if key in after:
            usual, chosen = learning_rate(names[method], settings["start"]), settings["methods"][method]["lr"]
            cells = [f"{usual:g}", *_scores(results), f"{chosen:g}", *_scores(after[key])]
        rows.append([method, *cells])
    return ["method", "preset: lr", "Acc.", "ECE", "tuned: lr", "Acc.", "ECE"], rows


def first_domains() -> Table:
    """Return what methods have with tuned rates on ImageNet's first twelve corruptions, where ROID was cut off."""
    unfinished = Result.from_dict(json.loads((IMAGENET_BF16 / "tuned" / "roid-unfinished.json").read_text()))
    count = len(unfinished.domains)
    found = [result for (result,) in by_method(IMAGENET_BF16 / "tuned" / "lifelong.json", "resnet").values()]
    rows = []
    for result in (*found, unfinished):
        scores = [100 * sum(getattr(d, score) for d in result.domains[:count]) / count for score in ("accuracy", "ece")]
        rows.append([result.method, *(f"{score:.1f}" for score in scores)])
    return ["method", f"first {count} corruptions: Acc.", "ECE"], rows


def on_a_stream() -> Table:
    """Return steps on streams of digits, of the ResNet and of the ViT, whose first run was cut off."""
    resnet, vit = (read(name, "cpu")["rows"] for name in ("steps_stream", "steps_stream_vit"))
    return steps_stream.table({"rows": [row for row in resnet if row["network"] == "digits-resnet"] + vit})


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
    **{f"cpu-{name}": partial(on_both, name) for name in ("indicator", "held-out")},
    **{f"cpu-{name}": partial(recipe, name, folder=CPU / "vit") for name in ("stability", "forgetting", "tune")},
    "cpu-held-out-ends": held_out,
    "cpu-components": partial(side_by_side, "components"),
    "cpu-lifelong": partial(tuned, "vit", CPU / "settings-vit.json", CPU / "vit"),
    **{f"tiny-severe-{net}": partial(tuned, net, SEVERE / f"settings-{net}.json", SEVERE) for net in NETWORKS},
    **{f"tiny-{net}": partial(tuned, net, TINY / f"settings-{net}.json", TINY) for net in NETWORKS},
    "tiny-single-domain": partial(summary, "single-domain", [m for m in _CIFAR10 if m not in ("CoTTA", "RDumb")], TINY),
    "tiny-held-out": partial(on_both, "held-out", TINY),
    "tiny-held-out-ends": partial(held_out, TINY),
    "tiny-indicator": partial(on_both, "indicator", TINY),
    "tiny-forgetting": partial(recipe, "forgetting", folder=TINY_CPU / "vit"),
    "imagenet-tuned": partial(tuned, "resnet", IMAGENET_BF16 / "settings-resnet.json", IMAGENET_BF16),
    "imagenet-tuned-first": first_domains,
    "imagenet-engines": engines,
    "summary-single-domain": partial(summary, "single-domain"),
    "speed": partial(measured, steps.speed, "steps", "h200"),
    "steps-stream-cpu": on_a_stream,
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
    "imports-cpu": partial(measured, imports.table, "imports", "cpu"),
    "bad-luck": partial(measured, bad_luck.table, "bad_luck", "cpu"),
    "guard-cpu": partial(measured, guard.table, "guard", "cpu"),
    "guard-cifar10-cpu": partial(measured, guard.table, "guard_cifar10", "cpu"),
    "guard-costs-cpu": partial(measured, guard.costs_table, "guard_costs", "cpu"),
    "guard-collapse": partial(measured, guard_collapse.table, "guard_collapse", "cpu"),
    "serving-cpu": partial(measured, serving.table, "serving", "cpu"),
    "serving-attacks": partial(measured, serving.attacks_table, "serving", "cpu"),
    "guard-first-cpu": partial(measured, guard.table, "guard_first", "cpu"),
    "guard-second-cpu": partial(measured, guard.table, "guard_second", "cpu"),
    "guard-third-cpu": partial(measured, guard.table, "guard_third", "cpu"),
    "guard-fourth-cpu": partial(measured, guard.table, "guard_fourth", "cpu"),
    "guard-collapse-fourth": partial(measured, guard_collapse.table, "guard_collapse_fourth", "cpu"),
    "guard-choices-fourth": partial(measured, guard_thresholds.choices_table, "guard_thresholds_fourth", "cpu"),
    "guard-thresholds": partial(measured, guard_thresholds.table, "guard_thresholds", "cpu"),
    "guard-choices": partial(measured, guard_thresholds.choices_table, "guard_thresholds", "cpu"),
    "guard-choices-third": partial(measured, guard_thresholds.choices_table, "guard_thresholds_third", "cpu"),
    "cameras": partial(measured, cameras.table, "cameras", "cpu"),
    **{f"fleet-{name}": partial(measured, table, "fleet", "cpu") for name, table in fleet.TABLES.items()},
    "parallel": partial(measured, parallel.table, "parallel", "cpu"),
    "one-by-one": partial(measured, cameras.accuracy_table, "cameras", "cpu"),
    "shared-learning": partial(measured, shared_learning.table, "shared_learning", "cpu"),
    "shared-learning-choice": partial(measured, shared_learning.choice_table, "shared_learning", "cpu"),
    **{
        f"hostile-{part}": partial(recipe, "hostile", part, DIGITS)
        for part in ("resnet", "vit", "resnet-clean", "vit-clean")
    },
    **{f"hostile-guard-{part}": partial(guarded, part) for part in ("resnet", "vit", "resnet-clean", "vit-clean")},
    "hostile-roid-clean": partial(guarded, "vit-clean", GUARDED_ROID),
    "hostile-fifth-vit": partial(guarded, "vit", GUARDED_FIFTH),
    **{
        f"hostile-{name}-{part}": partial(guarded, part, folder)
        for name, folder in (("third", GUARDED_THIRD), ("fourth", GUARDED_FOURTH))
        for part in ("resnet", "vit", "resnet-clean", "vit-clean")
    },
    **{
        f"hostile-second-{part}": partial(recipe, "hostile", part, GUARDED_SECOND)
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


def first_seed(file: Path, network: str, methods: Sequence[str]) -> list[Result]:
    """Return the results of some methods on a network, with all images and the first seed."""
    found = by_method(file, network)
    return [min(found[method, None], key=lambda result: result.seed) for method in methods]


_SHOWN = ("Source", "BNAdapt", "Tent", "EATA", "EATAC")
_SHOWN_VIT = ("Source", "Tent", "ROID", "EATA", "EATAC")

FIGURES: dict[str, Callable[[], Figure]] = {
    "reliability-imagenet": lambda: reliability(first_seed(IMAGENET / "lifelong.json", "resnet", _SHOWN)),
    "reliability-resnet": lambda: reliability(first_seed(RECIPE_FILES / "lifelong.json", "resnet", _SHOWN)),
    "reliability-vit": lambda: reliability(first_seed(RECIPE_FILES / "lifelong.json", "vit", _SHOWN_VIT)),
    "ece-vit": lambda: along([first_seed(RECIPE_FILES / "lifelong.json", "vit", _SHOWN_VIT)], "ece"),
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
    parser.add_argument("--to", type=Path, default=RECIPE_FILES.name, help="folder of benchmarks/results to copy to")
    arguments = parser.parse_args()
    folder = arguments.folder
    if folder is not None:
        found = [file for file in sorted(folder.glob("*.json")) if file.stem in RECIPES]
        if not found:
            raise SystemExit(f"{folder} has no numbers of a recipe: name the folder of a scale, such as paper/cifar10")
        for file in found:
            (RESULTS / arguments.to).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, RESULTS / arguments.to)
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
