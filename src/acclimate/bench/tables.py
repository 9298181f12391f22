"""Results as tables: domains as columns, accuracy (or mIoU) and ECE as rows; and the one writer of all tables."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from statistics import mean, stdev
from typing import Any, TypeAlias

from ..methods import METHODS
from .plan import PROTOCOL, SHARED
from .result import Count, Result

__all__ = [
    "FORMATS",
    "Table",
    "as_csv",
    "as_html",
    "as_json",
    "as_latex",
    "as_markdown",
    "best_cells",
    "differences",
    "in_table_order",
    "mean_and_deviation",
    "paper_table",
    "passes_per_domain",
    "summary_table",
]

Table: TypeAlias = tuple[list[str], list[list[str]]]
"""Header and rows."""


def mean_and_deviation(values: Sequence[float | None], form: str = ".1f") -> str:
    """Format `mean ± deviation`; one value has no deviation, and a dash stands for a missing one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    deviation = f" ± {stdev(known):{form}}" if len(known) > 1 else ""
    return f"{mean(known):{form}}{deviation}"


def differences(results: Sequence[Result]) -> list[str]:
    """Return why these results should not be in one table; an empty list if they may be."""
    found = []
    for name in ("model", "weights", "preprocess", *PROTOCOL, *SHARED, "torch", "device"):
        values = sorted({_value(result, name) for result in results})
        if len(values) > 1:
            found.append(f"their {name} differs: {', '.join(values)}")
    known: dict[tuple[int, str], float] = {}
    for result in results:  # the same network on the same data is as accurate everywhere, whatever the files are called
        for domain, accuracy in (result.source_accuracy or {}).items():
            before = known.setdefault((result.seed, domain), accuracy)
            if abs(before - accuracy) > 0.005:
                found.append(f"their source accuracy on {domain} differs: {before:.3f}, {accuracy:.3f}")
    return list(dict.fromkeys(found))


def _value(result: Result, name: str) -> str:
    if name in PROTOCOL:
        return str(result.protocol.get(name))
    if name in SHARED:
        return str(result.arguments.get(name))
    return str(result.origin.get(name) if name in ("torch", "device") else getattr(result, name))


def passes_per_domain(results: Sequence[Result], count: Count = "paper") -> list[str]:
    """Format the forward and backward passes per domain, averaged over seeds."""
    forwards = mean(result.forwards / len(result.domains) for result in results)
    counted = [(result.backward_passes(count), len(result.domains)) for result in results]
    known = [passes / domains for passes, domains in counted if passes is not None]
    return [f"{forwards:,.0f}", f"{mean(known):,.0f}" if len(known) == len(results) else "–"]


def paper_table(results: Sequence[Result], *, every: bool = False, count: Count = "paper") -> Table:
    """Return accuracy and ECE of each method per domain, and their mean, with the deviation over several seeds.

    If there are more than four rounds, the table has the first, fourth, seventh and so on, as in the paper, or `every`
    one. Means are over all rounds. `count` says which backward passes are counted.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", accuracy=0.5, ece=0.1, images=64, forwards=64, backwards=0, seconds=1.0)
    >>> result = Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog])
    >>> result.protocol = {"images": 64}
    >>> header, rows = paper_table([result])
    >>> header[2:4], [row[:3] for row in rows]
    (['fog', 'Avg.'], [['Source', 'Acc.', '50.0'], ['', 'ECE', '10.0']])
    """
    names = list(dict.fromkeys(domain.name for result in results for domain in result.domains))
    names = names if every else _some_rounds(names)
    header = ["Method", "", *(_ROUND.sub(r"\2: \1", name.replace("_", " ")) for name in names)]
    header += ["Avg.", "#Forwards", "#Backwards"]
    rows = []
    groups = _by_setting(results)
    counts = {result.protocol["images"] for result in results}
    most = None if None in counts else max(counts)
    several = len({result.model for result in results}) > 1
    for runs in groups:
        label = runs[0].label + (f", {runs[0].model}" if several else "")
        if (images := runs[0].protocol["images"]) != most:
            label += f", {images:,} images"
        passes = passes_per_domain(runs, count)
        score = ("Acc.", "accuracy") if any(run.miou is None for run in runs) else ("mIoU", "miou")
        for first, (kind, key) in ((True, score), (False, ("ECE", "ece"))):
            by_name: dict[str, list[float]] = {name: [] for name in names}
            for domain in (domain for run in runs for domain in run.domains if domain.name in by_name):
                by_name[domain.name].append(100 * getattr(domain, key))
            cells = [f"{mean(values):.1f}" if values else "–" for values in by_name.values()]
            average = mean_and_deviation([100 * getattr(run, key) for run in runs], ".2f")
            rows.append([label if first else "", kind, *cells, average, *(passes if first else ["", ""])])
    return header, rows


