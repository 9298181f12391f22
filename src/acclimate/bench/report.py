"""Results as one HTML page that needs no other file: tables, figures, pictures, and how the numbers were measured."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import Template

from matplotlib.figure import Figure
from torch import Tensor

from ..files import AnyPath, write_text
from ..methods import METHODS
from ..parts.multiscale import resized
from . import figures
from .plan import Job
from .result import Result
from .run import Run
from .tables import as_html, best_cells, differences, in_table_order, summary_table

__all__ = ["scene_pictures", "selection_pictures", "write_demo", "write_report"]

SHOWN = ("eata-c", "eta-c", "dat", "cotta", "eata", "eta", "tent")
SELECTING = ("eata", "eta", "eata-c", "eta-c", "rdumb", "sar", "roid")


@dataclass(frozen=True)
class Section:
    """A part of the page: a table of results, then figures, each with a caption."""

    title: str
    results: Sequence[Result]
    figures: Sequence[tuple[str, Figure]]


def write_report(path: AnyPath, results: Sequence[Result], run: Run | None = None) -> None:
    """Write a page of any results; with their run, also pictures of samples that were and were not learned from."""
    sections = [_compared(model, own) for model, own in _by_model(results).items()]
    if run is not None and run.task == "classification" and (pictures := selection_pictures(run)):
        method, kept, removed = pictures
        caption = f"Images of one batch that {method} learned from, and images that it left out."
        shown = figures.examples([("learned from", kept), ("left out", removed)])
        sections.append(Section("What was learned from", [], [(caption, shown)]))
    if run is not None and run.task == "segmentation":
        method, scenes = scene_pictures(run)
        caption = f"One scene per domain: the prediction of the source network, and of {method} after a few scenes."
        sections.append(Section("Scenes", [], [(caption, figures.scenes(scenes))]))
    protocol = results[0].protocol
    lead = f"{protocol['data'].partition(':')[0]}, {protocol['scenario']}, severity {protocol['severity']}."
    if different := differences(results):
        lead += f" NOT COMPARABLE: {'; '.join(different)}."
    _write(path, "acclimate: methods compared", lead, sections)


def write_demo(out: Path, results: Sequence[Result], run: Run, command: str) -> Path:
    """Write the demo's numbers as JSON, a figure, and a page with pictures of the stream; return the page's path."""
    content = {"command": command, "results": [result.as_dict() for result in results]}
    write_text(out / "results.json", json.dumps(content, indent=1) + "\n")
    groups = _by_model(results)
    figures.along([*groups.values()]).savefig(out / "accuracy.png", dpi=150)
    titles = {"digits-resnet": "A small ResNet: BatchNorm", "digits-vit": "A small ViT: LayerNorm"}
    domains = run.scenario(run.plan.seeds[0]).domains
    pictures = figures.examples([(domain.name, next(iter(domain.on("cpu")))[0][:8]) for domain in domains])
    seen = Section("What the networks see", [], [("Eight digits of each corruption.", pictures)])
    lead = (
        f"Small networks, trained only on clean digits, see {len(domains)} corruptions one after another at severity "
        f"{run.plan.severity}, {results[0].domains[0].images:,} digits each, and are never reset. Each method "
        "predicts a batch, then learns from it, without labels."
    )
    page = out / "report.html"
    sections = [_compared(titles[model], own) for model, own in groups.items()]
    _write(page, "acclimate: small networks on corrupted digits", lead, [*sections, seen])
    return page


def _by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each network, in table order."""
    groups: dict[str, list[Result]] = {result.model: [] for result in results}
    for result in in_table_order(results):
        groups[result.model].append(result)
    return groups


def _compared(title: str, results: Sequence[Result]) -> Section:
    first = [result for result in results if result.seed == results[0].seed]
    score = first[0].score_name
    name = "Accuracy" if score == "accuracy" else score
    shown = [
        (f"{name} on each domain, in the order of the stream.", figures.along([first])),
        ("Expected calibration error on each domain.", figures.along([first], "ece")),
        (
            "How often predictions of each confidence are right. A calibrated method follows the dashed line; bars "
            "below it show overconfidence.",
            figures.reliability(first),
        ),
        (f"Cost against {score}: forward and backward passes per sample.", figures.cost(first)),
    ]
    if any(result.health is not None for result in first):
        caption = (
            "Accuracy along the stream. A point: the source network answers; a triangle: what was learned is undone."
        )
        shown.insert(0, (caption, figures.watched([(title, first)], columns=1)))
    if all(result.clean_before is not None for result in first):
        shown.append((f"{name} on clean images, before the stream and after each domain.", figures.forgetting(first)))
    return Section(title, results, shown)


