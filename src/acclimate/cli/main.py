"""The commands: parse arguments, call the library, print (see `terminal`)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import torch

from .._version import __version__
from ..bench import preflight
from ..bench.demo import DEMO_METHODS, demo_plans
from ..bench.locks import locked
from ..bench.networks import KINDS
from ..bench.plan import PlanError, combine, read_config
from ..bench.provenance import origin
from ..bench.result import Count, Result
from ..bench.result_folder import read_plan, read_results
from ..bench.run import Run
from ..bench.scenarios import SCENARIOS
from ..bench.sweep import sweep
from ..bench.tables import FORMATS, differences, paper_table
from ..bench.torchrun import is_one_of_many, joined, on_first
from ..bench.workers import Here, Workers
from ..checks import no_such
from ..data import SUITES, open_suite
from ..data.folders import Preprocess, unread_files
from ..engine import show_with
from ..extras import install_command
from ..files import to_path
from ..methods import METHODS

try:
    import typer
    from rich.markup import escape

    from .check import check
    from .doctor import doctor
    from .options import plan_options
    from .paper import paper
    from .serve import serve
    from .terminal import (
        EXPECTED,
        RESUMES,
        console,
        messages,
        one_line_errors,
        only_first_prints,
        print_table,
        print_trials,
        progress_bars,
        repeatable,
        say,
        show_plan,
    )
    from .warm_up import warm_up
    from .workers import Bar, CpusPerRun, GpusPerRun, On, ProcessCount, choose_workers, job_bars, say_without_locks
except ImportError as error:
    sys.exit(f"the command line needs an extra ({error.name} is missing): {install_command('bench')}")

app = typer.Typer(
    no_args_is_help=True,
    help="Test-time adaptation for PyTorch: vision models that keep adapting to the unlabelled stream they receive.",
)
app.add_typer(paper, name="paper")
app.command()(serve)
app.command()(check)
app.command()(doctor)
app.command("warm-up")(warm_up)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"acclimate {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if is_one_of_many():
        if context.invoked_subcommand != "run":
            raise typer.BadParameter("only `acclimate run` shares its work among the processes of torchrun")
        only_first_prints()
    show_with(lambda text: say(escape(text)) if messages.is_terminal else None)


Listing = Annotated[str, typer.Option("--format", help="text or json.")]


def _about(entries: Mapping[str, object]) -> dict[str, str]:
    return {name: (entry.__doc__ or "").partition("\n")[0] for name, entry in entries.items()}


def _about_methods() -> dict[str, str]:
    """Return the first line of each method, plug-ins included; of a broken one, what is wrong with it."""
    return {name: _about_method(name) for name in METHODS.known()}


def _about_method(name: str) -> str:
    try:
        return _about({name: METHODS[name]})[name]
    except EXPECTED as error:
        return str(error)


@app.command()
def methods(layout: Listing = "text") -> None:
    """List the methods."""
    _check_format(layout, ("text", "json"))
    if layout == "json":
        typer.echo(json.dumps(_about_methods(), indent=1, ensure_ascii=False))
        return
    for name, about in _about_methods().items():
        console.print(f"[bold]{name:10}[/] {escape(about)}", highlight=False)


@app.command("list")
def list_names(layout: Listing = "text") -> None:
    """List methods, networks, data sets and scenarios by name."""
    _check_format(layout, ("text", "json"))
    groups = {
        "methods": _about_methods(),
        "networks": KINDS,
        "data sets": {name: usage for name, (_, usage) in SUITES.items()},
        "scenarios": _about(SCENARIOS),
    }
    if layout == "json":
        typer.echo(json.dumps(groups, indent=1, ensure_ascii=False))
        return
    for title, names in groups.items():
        console.print(f"\n[bold]{title}[/]")
        for name, about in names.items():
            console.print(f"  [bold]{name:18}[/] {escape(about)}", soft_wrap=True, highlight=False)


def _check_format(layout: str, known: Collection[str]) -> None:
    if layout not in known:
        raise typer.BadParameter(no_such("format", layout, known), param_hint="--format")


Out = Annotated[Path, typer.Option(help="Folder for the report.")]
Network = Annotated[list[str] | None, typer.Option(help="resnet or vit; both by default.")]
Seed = Annotated[int, typer.Option(help="Seed of the corruptions and the adapters.")]
_DIGITS = ("methods", "severity", "images", "device")
_ABOUT = {"methods": "A method to run; repeat for more.", "images": "Digits per corruption."}


@app.command()
@plan_options(*_DIGITS, about=_ABOUT, usual={"methods": ", ".join(DEMO_METHODS), "severity": "4", "images": "384"})
def demo(options: dict[str, Any], network: Network = None, seed: Seed = 0, out: Out = Path("acclimate-demo")) -> None:
    """Adapt small networks to a lifelong stream of corrupted digits, and write an HTML report."""
    _adapt_to_digits("demo", out, network, seed, **{"methods": DEMO_METHODS, "images": 384, **options})


@app.command()
@plan_options(*_DIGITS, about=_ABOUT, usual={"methods": "all", "severity": "4", "images": "128"})
def compare(
    options: dict[str, Any], network: Network = None, seed: Seed = 0, out: Out = Path("acclimate-compare")
) -> None:
    """Compare every method on a shorter stream of the demo's digits: some minutes, most of them for MEMO and TEA."""
    _adapt_to_digits("compare", out, network, seed, **{"images": 128, **options})


