"""Time of a step on a real stream: `python -m benchmarks.steps_stream [--model NAME --data NAME] [--device cuda]`

Corrupted images, one corruption after the other, by default digits in small batches. The methods select by themselves,
so that the number of kept samples changes from batch to batch, and fewer are kept where corruptions are severe. A row
is a method with a strategy on an engine: plain PyTorch, the same in bfloat16, and `auto`. Each row has a process of its
own, so that its memory is its own, and the processes take turns: a chunk of the stream each. A ratio of two rows is the
median over the chunks, since the machine may be shared. MEMO runs on the first images of a chunk, one at a time, and is
scaled up. `benchmarks.steps` measures fixed shares. Writes `steps_stream_DEVICE.json`; for other networks than those on
digits, `steps_stream_MODEL_DEVICE.json`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from acclimate import METHODS, Adapter, BNAdapt, Source
from acclimate.bench.networks import load_network
from acclimate.bench.stream import SampledDomain, sample_domain
from acclimate.bench.tables import Table
from acclimate.data import open_suite
from acclimate.data.types import Suite

from .command import ENGINES, command, name_of, write

SHIFTS = ("gaussian_noise", "contrast", "defocus_blur", "brightness", "pixelate", "fog")
DIGITS = {"digits-resnet": "cifar-resnet", "digits-vit": "cifar-vit"}
"""The networks on digits, and presets for about ten classes."""
SHOWN = {"inference": "inference", "eata-c": "EATA-C", "eta-c": "ETA-C"}
"""Methods that the table does not show by the name of their class."""
NAMES = {"resnet": "small ResNet", "vit": "small ViT", "digits-resnet": "small ResNet", "digits-vit": "small ViT"}
"""Networks that it does not show by their own name; earlier results have `resnet` and `vit`."""
SEVERITIES = (3, 5)
FEW = 4
"""Images per chunk for MEMO."""
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
    """Share of the samples."""
    accuracy: float = 0.0
    milliseconds: list[float] = field(default_factory=list)
    """Per batch, one entry per chunk."""
    numbers: list[int] = field(default_factory=list)
    """Of kept samples, one entry per batch."""
    peak_mb: float | None = None
    """Most memory in use at any time, the warm-up included, without the images of the stream."""
    reserved_mb: float | None = None
    """What torch has reserved of the GPU at the end, without the images."""


@dataclass(frozen=True)
class Way:
    """What tells the rows of a stream apart."""

    method: str
    """`inference`, or a method's name on the command line."""
    engine: str
    strategy: str | None = None

    @property
    def shown(self) -> str:
        """The method's name in the table."""
        return SHOWN.get(self.method) or METHODS[self.method].__name__


@dataclass(frozen=True)
class Setting:
    """A network, and a stream of corrupted images for it: chunks in files, each with the same number of batches."""

    model: str
    preset: str | None
    severity: int
    batch: int
    classes: Sequence[int] | None
    device: str
    folder: Path

    def source(self) -> Tensor:
        """Return clean images, for the Fisher importance."""
        return torch.load(self.folder / "source.pt")  # type: ignore[no-any-return]

    def chunk(self, number: int) -> tuple[Tensor, Tensor]:
        """Return images and labels, (batches, images per batch, …)."""
        return torch.load(self.folder / f"{number}.pt")  # type: ignore[no-any-return]


@dataclass
class Entry:
    """A row with its adapter, and memory for the images of a chunk."""

    row: Row
    adapter: Adapter
    images: Tensor
    others: int = 0
    """Bytes of the GPU that do not belong to the row."""
    right: int = 0
    seen: int = 0

    def run(self, x: Tensor, y: Tensor) -> Row:
        """Time a chunk of the stream; return the row so far. Nothing is read from the GPU while it is timed."""
        self.images.copy_(x)
        parts = [*self.images]
        if self.row.method == "MEMO":
            parts, y = [*self.images[0, :FEW].split(1)], y[0, :FEW]
        logits, kept = [], []
        _wait(self.images)
        start = time.perf_counter()
        for part in parts:
            logits.append(self.adapter(part))
            kept.append(self.adapter.last.kept)
        _wait(self.images)
        seconds = time.perf_counter() - start
        row, images = self.row, sum(map(len, parts))
        row.milliseconds.append(1e3 * seconds * row.batch / images)
        self.right += int((torch.cat(logits).argmax(1).cpu() == y.flatten()).sum())
        self.seen += images
        row.accuracy = 100 * self.right / self.seen
        row.numbers += [int(mask.sum()) for mask in kept if mask is not None]
        row.kept = sum(row.numbers) / self.seen if row.numbers else None
        if self.images.is_cuda:
            row.peak_mb = (torch.cuda.max_memory_allocated() - self.others) / 2**20
            row.reserved_mb = (torch.cuda.memory_reserved() - self.others) / 2**20
        return row


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


# In the process of a row ----------------------------------------------------------------------------------------------

_entries: dict[Way, Entry] = {}
"""The row of this process."""


