"""The paper's own numbers, to show beside ours where the setting is the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..bench.result import Result

__all__ = ["PaperRow", "legend", "paper_notes", "paper_rows", "paper_table_of", "rows_for", "with_paper"]

_NETWORKS = {
    "resnet50": "resnet50",
    "vit_base_patch16": "vit-base",
    "vit_b_16": "vit-base",
    "segformer-b5": "segformer-b5",
}
"""The paper's networks, by a part of their names in plans."""


@dataclass(frozen=True)
class PaperRow:
    """A method's line in one of the paper's tables, in per cent."""

    data: str
    scenario: str
    severity: int | None
    network: str
    method: str
    note: str
    """`†` or `*` where the paper ran it under another scenario: see `paper_notes`."""
    accuracy: Sequence[float]
    """Per domain; on ACDC mIoU in rounds 1, 4, 7 and 10, while `average` is over all ten."""
    ece: Sequence[float]
    average: Sequence[float]
    forwards: int | None
    backwards: int | None


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("acclimate.paper") / "published.json").read_text(encoding="utf-8"))
    return content


def paper_rows() -> list[PaperRow]:
    """Return every line: ImageNet-C at severity 5, lifelong and single-domain, ImageNet-R, and ten rounds of ACDC.

    ACDC is from the main table: the supplement repeats Tent's numbers under CoTTA.
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


def paper_table_of(recipe: str) -> tuple[list[str], list[list[str]]] | None:
    """Return the paper's table for a recipe that does not compare methods by domain."""
    found = _content()["tables"].get(recipe)
    return None if found is None else (found["header"], found["rows"])


def rows_for(result: Result) -> list[PaperRow]:
    """Return the lines with a result's setting: data, scenario, severity, all images, and network."""
    protocol, model = result.protocol, result.model.lower()
    if protocol["images"] is not None or protocol["shifts"] is not None or protocol.get("rounds") not in (None, 10):
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
    known = {row.method: row for row in rows_for(results[0])}
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
