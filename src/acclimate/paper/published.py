"""The paper's own numbers, to show beside ours where the setting is the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean
from typing import Any

from ..bench.result import Result
from ..bench.tables import Table

__all__ = [
    "PaperRow",
    "compare_averages",
    "compare_source",
    "legend",
    "notes_beside",
    "paper_notes",
    "paper_rows",
    "paper_table_of",
    "rows_for",
    "with_paper",
]

_NETWORKS = {
    "resnet50": "resnet50",
    "vit_base_patch16": "vit-base",
    "vit_b_16": "vit-base",
    "segformer-b5": "segformer-b5",
}
"""The paper's networks, by a part of their names in plans."""

_COLUMNS = {"ResNet-50 ": "resnet ", "ViT-Base ": "vit "}
"""The paper's networks and ours in the heads of tables."""

APART = 2.0
"""Points by which the accuracy of two source networks may differ, if their results are to be compared."""


@dataclass(frozen=True)
class PaperRow:
    """A method's line in one of the paper's tables, in per cent."""

    data: str
    scenario: str
    severity: int | None
    network: str
    method: str
    note: str
    """A mark where the paper ran it under another scenario, or where a table has a slip: see `paper_notes`."""
    accuracy: Sequence[float]
    """Per domain; on ACDC mIoU. `average` is over all ten rounds there, also if the row has four of them."""
    ece: Sequence[float]
    average: Sequence[float]
    forwards: int | None
    backwards: int | None


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("acclimate.paper") / "published.json").read_text(encoding="utf-8"))
    return content


def paper_rows() -> list[PaperRow]:
    """Return every line: ImageNet-C at severity 5, lifelong and single-domain, ImageNet-R, and ACDC.

    ACDC has two lines per method: rounds 1, 4, 7 and 10 of Table 4, and all ten of the supplement's Table B.
    """
    return [PaperRow(**row) for row in _content()["rows"]]


def paper_notes() -> dict[str, str]:
    """Return the meaning of each mark."""
    notes: dict[str, str] = _content()["notes"]
    return notes


def legend(cells: Iterable[str]) -> str:
    """Explain the marks at the end of cells in a line of Markdown; stars are escaped, a leading one starts a list."""
    ends = {cell.rstrip(")")[-1:] for cell in cells}
    notes = [f"{mark} {note}".replace("*", "\\*") for mark, note in paper_notes().items() if mark in ends]
    return f"{'; '.join(notes)}." if notes else ""


def paper_table_of(recipe: str) -> Table | None:
    """Return the paper's table for a recipe that does not compare methods by domain."""
    found = _content()["tables"].get(recipe)
    return None if found is None else (found["header"], found["rows"])


def notes_beside(recipe: str, ours: Table) -> str:
    """Return what to know about that table, and a warning if our source network is not the paper's."""
    content = _content()["tables"][recipe]
    paper = (
        _numbers(_ours(content["source"])) if "source" in content else _sources((content["header"], content["rows"]))
    )
    return "\n\n".join(filter(None, (content.get("note", ""), _compare(_sources(ours), paper))))


def rows_for(result: Result) -> list[PaperRow]:
    """Return the lines with a result's setting: data, scenario, severity, all images, and network."""
    protocol, model = result.protocol, result.model.lower()
    if (
        result.skipped
        or protocol["images"] is not None
        or protocol["shifts"] is not None
        or protocol.get("rounds") not in (None, 10)
    ):
        return []
    network = next((known for part, known in _NETWORKS.items() if part in model), "")
    data = protocol["data"].partition(":")[0]
    return [
        row
        for row in paper_rows()
        if (row.data, row.network) == (data, network)
        and row.severity in (None, protocol["severity"])
        and (row.scenario == protocol["scenario"] or row.data == "imagenet-r")
    ]


