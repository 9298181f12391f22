"""Choose the settings of the guard: `python -m benchmarks.guard_thresholds [--seeds 3] [--processes 2] [--choices]`

On training digits under the four corruptions that no table uses, alone and two or three on top of each other, so that
neither images nor corruptions nor seeds are those that a guard is judged on. A batch is harmed if the method is more
than five points below the source network on it. The rules:

- `skew`, `collapse`: the smallest multiple of 0.02 that no batch of an honest stream exceeds unless it is harmed;
- `harm`, for a roll back: of the choices with which no honest run of EATA or EATA-C loses more than 0.1 points against
  the run without a guard (or else as little as possible), the one whose worst hostile run of ETA or Tent at 20 times
  its rate is best, on the stream or on clean images, against the source network; if these are equal to a tenth of a
  point, the one that gains most on honest streams.

Not chosen here are `tolerated`, a tenth, as was set before any guard was measured, and `familiar`, which is above the
largest novelty of 1,000 clean batches; what follows evidence, and how long to pause, are as the same rule chose them
for the fourth guard. `--choices` keeps the first rule's stored results. Writes `guard_thresholds_cpu.json`.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Generator, Tensor

from acclimate import POLICIES, Adapter, Guard, Policy
from acclimate.bench.demo import digit_overrides
from acclimate.bench.evaluate import evaluate
from acclimate.bench.networks import load_network
from acclimate.bench.result import Result
from acclimate.bench.scenarios import SCENARIOS
from acclimate.bench.stream import Domain
from acclimate.bench.tables import Table, as_markdown
from acclimate.data.corruptions import corrupted
from acclimate.data.digits import load_digits
from acclimate.data.folders import Tensors
from acclimate.data.on_the_fly import Corrupted
from acclimate.data.types import Part
from acclimate.methods import METHODS
from acclimate.online.novelty import Novelty

from .command import command, read, write

SHIFTS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
HARD = tuple("+".join(names) for count in (1, 2, 3) for names in permutations(SHIFTS, count))
FIRST_SEED = 11
NETWORKS = ("resnet", "vit")
HONEST = ("eata", "eata-c")
WRONG_LABELS = ("correlated", "sorted", "one-class")
HOSTILE = (*WRONG_LABELS, "mixing")
HONEST_STREAMS = ("hard", "blocks")
CHOICES = [{"harm": above} for above in (0.02, 0.1, 0.3, 1.0)]
"""Harm is never above 1: nothing is rolled back then."""
HARMED, LOST, STEP = 0.05, 0.1, 0.02
Found = TypeVar("Found")


class Combined(Corrupted):
    """Images under several corruptions, one on top of the other: `spatter+saturate`."""

    extra = HARD

    def part(self, shift: str, severity: int) -> Part:
        """Return the images with these corruptions at one severity."""
        return Part(self.images, partial(_combine, shift.split("+"), severity))


def _combine(shifts: Sequence[str], severity: int, x: Tensor, generator: Generator) -> Tensor:
    for shift in shifts:
        x = corrupted(x, shift, severity, generator, "imagenet-c")
    return x


def run(network: str, method: str, stream: str, severity: int, seed: int, factor: float = 1, **guard: Any) -> Result:
    """Return the result of a method on training digits, watched by a guard with these options if there are any.

    The stream `hard` has forty single and combined corruptions in random order, 128 images each, `blocks` fifteen with
    256, the others the four single ones.
    """
    digits = load_digits()[0]
    suite = Combined("digits", Tensors(digits.x[:2000], digits.y[:2000]), outputs=10)
    held_out, source = digits.x[2000:2512], digits.x[2512:2744]
    loaded = load_network(f"digits-{network}", "cpu")
    settings: dict[str, Any] = {**digit_overrides(network).get(method, {}), "seed": seed}
    if factor != 1:
        settings["lr"] *= factor
    if "source" in inspect.signature(METHODS[method]).parameters:
        settings["source"] = [source]
    adapter: Adapter | Guard = METHODS[method].preset(loaded.family, loaded.model, **settings)
    if guard:
        adapter = Guard(adapter, seed=seed, **{"probe": held_out, **guard})
    if stream in HONEST_STREAMS:
        count, images = (len(HARD), 128) if stream == "hard" else (15, 256)
        order = random.Random(seed).sample(HARD, count)  # noqa: S311 - an order, not a secret
        scenario = SCENARIOS["lifelong"](
            suite, severity=severity, shifts=order, images=images, batch_size=64, seed=seed
        )
    else:
        scenario = SCENARIOS[stream](suite, severity=severity, shifts=SHIFTS, images=512, batch_size=64, seed=seed)
    return evaluate(adapter, scenario, clean=Domain.of("clean", digits.x[2744:], digits.y[2744:]))


def checks(network: str, method: str, stream: str, severity: int, seed: int, factor: float = 1) -> list[dict[str, Any]]:
    """Return the signals of every batch of a stream on which the guard does nothing, and whether it was harmed."""
    watch: dict[str, Any] = {"policies": (), "every": 1, "probe": None}
    own = run(network, method, stream, severity, seed, factor, **watch)
    source = run(network, "source", stream, severity, seed, **watch)
    now, before = own.along or [], source.along or []
    return [
        {
            "skew": each["skew"],
            "collapse": each["collapse"],
            "harmed": before[each["batch"]] - now[each["batch"]] > HARMED,
        }
        for each in (own.health or {})["history"]
    ]


def threshold(signal: str, honest: list[dict[str, Any]], hostile: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the threshold that the rule chooses for a signal, and what it finds."""
    calm = [each[signal] for each in honest if each[signal] is not None and not each["harmed"]]
    harmed = [each[signal] for each in (*honest, *hostile) if each[signal] is not None and each["harmed"]]
    above = STEP * math.ceil(max(calm) / STEP)
    return {
        "signal": signal,
        "honest": len(calm),
        "largest": max(calm),
        "chosen": above,
        "harmed": len(harmed),
        "found": sum(value > above for value in harmed) / len(harmed),
    }


