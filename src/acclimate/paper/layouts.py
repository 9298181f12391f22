"""Layouts of results: the paper's tables, curves and maps. Each takes measured cases and returns tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import mean
from typing import Any, TypeAlias

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..bench.figures import COLOURS, STYLE, examples, reliability, watched
from ..bench.result import Result
from ..bench.tables import Table, mean_and_deviation, paper_table
from ..bench.tune import score, settings_from
from ..methods import METHODS
from .numbers import Case, Shown
from .published import compare_source, with_paper

__all__ = [
    "boundaries",
    "by_domain",
    "calibration",
    "curves",
    "grid",
    "heat_maps",
    "hostile",
    "indicators",
    "measured_grid",
    "pictures",
    "sweep",
    "trials",
    "whole_table",
]

Layout: TypeAlias = Callable[[Sequence[Case]], Shown]


def _clean(result: Result) -> float | None:
    """Return the score on clean images, averaged over the domains after which it was measured."""
    scores = [domain.clean_accuracy for domain in result.domains]
    return None if None in scores else 100 * mean(score for score in scores if score is not None)


METRICS: dict[str, tuple[str, str, Callable[[Result], float | None]]] = {
    "accuracy": ("Acc.", ".1f", lambda r: 100 * r.accuracy),
    "ece": ("ECE", ".1f", lambda r: 100 * r.ece),
    "forwards": ("#Forwards", ",.0f", lambda r: r.forwards / len(r.domains)),
    "backwards": ("#Backwards", ",.0f", lambda r: _times(r.backward_passes(), 1 / len(r.domains))),
    "clean": ("Clean acc.", ".1f", _clean),
    "clean before": ("Clean acc. before", ".1f", lambda r: _times(r.clean_before, 100)),
    "time": ("ms per image", ".2f", lambda r: 1e3 * r.seconds / sum(d.images for d in r.domains)),
    "memory": ("Mem. (MB)", ",.1f", lambda r: r.gpu_memory),
}
"""Head, format and value of each metric that a column or panel can show."""


def whole_table(cases: Sequence[Case]) -> Shown:
    """Methods by domains, one table per network; with the paper's rows where the setting is the same."""
    networks: dict[str, list[Result]] = {}
    for case in cases:
        networks.setdefault(case.column, []).extend(case.results)
    some, every = ({network: _beside(own, every) for network, own in networks.items()} for every in (False, True))
    notes = {network: compare_source(own) for network, own in networks.items()}
    return Shown(some, whole=every, notes=notes)


def _beside(results: Sequence[Result], every: bool) -> Table:
    header, rows = paper_table(results, every=every)
    return header, with_paper(rows, results)


def grid(*metrics: str) -> Layout:
    """Rows by columns, each with some metrics."""

    def show(cases: Sequence[Case]) -> Shown:
        rows, columns = _distinct(cases, "row"), _distinct(cases, "column")
        header = [""] + [f"{column} {METRICS[m][0]}".strip() for column in columns for m in metrics]
        cells = {(case.row, case.column): [_cell(case, m) for m in metrics] for case in cases}
        empty = ["–"] * len(metrics)
        table = [[row, *(cell for column in columns for cell in cells.get((row, column), empty))] for row in rows]
        return Shown({"": (header, table)})

    return show


def sweep(axis: str, *metrics: str, xscale: str = "linear") -> Layout:
    """Metrics against a number: one panel per metric and column, one line per row; and the numbers as a table."""

    def show(cases: Sequence[Case]) -> Shown:
        columns = _distinct(cases, "column")
        header = ["", axis, *(METRICS[m][0] for m in metrics)]
        table = [[_label(case), f"{case.x:g}", *(_cell(case, m) for m in metrics)] for case in cases]
        with _figure(4 * len(metrics), 3.2 * len(columns)) as figure:
            for place, (column, metric) in enumerate(product(columns, metrics)):
                axes = figure.add_subplot(len(columns), len(metrics), place + 1)
                _lines(axes, [case for case in cases if case.column == column], partial(_mean, metric=metric))
                axes.set(xlabel=axis, ylabel=METRICS[metric][0], title=column, xscale=xscale)
            axes.legend()
        return Shown({"": (header, table)}, {"": figure})

    return show


