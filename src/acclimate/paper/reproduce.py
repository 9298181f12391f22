"""Carry out a recipe: measure its cases, and write numbers, tables and figures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

from ..bench import preflight
from ..bench.locks import locked
from ..bench.plan import PlanError
from ..bench.tables import FORMATS
from ..bench.tune import write_settings
from ..bench.workers import Here
from ..core.options import FEW_CLASSES
from ..core.settings_file import is_settings_file
from ..files import AnyPath, write_bytes, write_text
from .measure import measure_all, missing, runs_of, with_results
from .numbers import Case, Numbers, Recipe, Shown
from .published import legend, notes_beside, paper_table_of
from .scales import Scale

__all__ = ["claimed", "reproduce", "show", "whose_settings"]


@contextmanager
def claimed(recipes: Iterable[Recipe], out: AnyPath) -> Iterator[None]:
    """Hold the locks of recipes' folders, so that no other command measures them."""
    with ExitStack() as stack:
        for recipe in recipes:
            stack.enter_context(locked(out / recipe.name))
        yield


def reproduce(recipe: Recipe, scale: Scale, out: AnyPath, *, command: str = "") -> list[AnyPath]:
    """Measure what is missing, write tables, figures and the file of numbers, and return their paths."""
    runs = runs_of([recipe], scale, out)
    for case, run in runs:
        preflight.check(run, case.due(scale))
    measure_all(missing(runs, scale), Here())
    cases = [case for case in map(with_results, runs) if case.results]
    if not cases:
        asked = ", ".join([*scale.only, *scale.within, *(f"level {level}" for level in scale.levels)])
        raise PlanError(f"{recipe.name} has nothing to show: it does not run {asked}")
    return show(recipe, Numbers(recipe.name, recipe.title, scale.name, command, cases), out)


def show(recipe: Recipe, numbers: Numbers, out: AnyPath) -> list[AnyPath]:
    """Write the file of numbers, and the tables and figures that it gives; return their paths."""
    weights: dict[str, set[str | None]] = {}
    for case in numbers.cases:
        weights.setdefault(case.plan.model, set()).update(result.weights for result in case.results)
    if mixed := [model for model, fingerprints in weights.items() if len(fingerprints) > 1]:
        raise PlanError(
            f"{out} would have results of two networks that are both called {mixed[0]}: choose another --out, or "
            "leave one of them out"
        )
    text = numbers.text()
    shown = recipe.show(Numbers.parse(text).cases)
    chosen = {out / f"settings-{network}.json": content for network, content in shown.settings.items()}
    for path, content in chosen.items():
        write_settings(path, content, numbers.command, numbers.origins[0])
    first, settings = next(iter(shown.tables)), whose_settings(numbers.cases)
    about = {part: (shown.notes.get(part), recipe.note if part == first else "", settings) for part in shown.tables}
    notes = {part: "\n\n".join(filter(None, lines)) for part, lines in about.items()}
    if published := paper_table_of(recipe.name):
        notes["paper"] = notes_beside(recipe.name, shown.tables[""])
        shown = replace(shown, tables={**shown.tables, "paper": published})
    file = out / f"{recipe.name}.json"
    write_text(file, text)
    return [*_written(recipe.name, replace(shown, notes=notes), out), *chosen, file]


def whose_settings(cases: Sequence[Case]) -> str:
    """Say which networks and whose settings a table shows: the paper's, our own, or those that `tune` chose."""
    changed: dict[tuple[str, str], set[str]] = {}
    for case in (case for case in cases if {*case.plan.methods} != {"source"}):  # which has no settings
        own = changed.setdefault((case.plan.model.partition("=")[0], str(case.plan.preset)), set())
        own.update(name for arguments in case.plan.overrides.values() for name in arguments)
    said = []
    for (model, preset), names in changed.items():
        if is_settings_file(preset):
            whose = f"learning rates chosen on other images and corruptions ({Path(preset).name})"
        elif preset in FEW_CLASSES.values():
            whose = f"our settings for ten classes ({preset}), chosen on this stream"
        else:
            whose = f"the paper's settings for {preset}"
        but = f", but for {', '.join(sorted(names))}" if names else ""
        said.append(f"{model}: {whose}{but}")
    return "; ".join(said) + "." * bool(said)


def _written(name: str, shown: Shown, out: AnyPath) -> Iterator[AnyPath]:
    for part, table in shown.tables.items():
        whole, stem = shown.whole.get(part, table), f"{name}{part and '-' + part}"
        marks, more = (legend(row[0] for row in each[1] if "(paper" in row[0]) for each in (table, whole))
        more = f"In the csv: {more}" if more != marks else ""
        below = "".join(f"\n{note}\n" for note in (marks, more, shown.notes.get(part)) if note)
        for suffix, text in (
            (".md", FORMATS["markdown"](*table) + below),
            (".csv", FORMATS["csv"](*whole)),
            (".tex", FORMATS["latex"](*table)),
        ):
            file = out / f"{stem}{suffix}"
            write_text(file, text)
            yield file
    for part, figure in shown.figures.items():
        file = out / f"{name}{part and '-' + part}.svg"
        with mpl.rc_context({"svg.hashsalt": name}):  # the same numbers give the same file
            figure.savefig(drawn := io.BytesIO(), format="svg", metadata={"Date": None})
        write_bytes(file, drawn.getvalue())
        yield file
