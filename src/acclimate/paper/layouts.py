"""Results in the paper's forms: its tables, its curves, its maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..bench.figures import COLOURS, STYLE, examples, reliability
from ..bench.result import Result
from ..bench.tables import mean_and_deviation, paper_table
from .published import with_paper
from .recipe import Found, Shown

__all__ = [
    "boundaries",
    "by_domain",
    "calibration",
    "curves",
    "grid",
    "heat_maps",
    "indicators",
    "measured_grid",
    "pictures",
    "sweep",
    "whole_table",
]

Layout = Callable[[Sequence[Found]], Shown]

METRICS: dict[str, tuple[str, str, Callable[[Result], float | None]]] = {
    "accuracy": ("Acc.", ".1f", lambda r: 100 * r.accuracy),
    "ece": ("ECE", ".1f", lambda r: 100 * r.ece),
    "forwards": ("#Forwards", ",.0f", lambda r: r.forwards / len(r.domains)),
    "backwards": ("#Backwards", ",.0f", lambda r: r.backwards / len(r.domains)),
    "clean": ("Clean acc.", ".1f", lambda r: _clean(r)),
    "time": ("ms an image", ".2f", lambda r: 1e3 * r.seconds / sum(d.images or 0 for d in r.domains)),
    "memory": ("Mem. (MB)", ",.0f", lambda r: r.gpu_memory),
}
"""What a column may show: its head, its format, its value."""


def _clean(result: Result) -> float | None:
    """On clean images after each domain, a mean."""
    told = [domain.clean_accuracy for domain in result.domains]
    return None if None in told else 100 * mean(value for value in told if value is not None)


def whole_table(found: Sequence[Found]) -> Shown:
    """Methods by domains, a table a network, the paper's rows beside where the setting is its own."""
    networks: dict[str, list[Result]] = {}
    for each in found:
        networks.setdefault(each.case.column, []).extend(each.results)
    shown = Shown()
    for network, stored in networks.items():
        header, rows = paper_table(stored)
        shown.tables[network] = header, with_paper(rows, stored)
    return shown


def grid(*metrics: str) -> Layout:
    """Rows by columns, each with some metrics."""

    def show(found: Sequence[Found]) -> Shown:
        rows, columns = (list(dict.fromkeys(getattr(f.case, name) for f in found)) for name in ("row", "column"))
        header = [""] + [f"{column} {METRICS[m][0]}".strip() for column in columns for m in metrics]
        cells = {(f.case.row, f.case.column): [_cell(f.results, m) for m in metrics] for f in found}
        empty = ["–"] * len(metrics)
        table = [[row, *(cell for column in columns for cell in cells.get((row, column), empty))] for row in rows]
        return Shown({"": (header, table)})

    return show


def sweep(axis: str, *metrics: str, xscale: str = "linear") -> Layout:
    """A number against another: a panel a metric and column, a line a row; and the numbers as a table."""

    def show(found: Sequence[Found]) -> Shown:
        columns = list(dict.fromkeys(f.case.column for f in found))
        header = ["", axis, *(METRICS[m][0] for m in metrics)]
        table = [
            [
                ", ".join(filter(None, (f.case.row, f.case.column))),
                _number(f.case.x),
                *(_cell(f.results, m) for m in metrics),
            ]
            for f in found
        ]
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(4 * len(metrics), 3.2 * len(columns)), layout="constrained")
            for place, (column, metric) in enumerate(product(columns, metrics)):
                axes = figure.add_subplot(len(columns), len(metrics), place + 1)
                own = [f for f in found if f.case.column == column]
                for row in dict.fromkeys(f.case.row for f in own):
                    points = [(f.case.x, _value(f.results, metric)) for f in own if f.case.row == row]
                    _line(axes, row, [p for p in points if None not in p])
                axes.set(xlabel=axis, ylabel=METRICS[metric][0], title=column, xscale=xscale)
            axes.legend()
        return Shown({"": (header, table)}, {"": figure})

    return show