def start(setting: Setting, way: Way) -> Row:
    """Build an adapter and warm it up."""
    warnings.simplefilter("ignore", DeprecationWarning)
    for message in ("a batch of one image", ".*of the samples"):
        warnings.filterwarnings("ignore", message=message)
    x, _ = setting.chunk(0)
    images = x.to(setting.device)
    others = torch.cuda.memory_reserved() if images.is_cuda else 0
    adapter = build(setting, way)
    _wait(images)
    begin = time.perf_counter()
    adapter.warm_up(images[0, :1] if way.method == "memo" else images[0])
    _wait(images)
    seconds = time.perf_counter() - begin
    names = name_of(setting.model), setting.severity, setting.batch, way.shown, adapter.strategy, way.engine
    _entries[way] = Entry(Row(*names, seconds), adapter, images, others)
    return _entries[way].row


def run(setting: Setting, way: Way, number: int) -> Row:
    """Time a chunk."""
    return _entries[way].run(*setting.chunk(number))


def build(setting: Setting, way: Way) -> Adapter:
    """Return a method with its preset for the network. Inference normalises as the adapting methods do."""
    loaded = load_network(setting.model, setting.device)
    options: dict[str, Any] = {"engine": ENGINES[way.engine], "classes": setting.classes}
    if way.method == "inference":
        return BNAdapt(loaded.model, prior=0.0, **options) if loaded.has_batch_norm else Source(loaded.model, **options)
    if way.strategy is not None:
        options["strategy"] = way.strategy
    if way.method in ("eata", "eata-c"):
        options["source"] = setting.source().to(setting.device)
    preset = setting.preset or DIGITS.get(name_of(setting.model), loaded.family)
    return METHODS[way.method].preset(preset, loaded.model, **options)


# All of them ----------------------------------------------------------------------------------------------------------


def ways(methods: Sequence[str], engines: Sequence[str], *, batch_norm: bool) -> Iterator[Way]:
    """Yield inference and each method, on one engine after the other; EATA also with the strategy of `fastest`."""
    for engine in engines:
        yield Way("inference", engine)
        for method in methods:
            yield Way(method, engine)
            if method == "eata" and batch_norm:  # elsewhere the fastest strategy is the default
                yield Way(method, engine, "fastest")


