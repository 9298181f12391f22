"""A recipe's numbers: a file that holds them all, tables and figures made of it, and several files made one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import matplotlib as mpl

from ..bench.plan import PROTOCOL, Job, Plan, PlanError
from ..bench.result import DomainResult, Result
from ..bench.tables import FORMATS
from ..files import write_text
from ..methods import METHODS
from .found import Case, Found, Shown
from .published import legend, paper_table_of

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
            raise PlanError(
                f"{out} would have results of two networks that are both called {model}: choose another --out, or "
                "leave one of them out"
            )
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
        found = [_found(case) for case in content["cases"]]
        missing = {"recipe", "scale", "command", "origins"} - content.keys()
    except IsADirectoryError as error:
        raise PlanError(f"{file} is a folder: name the file of numbers in it, such as lifelong.json") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(f"{file} is damaged, or holds no numbers of a recipe ({error!r})") from error
    if missing or not found:
        lack = ", ".join(sorted(missing)) or "case"
        raise PlanError(f"{file} is damaged, or holds no numbers of a recipe (it has no {lack})")
    return content


def _kind(case: Content) -> str:
    """Where it has what was found."""
    return "measured" if "measured" in case else "results"


def _key(found: Content) -> tuple[str, int]:
    return found["method"], found["seed"]


def _without(before: Sequence[Content], case: Content) -> Iterator[Content]:
    """What was found before at the same place, but what was measured again."""
    kind, mine = _kind(case), _compared(case)
    again = {_key(found) for found in case[kind]}
    for one in before:
        theirs = _compared(one)
        if differs := [name for name in ("model", "preset", *PROTOCOL) if mine[name] != theirs[name]]:
            told = f"{differs[0]} is {theirs[differs[0]]!r} and {mine[differs[0]]!r}"
            raise PlanError(f"{case['row']} was measured in two ways: {told}")
        if kept := [found for found in one[kind] if _key(found) not in again]:
            yield {**one, kind: kept}


_HOW = ("methods", "seeds", "device", "workers", "cache")
"""What may differ between files: who, and on what machine; the device itself is compared by its name."""


def _compared(case: Content) -> Content:
    """A plan, with the fields that it has today; data without its path."""
    plan = Plan.from_dict(case["plan"]).as_dict()
    return {**plan, "data": plan["data"].rpartition(":")[0] or plan["data"]}


def _by_plan(cases: Sequence[Content]) -> list[Content]:
    """One of each plan; the seeds of a method are all of one, and of one kind of device."""
    plans: dict[str, Content] = {}
    for case in cases:
        plan = json.dumps({name: value for name, value in _compared(case).items() if name not in _HOW})
        plans[plan] = _together(plans[plan], case) if plan in plans else case
    ways: dict[str, set[tuple[str, ...]]] = {}
    for plan, case in plans.items():
        for found in case[_kind(case)]:
            way = (plan, *(str(found["origin"].get(what)) for what in ("device", "torch")))
            ways.setdefault(found["method"], set()).add(way)
    if mixed := [method for method, own in ways.items() if len(own) > 1]:
        raise PlanError(
            f"seeds of {', '.join(mixed)} were measured in two ways, such as with two engines, devices or versions of "
            "torch: a mean of them says nothing"
        )
    return [*plans.values()]


def _together(one: Content, other: Content) -> Content:
    kind = _kind(other)
    whole = {name: [*dict.fromkeys(one["plan"][name] + other["plan"][name])] for name in ("methods", "seeds")}
    return {**other, "plan": {**other["plan"], **whole}, kind: one[kind] + other[kind]}


_NAMES = {method.__name__: name for name, method in METHODS.items()}


def _found(case: Mapping[str, Any]) -> Found:
    """The reverse of `_told`, as far as tables and figures need it."""
    plan = Plan.from_dict(case["plan"])
    asked = Case(case["row"], plan, case["column"], case["x"])
    if "measured" in case:
        return Found(asked, measured=case["measured"])
    return Found(asked, [_result(plan, result) for result in case["results"]])


def _result(plan: Plan, content: Mapping[str, Any]) -> Result:
    """Read a result, or one of the files written before `Result.compact`."""
    if "done" in content:
        return Result.from_dict(content)
    own = {f.name: content[f.name] for f in fields(Result) if f.name in content}
    domains = [DomainResult(**{"in_graph": None, **domain}) for domain in content["domains"]]
    job = Job(_NAMES[content["method"]], content["seed"])
    more = {"model": plan.model, "protocol": plan.protocol, "arguments": plan.arguments(job), "done": True}
    return Result(**{**own, **more, "domains": domains, "weights": content["origin"]["model"]})


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
    told = legend(row[0] for row in rows if "(paper" in row[0])
    return f"\n{told}\n" if told else ""


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(told) for told in dict.fromkeys(json.dumps(value) for value in values)]


def _told(found: Found) -> dict[str, Any]:
    case = found.case
    told: dict[str, Any] = {"row": case.row, "column": case.column, "x": case.x, "plan": case.plan.as_dict()}
    if found.measured:
        return {**told, "measured": [{k: v for k, v in each.items() if k != "settings"} for each in found.measured]}
    return {**told, "results": [result.compact() for result in found.results]}