def trials(cases: Sequence[Case]) -> Shown:
    """Trials of each method and network, the chosen ones marked; and the settings that were chosen."""
    networks: dict[str, dict[tuple[str, float], list[Case]]] = {}
    for case in cases:
        own = networks.setdefault(case.column.partition(",")[0], {})
        own.setdefault((case.row, case.x or 0.0), []).append(case)
    order, rows, settings = [*METHODS], [], {}
    for network, own in networks.items():
        plans = [each[0].plan for each in own.values()]
        found = [
            score(plan.methods[0], {"lr": lr}, [case.results[0] for case in each])
            for plan, ((_, lr), each) in zip(plans, own.items(), strict=True)
        ]
        settings[network], chosen = settings_from(plans[0], found, str(plans[0].preset))
        for trial in sorted(found, key=lambda trial: (order.index(trial.method), trial.settings["lr"])):
            numbers = [f"{value:.1f}" for value in (trial.accuracy, trial.ece, trial.forgotten)]
            mark = "chosen" if trial in chosen else ""
            rows.append([network, METHODS[trial.method].__name__, f"{trial.settings['lr']:g}", *numbers, mark])
    return Shown({"": (["", "", "lr", "Acc.", "ECE", "Clean acc. lost", ""], rows)}, settings=settings)


def hostile(cases: Sequence[Case]) -> Shown:
    """Points above or below Source on each stream, without and with a guard, and on clean images afterwards."""
    networks = dict.fromkeys(case.column.partition(", ")[0] for case in cases)
    tables: dict[str, Table] = {}
    figures: dict[str, Figure] = {}
    for network in networks:
        own = [case for case in cases if case.column.startswith(f"{network}, ")]
        tables[network] = _against_source(own, lambda r: 100 * r.accuracy)
        tables[f"{network}-clean"] = _against_source(own, lambda r: _times(r.clean_after, 100))
        streams = dict.fromkeys(case.column.partition(", ")[2] for case in own)
        panels = [(stream, _lines_of(own, f"{network}, {stream}")) for stream in streams]
        if drawn := [panel for panel in panels if any(r.method == "Source" for r in panel[1])]:
            figures[network] = watched(drawn)
    return Shown(tables, figures)


_GUARDED = ", guarded"
_DRAWN = ("Source", "Tent", "EATAC")


def _lines_of(cases: Sequence[Case], column: str) -> list[Result]:
    shown = [case for case in cases if case.column == column and case.row.removesuffix(_GUARDED) in _DRAWN]
    return [case.results[0] for case in shown if case.results and case.results[0].along]


