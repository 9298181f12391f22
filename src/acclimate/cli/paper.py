"""The command `acclimate paper`: the paper's tables and figures, by name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench import estimate, preflight
from ..bench.run import Run
from ..checks import no_such
from ..files import AnyPath, read_text, to_path
from ..methods import METHODS
from .options import plan_options
from .terminal import RESUMES, console, duration, messages, one_line_errors, repeatable, say
from .workers import Bar, CpusPerRun, GpusPerRun, On, ProcessCount, choose_workers, job_bars, say_without_locks

if TYPE_CHECKING:  # drawing libraries are imported only by commands that need them
    from ..paper.numbers import Recipe
    from ..paper.scales import Scale

paper = typer.Typer(help="The paper's tables and figures: list them, and run them at any scale.", no_args_is_help=True)


@paper.command("list")
def list_recipes() -> None:
    """List recipes and scales."""
    from ..paper.recipes import RECIPES
    from ..paper.scales import SCALES

    recipes = Table("recipe", "what it makes", box=SIMPLE_HEAD, pad_edge=False)
    for recipe in RECIPES.values():
        needs = f"It needs {recipe.needs}." if recipe.needs else ""
        recipes.add_row(recipe.name, " ".join(filter(None, (f"{recipe.title}.", needs, recipe.note))))
    scales = Table("--scale", "on what", "needs", box=SIMPLE_HEAD, pad_edge=False)
    for scale in SCALES.values():
        scales.add_row(scale.name, scale.about, scale.needs)
    console.print(recipes)
    console.print(scales)


@paper.command("run")
@plan_options(
    *("data", "source", "seeds", "images", "source_images", "probe_images", "batch_size", "rounds"),
    *("device", "engine", "precision", "workers", "cache", "skip_broken"),
    about={"data": "Data for the scale, such as imagenet-c:FOLDER,CLEAN.", "rounds": "Rounds of the recipe acdc."},
    usual={
        "data": "",
        "images": "the scale's",
        "source_images": "the scale's",
        "probe_images": "the scale's",
        "precision": "fp32",
        "workers": "0",
    },
)
def run_recipes(
    options: dict[str, Any],
    names: Annotated[list[str], typer.Argument(help="Recipes, as listed by `acclimate paper list`; or all.")],
    scale: Annotated[str, typer.Option(help="A scale, as listed by `acclimate paper list`.")] = "digits",
    resnet: Annotated[str | None, typer.Option(help="Another network with BatchNorm, named as for --model.")] = None,
    vit: Annotated[str | None, typer.Option(help="Another network with LayerNorm.")] = None,
    segformer: Annotated[str | None, typer.Option(help="Another network for street scenes.")] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="Settings that the recipe `tune` has chosen; repeat for more networks."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Measure only this method; repeat for more. All by default.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only on this network: resnet, vit or segformer. By default on all; recipes that the paper "
            "has on one network, on that one."
        ),
    ] = None,
    level: Annotated[
        list[int] | None, typer.Option(help="Measure only at this severity; repeat for more. All by default.")
    ] = None,
    on: On = None,
    processes: ProcessCount = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    out: Annotated[
        str, typer.Option(help="Folder for the results, or s3://BUCKET/FOLDER; a stopped run resumes there.")
    ] = "acclimate-paper",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is needed and how long it takes, and stop.")
    ] = False,
) -> None:
    """Reproduce tables and figures of the paper. Each recipe writes its numbers, and a table or a figure."""
    from ..paper.measure import longest_first, measure_all, missing, runs_of
    from ..paper.recipes import RECIPES
    from ..paper.reproduce import claimed, reproduce
    from ..paper.scales import KINDS_OF_NETWORK, SCALES, presets_in

    _check("scale", [scale], SCALES)
    _check("recipe", names, [*RECIPES, "all"])
    _check("method", method, METHODS)
    _check("network", network, KINDS_OF_NETWORK)
    given = {"resnet": resnet, "vit": vit, "segformer": segformer}
    networks: Any = {kind: named for kind, named in given.items() if named}
    within: Any = tuple(network or ())
    command = shlex.join(["acclimate", *repeatable(sys.argv[1:])])
    with one_line_errors("cannot run", RESUMES):
        limits: Any = {"only": tuple(method or ()), "within": within, "levels": tuple(level or ())}
        at = SCALES[scale].on(networks=networks, **limits, **options)
        at = at.on(presets=presets_in(preset or (), at.networks))
        chosen = [RECIPES[name] for name in dict.fromkeys(names) if name != "all"]
        if "all" in names:
            kind, special = at.data.partition(":")[0], {kind for recipe in RECIPES.values() for kind in recipe.data}
            fitting = [r for r in RECIPES.values() if kind in r.data or (kind not in special and not r.data)]
            possible = [recipe for recipe in fitting if not recipe.apart or (at.apart and not preset)]
            chosen = [recipe for recipe in possible if any(case.due(at) for case in recipe.plans(at))]
        folder = to_path(out) / at.name
        workers = choose_workers(on, processes, cpus_per_run, gpus_per_run, options.get("device", "cpu"))
        _show_cost(chosen, at, folder, console if dry_run else messages, timed=workers.here)
        if dry_run:
            return
        say_without_locks(folder)
        with claimed(chosen, folder):
            for group in [chosen] if workers.parallel else [[recipe] for recipe in chosen]:
                tasks = missing(runs_of(group, at, folder), at)
                tasks = longest_first(tasks) if workers.parallel else tasks
                with job_bars([Bar(name) for name in tasks]) as on_event:
                    measure_all(tasks, workers, on_event)
                for recipe in group:
                    _show(recipe, reproduce(recipe, at, folder, command=command))


def _check(what: str, names: Sequence[str] | None, known: Any) -> None:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(no_such(what, name, known))


@paper.command("join")
def join_files(
    files: Annotated[list[str], typer.Argument(help="NAME.json of one recipe, as `paper run` writes it.")],
    out: Annotated[str, typer.Option(help="Folder for the tables, the figures and the joined file.")],
) -> None:
    """Join files of one recipe, such as those of several machines, into one table; the last file takes precedence."""
    from ..paper.numbers import join
    from ..paper.recipes import RECIPES
    from ..paper.reproduce import show

    with one_line_errors("cannot join"):
        whole = join([to_path(file) for file in files])
        recipe = RECIPES.get(whole.recipe)
        if recipe is None:
            raise ValueError(f"there is no recipe {whole.recipe!r} any more")
        written = show(recipe, whole, to_path(out))
    for what in ("device", "torch"):
        if len(values := sorted({str(origin.get(what)) for origin in whole.origins})) > 1:
            say(f"[yellow]their {what} differs: {', '.join(values)}[/]")
    _show(recipe, written)


def _show(recipe: Recipe, written: Sequence[AnyPath]) -> None:
    """Print a recipe's tables, and where they are."""
    for file in written:
        if file.suffix == ".md":
            typer.echo(f"\n{recipe.title}\n\n{read_text(file)}")
    say(f"written: {', '.join(str(file) for file in written)}")


