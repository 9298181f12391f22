"""The command line, thin: it parses, shows progress and prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ._version import __version__

if TYPE_CHECKING:
    from .evaluate import Result

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"the command line needs an extra ({error.name} is missing): pip install 'acclimate[bench]'")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Test-time adaptation for PyTorch vision models: efficient, calibrated, without forgetting.",
)
console = Console()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"acclimate {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def methods() -> None:
    """List the methods."""
    from .methods import METHODS

    for name, method in METHODS.items():
        console.print(f"[bold]{name:10}[/] {(method.__doc__ or '').splitlines()[0]}", highlight=False)


Out = Annotated[Path, typer.Option(help="Folder for the report.")]
Method = Annotated[
    list[str] | None, typer.Option(help="A method to run; repeat for more. `acclimate methods` lists them.")
]
Network = Annotated[list[str] | None, typer.Option(help="resnet or vit; both, unless one is named.")]
Severity = Annotated[int, typer.Option(min=1, max=5, help="How strong the corruptions are.")]
Images = Annotated[int, typer.Option(min=8, max=1600, help="Digits in each corruption.")]
Seed = Annotated[int, typer.Option(help="Of the corruptions and the adapters.")]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda.")]


@app.command()
def demo(
    out: Out = Path("acclimate-demo"),
    method: Method = None,
    network: Network = None,
    severity: Severity = 4,
    images: Images = 384,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Adapt small networks through a lifelong stream of corrupted digits; writes an HTML report."""
    _adapt_to_digits("demo", out, method, network, severity, images, seed, device)


@app.command()
def compare(
    out: Out = Path("acclimate-compare"),
    method: Method = None,
    network: Network = None,
    severity: Severity = 4,
    images: Images = 128,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Every method on a shorter stream of the demo's digits, in one table: some minutes, most for MEMO and TEA."""
    from .methods import METHODS

    _adapt_to_digits("compare", out, method or [*METHODS], network, severity, images, seed, device)


def _adapt_to_digits(
    command: str,
    out: Path,
    method: list[str] | None,
    network: list[str] | None,
    severity: int,
    images: int,
    seed: int,
    device: str,
) -> None:
    from .demo import Demo
    from .evaluate import Moment, evaluate
    from .methods import METHODS
    from .stream import Scenario

    if unknown := [name for name in method or () if name not in METHODS]:
        raise typer.BadParameter(f"no method {unknown[0]!r}: choose from {', '.join(METHODS)}", param_hint="--method")
    if unknown := [name for name in network or () if name not in Demo.networks]:
        raise typer.BadParameter(f"no network {unknown[0]!r}: resnet or vit", param_hint="--network")
    show = Demo(method or Demo.methods, network or Demo.networks, severity, images, seed, device)

    results: list[Result] = []
    with _progress() as progress:
        making = progress.add_task("digits", total=len(show.corruptions), note="")
        domains = []
        for domain in show.domains():
            domains.append(domain)
            progress.update(making, advance=1, note=domain.name)
        scenario = Scenario("lifelong", domains)
        for adapter in show.adapters():
            label = f"{type(adapter).__name__}, {type(adapter.model).__name__}"
            task = progress.add_task(label, total=len(scenario), note="")

            def advance(moment: Moment, accuracy: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, note=f"{moment.domain}: {100 * accuracy:.0f} %")

            results.append(evaluate(adapter, scenario, clean=show.clean(), on_batch=advance))
            progress.update(task, note=f"accuracy {100 * results[-1].accuracy:.1f} %")

    _print_table(f"{len(domains)} corruptions of severity {severity}, {images:,} digits each, no reset", results)
    page = show.write(out, domains, results, command)
    console.print(f"\nReport: [bold]{page}[/]", soft_wrap=True, highlight=False)


def _progress() -> Progress:
    return Progress(
        TextColumn("[bold]{task.description:20}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:22}"),
        TimeRemainingColumn(),
        console=console,
    )


def _print_table(title: str, results: list[Result]) -> None:
    from .report import COLUMNS, rows

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        first = column == "method"
        table.add_column(column, justify="left" if first else "right", min_width=11 if first else None)
    for network in dict.fromkeys(result.network for result in results):
        table.add_row(f"[bold]{network}")
        for method, *numbers in rows([result for result in results if result.network == network]):
            table.add_row(f"  {method}", *numbers)
        table.add_section()
    console.print(table)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
