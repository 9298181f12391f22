"""Measure guarded methods on hostile streams again: `python -m benchmarks.guard_hostile [--processes 2] [--out FOLDER]`

All guarded cells of `acclimate paper run hostile --scale digits --images 512`, but for MEMO, which keeps nothing from
one image to the next. The numbers of the source network and of methods without a guard are those of the first file,
`results/digits/hostile.json`: nothing has changed for them. In addition, Tent at 20 times its rate, without and with a
guard. Results are kept in a folder, so that a run that was stopped continues; `--network vit` measures one network.
Writes `digits-guard/hostile.json`.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import gettempdir

import torch
from rich.console import Console
from rich.progress import track

from acclimate.bench.result import DomainResult, Result
from acclimate.bench.run import Run
from acclimate.cli.terminal import repeatable
from acclimate.files import write_text
from acclimate.paper.cases import HOSTILE_SHIFTS, rate
from acclimate.paper.numbers import Case, Numbers
from acclimate.paper.recipes import RECIPES
from acclimate.paper.scales import SCALES, Scale

from .command import RESULTS, command

TENT = "Tent, 20 × the rate"


def first_scale() -> Scale:
    """Return the scale of the first file: 512 images per corruption."""
    scale = SCALES["digits"]
    return replace(scale, fields={**scale.fields, "images": 512})


def due() -> list[Case]:
    """Return the cases to measure."""
    scale = first_scale()
    cases = RECIPES["hostile"].plans(scale)
    found = [case for case in cases if case.plan.guard and not case.row.startswith("MEMO")]
    for stream, guard in product(("lifelong", "sorted"), (False, True)):
        plan = scale.plan(
            "vit",
            "tent",
            arguments={"lr": rate(scale, "vit", "tent", 20)},
            images=512,
            guard=guard,
            scenario=stream,
            severity=3,
            shifts=HOSTILE_SHIFTS,
        )
        found.append(Case(TENT + ", guarded" * guard, plan, f"vit, {stream}"))
    return found


def measure(case: Case, folder: Path) -> Case:
    """Return a case with its result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return replace(case, results=[Run(case.plan, folder / case.name).do(job) for job in case.plan.jobs()])


def beside_first(first: Sequence[Case], now: Sequence[Case]) -> list[Case]:
    """Return the cases without a guard of the first file, and the new ones after those that they belong to."""
    new = {(case.row, case.column): case for case in now}
    cases = []
    for case in first:
        if not case.plan.guard and "MEMO" not in case.row:
            cases += [case, *filter(None, [new.pop((f"{case.row}, guarded", case.column), None)])]
    return [*cases, *new.values()]


def brief(case: Case) -> Case:
    """Return a case with what the tables show: the stream as one domain, without its single batches."""
    return replace(case, results=[replace(each, domains=[_whole(each)], along=[]) for each in case.results])


def _whole(result: Result) -> DomainResult:
    domains = result.domains
    kept = [domain.kept for domain in domains if domain.kept is not None]
    return DomainResult(
        "the whole stream",
        result.accuracy,
        result.ece,
        **{name: sum(getattr(d, name) for d in domains) for name in ("images", "forwards", "backwards")},
        seconds=round(result.seconds, 1),
        clean_accuracy=result.clean_after,
        kept=sum(kept) / len(kept) if kept else None,
    )


def main() -> None:
    """Measure, and write the file."""
    parser = command(__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--network", choices=("resnet", "vit"))
    parser.add_argument("--work", type=Path, default=Path(gettempdir()) / "acclimate-guard-hostile")
    arguments = parser.parse_args()
    first = Numbers.read(RESULTS / "digits" / "hostile.json")
    cases = [case for case in due() if arguments.network in (None, case.column.partition(",")[0])]
    with ProcessPoolExecutor(arguments.processes) as pool:
        waiting = [pool.submit(measure, case, arguments.work) for case in cases]
        now = [each.result() for each in track(waiting, "hostile streams", console=Console(stderr=True))]
    own = shlex.join(["python", "-m", "benchmarks.guard_hostile", *repeatable(sys.argv[1:])])
    numbers = replace(first, command=own, cases=[brief(case) for case in now])
    out = RESULTS / "digits-guard" if arguments.out == RESULTS else arguments.out
    write_text(out / "hostile.json", numbers.text())


if __name__ == "__main__":
    main()