def with_paper(rows: Sequence[list[str]], results: Sequence[Result]) -> list[list[str]]:
    """Insert the paper's rows, marked as such, after each method's rows, if the results have one of its settings."""
    domains = len(rows[0]) - len(["Method", "", "Avg.", "#Forwards", "#Backwards"])
    models = {result.model: result for result in results}
    known = {
        row.method + (f", {model}" if len(models) > 1 else ""): row
        for model, result in models.items()
        for row in rows_for(result)
        if len(row.accuracy) == domains
    }
    out: list[list[str]] = []
    method = score = ""
    for row in rows:
        method, score = row[0] or method, score if row[1] == "ECE" else row[1]
        out.append(list(row))
        line = known.get(method)
        if row[1] == "ECE" and line is not None:
            passes = ["" if n is None else f"{n:,}" for n in (line.forwards, line.backwards)]
            accuracy = [*(f"{v:.1f}" for v in line.accuracy), f"{line.average[0]:.2f}"]
            out.append([f"{method} (paper{line.note})", score, *accuracy, *passes])
            if line.ece:
                out.append(["", "ECE", *(f"{v:.1f}" for v in line.ece), f"{line.average[1]:.2f}", "", ""])
    return out


def compare_source(results: Sequence[Result]) -> str:
    """Return a warning if a source network's scores are not the paper's, which stand beside them; or ""."""
    models: dict[str, list[Result]] = {}
    for result in results:
        models.setdefault(result.model, []).append(result)
    found = [_compare_model(own) for own in models.values()]
    return "\n\n".join(filter(None, found))


def _compare_model(results: Sequence[Result]) -> str:
    lines = [row for row in rows_for(results[0]) if row.method == "Source"]
    if not lines:
        return ""
    by_name: dict[str, list[float]] = {}
    for result in (result for result in results if result.method == "Source"):
        for domain in result.domains:
            by_name.setdefault(domain.name, []).append(100 * domain.score)
    ours = {name: mean(scores) for name, scores in by_name.items()}
    line = next((row for row in lines if len(row.accuracy) == len(ours)), lines[0])
    paper = dict(zip(ours, line.accuracy, strict=True)) if len(line.accuracy) == len(ours) else {}
    average = {"average": mean(ours.values())} if ours else {}
    return _compare({**average, **ours}, {"average": line.average[0], **paper})


def compare_averages(results: Sequence[Result], row: PaperRow) -> str:
    """Return a warning if the average of a source network's results is not that of a row of the paper; or ""."""
    ours = {"average": mean(100 * result.score for result in results)} if results else {}
    return _compare(ours, {"average": row.average[0]})


def _sources(table: Table) -> dict[str, float]:
    """Return the source network's accuracies in a table by the heads of their columns."""
    header, rows = table
    if header[1:2] == ["Source"]:  # methods are columns
        return _numbers({rows[0][0]: rows[0][1]})
    found: dict[str, str] = {}
    for row in (row for row in rows if row[0] == "Source"):
        found |= {head: cell for head, cell in zip(header, row, strict=True) if head.endswith("Acc.")}
    return _numbers(_ours(found))


def _ours(cells: Mapping[str, str]) -> dict[str, str]:
    """Return cells with our names of the networks in their heads."""
    for theirs, name in _COLUMNS.items():
        cells = {head.replace(theirs, name): cell for head, cell in cells.items()}
    return dict(cells)


def _numbers(cells: Mapping[str, str]) -> dict[str, float]:
    """Return the cells that are numbers, perhaps with a deviation."""
    plain = {head: cell.partition(" ± ")[0] for head, cell in cells.items()}
    return {head: float(cell) for head, cell in plain.items() if cell.replace(".", "").isdigit()}


def _compare(ours: Mapping[str, float], paper: Mapping[str, float]) -> str:
    """Name the two numbers that are furthest apart, if that is too far; and say so if there is nothing to compare."""
    if not paper:
        return ""
    if not ours:
        return "There is no row Source: measure it to see whether the network and the data are the paper's."
    apart = {name: abs(ours[name] - paper[name]) for name in ours if name in paper}
    if not apart or max(apart.values()) <= APART:
        return ""
    shown = dict.fromkeys([*(["average"] if "average" in apart else []), max(apart, key=apart.__getitem__)])
    values = "; ".join(f"{name.replace('_', ' ')}: {ours[name]:.1f}, in the paper {paper[name]:.1f}" for name in shown)
    return (
        f"Warning: the source network's accuracy differs from the paper's ({values}). The network, its normalisation "
        "or the data is not the paper's, so do not compare the other rows."
    )
