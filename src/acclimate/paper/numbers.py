"""A recipe's numbers: a file that holds them all, tables and figures made of it, and several files made one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import matplotlib as mpl

from ..evaluate import Result
from ..files import write_text
from ..methods import METHODS
from ..plan import PROTOCOL, Job, Plan, PlanError
from ..results import Stored
from ..tables import FORMATS
from .found import Case, Found, Shown
from .published import paper_notes, paper_table_of

if TYPE_CHECKING:
    from .recipe import Recipe

__all__ = ["join", "show", "write"]

Content: TypeAlias = dict[str, Any]
"""Of a file of numbers."""


def write(recipe: Recipe, found: Sequence[Found], out: Path, *, scale: str, command: str) -> list[Path]:
    """Tables, figures and one file of numbers; returns what was written."""
    content = {
        "recipe": recipe.name,
        "title": recipe.title,
        "scale": scale,
        "command": command,
        "origins": _distinct(origin for each in found for origin in each.origins),
        "cases": [_told(each) for each in found],
    }
    return _put(recipe, found, content, out)


def show(recipe: Recipe, content: Content, out: Path) -> list[Path]:
    """The same out of a file's numbers alone."""
    return _put(recipe, [_found(case) for case in content["cases"]], content, out)


def _put(recipe: Recipe, found: Sequence[Found], content: Content, out: Path) -> list[Path]:
    for model in {each.case.plan.model for each in found}:
        if len(set().union(*(each.weights for each in found if each.case.plan.model == model))) > 1:
            raise PlanError(f"these are results of two networks that are both called {model}: choose another --out")
    shown = recipe.show(found)
    if published := paper_table_of(recipe.name):
        shown.tables["paper"] = published
    written = [*_written(shown, out, recipe.name)]
    numbers = out / f"{recipe.name}.json"
    write_text(numbers, json.dumps(content, indent=1) + "\n")
    return [*written, numbers]


def join(files: Sequence[Path]) -> Content:
    """Several files of one recipe, such as methods that were measured apart. What two have counts as in the later."""
    contents = [_read(file) for file in files]
    for what in ("recipe", "scale"):
        if len(told := {content[what] for content in contents}) > 1:
            raise PlanError(f"these are files of two {what}s, {' and '.join(sorted(told))}: join those of one")
    places: dict[tuple[Any, ...], list[Content]] = {}
    for case in (case for content in contents for case in content["cases"]):
        own = places.setdefault((case["row"], case["column"], case["x"]), [])
        own[:] = [*_without(own, case), case]
    return {
        **contents[-1],
        "command": " && ".join(dict.fromkeys(content["command"] for content in contents)),
        "origins": _distinct(origin for content in contents for origin in content["origins"]),
        "cases": [case for own in places.values() for case in _by_plan(own)],
    }


def _read(file: Path) -> Content:
    try:
        content: Content = json.loads(file.read_text())
        for case in content["cases"]:
            _found(case)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is damaged, or holds no numbers of a recipe ({error})") from error
    return content


def _without(before: Sequence[Content], case: Content) -> Iterator[Content]:
    """What was found before at the same place, but what was measured again."""
    again = {(result["method"], result["seed"]) for result in case.get("results", ())}
    for one in before:
        for name in ("model", "preset", *PROTOCOL):
            mine, theirs = case["plan"][name], one["plan"][name]
            if mine != theirs:
                raise PlanError(f"{case['row']} was measured in two ways: {name} is {theirs!r} and {mine!r}")
        kept = [result for result in one.get("results", ()) if (result["method"], result["seed"]) not in again]
        if kept:
            yield {**one, "results": kept}


def _by_plan(cases: Sequence[Content]) -> list[Content]:
    """One of each plan; the seeds of a method are all of one."""
    plans: dict[str, Content] = {}
    for case in cases:
        plan = json.dumps({**case["plan"], "methods": None, "seeds": None})
        plans[plan] = {**case, "results": plans[plan]["results"] + case["results"]} if plan in plans else case
    methods = [name for case in plans.values() for name in {result["method"] for result in case.get("results", ())}]
    if twice := {name for name in methods if methods.count(name) > 1}:
        raise PlanError(f"seeds of {', '.join(sorted(twice))} were measured in two ways, such as with two engines")
    return [*plans.values()]


def _found(case: Mapping[str, Any]) -> Found:
    """The reverse of `_told`, as far as tables and figures need it."""
    plan = Plan.from_dict(case["plan"])
    asked = Case(case["row"], plan, case["column"], case["x"])
    if "measured" in case:
        return Found(asked, measured=case["measured"])
    return Found(asked, [_stored(plan, result) for result in case["results"]])


def _stored(plan: Plan, content: Mapping[str, Any]) -> Stored:
    """A result as a file of its own would have it; the bins of all domains are the first one's."""
    none = {name: [0.0] * len(values) for name, values in content["bins"].items()}
    domains = [{"in_graph": 0, **none, **domain} for domain in content["domains"]]
    domains[0] |= content["bins"]
    result = Result.from_dict({**content, "domains": domains})
    (method,) = (name for name, method in METHODS.items() if method.__name__ == result.method)
    job = Job(method, result.seed)
    told = {"done": True, "job": asdict(job), "arguments": plan.arguments(job), "protocol": plan.protocol}
    weights = {"weights": result.origin["model"], "preprocess": None, "source_accuracy": None}
    return Stored(result, {**told, "model": plan.model, "fingerprint": weights})


def _written(shown: Shown, out: Path, name: str) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for part, (header, rows) in shown.tables.items():
        for suffix, layout in ((".md", "markdown"), (".csv", "csv"), (".tex", "latex")):
            file = out / f"{name}{part and '-' + part}{suffix}"
            write_text(file, FORMATS[layout](header, rows) + (_legend(rows) if layout == "markdown" else ""))
            yield file
    for part, figure in shown.figures.items():
        file = out / f"{name}{part and '-' + part}.svg"
        with mpl.rc_context({"svg.hashsalt": name}):  # the same numbers, the same file
            figure.savefig(file, metadata={"Date": None})
        yield file


def _legend(rows: Sequence[Sequence[str]]) -> str:
    """What the marks of the paper's rows mean."""
    told = [f"{mark} {note}" for mark, note in paper_notes().items() if any(f"(paper{mark})" in row[0] for row in rows)]
    return f"\n{'; '.join(told)}.\n" if told else ""


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(told) for told in dict.fromkeys(json.dumps(value) for value in values)]


_KEPT = ("name", "accuracy", "ece", "forwards", "backwards", "seconds", "clean_accuracy", "kept", "gpu_memory")


def _told(found: Found) -> dict[str, Any]:
    case = found.case
    told: dict[str, Any] = {"row": case.row, "column": case.column, "x": case.x, "plan": case.plan.as_dict()}
    if found.measured:
        return {**told, "measured": [{k: v for k, v in each.items() if k != "settings"} for each in found.measured]}
    return {**told, "results": [_summary(result) for result in found.results]}


def _summary(result: Result) -> dict[str, Any]:
    """Without the bins of each domain; they are summed."""
    whole: Mapping[str, Any] = result.as_dict()
    domains = [{name: getattr(domain, name) for name in _KEPT} for domain in result.domains]
    bins = {
        name: [sum(values) for values in zip(*(getattr(d, name) for d in result.domains), strict=True)]
        for name in ("count", "confident", "correct")
    }
    return {**{k: v for k, v in whole.items() if k != "domains"}, "bins": bins, "domains": domains}