def by_domain(what: str) -> Layout:
    """A number of each domain, a panel a column, a line a row: `forgetting` has clean accuracy too, dashed."""

    def show(found: Sequence[Found]) -> Shown:
        columns = list(dict.fromkeys(f.case.column for f in found))
        down, across = -(-len(columns) // 2), min(2, len(columns))
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(6.2 * across, 1 + 2.2 * down), layout="constrained")
            legend: dict[str, Any] = {}
            for place, column in enumerate(columns, 1):
                axes = figure.add_subplot(down, across, place)
                for each in (f for f in found if f.case.column == column):
                    _domains(axes, each, what)
                axes.set_title(column)
                axes.tick_params(labelbottom=place > len(columns) - across)
                handles, labels = axes.get_legend_handles_labels()
                legend |= zip(labels, handles, strict=True)
            figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=6)
        metrics = ("accuracy", "clean") if what == "forgetting" else ("accuracy", "backwards")
        table = [[f.case.column, f.case.row, *(_cell(f.results, m) for m in metrics)] for f in found]
        return Shown({"": (["", "", *(METRICS[m][0] for m in metrics)], table)}, {"": figure})

    return show


def curves(axis: str, **panels: tuple[str, float]) -> Layout:
    """What each case measured along something, a panel a name: its head, and a factor."""

    def show(found: Sequence[Found]) -> Shown:
        table = []
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(8.4, 3.2), layout="constrained")
            places = {name: figure.add_subplot(1, len(panels), place) for place, name in enumerate(panels, 1)}
            for each in found:
                told = _averaged(each.values)
                for name, (head, factor) in panels.items():
                    line = [*zip(told["batches"], (factor * value for value in told[name]), strict=True)]
                    _line(places[name], each.case.row, line)
                    places[name].set(xlabel=axis, ylabel=head)
                for place, batches in enumerate(told["batches"]):
                    values = [f"{factor * told[name][place]:,.1f}" for name, (_, factor) in panels.items()]
                    table.append([each.case.row, f"{batches:.0f}", *values])
            [*places.values()][-1].legend()
        return Shown({"": (["", axis, *(head for head, _ in panels.values())], table)}, {"": figure})

    return show


def measured_grid(axis: str = "", **columns: tuple[str, str, float]) -> Layout:
    """What cases measured, a row a case: columns by name, with a head, a format and a factor; a curve over `axis`."""

    def show(found: Sequence[Found]) -> Shown:
        header = ["", *([axis] if axis else []), *(head for head, _, _ in columns.values())]
        table = [
            [
                f.case.row,
                *([_number(f.case.x)] if axis else []),
                *(_told(f, name, *columns[name][1:]) for name in columns),
            ]
            for f in found
        ]
        shown = Shown({"": (header, table)})
        if axis:
            with mpl.rc_context(STYLE):
                figure = Figure(figsize=(5, 3.4), layout="constrained")
                axes = figure.add_subplot()
                name, (head, _, factor) = next(iter(columns.items()))
                for row in dict.fromkeys(f.case.row for f in found):
                    own = [f for f in found if f.case.row == row]
                    _line(axes, row, [(f.case.x, factor * mean(m[name] for m in f.values)) for f in own])
                axes.set(xlabel=axis, ylabel=head)
                axes.legend()
            shown.figures[""] = figure
        return shown

    return show


def heat_maps(axis: str) -> Layout:
    """A map a row: accuracy by a number on the x axis and by columns."""

    def show(found: Sequence[Found]) -> Shown:
        rows, columns = (list(dict.fromkeys(getattr(f.case, name) for f in found)) for name in ("row", "column"))
        xs = sorted({f.case.x for f in found if f.case.x is not None})
        value = {(f.case.row, f.case.column, f.case.x): 100 * mean(m["accuracy"] for m in f.values) for f in found}
        table = [
            [row, column, *(f"{value[row, column, x]:.1f}" if (row, column, x) in value else "–" for x in xs)]
            for row in rows
            for column in columns
            if any((row, column, x) in value for x in xs)
        ]
        with mpl.rc_context(STYLE | {"axes.grid": False}):
            figure = Figure(figsize=(4.6 * len(rows), 0.9 + 0.5 * len(columns)), layout="constrained")
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


