"""The report: order, best values, and figures that fit on any page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from acclimate import METHODS
from acclimate.bench import figures
from acclimate.bench.report import write_report
from acclimate.bench.result import DomainResult, Result
from acclimate.bench.tables import as_html, as_markdown, best_cells, summary_table

NAMES = [method.__name__ for method in METHODS.values()]


def result(method: str, accuracy: float = 0.5, *, seed: int = 0, domains: int = 3, passes: int = 1) -> Result:
    each = [
        DomainResult(f"gaussian_noise {i}", accuracy, 0.2, 10, 10 * passes, 0, 1.0, clean_accuracy=0.9)
        for i in range(domains)
    ]
    protocol = {"data": "digits", "scenario": "lifelong", "severity": 5}
    return Result(method, "Net", f"{method}(Net)", "lifelong", seed, "net", 0.9, each, protocol=protocol)


def test_methods_are_in_table_order_everywhere(tmp_path: Path) -> None:
    shuffled = [result(name) for name in ("EATAC", "Tent", "Source", "EATA")]
    page = tmp_path / "page.html"
    write_report(page, shuffled)
    text = page.read_text()
    ordered = ["Source", "Tent", "EATA", "EATAC"]
    assert re.findall(r"<tr><td>(\w+)", text) == ordered
    assert re.findall(r"<code>(\w+)", text) == ordered
    assert re.findall(rf"<!-- ({'|'.join(ordered)}) -->", text)[:4] == ordered, "in the first legend"


def test_seeds_are_one_row() -> None:
    results = [result("EATA", 0.6, seed=1), result("EATA", 0.5), result("Source", 0.4)]
    assert [row[:2] for row in summary_table(results)[1]] == [["Source", "40.0"], ["EATA", "55.0 ± 7.1"]]


def test_the_best_value_of_a_column_is_marked() -> None:
    header = ["method", "acc %", "ECE %", "backwards", "clean before", "clean after", "seconds"]
    rows = [
        ["Source", "40.0", "9.5", "0", "99.0", "–", "1.0"],
        ["Tent", "61.2 ± 0.3", "12.0", "10", "98.0", "97.0", "2.0"],
        ["EATA", "61.2", "9.5", "5", "99.0", "97.0", "2.0"],
    ]
    assert best_cells(header, rows) == {(1, 1), (2, 1), (0, 2), (2, 2)}, "ties are shared; equal columns have no best"
    assert best_cells(header, rows[:1]) == set()
    assert "<td><strong>61.2</strong></td><td>9.5</td>" in as_html(header, rows, {(2, 1)})


def test_the_page_has_a_dark_mode_and_figures_follow_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(page, [result("Source"), result("EATA", passes=2)])
    text = page.read_text()
    assert "prefers-color-scheme: dark" in text
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert "currentColor" in figure
        assert not re.search(r"#000000|fill: #f{6}", figure)


@pytest.mark.parametrize("name", NAMES)
def test_colours_are_readable_on_white_and_on_dark(name: str) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    own, dark = (luminance(colour) + 0.05 for colour in (figures.COLOURS[name], "#14181f"))
    assert min(1.05 / own, own / dark) > 2.1


def cut(figure: Figure) -> list[str]:
    """Return the texts of titles, axis labels, domain names and legends that reach beyond the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = []
    for axes in figure.axes:
        texts += [axes.yaxis.label, axes.xaxis.label, axes.title, *axes.get_xticklabels()]
        texts += legend.get_texts() if (legend := axes.get_legend()) else []
    width, height = canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    return [text for text, box in boxes if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1]


@pytest.mark.parametrize("domains", [1, 15, 150])
@pytest.mark.parametrize("methods", [1, len(NAMES)])
def test_no_label_of_a_curve_is_cut(methods: int, domains: int) -> None:
    results = [result(name, domains=domains) for name in NAMES[:methods]]
    for figure in (figures.along([results, results]), figures.forgetting(results), figures.reliability(results)):
        assert cut(figure) == []
        assert all(len(axes.get_xticks()) <= 40 for axes in figure.axes), "names do not overlap"


@pytest.mark.parametrize("size", [(8, 16), (6, 16)])
def test_no_name_of_a_scene_is_cut(size: tuple[int, int]) -> None:
    pictures = [("image", torch.rand(3, *size)), ("label", torch.zeros(size, dtype=torch.long))]
    assert cut(figures.scenes([("foggy night with heavy rain", pictures)] * 3)) == []


def test_costs_have_plain_numbers() -> None:
    figure = figures.cost([result("Source"), result("Tent", passes=2), result("MEMO", passes=1000)])
    FigureCanvasAgg(figure).draw()
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels(which="both")]
    assert {"1", "2", "1,000"} <= {*shown}
    assert not any("10^" in label or "times" in label for label in shown)
    assert figure.axes[0].xaxis.get_minorticklabels() == []


def test_rows_of_pictures_may_differ_in_length() -> None:
    shown = figures.examples([("kept", torch.rand(3, 1, 8, 8)), ("left out", torch.rand(2, 1, 8, 8))])
    (image,) = shown.axes[0].images
    pixels = image.get_array()
    assert pixels[4, 4, 3] == 1
    assert pixels[14, 24, 3] == 0, "there is nothing after the last picture"


def test_a_table_without_rows_has_all_its_columns() -> None:
    header, rule = as_markdown(["method", "acc %", "ECE"], []).splitlines()
    assert header.count("|") == rule.count("|") == 4
