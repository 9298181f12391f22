"""Two processes that share a batch: `python -m benchmarks.parallel [--repeats 20]`

For each method on the demo's networks: the messages and bytes that a rank sends per step, and the time of a step of two
ranks with 32 digits each beside that of one process with all 64: processor time, which other work on the machine hardly
changes, and elapsed time, which includes waiting and is noisy on shared cores. What a step consists of is timed, too:
half of the batch in one process; what a rank computes, without sending its messages; a message between two other
computations, as in a step; and the message with all gradients. All alternate. The result file has ratios to one
process's step, as medians with quartiles. Writes `parallel_cpu.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acclimate import METHODS, Adapter, Ranks
from acclimate.bench.demo import DEMO_NETWORKS, digit_overrides
from acclimate.bench.networks import load_network
from acclimate.bench.tables import Table, as_markdown
from acclimate.data.corruptions import corrupt
from acclimate.data.digits import load_digits

from .command import command, write

RANKS = 2
SIZE = 64
MEASURED = {
    "resnet": ("source", "bn-adapt", "tent", "eata", "eata-c", "sar", "roid", "cotta", "tea"),
    "vit": ("source", "tent", "eata", "eata-c", "sar", "roid", "cotta", "tea"),
}
SLOW = {"tea": 4}
"""Methods with fewer repeats: the others' are divided by this."""


BETWEEN = 32
"""Messages that are timed together, between other computations."""


class Silent(Ranks):
    """Ranks that compute what others do, and send nothing: each one believes that the others have its own numbers."""

    def _call(self, name: str, sent: Tensor, *arguments: Any, **named: Any) -> None:  # noqa: ARG002
        if name == "all_gather":
            for part in arguments[0]:
                part.copy_(sent)


def build(method: str, network: str, **options: Any) -> Adapter:
    """Return a method around a network for digits, with the settings of the demo."""
    loaded = load_network(DEMO_NETWORKS[network], "cpu")
    arguments = digit_overrides(network).get(method, {})
    if method in ("eata", "eata-c"):
        arguments = {**arguments, "source": [*load_digits()[0].x[:512].split(SIZE)]}
    return METHODS[method].preset(loaded.family, loaded.model, **arguments, **options)


def seconds(what: Callable[[], object]) -> list[float]:
    """Return processor time and elapsed time of a call that all ranks begin together; the slowest counts."""
    dist.barrier()
    start = time.process_time(), time.perf_counter()
    what()
    taken = torch.tensor([time.process_time() - start[0], time.perf_counter() - start[1]], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.tolist()


def between(messages: int, numbers: Tensor, matrix: Tensor) -> None:
    """Compute something for about a third of a millisecond, many times, and send messages after the first ones."""
    for place in range(BETWEEN):
        matrix @ matrix
        if place < messages:
            dist.all_reduce(numbers)


def point(method: str, network: str, repeats: int) -> dict[str, Any]:
    """Measure one method on one network."""
    x = corrupt(load_digits()[1].x[:SIZE], "gaussian_noise", 3, torch.Generator().manual_seed(0))
    shared, alone, half = build(method, network, ranks="all"), build(method, network), build(method, network)
    silent = build(method, network, ranks=Silent())
    silent._compared = True  # this needs an answer
    rank, world = dist.get_rank(), shared.world
    assert isinstance(world, Ranks)  # noqa: S101
    own = x.chunk(RANKS)[rank]
    shared(own)
    messages, sent = world.messages, world.sent
    shared(own)
    messages, sent = world.messages - messages, world.sent - sent
    alone(x)
    half(own)
    silent(own)
    numbers, matrix = torch.zeros(SIZE, dtype=torch.float64), torch.rand(256, 256)
    gradients = torch.cat([p.detach().flatten() for p in shared.adapted] or [numbers])
    timed: dict[str, Callable[[], object]] = {
        "alone": lambda: alone(x) if rank == 0 else None,
        "shared": lambda: shared(own),
        "half": lambda: half(own),
        "silent": lambda: silent(own),
        "messages": lambda: between(BETWEEN, numbers, matrix),
        "no messages": lambda: between(0, numbers, matrix),
        "gradients": lambda: dist.all_reduce(gradients),
    }
    trials = [{name: seconds(call) for name, call in timed.items()} for _ in range(repeats)]

    def quartiles(trial: str, clock: int, to: str = "alone") -> dict[str, float]:
        return _quartiles([each[trial][clock] / each[to][clock] for each in trials])

    price = _quartiles([(each["messages"][0] - each["no messages"][0]) / BETWEEN / each["alone"][0] for each in trials])

    return {
        "network": network,
        "method": method,
        "messages": messages,
        "bytes": sent,
        "gradient_bytes": sum(p.nbytes for p in shared.adapted),
        "processor": quartiles("shared", 0),
        "elapsed": quartiles("shared", 1),
        "processor_of_half": quartiles("half", 0),
        "processor_without_messages": quartiles("silent", 0),
        "processor_of_a_message": price,
        "elapsed_of_gradients": quartiles("gradients", 1, to="shared"),
        "milliseconds_alone": {
            clock: 1e3 * statistics.median(each["alone"][place] for each in trials)
            for place, clock in enumerate(("processor", "elapsed"))
        },
    }


def _quartiles(values: list[float]) -> dict[str, float]:
    return dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4), strict=True))


def work(rank: int, folder: str, repeats: int) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        measure(folder, repeats)
    finally:
        dist.destroy_process_group()


def measure(folder: str, repeats: int) -> None:
    """Measure all methods; the first rank writes what was found."""
    rank, found = dist.get_rank(), []
    for network, method in itertools.chain.from_iterable(itertools.product([n], own) for n, own in MEASURED.items()):
        found.append(point(method, network, max(2, repeats // SLOW.get(method, 1))))
        if rank == 0:
            print(found[-1], flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


def table(content: dict[str, Any]) -> Table:
    """Return one row per network and method."""
    rows = [
        [
            entry["network"],
            entry["method"],
            str(entry["messages"]),
            f"{entry['bytes'] / 1024:.1f}",
            f"{entry['gradient_bytes'] / 1024:.1f}",
            f"{100 * entry['elapsed_of_gradients']['median']:.1f}" if entry["gradient_bytes"] else "",
            *(_shown(entry[clock]) for clock in ("processor", "elapsed")),
        ]
        for entry in content["points"]
    ]
    head = ["network", "method", "messages", "KiB sent", "KiB of gradients"]
    return [*head, "% of a step", "processor time of a rank", "elapsed time"], rows


def _shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, arguments.repeats), nprocs=RANKS)
        points = json.loads(Path(folder, "found.json").read_text())
    result = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[1],
        "ranks": RANKS,
        "batch": SIZE,
        "repeats": arguments.repeats,
        "points": points,
    }
    print(as_markdown(*table(result)))
    write("parallel", arguments, result, depth=3)


if __name__ == "__main__":
    main()
