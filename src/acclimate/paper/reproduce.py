"""Carry out a recipe: measure its cases, write numbers, tables and figures, and join numbers that were measured apart.

A recipe names cases: plans, each with its place in a table or figure. Each case has a folder of results, so a stopped
recipe resumes. The numbers of all cases go into one file, from which tables and figures can be made again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from ..bench.plan import PROTOCOL, Job, Plan, PlanError
from ..bench.provenance import origin
from ..bench.result import Result
from ..bench.run import Run
from ..bench.tables import FORMATS
from ..data.corruptions import BENCHMARK
from ..files import json_lines, write_text
from ..methods import METHODS, Source
from .published import legend, paper_table_of
from .scales import Scale

__all__ = ["Case", "Measure", "Measurement", "Numbers", "Recipe", "Shown", "Tick", "join", "reproduce", "show", "side_by_side"]

Tick: TypeAlias = Callable[[str], None]
"""Called after each batch with a short note."""
Measure: TypeAlias = Callable[[Run, Job, Tick], dict[str, Any]]
"""A measurement other than accuracy along a stream: plain data for a method and a seed."""
Shown: TypeAlias = tuple[dict[str, tuple[list[str], list[list[str]]]], dict[str, Figure]]
"""Tables, as header and rows, and figures, by the suffix of their files' names."""


@dataclass(frozen=True)
class Measurement:
    """What a `Measure` returned, with what it depends on."""

    method: str
    seed: int
    values: dict[str, Any]
    weights: str
    origin: dict[str, str | None]
    settings: dict[str, Any]


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
    """The recipe that holds its folder, where several recipes share a case; its own if empty."""
    results: Sequence[Result] = ()
    """Once it ran: one per method and seed."""
    measured: Sequence[Measurement] = ()
    """The same for a case with a `measure`."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        parts = [self.row, self.column, "" if self.x is None else f"{self.x:g}"]
        return re.sub(r"[^\w.+-]+", "-", " ".join(part for part in parts if part)).strip("-").lower()

    @property
    def found(self) -> Sequence[Result | Measurement]:
        """Everything that was measured."""
        return [*self.results, *self.measured]

    def due(self, scale: Scale) -> list[Job]:
        """Return the jobs to measure at a scale, where they are not there yet."""
        if scale.within and self.plan.model not in [scale.networks[kind] for kind in scale.within]:
            return []
        return [job for job in self.plan.jobs() if not scale.only or job.method in scale.only]

    def folder(self, out: Path, recipe: str) -> Path:
        """Return the folder of its results."""
        return out / (self.home or recipe) / self.name

    def keeping(self, keep: Callable[[Result | Measurement], bool]) -> Case:
        """Return it with some of what was measured."""
        return replace(self, results=[*filter(keep, self.results)], measured=[*filter(keep, self.measured)])

    def as_dict(self, origins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return it for JSON; an origin is an index into `origins`."""
        usual = Plan(data=self.plan.data).as_dict()
        plan = {name: value for name, value in self.plan.as_dict().items() if value != usual[name]}
        place = {"row": self.row, "column": self.column, "x": self.x, "plan": plan}
        if self.measured:
            own = [asdict(each) for each in self.measured]
            return place | {"measured": [{**each, "origin": origins.index(each["origin"])} for each in own]}
        compact = [(result.compact(), origins.index(result.origin)) for result in self.results]
        own = [{**{k: v for k, v in content.items() if k not in _NOT_STORED}, "origin": at} for content, at in compact]
        return place | {"results": own}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origins: Sequence[dict[str, Any]]) -> Case:
        """Read what `as_dict` returned; the results' protocol and arguments are those of the plan."""
        plan = Plan.from_dict(content["plan"])
        results = []
        for stored in content.get("results", ()):
            job = Job(_NAMES[stored["method"]], stored["seed"])
            known = {"model": plan.model, "protocol": plan.protocol, "arguments": plan.arguments(job), "done": True}
            results.append(Result.from_dict({**stored, **known, "origin": origins[stored["origin"]]}))
            if not results[-1].domains:
                raise ValueError(f"{stored['method']} has no domain")
        measured = [Measurement(**{**m, "origin": origins[m["origin"]]}) for m in content.get("measured", ())]
        return cls(content["row"], plan, content["column"], content["x"], results=results, measured=measured)