def summary_table(results: Sequence[Result]) -> Table:
    """Return score, ECE, passes, clean score before and after, and seconds of each method; means over several seeds.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", accuracy=0.5, ece=0.1, images=64, forwards=64, backwards=0, seconds=1.0)
    >>> header, rows = summary_table([Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog])])
    >>> header[:3], rows[0][:3]
    (['method', 'acc %', 'ECE %'], ['Source', '50.0', '10.0'])
    """

    def percent(values: Sequence[float | None]) -> str:
        return mean_and_deviation([None if value is None else 100 * value for value in values])

    def passes(values: Sequence[int | None]) -> str:
        return mean_and_deviation(values, ",.0f").partition(" ")[0]

    groups = _by_setting(results)
    repeated = {name for name, count in Counter(runs[0].method for runs in groups).items() if count > 1}
    score = "acc %" if any(result.miou is None for result in results) else "mIoU %"
    header = ["method", score, "ECE %", "forwards", "backwards", "clean before", "clean after", "seconds"]
    rows = [
        [
            runs[0].label if runs[0].method in repeated or runs[0].health else runs[0].method,
            percent([run.score for run in runs]),
            percent([run.ece for run in runs]),
            passes([run.forwards for run in runs]),
            passes([run.backward_passes() for run in runs]),
            percent([run.clean_before for run in runs]),
            percent([run.clean_after for run in runs]),
            f"{mean(run.seconds for run in runs):.1f}",
        ]
        for runs in groups
    ]
    return header, rows


def in_table_order(results: Sequence[Result]) -> list[Result]:
    """Return results in the order of `METHODS`, plug-ins last; those of one method keep theirs."""
    order = {method.__name__: place for place, method in enumerate(METHODS.values())}
    return sorted(results, key=lambda result: order.get(result.method, len(order)))


def _by_setting(results: Sequence[Result]) -> list[list[Result]]:
    """Return the seeds of each setting together, in table order."""
    groups: dict[str, list[Result]] = {}
    for result in in_table_order(results):
        groups.setdefault(result.setting, []).append(result)
    return [*groups.values()]


_BEST: dict[str, Callable[[Sequence[float]], float]] = {
    "acc %": max,
    "mIoU %": max,
    "ECE %": min,
    "clean after": max,
}
"""Columns in which one direction is better. Passes and seconds are not among them: not adapting is always cheapest."""


def best_cells(header: Sequence[str], rows: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """Return row and column of the best values as they are shown: all of a tie, but none where all rows are equal."""
    found = set()
    for column, name in enumerate(header):
        if name not in _BEST:
            continue
        values = {i: float(row[column].split()[0]) for i, row in enumerate(rows) if row[column][0].isdigit()}
        if len({*values.values()}) > 1:
            best = _BEST[name]([*values.values()])
            found |= {(row, column) for row, value in values.items() if value == best}
    return found


_ROUND = re.compile(r"(.*), round (\d+)")
_FEW = 4


def _some_rounds(names: Sequence[str]) -> list[str]:
    found = {name: int(match[2]) for name in names if (match := _ROUND.fullmatch(name))}
    rounds = set(found.values())
    if len(rounds) <= _FEW:
        return list(names)
    shown = {*range(1, max(rounds) + 1, 3), max(rounds)}
    return [name for name in names if found.get(name, 1) in shown]


def as_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table; columns of numbers are flush right, except the first.

    >>> print(as_markdown(["method", "acc %"], [["Source", "35.9"], ["EATA", "74.6"]]), end="")
    | method | acc % |
    | --- | ---: |
    | Source | 35.9 |
    | EATA | 74.6 |
    """
    columns = [[row[place] for row in rows] for place in range(1, len(header))]
    rule = ["---", *("---:" if all(cell == "" or _is_number(cell) for cell in column) else "---" for column in columns)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *rows]) + "\n"


def _is_number(cell: str) -> bool:
    return cell[0].isdigit() or cell[0] in "–-"


def as_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


_TEX = {sign: rf"\{sign}" for sign in "_#%&"} | {"±": r"$\pm$", "–": "--", "†": r"$^\dagger$", "×": r"$\times$"}
_TEX |= {"ε": r"$\epsilon$", "α": r"$\alpha$", "β": r"$\beta$"}


def as_latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a LaTeX tabular with the rules of booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_TEX.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    body = "\n".join(line(row) for row in rows)
    columns = "ll" + "r" * (len(header) - 2)
    rule = ["\\toprule", line(header), "\\midrule", body, "\\bottomrule"]
    return "\n".join([f"\\begin{{tabular}}{{{columns}}}", *rule, "\\end{tabular}"]) + "\n"


def as_html(
    header: Sequence[str], rows: Sequence[Sequence[str]], strong: Collection[tuple[int, int]] = frozenset()
) -> str:
    """Write an HTML table; the cells in `strong`, by row and column, are emphasised."""

    def line(cells: Sequence[str], row: int) -> str:
        shown = [html.escape(cell) for cell in cells]
        return "".join(f"<td>{f'<strong>{c}</strong>' if (row, i) in strong else c}</td>" for i, c in enumerate(shown))

    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{line(cells, row)}</tr>\n" for row, cells in enumerate(rows))
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"


def as_json(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a list of objects, one per row: numbers as numbers, a deviation under its own name, null for a dash.

    Empty cells of the first column repeat the one above; a column without a name is the metric.
    """
    records: list[dict[str, Any]] = []
    for row in rows:
        record: dict[str, Any] = {}
        for name, cell in zip(header, row, strict=True):
            value, _, deviation = cell.partition(" ± ")
            record[name or "Metric"] = _value_of(value)
            if deviation:
                record[f"{name} deviation"] = _value_of(deviation)
        if records and not row[0]:
            record[header[0]] = records[-1][header[0]]
        records.append(record)
    return json.dumps(records, indent=1, ensure_ascii=False) + "\n"


def _value_of(cell: str) -> str | float | None:
    """Return a number as a number, and nothing as None."""
    if cell in ("", "–"):
        return None
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return cell
    return int(number) if number.is_integer() and "." not in cell else number


FORMATS: dict[str, Callable[[Sequence[str], Sequence[Sequence[str]]], str]] = {
    "markdown": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}
"""Writers of a table by the name of their format."""
