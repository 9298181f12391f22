"""Results as one self-contained HTML page and one JSON file."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from ..files import write_text
from .result import Result

__all__ = ["Section", "columns", "markdown", "rows", "write_html", "write_json"]


def columns(results: Sequence[Result]) -> tuple[str, ...]:
    """The table's; a segmenter is told by its mIoU."""
    score = "acc %" if any(r.miou is None for r in results) else "mIoU %"
    return ("method", score, "ECE %", "forwards", "backwards", "clean before", "clean after", "seconds")


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The table, a row a method, in the order of `columns`."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    return [
        (
            r.method,
            percent(r.accuracy if r.miou is None else r.miou),
            percent(r.ece),
            f"{r.forwards:,}",
            f"{r.backwards:,}",
            percent(r.clean_before),
            percent(r.clean_after),
            f"{r.seconds:.1f}",
        )
        for r in results
    ]


def markdown(results: Sequence[Result]) -> str:
    """The table in Markdown."""
    head = columns(results)
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows(results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path, results: Sequence[Result], command: str) -> None:
    """Everything measured, with its origin and the command that measures it again. Whole or not at all."""
    text = json.dumps({"command": command, "results": [r.as_dict() for r in results]}, indent=1)
    write_text(path, text + "\n")


@dataclass(frozen=True)
class Section:
    """A part of the page: its results as a table, then figures with a caption each."""

    title: str
    results: Sequence[Result]
    figures: Sequence[tuple[str, Figure]]


def write_html(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """One page that needs no other file: tables, figures, and how the numbers came about."""
    results = [result for section in sections for result in section.results]
    calls = "".join(f"<li><code>{html.escape(r.call)}</code></li>\n" for r in results)
    origin = ", ".join(f"{key} {value}" for key, value in results[0].origin.items() if value and key != "model")
    page = Template(_PAGE).substitute(
        title=html.escape(title),
        lead=html.escape(lead),
        sections="".join(map(_html, sections)),
        calls=calls,
        origin=html.escape(origin),
    )
    write_text(path, page)


def _html(section: Section) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(section.results))
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows(section.results))
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    table = f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
    drawn = "".join(
        f"<figure>{_svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>\n"
        for caption, figure in section.figures
    )
    return f"<h2>{html.escape(section.title)}</h2>\n{table if section.results else ''}{drawn}"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  body { font: 16px/1.55 system-ui, sans-serif; color: #1c2330; background: #fff; max-width: 60rem; margin: 2.5rem auto;
         padding: 0 1.2rem; }
  h1 { font-size: 1.7rem; margin-bottom: .3rem; }
  .lead { color: #4a5568; margin-top: 0; }
  .table { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: .45rem .7rem; border-bottom: 1px solid #e3e7ee; white-space: nowrap; }
  th { color: #4a5568; font-weight: 600; border-bottom: 2px solid #c5cddb; }
  th:first-child, td:first-child { text-align: left; font-weight: 600; }
  figure { margin: 2rem 0; }
  figure svg { width: 100%; height: auto; }
  figcaption { color: #4a5568; font-size: .92rem; }
  code { font-size: .82rem; overflow-wrap: anywhere; }
  footer { color: #6b7688; font-size: .85rem; border-top: 1px solid #e3e7ee; margin-top: 2.5rem; padding-top: 1rem; }
</style>
<h1>$title</h1>
<p class="lead">$lead</p>
$sections
<h2>What ran</h2>
<ul>
$calls</ul>
<footer>$origin</footer>
</html>
"""
