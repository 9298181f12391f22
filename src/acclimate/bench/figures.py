"""Figures of results, and pictures of images."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from ..data.scenes import CITYSCAPES
from .result import Result

__all__ = ["COLOURS", "STYLE", "along", "cost", "examples", "forgetting", "reliability", "scenes", "watched"]

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
}
# mid-tones, so that lines are readable on white and on a dark page
COLOURS = {
    "Source": "#8a8f98",
    "BNAdapt": "#4c78a8",
    "Tent": "#e07b39",
    "MEMO": "#72b7b2",
    "CoTTA": "#9d755d",
    "SAR": "#3d5fc4",
    "ROID": "#f28cb1",
    "RDumb": "#7a9a01",
    "TEA": "#8463c4",
    "DAT": "#17807e",
    "ETA": "#b279a2",
    "EATA": "#54a24b",
    "ETAC": "#cfa81e",
    "EATAC": "#d64550",
}

_MOST_NAMES = 36  # of domains along an axis
_NAMES = 0.9  # their height, in inches


def _colour(result: Result) -> str:
    """A method has the same colour in every figure."""
    return COLOURS.get(result.method, "#808080")


def _axes(height: float, results: Sequence[Result]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, max(height, _NAMES + _legend_height(results))), layout="constrained")
    return figure, figure.add_subplot()


def _legend_height(results: Sequence[Result]) -> float:
    """Return the height of a legend, in inches."""
    return 0.2 + 0.215 * len(results)


def _plot(axes: Axes, results: Sequence[Result], values: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    for result, line in zip(results, values, strict=True):
        shown = [100 * v for v in line]
        axes.plot(range(len(line)), shown, "o-", ms=4, lw=1.8, color=_colour(result), label=result.method)
    ticks = range(0, len(names), -(-len(names) // _MOST_NAMES))
    axes.set_xticks(ticks, [names[i].replace("_", " ") for i in ticks], rotation=40, ha="right")
    axes.set_ylabel(f"{results[0].score_name} (%)")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


@mpl.rc_context(STYLE)
def along(groups: Sequence[Sequence[Result]], name: Literal["score", "ece"] = "score") -> Figure:
    """Plot a number per domain, in the order of the stream; one panel per group of results.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", 0.5, 0.1, 64, 64, 0, 1.0, clean_accuracy=0.9)
    >>> result = Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog])
    >>> along([[result]]).axes[0].get_ylabel()
    'accuracy (%)'
    """
    heights = [max(2.6, _legend_height(results)) for results in groups]
    figure = Figure(figsize=(9, _NAMES + sum(heights)), layout="constrained")
    for axes, results in zip(figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0], groups, strict=True):
        lines = [[getattr(domain, name) for domain in result.domains] for result in results]
        _plot(axes, results, lines, [domain.name for domain in results[0].domains])
        label = results[0].score_name if name == "score" else "calibration error"
        axes.set_ylabel(f"{label} (%)")
        axes.set_title(f"{results[0].network}: {label} along the stream")
    return figure


@mpl.rc_context(STYLE)
def watched(panels: Sequence[tuple[str, Sequence[Result]]], columns: int = 2) -> Figure:
    """Plot accuracy along each stream, batch by batch: dashed without a guard, and what the guard has done."""
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * min(columns, len(panels)), 2.4 * lines + 0.5), layout="constrained")
    for place, (title, results) in enumerate(panels):
        axes = figure.add_subplot(lines, min(columns, len(panels)), place + 1)
        for result in results:
            guarded = result.health is not None
            style = "-" if guarded or result.method == "Source" else "--"
            values = _smooth([100 * value for value in result.along or ()])
            label = result.method + ", guarded" * guarded
            places = range(0, len(values), max(1, len(values) // 100))
            shown = [values[place] for place in places]
            axes.plot(places, shown, style, lw=1.6 if guarded else 1.2, color=_colour(result), label=label)
            for alarm in (result.health or {}).get("alarms", ()):
                shape = ".v"[alarm["action"] not in ("source", "blend", "skip")]
                if alarm["batch"] < len(values):
                    axes.plot(alarm["batch"], values[alarm["batch"]], shape, ms=7, color=_colour(result))
        axes.set(title=title, ylim=(0, 102), xlabel="batches" if place + columns >= len(panels) else "")
        axes.set_ylabel("accuracy (%)" if place % columns == 0 else "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and some before it."""
    width = max(5, len(values) // 16)
    return [sum(some := values[max(0, i - width + 1) : i + 1]) / len(some) for i in range(len(values))]


@mpl.rc_context(STYLE)
def cost(results: Sequence[Result]) -> Figure:
    """Plot accuracy, or mIoU, against passes per sample: up and to the left is better.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", 0.5, 0.1, 64, 64, 0, 1.0, clean_accuracy=0.9)
    >>> result = Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog])
    >>> cost([result]).axes[0].get_ylabel()
    'accuracy (%)'
    """
    figure, ax = _axes(3.6, results)
    for result in results:
        samples = sum(domain.images for domain in result.domains)
        passes = (result.forwards + (result.backward_passes() or 0)) / samples
        ax.scatter(passes, 100 * result.score, s=60, color=_colour(result), label=result.method, zorder=3)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda passes, _: f"{passes:,g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="forward and backward passes per sample", ylabel=f"{results[0].score_name} (%)")
    ax.set_title(f"Cost against {results[0].score_name}")
    _legend(ax)
    return figure


@mpl.rc_context(STYLE)
def forgetting(results: Sequence[Result]) -> Figure:
    """Plot the accuracy on clean images, probed before the stream and after each domain.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", 0.5, 0.1, 64, 64, 0, 1.0, clean_accuracy=0.9)
    >>> result = Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog])
    >>> forgetting([result]).axes[0].get_ylabel()
    'accuracy (%)'
    """
    figure, ax = _axes(3.4, results)
    lines = [[r.clean_before or 0.0, *(d.clean_accuracy or 0.0 for d in r.domains)] for r in results]
    _plot(ax, results, lines, ["before", *(d.name for d in results[0].domains)])
    ax.set_title("Clean images: what adaptation forgets")
    lowest = min(min(line) for line in lines)
    ax.set_ylim(max(0.0, 100 * lowest - 3), 100.5)
    return figure


@mpl.rc_context(STYLE)
def reliability(results: Sequence[Result], columns: int = 5) -> Figure:
    """Plot how often predictions of each confidence are right; a calibrated method lies on the diagonal.

    >>> from acclimate.bench.result import DomainResult, Result
    >>> fog = DomainResult("fog", 0.5, 0.1, 64, 64, 0, 1.0, clean_accuracy=0.9)
    >>> bins = {name: [0.0] * 14 + [value] for name, value in (("count", 8.0), ("confident", 7.6), ("correct", 6.0))}
    >>> result = Result("Source", "SmallResNet", "Source(…)", "lifelong", 0, domains=[fog], bins=bins)
    >>> len(reliability([result]).axes)
    1
    """
    columns = min(columns, len(results))
    lines = -(-len(results) // columns)
    figure = Figure(figsize=(1.9 * columns, 2.5 * lines), layout="constrained")
    for place, result in enumerate(results):
        ax = figure.add_subplot(lines, columns, place + 1)
        count, correct = (torch.tensor(result.bins[name]) for name in ("count", "correct"))
        width = 1 / len(count)
        centres = [width * (i + 0.5) for i in range(len(count))]
        share = (correct / count.clamp(min=1)).tolist()
        ax.bar(centres, share, width=0.92 * width, color=_colour(result), alpha=0.85)
        ax.plot([0, 1], [0, 1], "--", color="#808080", lw=1)
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.set_title(f"{result.method}\nECE {100 * result.ece:.1f}", fontsize=10)
        if place % columns == 0:
            ax.set_ylabel("accuracy")
        if place + columns >= len(results):
            ax.set_xlabel("confidence")
    return figure


@mpl.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False})
def examples(pictures: Sequence[tuple[str, Tensor]], gap: int = 2) -> Figure:
    """Show a few images of each domain, one row per domain; what is between and after them is transparent.

    >>> figure = examples([("clean", torch.rand(4, 1, 8, 8)), ("fog", torch.rand(4, 1, 8, 8))])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['clean', 'fog']
    """
    columns = max(len(images) for _, images in pictures)
    height = pictures[0][1].shape[-2] + gap
    rows = [_row(images, columns, gap) for _, images in pictures]
    figure = Figure(figsize=(1.2 + 0.55 * columns, 0.55 * len(pictures)), layout="constrained")
    ax = figure.add_subplot()
    ax.imshow(torch.cat(rows, 1).movedim(0, -1).cpu().numpy())
    ax.set_xticks([])
    middles = [height * (i + 0.5) for i in range(len(pictures))]
    ax.set_yticks(middles, [name.replace("_", " ") for name, _ in pictures])
    ax.tick_params(length=0)
    return figure