def _adapt_to_digits(
    command: str,
    out: Path,
    networks: Sequence[str] | None,
    seed: int,
    *,
    images: int,
    methods: Sequence[str] | None = None,
    severity: int = 4,
    device: str = "cpu",
) -> None:
    from ..bench.report import write_demo

    restart = "this command saves no partial results; run it again from the start"
    with one_line_errors("cannot run", restart), TemporaryDirectory() as folder:
        plans = demo_plans(methods, networks, images=images, seed=seed, severity=severity, device=device)
        runs = [Run(plan, Path(folder) / plan.model) for plan in plans]
        for each in runs:
            preflight.check(each)
        options = [f"--severity {severity} --images {images} --seed {seed} --device {device}"]
        options += [f"--network {plan.model.removeprefix('digits-')}" for plan in plans]
        options += [f"--method {name}" for name in dict.fromkeys(name for plan in plans for name in plan.methods)]
        with locked(out):
            results = _carry_out(runs, Here())
            page = write_demo(out, results, runs[0], " ".join(["acclimate", command, *options]))
        count = len(results[0].domains)
        print_table(f"{count} corruptions of severity {severity}, {images:,} digits each, no reset", results)
    say(f"\nReport: [bold]{page}[/]")


def _carry_out(runs: Sequence[Run], workers: Workers, checked: Run | None = None) -> list[Result]:
    """Carry out all jobs of some runs with progress bars; `checked` has the data, if the runs belong elsewhere."""
    bars = [
        Bar(
            job.name if len(runs) == 1 else f"{job.method}, {each.plan.model}",
            len((checked or each).scenario(job.seed)),
            "compiling at the first batch" if each.plan.engine == "auto" else "",
        )
        for each in runs
        for job in each.plan.jobs()
    ]
    with job_bars(bars) as on_event:
        return sweep(runs, workers, on_event)


@app.command()
@plan_options()
def run(
    options: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="A JSON or TOML file with a plan; options override it.")] = None,
    out: Annotated[
        str, typer.Option(help="Folder for the results, or s3://BUCKET/FOLDER; a stopped run resumes there.")
    ] = "acclimate-run",
    on: On = None,
    processes: ProcessCount = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost, and stop.")] = False,
) -> None:
    """Compare methods on a network and a stream. Results are written after each domain, and a stopped run resumes."""
    with one_line_errors("cannot run", RESUMES), ExitStack() as stack:
        content, folder = {} if config is None else read_config(config), to_path(out)
        plan = combine(content, options)
        workers = choose_workers(on, processes, cpus_per_run, gpus_per_run, plan.device)
        world = stack.enter_context(joined(plan.device))
        if world.size > 1 and not isinstance(workers, Here):
            raise PlanError("under torchrun the ranks share each batch, so that runs are carried out --on here")
        with world.together():
            job = Run(plan if workers.here else replace(plan, device="cpu"), folder, world=world)
            if "methods" not in {**content, **options} and (unfit := preflight.unfit(job)):
                job = preflight.fitting(job)
                for name, why in unfit.items():
                    say(f"{name} is left out: {escape(why)}")
        preflight.check(job)
        for hint in preflight.hints(job):
            say(escape(hint))
        for message in job.suite.missing():
            say(f"[yellow]{escape(message)}[/]")
        if dry_run:
            show_plan(job, timed=workers.here)
            return
        say_without_locks(folder)
        with on_first(world, locked(folder)):
            runs = [Run(replace(job.plan, device=plan.device), folder, job, world)]
            results = _carry_out(runs, workers if world.size == 1 else Here(world), job)
    print_table(job.title, results)
    if skipped := max(result.skipped for result in results):
        say(f"[yellow]{skipped} broken images were left out[/]; `acclimate scan {escape(job.plan.data)}` lists them")
    say(f"\nResults: [bold]{out}[/]; `acclimate table {out}` shows every domain")


_TUNED = (
    *("methods", "model", "data", "severity", "batch_size", "images", "source", "source_images", "probe_images"),
    *("preset", "overrides", "device", "engine", "precision", "workers", "cache", "skip_broken"),
)


