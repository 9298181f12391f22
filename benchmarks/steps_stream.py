"""Time of a step on a real stream: `python -m benchmarks.steps_stream [--device cuda] [--sizes 1 4 16] [--out FOLDER]`

Corrupted digits, one corruption after the other, on the networks that were trained on clean ones, with small batches.
The method selects by itself, so that the number of kept samples changes from batch to batch, and fewer are kept where
corruptions are severe. Every row sees the same
batches in turn with the others, the plain eager program among them: a chunk of the stream each. The ratio to the plain
eager program is the median over chunks, since the machine may be shared. `benchmarks.steps` measures fixed shares.
Writes `steps_stream_DEVICE.json`.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from acclimate import EATA, EATAC, Adapter, BNAdapt, Engine, Source
from acclimate.bench.networks import load_network
from acclimate.bench.tables import Table
from acclimate.data.corruptions import corrupt
from acclimate.data.digits import load_digits

from .command import command, write

SHIFTS = ("gaussian_noise", "contrast", "defocus_blur", "brightness", "pixelate", "fog")
NETWORKS = {"resnet": "cifar-resnet", "vit": "cifar-vit"}
"""The networks on digits, and presets for about ten classes."""
SEVERITIES = (3, 5)
SEED = 0


@dataclass
class Row:
    """One way to run a method on one stream."""

    network: str
    severity: int
    batch: int
    method: str
    strategy: str
    engine: str
    warm_up_s: float
    kept: float | None = None
    accuracy: float = 0.0
    milliseconds: list[float] = field(default_factory=list)
    """Per batch, one entry per chunk."""


@dataclass
class Entry:
    """A row with its adapter."""

    row: Row
    adapter: Adapter

    def run(self, chunk: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, int]:
        """Time a chunk of the stream; return how many images were predicted correctly, and how many kept."""
        logits, kept = [], 0
        _wait(chunk[0][0])
        start = time.perf_counter()
        for x, _ in chunk:
            logits.append(self.adapter(x))
            kept += 0 if self.adapter.last.kept is None else int(self.adapter.last.kept.sum())
        _wait(chunk[0][0])
        self.row.milliseconds.append(1e3 * (time.perf_counter() - start) / len(chunk))
        return sum(int((z.argmax(1) == y).sum()) for z, (_, y) in zip(logits, chunk, strict=True)), kept


def stream(severity: int, batch: int, chunks: int, batches: int, device: str) -> list[list[tuple[Tensor, Tensor]]]:
    """Return chunks of a stream: each has the same number of batches, and the corruption changes along the stream."""
    _, test = load_digits()
    per_shift = -(-chunks // len(SHIFTS)) * batches * batch
    generator, images, labels = torch.Generator().manual_seed(SEED), [], []
    for shift in SHIFTS:
        places = torch.randint(len(test.x), (per_shift,), generator=generator)
        images.append(corrupt(test.x[places], shift, severity, generator))
        labels.append(test.y[places])
    pairs = zip(torch.cat(images).to(device).split(batch), torch.cat(labels).to(device).split(batch), strict=True)
    every = [*pairs]
    return [every[i * batches : (i + 1) * batches] for i in range(chunks)]


def entries(
    network: str, severity: int, batch: int, like: Tensor, source: Tensor, *, compiled: bool
) -> Iterator[Entry]:
    """Yield inference, EATA and EATA-C: the plain eager program first, then other engines and strategies."""
    engines: dict[str, Any] = {"eager": Engine()} | ({"auto": "auto"} if compiled else {})
    ways: list[tuple[str, Literal["fastest"] | None]] = [("inference", None), ("EATA", None), ("EATA-C", None)]
    if network == "resnet":  # elsewhere the fastest strategy is the default
        ways.insert(2, ("EATA", "fastest"))
    for engine, how in engines.items():
        for method, strategy in ways:
            model = load_network(f"digits-{network}", like.device).model
            adapter: Adapter
            if method == "inference":
                adapter = BNAdapt(model, prior=0.0, engine=how) if network == "resnet" else Source(model, engine=how)
            else:
                learner = EATA if method == "EATA" else EATAC
                adapter = learner.preset(NETWORKS[network], model, source=source, engine=how, strategy=strategy)
            start = time.perf_counter()
            adapter.warm_up(like)
            row = Row(network, severity, batch, method, adapter.strategy, engine, time.perf_counter() - start)
            print(f"{network}, batch {batch}: {method} {row.strategy} {engine}, {row.warm_up_s:.0f} s", flush=True)
            yield Entry(row, adapter)


def measure(
    network: str, severity: int, batch: int, chunks: int, batches: int, device: str, *, compiled: bool
) -> list[Row]:
    """Run all ways on the same stream, a chunk in turn."""
    train, _ = load_digits()
    parts = stream(severity, batch, chunks, batches, device)
    chosen = [*entries(network, severity, batch, parts[0][0][0], train.x[:64].to(device), compiled=compiled)]
    right, kept = [0] * len(chosen), [0] * len(chosen)
    for part in parts:
        for i, entry in enumerate(chosen):
            correct, some = entry.run(part)
            right[i], kept[i] = right[i] + correct, kept[i] + some
    for entry, correct, some in zip(chosen, right, kept, strict=True):
        images = chunks * batches * batch
        entry.row.accuracy = 100 * correct / images
        entry.row.kept = None if entry.row.method == "inference" else some / images
    return [entry.row for entry in chosen]


def ratio(row: Row, rows: Sequence[Row]) -> float:
    """Return the time relative to the plain eager program of the same method, the median over chunks."""
    where = (row.network, row.severity, row.batch, row.method, "eager")
    plain = next(r for r in rows if (r.network, r.severity, r.batch, r.method, r.engine) == where)
    return statistics.median(a / b for a, b in zip(row.milliseconds, plain.milliseconds, strict=True))


def table(content: dict[str, Any]) -> Table:
    """Return one row per method, strategy and engine: milliseconds, and the ratio to the plain eager program."""
    rows = [Row(**row) for row in content["rows"]]
    sizes = sorted({row.batch for row in rows})
    names = {"resnet": "small ResNet", "vit": "small ViT"}
    cells: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        strategy = "" if row.method == "inference" else row.strategy
        key = (names[row.network], str(row.severity), row.method, strategy, row.engine)
        cells.setdefault(key, {})[row.batch] = row
    head = ["network", "severity", "method", "strategy", "engine"]
    for size in sizes:
        head += [f"batch {size}: ms", "× plain", "kept", "accuracy"]
    lines = []
    for place, by_size in cells.items():
        line = [*place]
        for size in sizes:
            row_ = by_size.get(size)
            if row_ is None:
                line += [""] * 4
                continue
            kept = "" if row_.kept is None else f"{row_.kept:.0%}"
            line += [f"{statistics.median(row_.milliseconds):.1f}", f"{ratio(row_, rows):.2f}", kept]
            line += [f"{row_.accuracy:.0f}"]
        lines.append(line)
    return head, lines


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    """Measure and write after each network and size."""
    parser = command(__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--compiled", nargs="*", type=int, help="sizes to compile for as well; all unless given")
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--batches", type=int, default=8, help="batches per chunk")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="a batch of one image")
    warnings.filterwarnings("ignore", message=".*of the samples")
    rows: list[Row] = []
    for network in arguments.networks:
        for severity, size in itertools.product(SEVERITIES, arguments.sizes):
            compiled = arguments.compiled is None or size in arguments.compiled
            rows += measure(
                network,
                severity,
                size,
                arguments.chunks,
                arguments.batches,
                arguments.device,
                compiled=compiled,
            )
            result = {"threads": torch.get_num_threads(), "seed": SEED, "rows": [asdict(row) for row in rows]}
            write("steps_stream", arguments, result, depth=2)
            head, lines = table(result)
            print("\n".join("  ".join(cell.rjust(9) for cell in line) for line in [head, *lines]), flush=True)


if __name__ == "__main__":
    main()
