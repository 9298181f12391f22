"""The command line, thin: it parses, calls and shows (see `terminal`)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .._version import __version__

if TYPE_CHECKING:
    from ..bench.demo import Demo
    from ..bench.result import Result
    from ..bench.run import Run

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import TaskID

    from .paper import paper
    from .terminal import EXPECTED, console, print_table, progress_bars, refuse, show_plan
except ImportError as error:
    sys.exit(f"the command line needs an extra ({error.name} is missing): pip install 'acclimate[bench]'")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Test-time adaptation for PyTorch vision models: efficient, calibrated, without forgetting.",
)
app.add_typer(paper, name="paper")


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
    from ..methods import METHODS

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
    from ..bench.demo import Demo

    _check_names(method, network)
    show = Demo(method or Demo.methods, network or Demo.networks, severity, images, seed, device)
    _adapt_to_digits(show, out, "demo")


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
    from ..bench.demo import Demo
    from ..methods import METHODS

    _check_names(method, network)
    every = [name for name, each in METHODS.items() if each.task != "segmentation"]
    show = Demo(method or every, network or Demo.networks, severity, images, seed, device)
    _adapt_to_digits(show, out, "compare")


def _check_names(method: list[str] | None, network: list[str] | None) -> None:
    from ..bench.demo import Demo
    from ..methods import METHODS

    if unknown := [name for name in method or () if name not in METHODS]:
        raise typer.BadParameter(f"no method {unknown[0]!r}: choose from {', '.join(METHODS)}", param_hint="--method")
    if unfit := [name for name in method or () if METHODS[name].task == "segmentation"]:
        raise typer.BadParameter(f"{unfit[0]} is for segmenters, and digits are classified", param_hint="--method")
    if unknown := [name for name in network or () if name not in Demo.networks]:
        raise typer.BadParameter(f"no network {unknown[0]!r}: resnet or vit", param_hint="--network")


def _adapt_to_digits(show: Demo, out: Path, command: str) -> None:
    from ..bench.evaluate import BatchResult, evaluate
    from ..bench.stream import Scenario

    results: list[Result] = []
    with progress_bars() as progress:
        making = progress.add_task("digits", total=len(show.corruptions), note="")
        domains = []
        for domain in show.domains():
            domains.append(domain)
            progress.update(making, advance=1, note=domain.name)
        scenario = Scenario("lifelong", domains)
        for adapter in show.adapters():
            label = f"{type(adapter).__name__}, {type(adapter.model).__name__}"
            task = progress.add_task(label, total=len(scenario), note="")

            def advance(batch: BatchResult, accuracy: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, note=f"{batch.domain}: {100 * accuracy:.0f} %")

            results.append(evaluate(adapter, scenario, clean=show.clean(), on_batch=advance))
            progress.update(task, note=f"accuracy {100 * results[-1].accuracy:.1f} %")

    title = f"{len(domains)} corruptions of severity {show.severity}, {show.images:,} digits each, no reset"
    print_table(title, results)
    page = show.write(out, domains, results, command)
    console.print(f"\nReport: [bold]{page}[/]", soft_wrap=True, highlight=False)


@app.command()
def run(
    method: Method = None,
    model: Annotated[str, typer.Option(help="A network: `acclimate list` shows how to name one.")] = "digits-resnet",
    data: Annotated[str, typer.Option(help="A data set: `acclimate list` shows how to name one.")] = "digits",
    scenario: Annotated[str, typer.Option(help="Such as lifelong, single-domain, mixed.")] = "lifelong",
    severity: Annotated[int, typer.Option(min=1, max=5, help="Of the corruptions.")] = 5,
    shift: Annotated[list[str] | None, typer.Option(help="A corruption; repeat for more. All, unless named.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat for more than one.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images at a time: 64, and 1 for street scenes, unless given.")
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Of each domain; all, unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of the scenario rounds.")] = 10,
    probe: Annotated[str, typer.Option(help="Of forgetting: snapshot, readapt (the paper's), or none.")] = "snapshot",
    probe_images: Annotated[int | None, typer.Option(min=1, help="Clean images for it; 1,000 unless given.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="resnet50, vit-base, segformer-b5, cifar-resnet or cifar-vit; by the network, unless given."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Data with clean images for EATA, if --data has none.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Such as eata.beta=500; repeat for more.")] = None,
    device: Device = "cpu",
    engine: Annotated[
        str, typer.Option(help="eager; recorded (CUDA graphs); auto: compiled, too, and in bf16.")
    ] = "eager",
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16; by the engine, unless given.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images; on a GPU most of the cores, unless given.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Folder for decoded images: files are decoded once, not for each method.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A JSON or TOML file with a plan; options override it.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; a run that was stopped goes on there.")] = Path(
        "acclimate-run"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost, and stop.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Compare methods on a network and a stream; results are written as they come, and a stopped run goes on."""
    from ..bench.plan import Plan, read_overrides
    from ..bench.run import Run

    given = {
        "methods": tuple(method) if method else None,
        "model": model,
        "data": data,
        "scenario": scenario,
        "severity": severity,
        "shifts": tuple(shift) if shift else None,
        "seeds": tuple(seed) if seed else None,
        "batch_size": batch_size,
        "images": images,
        "rounds": rounds,
        "probe": probe,
        "probe_images": probe_images,
        "preset": preset,
        "source": source,
        "device": device,
        "engine": engine,
        "precision": precision or ("bf16" if engine == "auto" and device.startswith("cuda") else "fp32"),
        "workers": (_most_cores() if device.startswith("cuda") else 0) if workers is None else workers,
        "cache": cache,
    }
    try:
        content = _read_plan(config)
        option = {"methods": "method", "shifts": "shift", "seeds": "seed"}
        said = {
            name: value
            for name, value in given.items()
            if value is not None and (name not in content or _named(context, option.get(name, name)))
        }
        old, new = content.pop("overrides", {}), read_overrides(settings or [])
        overrides = {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}
        plan = Plan.from_dict({**content, **said, "overrides": overrides})
        job = Run(plan, out)
        if method is None and "methods" not in content and (unfit := job.unfit()):
            plan = replace(plan, methods=[name for name in plan.methods if name not in unfit])
            job = Run(plan, out)
            for name, why in unfit.items():
                console.print(f"{name} is left out: {why}")
        job.check()
        for hint in filter(None, (job.idle_cache(), job.hint())):
            console.print(hint, soft_wrap=True, highlight=False)
        for told in getattr(job.suite, "missing", list)():
            console.print(f"[yellow]{told}[/]", soft_wrap=True, highlight=False)
        if dry_run:
            show_plan(job)
            return
        results = _do(job)
    except EXPECTED as error:
        refuse("cannot run", error)
    print_table(job.title, results)
    console.print(
        f"\nResults: [bold]{out}[/]; `acclimate table {out}` shows every domain", soft_wrap=True, highlight=False
    )


