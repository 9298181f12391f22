"""What a guard costs: `python -m benchmarks.guard [--cifar10 FOLDER] [--images 512] [--seeds 0 1 2] [--costs]`

On honest streams: fifteen corruptions at severity 5, lifelong, EATA and EATA-C without and with a guard, on digits or,
with `--cifar10`, on CIFAR-10, and what is lost on clean images afterwards. A rollback is false if the method without a
guard is better than the source network on the corruption in which it came; one for `evidence`, if the method without a
guard loses no more than a tenth of the clean images. Writes `guard_cpu.json` or `guard_cifar10_cpu.json`.

With `--costs`, instead, what a guard costs per step, on a machine with nothing else to do: medians of steps on
JPEGs without a guard, with one that never checks, and with one that always does; with a check in 128 steps the cost
follows. Writes `guard_costs_cpu.json`, or `guard_costs_cifar10_cpu.json`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

from acclimate import EATA, EATAC, Adapter, Guard
from acclimate.bench.demo import digit_overrides
from acclimate.bench.networks import load_network
from acclimate.bench.plan import Job, Plan
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.bench.scenarios import sample_domain
from acclimate.bench.tables import Table, as_markdown
from acclimate.data import open_suite
from acclimate.online.policy import LASTING

from .command import command, write

EVERY = 128
METHODS = ("eata", "eata-c")


def honest(
    folder: Path, cifar10: Path | None, network: str | None, images: int, seeds: Sequence[int], tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return accuracy on honest streams, without and with a guard, and what the guard did."""
    rows = []
    for data, model, fields in streams(cifar10, network):
        plans = {
            guard: Plan(
                methods=METHODS, model=model, data=data, images=images, seeds=tuple(seeds), guard=guard, **fields
            )
            for guard in (False, True)
        }
        runs = {guard: Run(plan, folder / f"{model}-{guard}") for guard, plan in plans.items()}
        without = {name: value for name, value in fields.items() if name != "overrides"}
        plan = Plan(methods=("source",), model=model, data=data, images=images, seeds=tuple(seeds), **without)
        source = Run(plan, folder / f"{model}-source")
        for job in plans[False].jobs():
            bare, guarded = (runs[guard].do(job) for guard in (False, True))
            still = source.do(Job("source", job.seed))
            health = guarded.health or {}
            rows.append(
                {
                    "network": model,
                    "method": job.method,
                    "seed": job.seed,
                    "accuracy": 100 * bare.accuracy,
                    "guarded": 100 * guarded.accuracy,
                    "clean": [
                        100 * (each or 0.0) for each in (bare.clean_before, bare.clean_after, guarded.clean_after)
                    ],
                    "alarms": [
                        [alarm["signal"], alarm["action"], *where(alarm["batch"], bare, still)]
                        for alarm in health["alarms"]
                    ],
                    "rollbacks": health["rollbacks"],
                }
            )
            tick()
    return rows


