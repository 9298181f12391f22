"""A recipe, its cases, and the file of its numbers, which can be joined with files from other runs.

A recipe names cases: plans, each with its place in a table or figure. The numbers of all cases go into one file, from
which tables and figures can be made again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from ..bench.plan import PROTOCOL, Job, Plan, PlanError
from ..bench.result import Result
from ..bench.stream import SampledDomain
from ..bench.tables import Table
from ..core.adapter import Adapter
from ..files import AnyPath, json_lines, read_text
from ..methods import METHODS
from .scales import Scale

__all__ = ["Case", "Measure", "Numbers", "Recipe", "Shown", "Tick", "join"]

Tick: TypeAlias = Callable[[str], None]
"""Called after each batch with a short note."""
Measure: TypeAlias = Callable[[Adapter, SampledDomain, Tick], dict[str, Any]]
"""A measurement other than accuracy along a stream, on one domain; returns plain data."""


@dataclass(frozen=True)
class Shown:
    """Tables and figures, by the suffix of their files' names."""

    tables: Mapping[str, Table]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    whole: Mapping[str, Table] = field(default_factory=dict)
    """Tables with more columns, for csv."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What to know about a table, below it in Markdown."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that were chosen, by network."""


@dataclass(frozen=True)
class Case:
    """A plan and its place: a row (a line of a figure), a column (a group of them), a number on an axis."""

    row: str
    plan: Plan
    column: str = ""
    x: float | None = None
    measure: Measure | None = None
    times: float = 1
    """How often it reads its images, roughly."""
    home: str = ""
    """The recipe that has its folder, if several recipes share a case; empty for its own."""
    results: Sequence[Result] = ()
    """One result per method and seed, after they have run."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        parts = [self.row, self.column, "" if self.x is None else f"{self.x:g}"]
        return re.sub(r"[^\w.+-]+", "-", " ".join(part for part in parts if part)).strip("-").lower()

    @property
    def place(self) -> tuple[str, str, float | None]:
        """Its place in a table or figure."""
        return self.row, self.column, self.x

    def due(self, scale: Scale) -> list[Job]:
        """Return the jobs that a scale measures, of its methods, networks and levels."""
        if scale.within and self.plan.model not in [scale.networks.get(kind) for kind in scale.within]:
            return []
        if scale.levels and self.plan.severity not in scale.levels:
            return []
        return [job for job in self.plan.jobs() if not scale.only or job.method in scale.only]

    def folder(self, out: AnyPath, recipe: str) -> AnyPath:
        """Return the folder of its results."""
        return out / (self.home or recipe) / self.name


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of the paper."""

    name: str
    title: str
    cases: Callable[[Scale], Iterable[Case]]
    show: Callable[[Sequence[Case]], Shown]
    note: str = ""
    """A caveat: where the paper is unclear, or ours differs."""
    needs: str = ""
    """What it needs, where that is not the scale's: options of the command."""
    data: Sequence[str] = ()
    """Kinds of data that it can use; empty for images with corruptions."""

    apart: bool = False
    """Whether it needs a scale with images apart for choosing settings."""

    def plans(self, scale: Scale) -> list[Case]:
        """Return its cases at a scale, each with a name of its own."""
        if (self.data and scale.data.partition(":")[0] not in self.data) or (self.apart and not scale.apart):
            raise PlanError(f"the recipe {self.name} needs {self.needs}")
        cases = [*self.cases(scale)]
        if len({case.name for case in cases}) != len(cases):
            raise ValueError(f"{self.name}: two cases have one name")
        return cases