def _against_source(cases: Sequence[Case], value: Callable[[Result], float | None]) -> Table:
    found = {(case.row, case.column): _average([value(result) for result in case.results]) for case in cases}
    rows, columns = _distinct(cases, "row"), _distinct(cases, "column")

    def cell(row: str, column: str) -> str:
        of_its_own = found.get((f"Source for {row.removesuffix(_GUARDED)}", column))
        own, source = found.get((row, column)), found.get(("Source", column)) if of_its_own is None else of_its_own
        if own is None or source is None:
            return "–"
        return f"{own:.1f}" if row.startswith("Source") else f"{round(own - source, 1) or 0.0:+.1f}"

    def both(row: str, column: str) -> str:
        cells = [cell(row, column), cell(row + _GUARDED, column)]
        return cells[0] if row.startswith("Source") else " → ".join(cells)

    header = ["", *(column.partition(", ")[2] for column in columns)]
    return header, [[row, *(both(row, column) for column in columns)] for row in rows if not row.endswith(_GUARDED)]


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def by_domain(what: str) -> Layout:
    """`backwards` or `forgetting` per domain: one panel per column, one line per row.

    Clean accuracy is dashed. The upper bound, the clean accuracy of Tent before it met a corruption, is dotted.
    """
    metrics = ("accuracy", *(("clean", "clean before") if what == "forgetting" else ("backwards",)))

    def show(cases: Sequence[Case]) -> Shown:
        shown = [m for m in metrics if any(_mean(case, m) is not None for case in cases)]
        columns = _distinct(cases, "column")
        down, across = -(-len(columns) // 2), min(2, len(columns))
        with _figure(6.2 * across, 1 + 2.2 * down) as figure:
            legend: dict[str, Any] = {}
            for place, column in enumerate(columns, 1):
                axes = figure.add_subplot(down, across, place)
                for case in (case for case in cases if case.column == column):
                    _domains(axes, case, what)
                axes.set_title(column)
                axes.tick_params(labelbottom=place > len(columns) - across)
                handles, labels = axes.get_legend_handles_labels()
                legend |= zip(labels, handles, strict=True)
            figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=6)
        table = [[case.column, case.row, *(_cell(case, m) for m in shown)] for case in cases]
        notes = {"": _upper_bound(cases)} if what == "forgetting" else {}
        return Shown({"": (["", "", *(METRICS[m][0] for m in shown)], table)}, {"": figure}, notes=notes)

    return show


def curves(axis: str, **panels: tuple[str, float]) -> Layout:
    """Measured lists along `axis`: one panel per name, with its head and a factor."""

    def show(cases: Sequence[Case]) -> Shown:
        table = []
        with _figure(8.4, 3.2) as figure:
            places = {name: figure.add_subplot(1, len(panels), place) for place, name in enumerate(panels, 1)}
            for case in cases:
                values = _averaged(case)
                for name, (head, factor) in panels.items():
                    points = [*zip(values["batches"], (factor * value for value in values[name]), strict=True)]
                    _line(places[name], case.row, points)
                    places[name].set(xlabel=axis, ylabel=head)
                cells = [_along(case, name, ",.1f", factor) for name, (_, factor) in panels.items()]
                for batches, *own in zip(values["batches"], *cells, strict=True):
                    table.append([case.row, f"{batches:.0f}", *own])
            [*places.values()][-1].legend()
        return Shown({"": (["", axis, *(head for head, _ in panels.values())], table)}, {"": figure})

    return show


def measured_grid(columns: Mapping[str, tuple[str, str, float]], axis: str = "") -> Layout:
    """Measured numbers, one row per case, with head, format and factor; the first is also a curve over `axis`."""

    def show(cases: Sequence[Case]) -> Shown:
        header = ["", *([axis] if axis else []), *(head for head, _, _ in columns.values())]
        table = []
        for case in cases:
            cells = [
                mean_and_deviation([_times(m[name], factor) for m in _measured(case)], form)
                for name, (_, form, factor) in columns.items()
            ]
            table.append([case.row, *([f"{case.x:g}"] if axis else []), *cells])
        if not axis:
            return Shown({"": (header, table)})
        name, (head, _, factor) = next(iter(columns.items()))
        with _figure(5, 3.4) as figure:
            axes = figure.add_subplot()
            _lines(axes, cases, lambda case: factor * mean(m[name] for m in _measured(case)))
            axes.set(xlabel=axis, ylabel=head)
            axes.legend()
        return Shown({"": (header, table)}, {"": figure})

    return show


