"""A long bench of bad luck: `python -m benchmarks.bad_luck [--minutes 60] [--seed 0] [--out FOLDER]`

Errors and interrupts at a random operation or line of every public operation of every method, and real signals at a
random time; passes that give NaN;
processes killed while they save, or while they run an experiment, which is then resumed; threads over one adapter.
After each fault the network, the next prediction and the files are compared with those of an undisturbed twin. Writes
`bad_luck_cpu.json`: faults injected, survived, lost. `tests/faults.py` has the trials.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from acclimate.bench.plan import Plan
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.bench.tables import Table, as_markdown

from .command import command, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import CASES, ERRORS, PLACES, Subject, in_child, kill, quiet, struck

Trial = Callable[[], str]


class Bench:
    """Draws faults at random, and counts what becomes of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)  # noqa: S311
        self.subjects = {name: Subject(name, folder) for name in CASES}
        self.counts: dict[tuple[str, str, str], int] = {}
        self.injected: dict[str, Counter[str]] = {name: Counter() for name in CASES}
        self.lost: list[dict[str, str]] = []
        self.experiments: dict[str, Any] = {}

    def round(self) -> None:
        """Try some faults of each kind on each method."""
        for name in CASES:
            for kind in (*ERRORS, "signal", "nan", "kill"):
                for _ in range(8):
                    self._count(name, kind, *self._draw(name, kind))
            self._count(name, "threads", *self._draw(name, "threads"))
            if name != "dat":  # no street scenes are embedded
                self._count(name, "killed run", *self._draw_run(name))

    def _draw(self, name: str, kind: str) -> tuple[str, Trial]:
        """Return a fault in words, and the trial."""
        subject, place = self.subjects[name], self.random.choice([*PLACES])
        if kind == "nan":
            which, at = self.random.choice(["forward", "backward"]), self.random.randint(1, 8)
            return f"{which} pass {at}", partial(subject.strike_nan, which, at)
        if kind == "threads":
            seed = self.random.randrange(10**6)
            return f"seed {seed}", partial(subject.hammer, 16, seed)
        which = "save" if kind == "kill" else self.random.choice([*subject.operations])
        if kind == "signal":
            seconds = 10 ** self.random.uniform(-5, -1.5)
            return f"{which}, {1e3 * seconds:.3g} ms", partial(subject.strike_soon, which, seconds)
        at = self.random.randint(1, max(1, self._length(name, which, place)))
        if kind == "kill":
            return f"save, {place} {at}", partial(subject.strike_dead, place, at)
        return f"{which}, {place} {at}", partial(subject.strike, which, place, at, kind)

    def _length(self, name: str, which: str, place: str) -> int:
        key = name, which, place
        if key not in self.counts:
            self.counts[key] = self.subjects[name].count(which, place)
        return self.counts[key]

    def _draw_run(self, name: str) -> tuple[str, Trial]:
        """Return a line of an experiment at which it is killed."""
        plan = Plan(methods=(name,), images=12, batch_size=4, shifts=("contrast", "fog"), probe="none", source_images=8)
        work = partial(_carry_out, plan)
        if name not in self.experiments:
            result, lines = work(self.folder / "whole"), struck(partial(work, self.folder / "again"), "line", 0, kill)
            self.experiments[name] = numbers(result), lines
        expected, lines = self.experiments[name]
        at = self.random.randint(1, lines)
        return f"line {at}", partial(self._kill_run, work, at, expected)

    def _kill_run(self, work: Callable[[Path], Result], at: int, expected: Any) -> str:
        """Kill an experiment at a line, then let it end. Return what differs from one that was never killed."""
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        in_child(partial(struck, partial(work, out), "line", at, kill))
        return "" if numbers(work(out)) == expected else "the experiment's numbers"

    def _count(self, name: str, kind: str, words: str, trial: Trial) -> None:
        self.injected[name][kind] += 1
        try:
            lost = trial()
        except Exception:
            lost = traceback.format_exc(limit=-2)
        if lost:
            self.lost.append({"method": name, "kind": kind, "fault": words, "lost": lost})
            self.subjects[name] = Subject(name, self.folder)


def _carry_out(plan: Plan, out: Path) -> Result:
    (job,) = plan.jobs()
    return Run(plan, out).do(job)


def numbers(result: Result) -> Any:
    """Return what must be equal from run to run."""
    return [(domain.name, domain.accuracy, domain.ece, domain.backwards) for domain in result.domains], result.bins


WORDS = {
    "error": "an error in a call",
    "interrupt": "an interrupt in a call",
    "signal": "a signal during a call, at any time",
    "nan": "a pass that gives NaN",
    "kill": "a kill while saving",
    "threads": "sixteen calls in four threads",
    "killed run": "a kill of an experiment",
}


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per kind of fault."""
    counts = [(WORDS[kind], count["injected"], count["lost"]) for kind, count in result["kinds"].items()]
    counts.append(("all", result["injected"], result["lost"]))
    rows = [[name, f"{injected:,}", f"{injected - lost:,}", f"{lost:,}"] for name, injected, lost in counts]
    return ["Fault", "Injected", "Survived", "Lost"], rows


def main() -> None:
    """Run the bench, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, rounds = time.monotonic(), 0
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    with TemporaryDirectory() as folder, quiet(), bar:
        bench = Bench(Path(folder), arguments.seed)
        task = bar.add_task("faults", total=60 * arguments.minutes)
        try:
            while (passed := time.monotonic() - start) < 60 * arguments.minutes:
                bench.round()
                rounds += 1
                injected = sum(count.total() for count in bench.injected.values())
                bar.update(task, completed=passed, description=f"{injected:,} faults, {len(bench.lost)} lost")
        except KeyboardInterrupt:
            bar.console.print("interrupted: what was tried so far counts")
    kinds = Counter[str]()
    for count in bench.injected.values():
        kinds.update(count)
    lost = Counter(entry["kind"] for entry in bench.lost)
    result = {
        "minutes": (time.monotonic() - start) / 60,
        "rounds": rounds,
        "injected": kinds.total(),
        "survived": kinds.total() - len(bench.lost),
        "lost": len(bench.lost),
        "kinds": {kind: {"injected": n, "lost": lost[kind]} for kind, n in kinds.items()},
        "methods": {name: dict(count) for name, count in bench.injected.items()},
        "losses": bench.lost,
    }
    print(as_markdown(*table(result)))
    write("bad_luck", arguments, result)


if __name__ == "__main__":
    main()