def choose_thresholds(seeds: range, pool: Executor) -> list[dict[str, Any]]:
    """Return what the rule chooses for `skew` and `collapse`."""
    lifelong = [
        (network, method, stream, severity, seed)
        for network, method, seed in product(NETWORKS, HONEST, seeds)
        for stream, severity in (("lifelong", 3), ("lifelong", 5), ("hard", 5))
    ]
    wrong = {
        signal: [(network, method, stream, 3, seed, factor) for stream in WRONG_LABELS for seed in seeds]
        for signal, network, method, factor in (("skew", "resnet", "eata", 1), ("collapse", "vit", "eta", 20))
    }
    honest = each_of(pool, checks, lifelong, "honest")
    return [threshold(signal, honest, each_of(pool, checks, jobs, signal)) for signal, jobs in wrong.items()]


def largest_novelty(seeds: range, count: int = 1000) -> float:
    """Return the largest novelty of random clean batches, for held-out images of the same kind."""
    digits = load_digits()[0].x
    novelty, random = Novelty(digits[2000:2512]), Generator().manual_seed(seeds[0])
    batches = (digits[torch.randint(2000, (64,), generator=random)] for _ in range(count))
    return max(float(novelty(batch)) for batch in batches)


def each_of(
    pool: Executor, call: Callable[..., list[Found]], jobs: Iterable[tuple[Any, ...]], about: str
) -> list[Found]:
    """Return what all calls have returned, in order, and show the progress."""
    waiting = [pool.submit(call, *job) for job in jobs]
    return [found for each in track(waiting, about, console=Console(stderr=True)) for found in each.result()]