def heat_maps(axis: str) -> Layout:
    """Measured accuracy by x and column: one map per row."""

    def show(cases: Sequence[Case]) -> Shown:
        rows, columns = _distinct(cases, "row"), _distinct(cases, "column")
        xs = sorted({case.x for case in cases if case.x is not None})
        value = {(c.row, c.column, c.x): 100 * mean(m["accuracy"] for m in _measured(c)) for c in cases}
        table = [
            [row, column, *(f"{value[row, column, x]:.1f}" if (row, column, x) in value else "–" for x in xs)]
            for row in rows
            for column in columns
            if any((row, column, x) in value for x in xs)
        ]
        with _figure(4.6 * len(rows), 0.9 + 0.5 * len(columns), grid=False) as figure:
            for place, row in enumerate(rows):
                axes = figure.add_subplot(1, len(rows), place + 1)
                own = sorted({x for r, _, x in value if r == row and x is not None})
                cells = [[value.get((row, column, x), float("nan")) for x in own] for column in columns]
                axes.imshow(cells, cmap="viridis", vmin=0, vmax=max(value.values()), aspect="auto")
                for i, line in enumerate(cells):
                    for j, cell in enumerate(line):
                        colour = "black" if cell > 0.6 * max(value.values()) else "white"
                        axes.text(j, i, f"{cell:.1f}", ha="center", va="center", color=colour, fontsize=8)
                axes.set_xticks(range(len(own)), [f"{x:g}" for x in own])
                axes.set_yticks(range(len(columns)), columns)
                axes.set(title=row, xlabel=axis)
        return Shown({"": (["", "", *(f"{axis} {x:g}" for x in xs)], table)}, {"": figure})

    return show


def indicators(cases: Sequence[Case]) -> Shown:
    """The table of the data-uncertainty indicator."""
    values = _averaged(cases[0])
    header = ["", *("Source" if b == 0 else f"after {b:.0f} batches" for b in values["batches"])]
    rows = [
        ["Sub-network acc. (%)", *_along(cases[0], "accuracy", ".1f", 100)],
        ["#Uncertain", *_along(cases[0], "uncertain", ",.0f", 1)],
        ["Indicator acc. (%)", *_along(cases[0], "right", ".1f", 100)],
    ]
    return Shown({"": (header, rows)})


def calibration(cases: Sequence[Case]) -> Shown:
    """Accuracy and ECE, and reliability diagrams side by side."""
    figure = reliability([case.results[0] for case in cases])
    return Shown(grid("accuracy", "ece")(cases).tables, {"": figure})


def pictures(cases: Sequence[Case]) -> Shown:
    """Images that were selected, and images that were not."""
    values = _measured(cases[0])[0]
    rows = [(name, torch.tensor(few["images"]) / 255) for name, few in values.items() if few["images"]]
    most = max(len(images) for _, images in rows)
    padded = [
        (name, torch.cat([images, images.new_ones(most - len(images), *images.shape[1:])])) for name, images in rows
    ]
    table = [[name, *(f"{c:.2f}" for c in few["confidence"])] for name, few in values.items()]
    header = ["confidence", *(str(i + 1) for i in range(most))]
    return Shown({"": (header, [row + [""] * (len(header) - len(row)) for row in table])}, {"": examples(padded)})


def boundaries(cases: Sequence[Case]) -> Shown:
    """The plane: both classes, the network's boundary, and the share of sub-networks that disagree with it."""
    values = _measured(cases[0])[0]
    points, classes, share = (torch.tensor(values[name]) for name in ("points", "classes", "disagreement"))
    with _figure(5.4, 3.6, grid=False) as figure:
        axes = figure.add_subplot()
        x, y = values["axes"]
        filled = axes.contourf(x, y, share.T.tolist(), levels=10, cmap="Oranges")
        axes.contour(x, y, torch.tensor(values["full"]).T.tolist(), levels=[0.5], colors="#222222")
        for label, colour in ((0, "#4c78a8"), (1, "#54a24b")):
            across, up = points[classes == label].T.tolist()
            axes.scatter(across, up, s=8, color=colour)
        figure.colorbar(filled, label="sub-networks that disagree")
    rows = [["disagree somewhere", f"{100 * float((share > 0).float().mean()):.0f} % of the plane"]]
    return Shown({"": (["sub-networks", ""], rows)}, {"": figure})


