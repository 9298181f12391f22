"""A comparison as one self-contained HTML page, and what it shows besides the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import figures, report
from .evaluate import Result
from .experiment import Run
from .plan import Job
from .report import Section
from .results import Stored
from .tables import differences

__all__ = ["selection_pictures", "write_page"]

SELECTING = ("eata", "eta", "eata-c", "eta-c", "rdumb", "sar", "roid")


def write_page(path: Path, results: Sequence[Stored], run: Run | None = None) -> None:
    """Tables and figures of results; with their run, pictures of what was learned from and what was left out."""
    groups: dict[str, list[Result]] = {}
    for stored in results:
        groups.setdefault(str(stored.content["model"]), []).append(stored.result)
    sections = [_section(network, runs) for network, runs in groups.items()]
    if run is not None and (pictures := selection_pictures(run)):
        method, kept, removed = pictures
        drawn = figures.examples([("learned from", kept), ("left out", removed)])
        caption = f"Images of one batch that {method} learned from, and images that it left out."
        sections.append(Section("What was learned from", [], [(caption, drawn)]))
    protocol = results[0].content["protocol"]
    lead = f"{protocol['data'].partition(':')[0]}, {protocol['scenario']}, severity {protocol['severity']}."
    if told := differences(results):
        lead += f" NOT COMPARABLE: {'; '.join(told)}."
    report.write_html(path, "acclimate: methods compared", lead, sections)


def _section(network: str, runs: Sequence[Result]) -> Section:
    first = [run for run in runs if run.seed == runs[0].seed]
    drawn = [
        ("Accuracy along the stream.", figures.along(first, "accuracy")),
        ("Expected calibration error along the stream.", figures.along(first, "ece")),
        (
            "How often predictions of each confidence are right. On the dashed line confidence means what it says.",
            figures.reliability(first),
        ),
        ("Cost against accuracy: forward and backward passes a sample.", figures.cost(first)),
    ]
    if all(run.clean_before is not None for run in first):
        drawn.append(("Accuracy on clean images, probed after each domain.", figures.forgetting(first)))
    return Section(network, runs, drawn)


def selection_pictures(run: Run, batches: int = 4, most: int = 10) -> tuple[str, Tensor, Tensor] | None:
    """Images of a batch early in the stream that a selecting method kept, and that it did not."""
    method = next((name for name in SELECTING if name in run.plan.methods), None)
    if method is None:
        return None
    job = Job(method, run.plan.seeds[0])
    adapter = run.adapter(job)
    found: tuple[str, Tensor, Tensor] | None = None
    try:
        for _, (x, _) in zip(range(batches), run.scenario(job.seed).domains[0].on(run.plan.device), strict=False):
            adapter(x)
            keep = adapter.last.kept
            if keep is None or keep.dim() > 1:
                return None
            kept, removed = x[keep][:most].cpu(), x[~keep][:most].cpu()
            if len(kept) and len(removed):
                found = (type(adapter).__name__, _padded(kept, most), _padded(removed, most))
    finally:
        adapter.reset()
    return found


def _padded(images: Tensor, count: int) -> Tensor:
    return torch.cat([images, images.new_ones(count - len(images), *images.shape[1:])])
