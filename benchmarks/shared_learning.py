"""What cameras gain from each other: `python -m benchmarks.shared_learning [--choose] [--seeds 3]`

Six cameras over one network, a batch of 16 digits each in turn, 20 batches per camera, severity 5. Four settings: all
cameras in the same weather; each in another; two groups of three; and cameras that join their group when the others
have ended, which alone are scored. Each seed has other corruptions. Cameras learn alone; share blindly, averaged or
added up; share by similarity; or have one state per weather, which needs to know the weather. `--choose` runs gains,
periods and temperatures on other images and the four corruptions that no table uses, and writes the choice only: it is
the default of `Pool` and `Shared`. Writes `shared_learning_cpu.json`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acclimate import Adapter
from acclimate.bench.demo import DEMO_NETWORKS
from acclimate.bench.scenarios import lifelong
from acclimate.bench.tables import Table, as_markdown
from acclimate.data import open_suite
from acclimate.data.corruptions import BENCHMARK, EXTRA
from acclimate.online.cameras import Streams
from acclimate.online.pool import Pool
from acclimate.online.shared import Shared

from .cameras import build
from .command import command, path, write

METHODS = ("eata", "eata-c")
SIZE, BATCHES, QUARTER = 16, 20, 5
SETTINGS = {
    "same": ("alone", "averaged", "similar", "known"),
    "different": ("alone", "averaged", "similar"),
    "groups": ("alone", "averaged", "added up", "similar"),
    "joining": ("alone", "averaged", "similar"),
}
"""The settings, and the ways to share that are worth running there."""


class Mode(NamedTuple):
    """How cameras share: not at all without a temperature, blindly with an infinite one."""

    temperature: float | None = None
    gain: float = 1.0
    every: int = 8
    known: bool = False
    """Whether cameras in the same weather have one state."""


class Camera(NamedTuple):
    """Its weather, and whether it comes when the others have ended."""

    shift: str
    late: bool = False


def layout(setting: str, shifts: Sequence[str], seed: int) -> list[Camera]:
    """Return six cameras; the corruptions rotate with the seed."""
    turn = [shifts[(5 * seed + 7 * i) % len(shifts)] for i in range(6)]
    if setting == "same":
        return [Camera(turn[0])] * 6
    if setting == "different":
        return [Camera(shift) for shift in turn]
    return [Camera(turn[group], setting == "joining" and i == 2) for group in range(2) for i in range(3)]


@cache
def batches(data: str, shift: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the stream of a camera."""
    suite = open_suite(data)
    scenario = lifelong(suite, severity=5, shifts=(shift,), images=SIZE * BATCHES, batch_size=SIZE, seed=seed)
    return [*scenario.domains[0].on("cpu")]


def play(adapter: Adapter, data: str, cameras: Sequence[Camera], mode: Mode, seed: int) -> list[float]:
    """Return the accuracy along the stream in per cent: the mean over the cameras that are scored, per batch."""
    adapter.reset()
    own = Streams(adapter)
    call = own if mode.temperature is None else Shared(own, Pool(mode.temperature, gain=mode.gain), every=mode.every)
    found: dict[bool, list[list[float]]] = {}
    alone = mode.temperature is None and not mode.known
    for late in sorted({camera.late for camera in cameras})[-1 if alone else 0 :]:
        present = [(i, camera.shift) for i, camera in enumerate(cameras) if camera.late == late]
        found[late] = [[] for _ in present]
        for n, (place, (i, shift)) in product(range(BATCHES), enumerate(present)):
            x, y = batches(data, shift, 10 * seed + i)[n]
            logits = call(shift if mode.known else str(i), x)
            found[late][place].append(100 * (logits.argmax(1) == y).float().mean().item())
    return average(found[max(found)])