def indicators(found: Sequence[Found]) -> Shown:
    """The table of the data-uncertainty indicator."""
    told = _averaged(found[0].values)
    header = ["", *("Source" if b == 0 else f"after {b:.0f} batches" for b in told["batches"])]
    rows = [
        ["Sub-network acc. (%)", *(f"{100 * v:.1f}" for v in told["accuracy"])],
        ["#Uncertain", *(f"{v:,.0f}" for v in told["uncertain"])],
        ["Indicator acc. (%)", *(f"{100 * v:.1f}" for v in told["right"])],
    ]
    return Shown({"": (header, rows)})


def _averaged(measured: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Lists of numbers, averaged over seeds."""
    return {name: [mean(values) for values in zip(*(m[name] for m in measured), strict=True)] for name in measured[0]}


def calibration(found: Sequence[Found]) -> Shown:
    """Reliability diagrams, side by side."""
    shown = grid("accuracy", "ece")(found)
    shown.figures[""] = reliability([f.results[0] for f in found])
    return shown


def pictures(found: Sequence[Found]) -> Shown:
    """Images that were selected, and images that were not."""
    told = found[0].values[0]
    rows = [(name, torch.tensor(few["images"]) / 255) for name, few in told.items() if few["images"]]
    most = max(len(images) for _, images in rows)
    padded = [
        (name, torch.cat([images, images.new_ones(most - len(images), *images.shape[1:])])) for name, images in rows
    ]
    table = [[name, *(f"{c:.2f}" for c in few["confidence"])] for name, few in told.items()]
    header = ["confidence", *(str(i + 1) for i in range(most))]
    return Shown({"": (header, [row + [""] * (len(header) - len(row)) for row in table])}, {"": examples(padded)})


def boundaries(found: Sequence[Found]) -> Shown:
    """The plane: both classes, the network's boundary, and how many sub-networks disagree with it."""
    told = found[0].values[0]
    points, classes = torch.tensor(told["points"]), torch.tensor(told["classes"])
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(5.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        x, y = told["axes"]
        share = torch.tensor(told["disagreement"]).T.tolist()
        map_ = axes.contourf(x, y, share, levels=10, cmap="Oranges")
        axes.contour(x, y, torch.tensor(told["full"]).T.tolist(), levels=[0.5], colors="#222222")
        for label, colour in ((0, "#4c78a8"), (1, "#54a24b")):
            across, up = points[classes == label].T.tolist()
            axes.scatter(across, up, s=8, color=colour)
        figure.colorbar(map_, label="sub-networks that disagree")
    share_there = torch.tensor(told["disagreement"]).flatten()
    rows = [["disagree somewhere", f"{100 * float((share_there > 0).float().mean()):.0f} % of the plane"]]
    return Shown({"": (["sub-networks", ""], rows)}, {"": figure})


def _domains(axes: Axes, found: Found, what: str) -> None:
    results, colour = found.results, COLOURS.get(found.results[0].method, "#222222")
    names = [domain.name.replace("_", " ") for domain in results[0].domains]
    key = "backwards" if what == "backwards" else "accuracy"
    factor = 1 if what == "backwards" else 100

    def values(name: str) -> list[float]:
        return [factor * mean(getattr(r.domains[i], name) or 0 for r in results) for i in range(len(names))]

    axes.plot(range(len(names)), values(key), "o-", ms=3, color=colour, label=found.case.row)
    if what == "forgetting" and results[0].domains[0].clean_accuracy is not None:
        axes.plot(
            range(len(names)), values("clean_accuracy"), "s--", ms=3, color=colour, label=f"{found.case.row}, clean"
        )
    axes.set_xticks(range(len(names)), names, rotation=50, ha="right", fontsize=7)
    axes.set_ylabel("#Backwards" if what == "backwards" else "accuracy (%)")


def _line(axes: Axes, label: str, points: Sequence[Any]) -> None:
    if points:
        method = label.partition(" ")[0].partition(",")[0]
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS.get(method), label=label)


def _value(results: Sequence[Result], metric: str) -> float | None:
    values = [METRICS[metric][2](result) for result in results]
    return None if None in values or not values else mean(value for value in values if value is not None)


def _cell(results: Sequence[Result], metric: str) -> str:
    return mean_and_deviation([METRICS[metric][2](result) for result in results], METRICS[metric][1])


def _told(found: Found, name: str, form: str, factor: float) -> str:
    values = [m[name] for m in found.values]
    return mean_and_deviation([None if value is None else factor * value for value in values], form)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:g}"