_NOT_STORED = ("model", "protocol", "arguments", "source_accuracy", "done")
"""Fields of a result that its case's plan or its source's result has."""
_NAMES = {method.__name__: name for name, method in METHODS.items()}


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of the paper."""

    name: str
    title: str
    cases: Callable[[Scale], Iterable[Case]]
    show: Callable[[Sequence[Case]], Shown]
    note: str = ""
    """A caveat: where the paper is unclear, or ours differs."""

    def plans(self, scale: Scale) -> list[Case]:
        """Return its cases at a scale, each with a name of its own."""
        cases = [*self.cases(scale)]
        if len({case.name for case in cases}) != len(cases):
            raise ValueError(f"{self.name}: two cases have one name")
        return cases


@dataclass(frozen=True)
class Numbers:
    """The file of a recipe's numbers."""

    recipe: str
    title: str
    scale: str
    command: str
    cases: Sequence[Case]

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Versions, device and commit of everything that was measured, each once."""
        texts = dict.fromkeys(json.dumps(each.origin) for case in self.cases for each in case.found)
        return [json.loads(text) for text in texts]

    def text(self) -> str:
        """Return the file's content."""
        origins, head = self.origins, {name: getattr(self, name) for name in ("recipe", "title", "scale", "command")}
        cases = [case.as_dict(origins) for case in self.cases]
        return json_lines({**head, "origins": origins, "cases": cases}, depth=4)

    @classmethod
    def read(cls, file: Path) -> Numbers:
        """Read a file, or raise an error that names it."""
        try:
            content = json.loads(file.read_text())
            cases = [Case.from_dict(case, content["origins"]) for case in content["cases"]]
            if not cases:
                raise ValueError("it has no case")
            return cls(*(content[name] for name in ("recipe", "title", "scale", "command")), cases)
        except IsADirectoryError as error:
            raise PlanError(f"{file} is a folder: name the file of numbers in it, such as lifelong.json") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanError(f"{file} is damaged, or holds no numbers of a recipe ({error!r})") from error


# Measuring


def reproduce(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    command: str = "",
    on_case: Callable[[Case, int, Run], Tick] | None = None,
) -> list[Path]:
    """Measure what is missing, write tables, figures and the file of numbers, and return their paths."""
    first: dict[str, Run] = {}
    cases = []
    for case in recipe.plans(scale):
        run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
        first.setdefault(case.plan.model, run)
        cases.append(_carried_out(case, run, case.due(scale), on_case))
    cases = [case for case in cases if case.found]
    if not cases:
        asked = ", ".join([*scale.only, *scale.within])
        raise PlanError(f"{recipe.name} has nothing to show: it does not run {asked}")
    return show(recipe, Numbers(recipe.name, recipe.title, scale.name, command, cases), out)