@contextmanager
def _figure(width: float, height: float, *, grid: bool = True) -> Iterator[Figure]:
    with mpl.rc_context(STYLE | ({} if grid else {"axes.grid": False})):
        yield Figure(figsize=(width, height), layout="constrained")


def _domains(axes: Axes, case: Case, what: str) -> None:
    results, colour = case.results, COLOURS.get(case.results[0].method, "#222222")
    names = [domain.name.replace("_", " ") for domain in results[0].domains]
    key, factor, label = ("backwards", 1, "#Backwards") if what == "backwards" else ("accuracy", 100, "accuracy (%)")

    def values(name: str) -> list[float]:
        return [factor * mean(getattr(r.domains[i], name) or 0 for r in results) for i in range(len(names))]

    axes.plot(range(len(names)), values(key), "o-", ms=3, color=colour, label=case.row)
    if what == "forgetting" and results[0].domains[0].clean_accuracy is not None:
        axes.plot(range(len(names)), values("clean_accuracy"), "s--", ms=3, color=colour, label=f"{case.row}, clean")
    if what == "forgetting" and case.row == "Tent" and (bound := _mean(case, "clean before")) is not None:
        axes.axhline(bound, ls=":", color=colour, label="upper bound, tested using Tent")
    axes.set_xticks(range(len(names)), names, rotation=50, ha="right", fontsize=7)
    axes.set_ylabel(label)


def _upper_bound(cases: Sequence[Case]) -> str:
    """Say what the upper bound of the clean accuracy is."""
    rows = _distinct(cases, "row")
    if any(case.row == "Tent" and _mean(case, "clean before") is not None for case in cases):
        source = " The dashed line of Source is the network without any adaptation." if "Source" in rows else ""
        return (
            "The dotted upper bound is the clean accuracy of Tent before it met a corruption, as in the paper "
            f'("tested using Tent").{source}'
        )
    drawn = "is the dashed line of Source, the network without any adaptation" if "Source" in rows else "is not drawn"
    return f"The upper bound here {drawn}. The paper's is tested using Tent; these results do not have it."


def _lines(axes: Axes, cases: Sequence[Case], value: Callable[[Case], float | None]) -> None:
    """Draw one line per row, over x."""
    for row in _distinct(cases, "row"):
        points = [(case.x, value(case)) for case in cases if case.row == row]
        _line(axes, row, [point for point in points if None not in point])


def _line(axes: Axes, label: str, points: Sequence[Any]) -> None:
    if points:
        method = label.partition(" ")[0].partition(",")[0]
        axes.plot(*zip(*sorted(points), strict=True), "o-", ms=4, color=COLOURS.get(method), label=label)


def _distinct(cases: Sequence[Case], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(case, name) for case in cases))


def _label(case: Case) -> str:
    return ", ".join(filter(None, (case.row, case.column)))


def _mean(case: Case, metric: str) -> float | None:
    values = [METRICS[metric][2](result) for result in case.results]
    return None if None in values or not values else mean(value for value in values if value is not None)


def _cell(case: Case, metric: str) -> str:
    _, form, value = METRICS[metric]
    if measured := _measured(case):
        return mean_and_deviation([each.get(metric) for each in measured], ".3g")
    return mean_and_deviation([value(result) for result in case.results], form)


def _measured(case: Case) -> list[dict[str, Any]]:
    return [result.measured for result in case.results if result.measured is not None]


def _along(case: Case, name: str, form: str, factor: float) -> list[str]:
    """Return a measured list as cells, with the deviation over seeds."""
    every = zip(*(measured[name] for measured in _measured(case)), strict=True)
    return [mean_and_deviation([factor * value for value in values], form) for values in every]


def _averaged(case: Case) -> dict[str, list[float]]:
    """Average measured lists over seeds."""
    every = _measured(case)
    return {name: [mean(values) for values in zip(*(v[name] for v in every), strict=True)] for name in every[0]}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