@app.command()
@plan_options(
    *_TUNED,
    about={"methods": "A method to tune; repeat for more.", "preset": "Hyper-parameters to start from."},
    usual={"methods": "eata-c", "images": "512"},
)
def tune(
    options: dict[str, Any],
    labels: Annotated[
        str, typer.Option(help="What counts as right: the labels of the data, or what the source network predicts.")
    ] = "data",
    forget: Annotated[float, typer.Option(help="Points of clean accuracy that a setting may cost.")] = 1.0,
    minutes: Annotated[float, typer.Option(help="No trial starts after this time; each method has at least one.")] = 30,
    out: Annotated[Path, typer.Option(help="The file of settings.")] = Path("acclimate-settings.json"),
) -> None:
    """Choose learning rates for a network of your own, on four corruptions of clean images that no table uses."""
    from ..bench.tune import Tuning, doubts, settings_from, write_settings

    with one_line_errors("cannot tune", RESUMES):
        trials_folder = out.with_name(f"{out.stem}-trials")
        tuning = Tuning(combine({"methods": ["eata-c"], "images": 512}, options), trials_folder, labels)
        preflight.check(tuning.first)
        with locked(trials_folder), progress_bars() as progress:
            task = progress.add_task("tune", total=tuning.batches, note="")
            trials = [*tuning.trials(60 * minutes, lambda name: progress.update(task, advance=1, note=name))]
        content, chosen = settings_from(tuning.plan, trials, tuning.first.family, labels=labels, most_forgotten=forget)
        command = shlex.join(["acclimate", *repeatable(sys.argv[1:])])
        write_settings(out, content, command, origin(torch.device(tuning.plan.device)))
    print_trials(trials, chosen, forget)
    for doubt in doubts(trials, chosen):
        say(f"[yellow]{doubt}[/]")
    say(f'\nSettings: [bold]{out}[/]; `acclimate run --preset {out}`, or `METHOD.preset("{out}", net)`, uses them')


@app.command("scan")
@plan_options("severity", "shifts", "workers")
def scan_files(
    options: dict[str, Any],
    data: Annotated[str, typer.Argument(help="A data set of image files, named as for --data.")],
) -> None:
    """Read every image of a data set, and list broken files with the reason. The exit code is 1 if there are any."""
    from ..data.scan import image_files, scan

    workers = options.pop("workers", 0)
    with one_line_errors("cannot scan"):
        suite = open_suite(data, Preprocess())
        files = image_files(suite, **options)
        shift = (options.get("shifts") or suite.shifts)[0]
        if unread := unread_files([suite.part(shift, options.get("severity", 5)).images]):
            say(unread)
        broken = []
        with progress_bars() as progress:
            task = progress.add_task("scan", total=len(files), note="")
            for path, reason in scan(files, workers):
                if reason is not None:
                    broken.append(f"{path}: {reason}")
                progress.update(task, advance=1, note=f"{len(broken)} broken")
    for line in broken:
        typer.echo(line)
    say(f"{len(broken)} of {len(files):,} files are broken")
    if broken:
        raise typer.Exit(1)


@app.command()
def table(
    folders: Annotated[list[str], typer.Argument(help="Folders that `acclimate run` wrote.")],
    layout: Annotated[str, typer.Option("--format", help="markdown, latex, csv, html or json.")] = "markdown",
    paper: Annotated[
        bool, typer.Option("--paper", help="Add the paper's numbers, where the setting is the same.")
    ] = False,
    count: Annotated[
        str,
        typer.Option(
            help="Backward passes to count: of samples that received a gradient (gradient), of all samples in the "
            "graph (graph), or as the paper does for each method (paper)."
        ),
    ] = "paper",
) -> None:
    """Print finished results in the paper's layout: domains as columns, accuracy and ECE as rows.

    If there are more than four rounds, it shows the first, fourth, seventh and so on, as the paper does; csv and json
    have all.
    """
    from ..paper.published import compare_source, legend, rows_for, with_paper

    _check_format(layout, FORMATS)
    if count not in get_args(Count):
        raise typer.BadParameter(no_such("count", count, get_args(Count)), param_hint="--count")
    with one_line_errors("no table"):
        results = read_results([to_path(folder) for folder in folders])
    for difference in differences(results):
        say(f"[red bold]these results are not comparable:[/] {escape(difference)}")
    header, rows = paper_table(results, every=layout in ("csv", "json"), count=count)  # type: ignore[arg-type]
    if paper:
        rows = with_paper(rows, results)
        missing = "the paper has no results for this network, data, scenario and severity, with all images"
        marks = legend(row[0] for row in rows if "(paper" in row[0])
        known = any(rows_for(result) for result in results)
        for line in filter(None, (marks, compare_source(results)) if known else (missing,)):
            say(f"[yellow]{escape(line)}[/]")
    typer.echo(FORMATS[layout](header, rows), nl=False)


@app.command()
def report(
    folders: Annotated[list[str], typer.Argument(help="Folders that `acclimate run` wrote.")],
    out: Annotated[str, typer.Option(help="The page to write.")] = "report.html",
    pictures: Annotated[bool, typer.Option(help="Run a few batches again to show what was learned from.")] = True,
) -> None:
    """Write finished results as one HTML page: curves along the stream, reliability, forgetting, cost, pictures."""
    from ..bench.report import write_report

    with one_line_errors("no report"):
        places, page = [to_path(folder) for folder in folders], to_path(out)
        results = read_results(places)
        plan = read_plan(places[0]) if pictures else None
        write_report(page, results)
    try:
        if plan is not None:
            write_report(page, results, Run(plan, places[0]))
    except EXPECTED as error:  # the network, the data or the device may not be available here
        say(f"[yellow]the page has no pictures:[/] {escape(str(error))}")
    say(f"Report: [bold]{out}[/]")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
