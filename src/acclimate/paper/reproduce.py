"""Carry out a recipe: measure its cases, and write numbers, tables and figures.

Each case has a folder of results, so a stopped recipe resumes. A command holds the lock of its recipes' folders, and
each process that of the job it measures: recipes and processes may share a case.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import torch

from ..bench.locks import locked
from ..bench.plan import Job, PlanError
from ..bench.result import Result
from ..bench.run import Run
from ..bench.stream import SampledDomain
from ..bench.tables import FORMATS
from ..bench.tune import write_settings
from ..core.options import FEW_CLASSES
from ..core.settings_file import is_settings_file
from ..data.corruptions import BENCHMARK
from ..files import write_text
from ..methods import METHODS
from ..online.guard import Guard
from .numbers import Case, Measure, Numbers, Recipe, Shown, Tick
from .published import legend, notes_beside, paper_table_of
from .scales import Scale

__all__ = ["claimed", "reproduce", "show", "side_by_side", "whose_settings"]


@contextmanager
def claimed(recipes: Iterable[Recipe], out: Path) -> Iterator[None]:
    """Hold the locks of recipes' folders, so that no other command measures them."""
    with ExitStack() as stack:
        for recipe in recipes:
            stack.enter_context(locked(out / recipe.name))
        yield


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
    runs = []
    for case in recipe.plans(scale):
        run = Run(case.plan, case.folder(out, recipe.name), first.get(case.plan.model))
        first.setdefault(case.plan.model, run)
        runs.append((case, run))
        run.check(case.due(scale))
    cases = [_carry_out(case, run, case.due(scale), on_case) for case, run in runs]
    cases = [case for case in cases if case.results]
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

    `on_job` gets the number of jobs as each one is done. Times are then not comparable. If a job fails, the others go
    on; the first error is raised at the end.
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
        for _ in as_completed(waiting):
            on_job(len(waiting))
        for done in waiting:
            done.result()
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():  # a job that is stopped resumes
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process(threads: int) -> None:
    """Limit a process to its share of threads, and its compiler to one; let the parent react to Ctrl-C.

    If the parent is killed, the process ends as well: what it has written is whole, and nobody waits for the rest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _one_job(case: Case, folder: Path, job: Job) -> None:
    alone = replace(case, plan=replace(case.plan, methods=(job.method,), seeds=(job.seed,)))
    _carry_out(alone, Run(case.plan, folder), [job], None)


def _carry_out(case: Case, run: Run, due: Sequence[Job], on_case: Callable[[Case, int, Run], Tick] | None) -> Case:
    """Measure the jobs that are due and missing; return the case with all results that are there."""
    jobs = [*case.plan.jobs()]
    there = {job: result for job in jobs if (result := run.folder.read(job)) is not None and result.done}
    if missing := [job for job in due if job not in there]:
        tick = (lambda _: None) if on_case is None else on_case(case, len(missing), run)
        for job in missing:
            if case.measure is None:
                there[job] = run.do(job, lambda batch, score: tick(f"{batch.domain}: {100 * score:.0f} %"))
            else:
                there[job] = _measure(case.measure, run, job, tick)
    return replace(case, results=[there[job] for job in jobs if job in there])


def _measure(measure: Measure, run: Run, job: Job, tick: Tick) -> Result:
    (domain,) = (domain for domain in run.scenario(job.seed).domains if isinstance(domain, SampledDomain))
    with run.folder.writing(job):
        adapter = run.adapter(job)
        if isinstance(adapter, Guard):
            raise PlanError("studies look inside a method: they run without a guard")
        result = run.start(job, adapter)
        try:
            result.measured, result.done = measure(adapter, domain, tick), True
            run.folder.write(job, adapter, result)
        finally:
            adapter.reset()  # the next job starts from the source network
    return result


def show(recipe: Recipe, numbers: Numbers, out: Path) -> list[Path]:
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


def _written(name: str, shown: Shown, out: Path) -> Iterator[Path]:
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
            figure.savefig(file, metadata={"Date": None})
        yield file