def average(curves: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean curve."""
    return [mean(values) for values in zip(*curves, strict=True)]


START = Mode(0.1, 8.0, 2)
TRIED = (
    START,
    START._replace(gain=2.0),
    START._replace(every=5),
    *(START._replace(temperature=t) for t in (0.03, 0.3)),
)
TIE = 0.25  # points that a longer period may cost
TUNED = (("same", 101), ("same", 102), ("different", 100), ("groups", 100))


def tune(network: str, method: str) -> list[float]:
    """Return the mean accuracy of each way to share, on images and corruptions that are not judged."""
    adapter = prepared(network, method)
    return [
        mean(mean(play(adapter, "digits:tune", layout(name, EXTRA, seed), mode, seed)) for name, seed in TUNED)
        for mode in TRIED
    ]


def choose(jobs: int) -> dict[str, Any]:
    """Return the accuracies, and the best gain, period and temperature, each varied by itself."""
    pairs = [*product(DEMO_NETWORKS, METHODS)]
    with ProcessPoolExecutor(jobs) as workers:
        found = [*workers.map(tune, *zip(*pairs, strict=True))]
    tried = dict(zip(TRIED, average(found), strict=True))
    gain = max(
        (mode for mode in TRIED if (mode.temperature, mode.every) == (START.temperature, START.every)),
        key=tried.__getitem__,
    ).gain
    warm = max((mode for mode in TRIED if (mode.gain, mode.every) == (START.gain, START.every)), key=tried.__getitem__)
    longer = tried[START._replace(every=5)] >= tried[START] - TIE
    chosen = Mode(warm.temperature, gain, 5 if longer else START.every)
    rows = [{**mode._asdict(), "accuracy": accuracy} for mode, accuracy in tried.items()]
    return {"shifts": EXTRA, "runs": TUNED, "tie": TIE, "tried": rows, "each": found, "chosen": chosen._asdict()}


@cache
def prepared(network: str, method: str) -> Adapter:
    """Return a method around a network, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return build(method, network, "cpu")


def ways(chosen: Mapping[str, Any]) -> dict[str, Mode]:
    """Return the ways to share that are judged."""
    similar = Mode(**chosen)
    return {
        "alone": Mode(),
        "averaged": Mode(math.inf, 1.0, similar.every),
        "added up": Mode(math.inf, similar.gain, similar.every),
        "similar": similar,
        "known": Mode(known=True),
    }


def judge(network: str, method: str, setting: str, chosen: Mapping[str, Any], seeds: int) -> list[dict[str, Any]]:
    """Return the accuracy along the stream for each way to share in a setting: one curve per seed."""
    adapter, rows = prepared(network, method), []
    for way in SETTINGS[setting]:
        runs = [(seed, layout(setting, BENCHMARK, seed)) for seed in range(seeds)]
        curves = [play(adapter, "digits:judge", cameras, ways(chosen)[way], seed) for seed, cameras in runs]
        rows.append({"network": network, "method": method, "setting": setting, "way": way, "curves": curves})
        print(network, method, setting, way, f"{mean(average(curves)):.2f}", flush=True)
    return rows


def needed(curve: Sequence[float], target: float) -> int | None:
    """Return after how many images of a camera the mean accuracy of a quarter first reaches a target."""
    ends = range(QUARTER, len(curve) + 1)
    return next((SIZE * end for end in ends if mean(curve[end - QUARTER : end]) >= target - 1e-9), None)


def table(content: Mapping[str, Any]) -> Table:
    """Return one row per network, method and setting: accuracy over all, and samples saved, beside learning alone."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in content["judged"]:
        found.setdefault((row["network"], row["method"], row["setting"]), {})[row["way"]] = average(row["curves"])
    rows = []
    shared = ("averaged", "added up", "similar", "known")
    for key, own in sorted(found.items(), key=lambda each: [*SETTINGS].index(each[0][2])):
        alone = own["alone"]
        others = [f"{mean(own[way]) - mean(alone):+.1f}" if way in own else "" for way in shared]
        similar = own["similar"]
        quarters = [
            f"{mean(alone[part]):.1f} → {mean(similar[part]):.1f}" for part in (slice(QUARTER), slice(-QUARTER, None))
        ]
        target = mean(alone[-QUARTER:])
        before, after = needed(alone, target), needed(similar, target)
        saved = "not reached" if after is None or before is None else f"{before - after} of {before}"
        rows.append([key[2], *key[:2], f"{mean(alone):.1f}", *others, *quarters, saved])
    return ["setting", "network", "method", "alone", *shared, "first quarter", "last quarter", "images saved"], rows


def choice_table(content: Mapping[str, Any]) -> Table:
    """Return one row per setting of the pool that was tried."""
    names = ("temperature", "gain", "every")
    rows = [[*(f"{row[name]:g}" for name in names), f"{row['accuracy']:.2f}"] for row in content["choice"]["tried"]]
    return ["temperature", "gain", "period", "accuracy"], rows


def main() -> None:
    """Choose or judge, print and write."""
    parser = command(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--choose", action="store_true", help="choose settings; else judge those of the last choice")
    arguments = parser.parse_args()
    arguments.device = "cpu"
    file = path("shared_learning", arguments)
    if arguments.choose:
        result: dict[str, Any] = {"choice": choose(arguments.jobs)}
        print(result)
    else:
        choice = json.loads(file.read_text())["choice"]
        parts = [*product(DEMO_NETWORKS, METHODS, SETTINGS)][::-1]  # the slow ones first
        with ProcessPoolExecutor(arguments.jobs) as workers:
            jobs = [workers.submit(judge, *part, choice["chosen"], arguments.seeds) for part in parts]
            judged = [row for job in jobs for row in job.result()]
        weather = {
            setting: [[camera.shift for camera in layout(setting, BENCHMARK, seed)] for seed in range(arguments.seeds)]
            for setting in SETTINGS
        }
        result = {"cores": os.cpu_count(), "choice": choice, "weather": weather, "judged": judged}
        print(as_markdown(*table(result)))
    write("shared_learning", arguments, result, depth=3)


if __name__ == "__main__":
    main()
