"""A comparison as one self-contained HTML page, and what it shows besides the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..methods import METHODS
from ..parts.multiscale import resized
from . import figures, report
from .plan import Job
from .report import Section
from .result import Result
from .run import Run
from .tables import differences

__all__ = ["scene_pictures", "selection_pictures", "write_page"]

SHOWN = ("eata-c", "eta-c", "dat", "cotta", "eata", "eta", "tent")
SELECTING = ("eata", "eta", "eata-c", "eta-c", "rdumb", "sar", "roid")


def write_page(path: Path, results: Sequence[Result], run: Run | None = None) -> None:
    """Tables and figures of results; with their run, pictures of what was learned from and what was left out."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.model, []).append(result)
    sections = [_section(network, runs) for network, runs in groups.items()]
    if run is not None and run.task == "classification" and (pictures := selection_pictures(run)):
        method, kept, removed = pictures
        drawn = figures.examples([("learned from", kept), ("left out", removed)])
        caption = f"Images of one batch that {method} learned from, and images that it left out."
        sections.append(Section("What was learned from", [], [(caption, drawn)]))
    if run is not None and run.task == "segmentation":
        method, scenes = scene_pictures(run)
        caption = f"A scene of each domain: what the source network sees in it, and {method}, a few scenes into it."
        sections.append(Section("Scenes", [], [(caption, figures.scenes(scenes))]))
    protocol = results[0].protocol
    lead = f"{protocol['data'].partition(':')[0]}, {protocol['scenario']}, severity {protocol['severity']}."
    if told := differences(results):
        lead += f" NOT COMPARABLE: {'; '.join(told)}."
    report.write_html(path, "acclimate: methods compared", lead, sections)


def _section(network: str, runs: Sequence[Result]) -> Section:
    first = [run for run in runs if run.seed == runs[0].seed]
    name = first[0].score_name
    told = "Accuracy" if name == "accuracy" else name
    drawn = [
        (f"{told} along the stream.", figures.along(first, "score")),
        ("Expected calibration error along the stream.", figures.along(first, "ece")),
        (
            "How often predictions of each confidence are right. On the dashed line confidence means what it says.",
            figures.reliability(first),
        ),
        (f"Cost against {name}: forward and backward passes a sample.", figures.cost(first)),
    ]
    if all(run.clean_before is not None for run in first):
        drawn.append((f"{told} on clean images, probed after each domain.", figures.forgetting(first)))
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


def scene_pictures(run: Run, batches: int = 4) -> tuple[str, list[tuple[str, list[tuple[str, Tensor]]]]]:
    """The method that is shown, and for each condition the last of a few scenes: image, predictions, label."""
    method = next((name for name in SHOWN if name in run.plan.methods), run.plan.methods[-1])
    job = Job(method, run.plan.seeds[0])
    domains = [d for d in run.scenario(job.seed).domains if getattr(d, "round", 1) == 1]
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


def _padded(images: Tensor, count: int) -> Tensor:
    return torch.cat([images, images.new_ones(count - len(images), *images.shape[1:])])