def side_by_side(
    recipes: Iterable[Recipe],
    scale: Scale,
    out: Path,
    processes: int,
    on_job: Callable[[int], None] = lambda _: None,
) -> None:
    """Measure each method and seed of each case in a process of its own, the longest first.

    `on_job` gets the number of jobs as each one is done. Times then say little about a method.
    """
    jobs: dict[tuple[Path, Job], tuple[float, Case]] = {}  # two recipes may share a case
    for recipe in recipes:
        for case in recipe.plans(scale):
            for job in case.due(scale):
                domains = len(case.plan.shifts or BENCHMARK)
                cost = case.times * domains * sum(METHODS[job.method].cost) * (case.plan.images or scale.clean)
                jobs.setdefault((case.folder(out, recipe.name), job), (cost, case))
    longest_first = sorted(jobs.items(), key=lambda each: each[1][0], reverse=True)
    threads = max(1, (os.cpu_count() or 1) // processes)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_process, (threads,))
    try:
        waiting = [pool.submit(_one_job, case, folder, job) for (folder, job), (_, case) in longest_first]
        for done in as_completed(waiting):
            done.result()
            on_job(len(waiting))
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process(threads: int) -> None:
    """Limit a process to its share of threads, and its compiler to itself."""
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _one_job(case: Case, folder: Path, job: Job) -> None:
    alone = replace(case, plan=replace(case.plan, methods=(job.method,), seeds=(job.seed,)))
    _carried_out(alone, Run(case.plan, folder), [job], None)


def _carried_out(
    case: Case, run: Run, due: Sequence[Job], on_case: Callable[[Case, int, Run], Tick] | None
) -> Case:
    """Return the case with what is there and, of the jobs that are due, what was missing."""
    jobs = [*case.plan.jobs()]
    find = _find_result if case.measure is None else _find_measurement
    there: dict[Job, Any] = {job: found for job in jobs if (found := find(run, job)) is not None}
    if missing := [job for job in due if job not in there]:
        run.check()
        tick = (lambda _: None) if on_case is None else on_case(case, len(missing), run)
        for job in missing:
            if case.measure is None:
                there[job] = run.do(job, lambda moment, score: tick(f"{moment.domain}: {100 * score:.0f} %"))
            else:
                there[job] = _measure(case.measure, run, job, tick)
    found = [there[job] for job in jobs if job in there]
    return replace(case, results=found) if case.measure is None else replace(case, measured=found)


def _find_result(run: Run, job: Job) -> Result | None:
    result, state = run.folder.find(job)
    return result if state is None else None


def _find_measurement(run: Run, job: Job) -> Measurement | None:
    file = _file(run, job)
    if not file.is_file():
        return None
    try:
        found = Measurement(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise PlanError(f"{file} is damaged ({error}): remove it to measure it again") from error
    if found.settings != _settings(run.plan, job):
        raise PlanError(f"{file} was measured under another plan: choose another --out")
    return found


def _measure(measure: Measure, run: Run, job: Job, tick: Tick) -> Measurement:
    weights, where = Source(run.network.model).fingerprint(), origin(torch.device(run.plan.device))
    values = measure(run, job, tick)
    found = Measurement(job.method, job.seed, values, weights, where, _settings(run.plan, job))
    write_text(_file(run, job), json.dumps(asdict(found), indent=1) + "\n")
    return found


def _file(run: Run, job: Job) -> Path:
    """Return the file of a measurement; `acclimate table` must not take it for a result."""
    return run.folder.path / f"{job.method}.{job.seed}.json"


def _settings(plan: Plan, job: Job) -> dict[str, Any]:
    """Return what a measurement depends on besides the network's weights."""
    return dict(json.loads(json.dumps({"model": plan.model, **plan.protocol, **plan.arguments(job)})))


# Writing


def show(recipe: Recipe, numbers: Numbers, out: Path) -> list[Path]:
    """Write a recipe's tables, figures and numbers, and return their paths."""
    weights: dict[str, set[str | None]] = {}
    for case in numbers.cases:
        weights.setdefault(case.plan.model, set()).update(each.weights for each in case.found)
    if mixed := [model for model, prints in weights.items() if len(prints) > 1]:
        raise PlanError(
            f"{out} would have results of two networks that are both called {mixed[0]}: choose another --out, or "
            "leave one of them out"
        )
    tables, figures = recipe.show(numbers.cases)
    if published := paper_table_of(recipe.name):
        tables = tables | {"paper": published}
    written = [*_written(recipe.name, tables, figures, out)]
    file = out / f"{recipe.name}.json"
    write_text(file, numbers.text())
    return [*written, file]


def _written(name: str, tables: Mapping[str, Any], figures: Mapping[str, Figure], out: Path) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for part, (header, rows) in tables.items():
        notes = legend(row[0] for row in rows if "(paper" in row[0])
        for suffix, layout in ((".md", "markdown"), (".csv", "csv"), (".tex", "latex")):
            file = out / f"{name}{part and '-' + part}{suffix}"
            write_text(file, FORMATS[layout](header, rows) + (f"\n{notes}\n" if notes and suffix == ".md" else ""))
            yield file
    for part, figure in figures.items():
        file = out / f"{name}{part and '-' + part}.svg"
        with mpl.rc_context({"svg.hashsalt": name}):  # the same numbers give the same file
            figure.savefig(file, metadata={"Date": None})
        yield file


# Joining


def join(files: Sequence[Path]) -> Numbers:
    """Join files of one recipe, such as methods that were measured apart; what two files have is taken from the later."""
    every = [Numbers.read(file) for file in files]
    for what in ("recipe", "scale"):
        if len(values := {getattr(numbers, what) for numbers in every}) > 1:
            raise PlanError(f"these are files of two {what}s, {' and '.join(sorted(values))}: join those of one")
    places: dict[tuple[Any, ...], list[Case]] = {}
    for case in (case for numbers in every for case in numbers.cases):
        own = places.setdefault((case.row, case.column, case.x), [])
        own[:] = [*_without(own, case), case]
    command = " && ".join(dict.fromkeys(numbers.command for numbers in every))
    return replace(every[-1], command=command, cases=[case for own in places.values() for case in _by_plan(own)])


def _without(before: Sequence[Case], case: Case) -> Iterator[Case]:
    """Yield cases at the same place without what the later `case` measured again."""
    again = {(each.method, each.seed) for each in case.found}
    mine = _compared(case.plan)
    for one in before:
        theirs = _compared(one.plan)
        if differs := [name for name in ("model", "preset", *PROTOCOL) if mine[name] != theirs[name]]:
            values = f"{differs[0]} is {theirs[differs[0]]!r} and {mine[differs[0]]!r}"
            raise PlanError(f"{case.row} was measured in two ways: {values}")
        kept = one.keeping(lambda each: (each.method, each.seed) not in again)
        if kept.found:
            yield kept


def _compared(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields, with the data's kind but not its path."""
    return {**plan.as_dict(), "data": plan.data.rpartition(":")[0] or plan.data}


_MAY_DIFFER = ("methods", "seeds", "device", "workers", "cache")
"""Fields of a plan that may differ between files; devices are compared by their names in the origins."""


def _by_plan(cases: Sequence[Case]) -> list[Case]:
    """Merge cases of the same plan; all seeds of a method must have one plan and one kind of device."""
    plans: dict[str, Case] = {}
    for case in cases:
        key = json.dumps({name: value for name, value in _compared(case.plan).items() if name not in _MAY_DIFFER})
        plans[key] = _merged(plans[key], case) if key in plans else case
    ways: dict[str, set[tuple[str, ...]]] = {}
    for key, case in plans.items():
        for each in case.found:
            way = (key, *(str(each.origin.get(what)) for what in ("device", "torch")))
            ways.setdefault(each.method, set()).add(way)
    if mixed := [method for method, own in ways.items() if len(own) > 1]:
        raise PlanError(
            f"seeds of {', '.join(mixed)} were measured in two ways, such as with two engines, devices or versions of "
            "torch: do not average them"
        )
    return [*plans.values()]


def _merged(one: Case, other: Case) -> Case:
    both: dict[str, Any] = {
        name: tuple(dict.fromkeys((*getattr(one.plan, name), *getattr(other.plan, name)))) for name in ("methods", "seeds")
    }
    results, measured = [*one.results, *other.results], [*one.measured, *other.measured]
    return replace(other, plan=replace(other.plan, **both), results=results, measured=measured)