def where(batch: int, bare: Result, source: Result) -> tuple[str, float, float]:
    """Return the corruption of a batch, and the accuracy on it without a guard and of the source network."""
    ends = accumulate(-(-domain.images // 64) for domain in bare.domains)
    place = next(i for i, end in enumerate(ends) if batch < end)
    return bare.domains[place].name, *(100 * each.domains[place].accuracy for each in (bare, source))


def streams(cifar10: Path | None, network: str | None) -> list[tuple[str, str, dict[str, Any]]]:
    """Return data, network and fields of the plans."""
    kinds = ("resnet", "vit") if network is None else (network,)
    usual: dict[str, Any] = {"source_images": 512, "probe_images": 500}
    if cifar10 is None:
        return [
            ("digits", f"digits-{kind}", {"overrides": {m: digit_overrides(kind)[m] for m in METHODS}, **usual})
            for kind in kinds
        ]
    return [(f"cifar10:{cifar10}", f"cifar10-{kind}", {"preset": f"cifar-{kind}", **usual}) for kind in kinds]


def steps(data: str, model: str, method: str, count: int = 66, builds: int = 3) -> dict[str, Any]:
    """Return milliseconds per step without a guard, with one that does not check, and with one that always does.

    They take turns, each as often first. They are built anew a few times, since where they lie in memory matters.
    """
    suite = open_suite(data, load_network(model, "cpu").preprocess)
    parts = (suite.clean(), 512), (suite.part("jpeg_compression", 3), 64)  # the guard knows clean images, and rests
    (images, _), (x, _) = (
        next(iter(sample_domain("images", part, batch_size=size, seed=seed).on("cpu")))
        for seed, (part, size) in enumerate(parts)
    )
    make = {"eata": EATA, "eata-c": EATAC}[method]

    def build() -> Adapter:
        return make(load_network(model, "cpu").model, source=images[:128], lr=1e-6)

    taken: dict[str, list[float]] = {"bare": [], "idle": [], "checked": []}
    for _ in range(builds):
        rare, always = Guard(build(), probe=images, every=10**6), Guard(build(), probe=images, every=1)
        rare._next = 10**9  # also none at the start
        each: dict[str, Callable[[Tensor], Tensor]] = {"bare": build(), "idle": rare, "checked": always}
        for turn in range(count + 2):
            for name in (*each, *each)[turn % len(each) :][: len(each)]:
                start = time.perf_counter()
                each[name](x)
                if turn > 1:
                    taken[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    idle = medians["idle"] / medians["bare"] - 1
    check = (medians["checked"] - medians["idle"]) / medians["bare"]
    return {"network": model, "method": method, **medians, "per_step": 100 * (idle + check / EVERY)}


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per network and method: honest streams, and the cost of a step."""
    rows = []
    for network, method in dict.fromkeys((row["network"], row["method"]) for row in result["honest"]):
        own = [row for row in result["honest"] if (row["network"], row["method"]) == (network, method)]
        bare, guarded = ([row[name] for row in own] for name in ("accuracy", "guarded"))
        cost = [
            row["per_step"] for row in result.get("steps", ()) if (row["network"], row["method"]) == (network, method)
        ]
        rows.append(
            [
                network,
                method,
                f"{statistics.mean(bare):.2f}",
                f"{statistics.mean(guarded):.2f}",
                f"{min(g - b for b, g in zip(bare, guarded, strict=True)):+.2f}",
                str(sum(row["rollbacks"] for row in own)) + _false(own),
                *_clean(own),
                *([f"{cost[0]:.1f} %"] if cost else []),
            ]
        )
    clean = ["Clean", "guarded"] if "clean" in result["honest"][0] else []
    costs = ["Cost per step"] if result.get("steps") else []
    return ["Network", "Method", "Acc.", "guarded", "worst seed", "Rollbacks", *clean, *costs], rows


def costs_table(result: Mapping[str, Any]) -> Table:
    """Return milliseconds per step and what a guard adds in the long run."""
    rows = [
        [row["network"], row["method"], *(f"{row[name]:.1f}" for name in ("bare", "idle", "checked")), cost]
        for row in result["steps"]
        for cost in [f"{row['per_step']:+.1f} %"]
    ]
    return ["Network", "Method", "ms", "guarded, no check", "with a check", "cost in the long run"], rows


def _false(rows: list[dict[str, Any]]) -> str:
    """Return how many alarms rang where the method was better than the source; the first files do not have it."""
    alarms = [(alarm, row.get("clean")) for row in rows for alarm in row["alarms"] if alarm[1] not in LASTING]
    if not alarms or any(len(alarm) < 5 for alarm, _ in alarms):
        return ""
    false = [
        before - after <= 10 if signal == "evidence" else bare > source
        for (signal, *_, bare, source), (before, after, _) in alarms
    ]
    return f", {sum(false)} false"


def _clean(rows: list[dict[str, Any]]) -> list[str]:
    """Return what is lost on clean images without and with a guard, in the mean; the first files do not have it."""
    if "clean" not in rows[0]:
        return []
    lost = [[row["clean"][place] - row["clean"][0] for row in rows] for place in (1, 2)]
    return [f"{statistics.mean(each):+.1f}" for each in lost]


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--cifar10", type=Path, help="folder that `python -m training.cifar10 unpack` wrote")
    parser.add_argument("--network", choices=("resnet", "vit"), help="one network; both by default")
    parser.add_argument("--images", type=int, default=512, help="images per corruption")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--costs", action="store_true", help="what a step costs, instead of honest streams")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.device, part = "cpu", "" if arguments.cifar10 is None else "_cifar10"
    if arguments.costs:
        found = [
            (data, model, method)
            for data, model, _ in streams(arguments.cifar10, arguments.network)
            for method in METHODS
        ]
        result = {
            "every": EVERY,
            "steps": [steps(*each) for each in track(found, "steps", console=Console(stderr=True))],
        }
        print(as_markdown(*costs_table(result)))
        write("guard", arguments, result, part=f"_costs{part}")
        return
    with warnings.catch_warnings(), TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        warnings.simplefilter("ignore")
        found = streams(arguments.cifar10, arguments.network)
        count = len(found) * len(METHODS)
        task = progress.add_task("honest streams", total=count * len(arguments.seeds))
        tick = partial(progress.advance, task)
        rows = honest(Path(folder), arguments.cifar10, arguments.network, arguments.images, arguments.seeds, tick)
    result = {"images": arguments.images, "every": EVERY, "honest": rows}
    print(as_markdown(*table(result)))
    write("guard", arguments, result, part=part)


if __name__ == "__main__":
    main()