def guarded_runs(network: str, method: str, stream: str, seed: int, policies: list[Policy]) -> list[dict[str, Any]]:
    """Return runs without a guard and with each choice; on a hostile stream a method has twenty times its rate."""
    severity, factor = (5, 1) if stream in HONEST_STREAMS else (3, 20)
    source, bare = run(network, "source", stream, severity, seed), run(network, method, stream, severity, seed, factor)
    rows = []
    for choice in CHOICES:
        own = [
            replace(p, above=choice["harm"]) if p.action == "roll back" and p.signal == "harm" else p for p in policies
        ]
        guarded = run(network, method, stream, severity, seed, factor, policies=own)
        rows.append(
            {
                "network": network,
                "method": method,
                "stream": stream,
                "seed": seed,
                **choice,
                "source": 100 * source.accuracy,
                "bare": 100 * bare.accuracy,
                "guarded": 100 * guarded.accuracy,
                "clean": [100 * (each.clean_after or 0.0) for each in (source, bare, guarded)],
                "undone": (guarded.health or {})["rollbacks"],
            }
        )
    return rows


def summary(rows: list[dict[str, Any]], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a choice gains at worst: on honest streams, on hostile ones, and on clean images after each."""
    own = [row for row in rows if all(row[name] == value for name, value in choice.items())]
    honest, hostile = ([row for row in own if (row["stream"] in HONEST_STREAMS) == wanted] for wanted in (True, False))
    gains = [row["guarded"] - row["bare"] for row in honest]
    return {
        **choice,
        "honest": [min(gains), sum(gains) / len(gains)],
        "honest clean": min(row["clean"][2] - row["clean"][0] for row in honest),
        "hostile": min(row["guarded"] - row["source"] for row in hostile),
        "hostile clean": min(row["clean"][2] - row["clean"][0] for row in hostile),
    }


def best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the choice that the rule prefers."""
    least = min(-LOST, max(each["honest"][0] for each in found))
    allowed = [each for each in found if each["honest"][0] >= least]
    return max(
        allowed,
        key=lambda each: (
            round(min(each["hostile"], each["hostile clean"]), 1),
            round(each["honest"][1], 1),
        ),
    )


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per signal: the largest honest value, the threshold, and how much harm lies above."""
    head = ["signal", "largest on honest batches", "threshold", "harmed batches above it"]
    return head, [
        [each["signal"], f"{each['largest']:.3f}", f"{each['chosen']:.2f}", f"{100 * each['found']:.0f} %"]
        for each in result["thresholds"]
    ]


def choices_table(result: Mapping[str, Any]) -> Table:
    """Return one row per choice: what honest and hostile runs lose and gain by it."""
    chosen = [name for name in ("harm", "evidence", "pause", "tolerated") if name in result["choices"][0]]
    head = [*chosen, "honest: worst", "mean", "clean", "hostile: worst", "clean"]
    return head, [
        [
            *(each[name] if isinstance(each[name], str) else f"{each[name]:g}" for name in chosen),
            *(f"{value:+.1f}" for value in (*each["honest"], each["honest clean"])),
            *(f"{value:+.1f}" for value in (each["hostile"], each["hostile clean"])),
        ]
        for each in result["choices"]
    ]


def _quietly() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """Measure, choose, print tables and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--choices", action="store_true", help="only the second rule")
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    with ProcessPoolExecutor(arguments.processes, initializer=_quietly) as pool:
        stored = read("guard_thresholds", "cpu") if arguments.choices else None
        thresholds = choose_thresholds(seeds, pool) if stored is None else stored["thresholds"]
        chosen = {each["signal"]: each["chosen"] for each in thresholds}
        policies = [replace(policy, above=chosen.get(policy.signal, policy.above)) for policy in POLICIES]
        novelty = largest_novelty(seeds)
        jobs = [
            ("vit", method, stream, seed, policies) for method, stream, seed in product(HONEST, HONEST_STREAMS, seeds)
        ]
        jobs += [("vit", method, stream, seeds[0], policies) for method, stream in product(("eta", "tent"), HOSTILE)]
        rows = each_of(pool, guarded_runs, jobs, "choices")
    found = [summary(rows, choice) for choice in CHOICES]
    chosen |= {name: best(found)[name] for name in CHOICES[0]}
    result = {"chosen": chosen, "novelty": novelty, "thresholds": thresholds, "choices": found, "runs": rows}
    print(as_markdown(*table(result)), as_markdown(*choices_table(result)), sep="\n\n")
    arguments.device = "cpu"
    write("guard_thresholds", arguments, result)


if __name__ == "__main__":
    main()