def stream(suite: Suite, severity: int, batch: int, count: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, an equal number of each corruption; images are drawn with replacement."""
    shifts = [shift for shift in SHIFTS if shift in suite.shifts] or suite.shifts
    each = -(-count // len(shifts))
    generator, workers = torch.Generator().manual_seed(SEED), (os.cpu_count() or 1) - 1 if device == "cuda" else 0
    for shift in shifts:
        part = suite.part(shift, severity)
        places = torch.randint(len(part.images), (each * batch,), generator=generator).tolist()
        yield from SampledDomain(shift, [part], [(0, i) for i in places], batch, SEED, workers).on(device)


def prepare(setting: Setting, suite: Suite, chunks: int, batches: int) -> None:
    """Write the stream and the clean images to the setting's folder."""
    source = sample_domain("source", suite.clean(), batch_size=64, images=64, seed=SEED + 1)
    torch.save(next(iter(source.on("cpu")))[0], setting.folder / "source.pt")
    pairs = stream(suite, setting.severity, setting.batch, chunks * batches, setting.device)
    for number in range(chunks):
        images, labels = zip(*itertools.islice(pairs, batches), strict=True)
        torch.save((torch.stack(images).cpu(), torch.stack(labels)), setting.folder / f"{number}.pt")


own_process = partial(ProcessPoolExecutor, 1, multiprocessing.get_context("spawn"))


def measure(
    setting: Setting, chosen: Sequence[Way], chunks: int, pool: Callable[[], Executor] = own_process, *, together: bool
) -> Iterator[list[Row]]:
    """Run all ways on the stream, a chunk in turn, and yield the rows after each chunk. Leave out what fails.

    They warm up one by one, or `together`.
    """
    with ExitStack() as stack:
        pools = {way: stack.enter_context(pool()) for way in chosen}
        for ready in [own.submit(os.getpid) for own in pools.values()]:
            ready.result()  # a process imports for some seconds
        starting: dict[Way, Future[Row]] = {}
        for way, own in pools.items():
            starting[way] = own.submit(start, setting, way)
            if not together:
                starting[way].exception()  # waits
        rows = {way: row for way, future in starting.items() if (row := _result(way, future)) is not None}
        for number in range(chunks):
            for way in [*rows]:
                row = _result(way, pools[way].submit(run, setting, way, number))
                if row is None:
                    del rows[way]
                else:
                    rows[way] = row
            yield [*rows.values()]


def _result(way: Way, future: Future[Row]) -> Row | None:
    """Return the row, or print why there is none."""
    error = future.exception()
    if error is not None:
        print(f"{way}: {type(error).__name__}: {error}", flush=True)
        return None
    row = future.result()
    if not row.milliseconds:
        print(f"{row.network}, batch {row.batch}: {way}, {row.warm_up_s:.0f} s", flush=True)
    return row


# Tables ---------------------------------------------------------------------------------------------------------------


def plain(row: Row, rows: Sequence[Row], engine: str = "eager", method: str | None = None) -> Row | None:
    """Return the row of the same method, or another, with its default strategy on an engine, on the same stream."""
    where = (row.network, row.severity, row.batch, method or row.method, engine)
    return next((r for r in rows if (r.network, r.severity, r.batch, r.method, r.engine) == where), None)


def ratio(row: Row, other: Row | None) -> str:
    """Return the time relative to another row, the median over chunks; nothing if there is no such row."""
    if other is None:
        return ""
    return f"{statistics.median(a / b for a, b in zip(row.milliseconds, other.milliseconds, strict=True)):.2f}"


def table(content: dict[str, Any]) -> Table:
    """Return one row per method, strategy and engine: milliseconds, and the ratio to the plain eager program."""
    rows = [Row(**row) for row in content["rows"]]
    sizes = sorted({row.batch for row in rows})
    cells: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        strategy = "" if row.kept is None else row.strategy
        key = (NAMES.get(row.network, row.network), str(row.severity), row.method, strategy, row.engine)
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
            line += [f"{statistics.median(row_.milliseconds):.1f}", ratio(row_, plain(row_, rows))]
            line += ["" if row_.kept is None else f"{row_.kept:.0%}", f"{row_.accuracy:.0f}"]
        lines.append(line)
    return head, lines


WHERE = ("network", "severity", "batch")
COSTS = ("× inference", "× eager", "× eager bf16", "kept", "accuracy", "warm-up s", "peak MB", "reserved MB")


def costs(content: dict[str, Any]) -> Table:
    """Return one row per row of the file: time beside inference on the same engine, and beside the plain programs."""
    rows = [Row(**row) for row in content["rows"]]
    where = [name for name in WHERE if len({getattr(row, name) for row in rows}) > 1]
    lines = []
    for row in rows:
        line = [*(str(getattr(row, name)) for name in where), row.method, "" if row.kept is None else row.strategy]
        line += ["eager bf16" if row.engine == "bf16" else row.engine, f"{statistics.median(row.milliseconds):.2f}"]
        line += [ratio(row, plain(row, rows, row.engine, "inference"))]
        line += [ratio(row, plain(row, rows, engine)) for engine in ("eager", "bf16")]
        line += ["" if row.kept is None else f"{row.kept:.0%}", f"{row.accuracy:.1f}", f"{row.warm_up_s:.0f}"]
        lines.append([*line, *("" if mb is None else f"{mb:,.0f}" for mb in (row.peak_mb, row.reserved_mb))])
    return [*where, "method", "strategy", "engine", "ms", *COSTS], lines


def text(of: Table) -> str:
    """Return a table for a terminal."""
    head, lines = of
    return "\n".join("  ".join(cell.rjust(9) for cell in line) for line in [head, *lines])


def main() -> None:
    """Measure and write after each network and size."""
    parser = command(__doc__)
    parser.add_argument("--model", nargs="*", default=[*DIGITS], help="networks, as `acclimate run` takes them")
    parser.add_argument("--data", default="digits", help="a data set, as `acclimate run` takes it")
    parser.add_argument("--preset", help="hyper-parameters to start from; by default those for the kind of network")
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--severities", nargs="*", type=int, default=SEVERITIES)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=["tent", "eata", "eata-c", "sar"])
    parser.add_argument("--engines", nargs="*", choices=ENGINES, help="eager and auto; on a GPU bf16, too")
    parser.add_argument("--compiled", nargs="*", type=int, help="sizes to run engine auto for; all unless given")
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--batches", type=int, default=8, help="batches per chunk")
    parser.add_argument("--together", action="store_true", help="warm up all rows at a time: faster, and not measured")
    arguments = parser.parse_args()
    device = arguments.device
    engines = arguments.engines or (["eager", "bf16", "auto"] if device == "cuda" else ["eager", "auto"])
    part = "" if arguments.data == "digits" else f"_{name_of(arguments.model[0])}"
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "seed": SEED}
    for model in arguments.model:
        loaded = load_network(model)
        suite = open_suite(arguments.data, loaded.preprocess)
        for severity, size in itertools.product(arguments.severities, arguments.sizes):
            compiled = arguments.compiled is None or size in arguments.compiled
            chosen = [engine for engine in engines if engine != "auto" or compiled]
            with TemporaryDirectory() as folder:
                place = suite.classes, device, Path(folder)
                setting = Setting(model, arguments.preset, severity, size, *place)
                prepare(setting, suite, arguments.chunks, arguments.batches)
                every = [*ways(arguments.methods, chosen, batch_norm=loaded.has_batch_norm)]
                for found in measure(setting, every, arguments.chunks, together=arguments.together):
                    result["rows"] = rows + [asdict(row) for row in found]
                    write("steps_stream", arguments, result, depth=2, part=part)
            rows = result["rows"]
            print(text(costs(result)), flush=True)


if __name__ == "__main__":
    main()