def _row(images: Tensor, columns: int, gap: int) -> Tensor:
    """Return images side by side as one RGBA image."""
    colours = images.clamp(0, 1).expand(-1, 3, -1, -1)
    opaque = torch.cat([colours, torch.ones_like(colours[:, :1])], 1)
    return F.pad(opaque, (0, gap, 0, gap, 0, 0, 0, columns - len(images))).movedim(0, 2).flatten(2, 3)


@mpl.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False})
def scenes(rows: Sequence[tuple[str, Sequence[tuple[str, Tensor]]]]) -> Figure:
    """Show street scenes: one row per domain, with images (3, H, W) and labels (H, W) in its columns."""
    columns = len(rows[0][1])
    height, width = rows[0][1][0][1].shape[-2:]
    high = 2.4 * height / width
    figure = Figure(figsize=(2.4 * columns, high * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for place, (line, (name, pictures)) in enumerate(zip(axes, rows, strict=True)):
        for ax, (title, picture) in zip(line, pictures, strict=True):
            ax.imshow((picture if picture.dim() == 3 else _coloured(picture)).movedim(0, -1).clamp(0, 1).cpu().numpy())
            ax.set(xticks=[], yticks=[])
            if place == 0:
                ax.set_title(title)
        line[0].set_ylabel(fill(name, max(4, int(9 * high))))  # letters per inch, with a margin
    return figure


def _coloured(labels: Tensor) -> Tensor:
    """One colour per class, Cityscapes' first; black where a pixel does not count."""
    colours = torch.zeros(256, 3)
    colours[: len(CITYSCAPES)] = torch.tensor([*CITYSCAPES.values()]) / 255
    spare = torch.arange(len(CITYSCAPES), 255)
    colours[spare] = torch.stack([spare * k % 97 / 96 for k in (31, 57, 83)], 1)
    return colours[labels.long().cpu()].movedim(-1, 0)