def _most_cores() -> int:
    return max(1, min(16, (os.cpu_count() or 2) - 1))


def _named(context: typer.Context, option: str) -> bool:
    """Whether the user gave an option, and it is not a default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _read_plan(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    text = config.read_text()
    if config.suffix == ".toml":
        try:
            import tomllib
        except ImportError as error:
            raise ValueError("TOML needs Python 3.11: write the plan as JSON") from error
        return tomllib.loads(text)
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{config} holds no plan: expected an object with methods, model, data, …")  # noqa: TRY004
    return content


def _do(job: Run) -> list[Result]:
    from ..bench.evaluate import BatchResult

    results = []
    with progress_bars() as progress:
        for each in job.plan.jobs():
            total = len(job.scenario(each.seed))
            starting = "compiling at the first batch" if job.plan.engine == "auto" else ""
            task = progress.add_task(each.name, total=total, note=starting)

            def advance(batch: BatchResult, accuracy: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, note=f"{batch.domain}: {100 * accuracy:.0f} %")

            results.append(job.do(each, on_batch=advance))
            last = results[-1]
            progress.update(task, completed=total, note=f"{last.score_name} {100 * last.score:.1f} %")
    return results


@app.command()
def table(
    folders: Annotated[list[Path], typer.Argument(help="Folders of `acclimate run`.")],
    layout: Annotated[str, typer.Option("--format", help="markdown, latex or csv.")] = "markdown",
    paper: Annotated[bool, typer.Option("--paper", help="With the paper's numbers, where the setting is its.")] = False,
) -> None:
    """Finished results in the paper's layout: domains as columns, accuracy and ECE as rows.

    Of more than four rounds it shows the first, fourth, seventh and so on, as the paper does; csv has all.
    """
    from ..bench.results import read_results
    from ..bench.tables import FORMATS, differences, paper_table
    from ..paper.published import paper_notes, rows_for, with_paper

    if layout not in FORMATS:
        raise typer.BadParameter(f"no format {layout!r}: choose from {', '.join(FORMATS)}", param_hint="--format")
    try:
        results = read_results(folders)
    except EXPECTED as error:
        refuse("no table", error)
    for told in differences(results):
        Console(stderr=True).print(f"[red bold]these results are not comparable:[/] {told}", soft_wrap=True)
    header, rows = paper_table(results, every=layout == "csv")
    if paper:
        marks = [f"{mark} {told}" for mark, told in paper_notes().items()]
        missing = "the paper has no results for this network, data, scenario and severity, with all images"
        Console(stderr=True).print("; ".join(marks) if rows_for(results[0]) else missing, soft_wrap=True)
        rows = with_paper(rows, results)
    typer.echo(FORMATS[layout](header, rows), nl=False)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of `acclimate run`.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    pictures: Annotated[bool, typer.Option(help="Run a few batches again to show what was learned from.")] = True,
) -> None:
    """Finished results as one HTML page: curves along the stream, reliability, forgetting, cost, pictures."""
    from ..bench.page import write_page
    from ..bench.plan import Plan
    from ..bench.results import read_results
    from ..bench.run import Run

    try:
        results = read_results(folders)
        told = folders[0] / "plan.json"
        plan = Plan.from_dict(json.loads(told.read_text())) if pictures and told.is_file() else None
        write_page(out, results)
    except EXPECTED as error:
        refuse("no report", error)
    try:
        if plan is not None:
            write_page(out, results, Run(plan, folders[0]))
    except EXPECTED as error:  # the network, the data or the device may not be at hand here
        console.print(f"[yellow]the page has no pictures:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    console.print(f"Report: [bold]{out}[/]", soft_wrap=True, highlight=False)


@app.command("list")
def show_names() -> None:
    """What can be named: methods, networks, data sets, scenarios."""
    from ..bench.networks import KINDS
    from ..bench.scenarios import SCENARIOS
    from ..data import SUITES
    from ..methods import METHODS

    groups = {
        "methods": {name: (method.__doc__ or "").splitlines()[0] for name, method in METHODS.items()},
        "networks": KINDS,
        "data sets": {name: told for name, (_, told) in SUITES.items()},
        "scenarios": {name: (make.__doc__ or "").splitlines()[0] for name, make in SCENARIOS.items()},
    }
    for title, names in groups.items():
        console.print(f"\n[bold]{title}[/]")
        for name, told in names.items():
            console.print(f"  [bold]{name:18}[/] {told}", highlight=False, markup=True, soft_wrap=True)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
