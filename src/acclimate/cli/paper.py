"""`acclimate paper`: its tables and figures, by name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .terminal import EXPECTED, console, duration, progress_bars, refuse, repeatable

if TYPE_CHECKING:
    from ..bench.run import Run
    from ..paper.reproduce import Case, Recipe, Tick
    from ..paper.scales import Scale

__all__ = ["paper"]

paper = typer.Typer(help="The paper's tables and figures: list them, and run them at any scale.", no_args_is_help=True)


@paper.command("list")
def list_recipes() -> None:
    """Every recipe, and every scale."""
    from ..paper.recipes import RECIPES
    from ..paper.scales import SCALES

    recipes = Table("recipe", "what it makes", box=SIMPLE_HEAD, pad_edge=False)
    for recipe in RECIPES.values():
        recipes.add_row(recipe.name, f"{recipe.title}. {recipe.note}".strip())
    scales = Table("--scale", "on what", "needs", box=SIMPLE_HEAD, pad_edge=False)
    for scale in SCALES.values():
        scales.add_row(scale.name, scale.about, scale.needs)
    console.print(recipes)
    console.print(scales)


@paper.command("run")
def run_recipes(
    names: Annotated[list[str], typer.Argument(help="Recipes, as `acclimate paper list` has them; or all.")],
    scale: Annotated[str, typer.Option(help="paper, 5k, cifar10 or digits.")] = "digits",
    data: Annotated[str | None, typer.Option(help="The scale's data, such as imagenet-c:FOLDER,CLEAN.")] = None,
    resnet: Annotated[str | None, typer.Option(help="Another network with BatchNorm, as --model takes it.")] = None,
    vit: Annotated[str | None, typer.Option(help="Another network with LayerNorm.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Measure this one; repeat for more. All, unless named.")
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="Measure on this one alone: resnet or vit. On both, unless named.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Clean images for EATA, if --data has none.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat for more than one.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Of each domain; the scale's, unless given.")] = None,
    probe_images: Annotated[int | None, typer.Option(min=1, help="Clean images that show what is forgotten.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="64, unless given.")] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    engine: Annotated[str, typer.Option(help="eager, recorded or auto, as of `acclimate run`.")] = "eager",
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16; fp32 unless given.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    cache: Annotated[str | None, typer.Option(help="Folder for decoded images: files are decoded once.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Methods and seeds that run beside each other; times then mean little.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results; what was stopped goes on there.")] = Path(
        "acclimate-paper"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is needed and what it costs, and stop.")] = False,
) -> None:
    """Measure tables and figures of the paper again; each writes its numbers, a table or a figure."""
    from ..methods import METHODS
    from ..paper.recipes import RECIPES
    from ..paper.reproduce import reproduce, side_by_side
    from ..paper.scales import KINDS_OF_NETWORK, SCALES

    asked: list[tuple[str, Sequence[str], str]]
    asked = [(scale, [*SCALES], "scale"), *((name, [*RECIPES, "all"], "recipe") for name in names)]
    asked += [*((name, [*METHODS], "method") for name in method or ())]
    asked += [*((name, [*KINDS_OF_NETWORK], "network") for name in network or ())]
    for name, known, what in asked:
        if name not in known:
            raise typer.BadParameter(f"no {what} {name!r}: choose from {', '.join(known)}")
    chosen = [RECIPES[name] for name in names if name != "all"]
    if "all" in names:
        chosen = [recipe for recipe in RECIPES.values() if recipe.name != "imagenet-r"]  # which is other data
    fields: dict[str, Any] = {"images": images, "batch_size": batch_size, "seeds": tuple(seed) if seed else None}
    fields |= {"device": device, "engine": engine, "precision": precision, "workers": workers or None, "source": source}
    fields |= {"probe_images": probe_images, "cache": cache}
    fields |= {"only": tuple(method or ()), "within": tuple(network or ())}
    networks = {kind: named for kind, named in (("resnet", resnet), ("vit", vit)) if named}
    command = shlex.join(["acclimate", *repeatable(sys.argv[1:])])
    try:
        at = SCALES[scale].on(data=data, networks=networks, **fields)  # type: ignore[arg-type]
        if "all" in names:
            chosen = [recipe for recipe in chosen if any(case.due(at) for case in recipe.plans(at))]
        _tell(chosen, at, out / at.name)
        if dry_run:
            return
        if processes > 1:
            with progress_bars() as progress:
                beside = progress.add_task("side by side", total=None, note="")

                def done(total: int, progress: Any = progress, task: Any = beside) -> None:
                    progress.update(task, advance=1, total=total)

                side_by_side(chosen, at, out / at.name, processes, done)
        for recipe in chosen:
            with progress_bars() as progress:

                def begin(case: Case, jobs: int, run: Run, progress: Any = progress) -> Tick:
                    total = None if case.measure else len(run.scenario(run.plan.seeds[0])) * jobs
                    task = progress.add_task(case.name[:28], total=total, note="")
                    return lambda note: progress.update(task, advance=1, note=note)

                written = reproduce(recipe, at, out / at.name, command=command, on_case=begin)
            _show(recipe, written)
    except EXPECTED as error:
        refuse("cannot run", error)


@paper.command("join")
def join_files(
    files: Annotated[list[Path], typer.Argument(help="NAME.json of one recipe, as `paper run` writes it.")],
    out: Annotated[Path, typer.Option(help="Folder for the tables, the figures and the one file.")],
) -> None:
    """Make one table of what was measured apart, such as methods on several machines; later files count more."""
    from ..paper.recipes import RECIPES
    from ..paper.reproduce import join, show

    try:
        whole = join(files)
        recipe = RECIPES.get(whole.recipe)
        if recipe is None:
            raise ValueError(f"there is no recipe {whole.recipe!r} any more")
        written = show(recipe, whole, out)
    except EXPECTED as error:
        refuse("cannot join", error)
    for what in ("device", "torch"):
        if len(told := sorted({str(origin.get(what)) for origin in whole.origins})) > 1:
            console.print(f"[yellow]their {what} differs: {', '.join(told)}[/]", soft_wrap=True, highlight=False)
    _show(recipe, written)


def _show(recipe: Recipe, written: Sequence[Path]) -> None:
    """Its tables, and where they are."""
    for file in written:
        if file.suffix == ".md":
            typer.echo(f"\n{recipe.title}\n\n{file.read_text()}")
    console.print(f"written: {', '.join(str(file) for file in written)}", soft_wrap=True, highlight=False)


def _tell(recipes: Sequence[Recipe], scale: Scale, out: Path) -> None:
    """What is needed, and about how long it takes."""
    from ..bench.run import Run

    console.print(f"[bold]scale[/]     {scale.name}: {scale.about}")
    console.print(f"[bold]data[/]      {scale.data or scale.needs}")
    networks = [name for kind, name in scale.networks.items() if kind in scale.within or not scale.within]
    console.print(f"[bold]networks[/]  {', '.join(networks)}")
    table = Table("recipe", "runs", "images met", "about", box=SIMPLE_HEAD, pad_edge=False)
    speeds: dict[tuple[str, int], tuple[float, float]] = {}
    first: dict[str, Run] = {}
    for recipe in recipes:
        cases, seconds, images = recipe.plans(scale), 0.0, 0.0
        for case in (case for case in cases if case.due(scale)):
            run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
            first.setdefault(case.plan.model, run)
            run.check()
            key = case.plan.model, case.plan.batch_size
            if key not in speeds:
                speeds[key] = run.speed()
            methods = {job.method for job in case.due(scale)}
            seconds += case.times * sum(t for name, t in run.seconds(speeds[key]).items() if name in methods)
            images += case.times * run.images_met() * len(case.due(scale))
        runs = sum(len(case.due(scale)) for case in cases)
        table.add_row(recipe.name, f"{runs:,}", f"{images:,.0f}", duration(seconds))
    console.print(table)
    for hint in {run.idle_cache() for run in first.values()} - {""}:
        console.print(hint, soft_wrap=True, highlight=False)
