"""What the command line shows: progress, tables, plans, and errors in a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..bench.result import Result
    from ..bench.run import Run

__all__ = ["EXPECTED", "console", "duration", "print_table", "progress_bars", "refuse", "repeatable", "show_plan"]

console = Console()

EXPECTED = (ValueError, TypeError, RuntimeError, AssertionError, ImportError, OSError)
"""What a wrong option, a missing folder or a broken file may raise: told in a line, without a traceback."""


def refuse(what: str, error: BaseException) -> NoReturn:
    """Say what is wrong, and stop."""
    console.print(f"[red bold]{what}:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    raise typer.Exit(2) from error


def repeatable(words: Sequence[str]) -> list[str]:
    """A command without `--out` and `--cache`, which say nothing of its results and may be paths of one's machine."""
    return [
        word
        for last, word in zip(["", *words], words, strict=False)
        if {"--out", "--cache"}.isdisjoint((last, word.partition("=")[0]))
    ]


def show_plan(job: Run) -> None:
    """What a run will do, and about how long each method takes."""
    plan = job.plan
    scenario = job.scenario(plan.seeds[0])
    console.print(f"[bold]network[/]   {job.network.name}, hyper-parameters of {job.family}")
    console.print(f"[bold]data[/]      {job.title}")
    console.print(f"[bold]scenario[/]  {scenario.name}: {len(scenario.domains)} domains, {len(scenario):,} batches")
    console.print(f"[bold]seeds[/]     {', '.join(map(str, plan.seeds))}")
    seconds = job.estimate()
    table = Table("method", "about", box=SIMPLE_HEAD, pad_edge=False)
    for method, needed in seconds.items():
        table.add_row(method, duration(needed))
    table.add_row("[bold]all", duration(sum(seconds.values())))
    console.print(table)


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def progress_bars() -> Progress:
    """A line a job, each with a note."""
    return Progress(
        TextColumn("[bold]{task.description:20}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:22}"),
        TimeRemainingColumn(),
        console=console,
    )


def print_table(title: str, results: list[Result]) -> None:
    """Results as people read them, a group a network."""
    from ..bench.report import columns, rows

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns(results):
        first = column == "method"
        table.add_column(column, justify="left" if first else "right", min_width=11 if first else None)
    for network in dict.fromkeys(result.network for result in results):
        table.add_row(f"[bold]{network}")
        for method, *numbers in rows([result for result in results if result.network == network]):
            table.add_row(f"  {method}", *numbers)
        table.add_section()
    console.print(table)
