"""What the command line shows: progress, tables, plans, and errors in one line.

Results go to stdout. Progress, hints, warnings and errors go to stderr, so that a redirected table is clean.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..bench import estimate
from ..bench.result import Result
from ..bench.run import Run
from ..bench.tables import summary_table
from ..bench.tune import Trial

console = Console()
messages = Console(stderr=True)

EXPECTED = (ValueError, TypeError, RuntimeError, AssertionError, ImportError, OSError)
"""What a wrong option, a missing folder or a broken file may raise. It is printed without a traceback."""


def say(text: str) -> None:
    """Print a message that the console neither wraps nor colours."""
    messages.print(text, soft_wrap=True, highlight=False)


def only_first_prints() -> None:
    """Let the ranks of a run other than the first print errors only."""
    if os.environ.get("RANK", "0") != "0":
        console.quiet = messages.quiet = True
        warnings.simplefilter("ignore")


@contextmanager
def one_line_errors(what: str, stopped: str = "") -> Iterator[None]:
    """Print an expected error in one line, and exit. After Ctrl-C, say how to continue."""
    try:
        yield
    except EXPECTED as error:
        messages.quiet = False
        say(f"[red bold]{what}:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        say(f"[bold]stopped[/]{stopped and ': '}{escape(stopped)}")
        raise typer.Exit(130) from error


RESUMES = "the same command continues after the last finished domain"
"""What to do after Ctrl-C."""


def repeatable(words: Sequence[str]) -> list[str]:
    """Return a command without options that do not change its results and may be private: paths, and a cluster."""
    private = {"--out", "--cache", "--work", "--on", "--cpus-per-run", "--gpus-per-run"}
    return [
        word
        for last, word in zip(["", *words], words, strict=False)
        if private.isdisjoint((last, word.partition("=")[0]))
    ]


def show_plan(run: Run, *, timed: bool = True) -> None:
    """Print what a run will do; and about how long each method takes, if it runs on this machine."""
    plan = run.plan
    scenario = run.scenario(plan.seeds[0])
    console.print(f"[bold]network[/]   {run.network.name}, hyper-parameters of {run.family}")
    console.print(f"[bold]data[/]      {run.title}")
    console.print(f"[bold]scenario[/]  {scenario.name}: {len(scenario.domains)} domains, {len(scenario):,} batches")
    console.print(f"[bold]seeds[/]     {', '.join(map(str, plan.seeds))}")
    if not timed:
        return
    seconds = estimate.seconds(run, estimate.speed(run))
    table = Table("method", "about", box=SIMPLE_HEAD, pad_edge=False)
    for method, needed in seconds.items():
        table.add_row(method, duration(needed))
    table.add_row("[bold]all", duration(sum(seconds.values())))
    console.print(table)


def duration(seconds: float) -> str:
    """Format seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def progress_bars() -> Progress:
    """Return progress bars with a note each."""
    return Progress(
        TextColumn("[bold]{task.description:20}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:22}"),
        TimeRemainingColumn(),
        console=messages,
    )


def print_trials(trials: Sequence[Trial], chosen: Sequence[Trial], forget: float) -> None:
    """Print all trials, with an arrow at the chosen ones."""
    table = Table("", "method", "settings", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("accuracy", "ECE", "forgotten"):
        table.add_column(name, justify="right")
    for trial in sorted(trials, key=lambda trial: trial.method):
        settings = ", ".join(f"{name}={value:g}" for name, value in trial.settings.items())
        numbers = [f"{value:.1f}" for value in (trial.accuracy, trial.ece, trial.forgotten)]
        best = trial in chosen
        table.add_row("→" if best else "", trial.method, settings, *numbers, style="bold" if best else None)
    console.print(table)
    for trial in chosen:
        if trial.forgotten > forget:
            say(f"[yellow]every setting of {trial.method} forgets more than {forget:g} points[/]: --forget allows more")


def print_table(title: str, results: Sequence[Result]) -> None:
    """Print the summary of results, grouped by network."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in summary_table(results)[0]:
        first = column == "method"
        table.add_column(column, justify="left" if first else "right", min_width=11 if first else None)
    for network in dict.fromkeys(result.network for result in results):
        table.add_row(f"[bold]{network}")
        for method, *numbers in summary_table([result for result in results if result.network == network])[1]:
            table.add_row(f"  {method}", *numbers)
        table.add_section()
    console.print(table)