_NAMES = {method.__name__: name for name, method in METHODS.items()}
_LEFT_OUT = {"model", "protocol", "arguments", "done", "source_accuracy"}
"""Fields of a result that are left out, because the case's plan or the source network's result has them."""
_DETAILS = {"adaptive_ece", "nll", "brier", "aurc", "process_memory", "iou"}
"""Fields of a domain that are left out, because no table or figure shows them; the folder of a run has them."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a recipe."""

    recipe: str
    title: str
    scale: str
    command: str
    cases: Sequence[Case]

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Versions, device and commit of the results, each once."""
        texts = dict.fromkeys(json.dumps(result.origin) for case in self.cases for result in case.results)
        return [json.loads(text) for text in texts]

    def text(self) -> str:
        """Return the content of its file: compact results, one plan and what differs from it, each origin once."""
        plans = [replace(case.plan, cache=None).as_dict() for case in self.cases]  # a folder of one machine
        origins, usual, cases = self.origins, plans[0], []
        for case, own in zip(self.cases, plans, strict=True):
            plan = {name: value for name, value in own.items() if value != usual[name]}
            results = []
            for result in case.results:
                stored = {name: value for name, value in result.compact().items() if name not in _LEFT_OUT}
                stored["domains"] = {name: v for name, v in stored["domains"].items() if name not in _DETAILS}
                if result.along is not None:  # of a stream that is shown batch by batch, and not by confidence
                    stored["along"] = [round(value, 3) for value in result.along]
                    del stored["bins"]
                if result.health is not None:  # what the guard did, without the signals of each check
                    stored["health"] = {name: result.health[name] for name in ("rollbacks", "rejected", "alarms")}
                results.append({**stored, "origin": origins.index(result.origin)})
            cases.append({"row": case.row, "column": case.column, "x": case.x, "plan": plan, "results": results})
        head = {name: getattr(self, name) for name in ("recipe", "title", "scale", "command")}
        return json_lines({**head, "plan": usual, "origins": origins, "cases": cases}, depth=4)

    @classmethod
    def parse(cls, text: str) -> Numbers:
        """Read the content of a file."""
        content = json.loads(text)
        cases = []
        for stored in content["cases"]:
            plan, results = Plan.from_dict({**content["plan"], **stored["plan"]}), []
            for each in stored["results"]:
                known = {"model": plan.model, "protocol": plan.protocol, "done": True}
                known["arguments"] = plan.arguments(Job(_NAMES[each["method"]], each["seed"]))
                results.append(Result.from_dict({**each, **known, "origin": content["origins"][each["origin"]]}))
                if not results[-1].domains and results[-1].measured is None:
                    raise ValueError(f"{each['method']} has no numbers")
            cases.append(Case(stored["row"], plan, stored["column"], stored["x"], results=results))
        return cls(content["recipe"], content["title"], content["scale"], content["command"], cases)

    @classmethod
    def read(cls, file: AnyPath) -> Numbers:
        """Read a file, or raise an error that names it."""
        try:
            numbers = cls.parse(read_text(file))
        except IsADirectoryError as error:
            raise PlanError(f"{file} is a folder: name the file of numbers in it, such as lifelong.json") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanError(f"{file} is damaged, or holds no numbers of a recipe ({error!r})") from error
        if not numbers.cases:
            raise PlanError(f"{file} is damaged, or holds no numbers of a recipe (it has no case)")
        return numbers


def join(files: Sequence[AnyPath]) -> Numbers:
    """Join files of one recipe, such as those of several machines; if two files overlap, the later one counts."""
    every = [Numbers.read(file) for file in files]
    for what in ("recipe", "scale"):
        if len(values := {getattr(numbers, what) for numbers in every}) > 1:
            raise PlanError(f"these are files of two {what}s, {' and '.join(sorted(values))}: join those of one")
    places: dict[Any, dict[tuple[str, int], tuple[Case, Result]]] = {}
    for case in (case for numbers in every for case in numbers.cases):
        own = places.setdefault(case.place, {})
        for before, _ in own.values():
            _check_protocol(before, case)
        for result in case.results:
            own.pop((result.method, result.seed), None)
            own[result.method, result.seed] = case, result
    command = " && ".join(dict.fromkeys(numbers.command for numbers in every))
    return replace(every[-1], command=command, cases=[case for own in places.values() for case in _by_plan(own)])


def _check_protocol(one: Case, other: Case) -> None:
    theirs, mine = _compared(one.plan), _compared(other.plan)
    for name in ("model", "preset", *PROTOCOL):
        if theirs[name] != mine[name]:
            values = f"{name} is {theirs[name]!r} and {mine[name]!r}"
            raise PlanError(f"{one.row} was measured in two ways: {values}")


def _compared(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields, with the data's kind and part but not its path."""
    kind, _, path = plan.data.rpartition(":")
    part = path.rpartition(",")[2] if path in ("judge", "tune") or path.endswith((",judge", ",tune")) else ""
    return {**plan.as_dict(), "data": f"{kind},{part}".rstrip(",") if kind else plan.data}


_MAY_DIFFER = ("methods", "seeds", "device", "workers", "cache")
"""Fields of a plan that may differ between files; devices are compared by their names in the origins."""


def _by_plan(place: Mapping[tuple[str, int], tuple[Case, Result]]) -> Iterator[Case]:
    """Yield one case per plan; all seeds of a method must have one plan, one kind of device and one torch."""
    plans: dict[str, list[tuple[Case, Result]]] = {}
    ways: dict[str, set[tuple[str, ...]]] = {}
    for case, result in place.values():
        plan = json.dumps({name: value for name, value in _compared(case.plan).items() if name not in _MAY_DIFFER})
        plans.setdefault(plan, []).append((case, result))
        way = (plan, *(str(result.origin.get(what)) for what in ("device", "torch")))
        ways.setdefault(result.method, set()).add(way)
    if mixed := [method for method, own in ways.items() if len(own) > 1]:
        raise PlanError(
            f"seeds of {', '.join(mixed)} were measured in two ways, such as with two engines, devices or versions of "
            "torch: do not average them"
        )
    for pairs in plans.values():
        last = pairs[-1][0]
        methods, seeds = (
            tuple(dict.fromkeys(value for case, _ in pairs for value in getattr(case.plan, name)))
            for name in ("methods", "seeds")
        )
        plan_of_all = replace(last.plan, methods=methods, seeds=seeds)
        yield replace(last, plan=plan_of_all, results=[result for _, result in pairs])