def _show_cost(recipes: Sequence[Recipe], scale: Scale, out: AnyPath, console: Console, *, timed: bool) -> None:
    """Check every case, and print what is needed; and about how long it takes, if it runs on this machine."""
    scale = scale if timed else scale.on(device="cpu")
    console.print(f"[bold]scale[/]     {scale.name}: {scale.about}")
    console.print(f"[bold]data[/]      {scale.data or scale.needs}")
    needed = dict.fromkeys(case.plan.model for recipe in recipes for case in recipe.plans(scale) if case.due(scale))
    console.print(f"[bold]networks[/]  {', '.join(needed)}")
    table = Table("recipe", "runs", "images met", "about", box=SIMPLE_HEAD, pad_edge=False)
    speeds: dict[tuple[str, int], tuple[float, float]] = {}
    first: dict[str, Run] = {}
    for recipe in recipes:
        cases, seconds, images = recipe.plans(scale), 0.0, 0.0
        for case in (case for case in cases if case.due(scale)):
            run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
            first.setdefault(case.plan.model, run)
            preflight.check(run, case.due(scale))
            if timed:
                key = case.plan.model, case.plan.batch_size
                if key not in speeds:
                    speeds[key] = estimate.speed(run)
                methods = {job.method for job in case.due(scale)}
                seconds += case.times * sum(
                    t for name, t in estimate.seconds(run, speeds[key]).items() if name in methods
                )
            images += case.times * estimate.images_met(run) * len(case.due(scale))
        runs = sum(len(case.due(scale)) for case in cases)
        table.add_row(recipe.name, f"{runs:,}", f"{images:,.0f}", duration(seconds) if timed else "")
    console.print(table)
    for hint in dict.fromkeys(hint for run in first.values() for hint in preflight.hints(run)):
        say(escape(hint))