def selection_pictures(run: Run, batches: int = 4, most: int = 10) -> tuple[str, Tensor, Tensor] | None:
    """Return images early in the stream that a selecting method kept, and images that it removed."""
    method = next((name for name in SELECTING if name in run.plan.methods), None)
    if method is None:
        return None
    job = Job(method, run.plan.seeds[0])
    adapter = run.adapter(job)
    found: tuple[str, Tensor, Tensor] | None = None
    try:
        for x, _ in islice(run.scenario(job.seed).domains[0].on(run.plan.device), batches):
            adapter(x)
            keep = adapter.last.kept
            if keep is None or keep.dim() > 1:
                return None
            kept, removed = x[keep][:most].cpu(), x[~keep][:most].cpu()
            if len(kept) and len(removed):
                found = (type(adapter).__name__, kept, removed)
    finally:
        adapter.reset()
    return found


def scene_pictures(run: Run, batches: int = 4) -> tuple[str, list[tuple[str, list[tuple[str, Tensor]]]]]:
    """Return the method shown, and for each condition the last of a few scenes: image, predictions, label."""
    method = next((name for name in SHOWN if name in run.plan.methods), run.plan.methods[-1])
    job = Job(method, run.plan.seeds[0])
    domains = [domain for domain in run.scenario(job.seed).domains if domain.round == 1]
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    for each, title in ((Job("source", job.seed), "source"), (job, method)):
        adapter = run.adapter(each)
        try:
            for domain in domains:
                adapter.new_domain()
                few = [*islice(domain.on(run.plan.device), batches)]
                predictions = [adapter(x) for x, _ in few]
                x, label = few[-1][0], few[-1][1][0]
                predicted = resized(predictions[-1], label).argmax(1)[0]
                name = domain.name.removesuffix(", round 1")
                seen.setdefault(name, [("image", x[0].cpu()), ("label", label)]).insert(-1, (title, predicted.cpu()))
        finally:
            adapter.reset()
    return METHODS[method].__name__, [*seen.items()]


def _write(path: AnyPath, title: str, lead: str, sections: Sequence[Section]) -> None:
    results = [result for section in sections for result in section.results]
    origin = ", ".join(f"{key} {value}" for key, value in results[0].origin.items() if value)
    page = Template(_PAGE).substitute(
        title=html.escape(title),
        lead=html.escape(lead),
        sections="".join(map(_section, sections)),
        calls="".join(f"<li><code>{html.escape(result.call)}</code></li>\n" for result in results),
        origin=html.escape(origin),
    )
    write_text(path, page)


def _section(section: Section) -> str:
    shown = "".join(
        f'<figure><div class="wide">{_svg(figure)}</div><figcaption>{html.escape(caption)}</figcaption></figure>\n'
        for caption, figure in section.figures
    )
    return f"<h2>{html.escape(section.title)}</h2>\n{_table(section.results)}{shown}"


def _table(results: Sequence[Result]) -> str:
    if not results:
        return ""
    header, rows = summary_table(results)
    best = best_cells(header, rows)
    legend = '<p class="note">Bold: the best value of a column, or all that tie.</p>\n' if best else ""
    return f'<div class="wide">{as_html(header, rows, best)}</div>\n{legend}'


def _svg(figure: Figure) -> str:
    """Return a figure that takes the page's colours: transparent, and what is black has the colour of the text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; --text: #1c2330; --soft: #4a5568; --rule: #e3e7ee; --page: #fff; }
  @media (prefers-color-scheme: dark) {
    :root { --text: #e4e8ef; --soft: #a3adbd; --rule: #333c4a; --page: #14181f; }
  }
  body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 60rem;
         margin: 2.5rem auto; padding: 0 1.2rem; }
  h1 { font-size: 1.7rem; margin-bottom: .3rem; }
  .lead { color: var(--soft); margin-top: 0; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; margin: 1.5rem 0 .5rem; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: .45rem .7rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
  th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
  th:first-child, td:first-child { text-align: left; }
  figure { margin: 2rem 0; }
  figure svg { max-width: max(100%, 36rem); height: auto; fill: currentColor; }
  figcaption, .note { color: var(--soft); font-size: .92rem; }
  .note { margin-top: 0; }
  code { font-size: .82rem; overflow-wrap: anywhere; }
  footer { color: var(--soft); font-size: .85rem; border-top: 1px solid var(--rule); margin-top: 2.5rem;
           padding-top: 1rem; }
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
