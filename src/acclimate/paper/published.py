"""The paper's own numbers, to stand beside ours where the setting is the same."""

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
    """Of each domain; on ACDC mIoU in the first, fourth, seventh and tenth round, where `average` is over all ten."""
    ece: Sequence[float]
    average: Sequence[float]
    forwards: int | None
    backwards: int | None


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("acclimate.paper") / "published.json").read_text(encoding="utf-8"))
    return content


def paper_rows() -> list[PaperRow]:
    """Every line: ImageNet-C at severity 5, lifelong and single-domain, and ImageNet-R, of ResNet-50 and ViT-Base;
    ten rounds of ACDC, of SegFormer-B5 (from the main table: the supplement's repeats Tent's numbers under CoTTA)."""
    return [PaperRow(**row) for row in _content()["rows"]]


def paper_notes() -> dict[str, str]:
    """What the marks mean."""
    notes: dict[str, str] = _content()["notes"]
    return notes


def legend(cells: Iterable[str]) -> str:
    """What the marks that cells end with mean, as a line of Markdown, where a star alone would begin a list."""
    ends = {cell.rstrip(")")[-1:] for cell in cells}
    told = [f"{mark} {note}".replace("*", "\\*") for mark, note in paper_notes().items() if mark in ends]
    return f"{'; '.join(told)}." if told else ""


def paper_table_of(recipe: str) -> tuple[list[str], list[list[str]]] | None:
    """The paper's own table for a recipe whose rows are not methods by domains."""
    found = _content()["tables"].get(recipe)
    return None if found is None else (found["header"], found["rows"])


def rows_for(result: Result) -> list[PaperRow]:
    """The lines whose setting a result has: data, scenario, severity, all images, and the network."""
    protocol, model = result.protocol, result.model.lower()
    network = next((known for part, known in _NETWORKS.items() if part in model), "")
    data = protocol["data"].partition(":")[0]
    if protocol["images"] is not None or protocol["shifts"] is not None or protocol.get("rounds") not in (None, 10):
        return []
    return [
        row
        for row in paper_rows()
        if (row.data, row.network) == (data, network)
        and row.severity in (None, protocol["severity"])
        and (row.scenario == protocol["scenario"] or row.data == "imagenet-r")
    ]


def with_paper(rows: Sequence[list[str]], results: Sequence[Result]) -> list[list[str]]:
    """Each method's rows of a `paper_table`, followed by the paper's where all results have a setting of the paper."""
    known = {row.method: row for row in rows_for(results[0])}
    out: list[list[str]] = []
    method = score = ""
    for row in rows:
        method, score = row[0] or method, score if row[1] == "ECE" else row[1]
        out.append(list(row))
        line = known.get(method)
        if row[1] == "ECE" and line is not None:
            cells = [f"{method} (paper{line.note})", score, *(f"{v:.1f}" for v in line.accuracy)]
            passes = ["" if n is None else f"{n:,}" for n in (line.forwards, line.backwards)]
            out.append([*cells, f"{line.average[0]:.2f}", *passes])
            if line.ece:
                out.append(["", "ECE", *(f"{v:.1f}" for v in line.ece), f"{line.average[1]:.2f}", "", ""])
    return out
