"""Time and memory of a step: `python -m benchmarks.steps [--device cuda] [--out FOLDER]`

Methods, strategies and precisions on random networks, with a fixed share of kept samples: median and quartiles of
interleaved repeats, the ratio to inference on the same engine, and peak memory. Then sweeps of the share and of the
batch size. Writes `steps_DEVICE.json`; `benchmarks.docs_tables` draws the sweeps.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from acclimate import EATA, EATAC, Adapter, BNAdapt, Engine, Selector, Source, Tent
from acclimate.bench.figures import STYLE
from acclimate.bench.own_networks import SmallResNet, SmallViT, cifar10_resnet
from acclimate.bench.provenance import origin
from acclimate.bench.tables import Table
from acclimate.engine import Precision

from .command import command, path, write

SHARES = (0.6, 0.18)
SWEEP = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
SIZES = (1, 4, 16, 64, 256)
PARTS = ("table", "batches")
COLOURS = {"masked": "#e07b39", "sparse": "#2f6f4f", "sparse, detached": "#2f6f4f", "replay-subset": "#3b6fb6"}
"""Of strategies in plots; earlier results have `sparse, detached`."""


class Share(Selector):
    """Keep a fixed share of a batch, spread evenly."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(share))

    def forward(self, logits: Tensor) -> Tensor:
        """Return one for each kept sample, else zero."""
        ends = (torch.arange(len(logits) + 1, device=logits.device) * self.share - 1e-4).ceil()
        return ends.diff().to(logits.dtype)

    def watch(self, keep: Tensor) -> None:
        """Do not warn about the share: it is fixed on purpose."""


@dataclass
class Row:
    """One row of the table."""

    network: str
    method: str
    strategy: str
    engine: str
    precision: str
    batch: int
    kept: float | None
    first_call_s: float = 0.0
    peak_mb: float | None = None
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.milliseconds)

    def spread(self) -> tuple[float, float]:
        """Return the first and third quartile."""
        quartiles = statistics.quantiles(self.milliseconds, n=4)
        return quartiles[0], quartiles[2]


@dataclass
class Entry:
    """A row with its adapter and batch."""

    row: Row
    adapter: Adapter
    x: Tensor

    def keep(self) -> None:
        """Set the adapter's share to that of the row."""
        if self.row.kept is not None:
            self.adapter.get_buffer("select.share").fill_(self.row.kept)


def networks(device: str) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Return makers and input shapes: ResNet-50 and ViT-Base on a GPU, small networks elsewhere."""
    if device != "cuda":
        return {
            "small ResNet": (SmallResNet, (1, 32, 32)),
            "small ViT": (lambda: SmallViT(width=128, depth=6), (1, 32, 32)),
        }
    import timm

    names = {"ResNet-50": "resnet50", "ViT-Base": "vit_base_patch16_224"}
    return {shown: (lambda name=name: timm.create_model(name), (3, 224, 224)) for shown, name in names.items()}


@dataclass(frozen=True)
class Line:
    """A method with its strategy on an engine."""

    method: str
    engine: Engine
    strategy: str | None = None

    @property
    def shown(self) -> str:
        """The strategy as the table shows it."""
        return self.strategy or ""


def lines(precisions: Sequence[Precision], vit: bool, cuda: bool) -> list[Line]:
    """Return eager PyTorch, then each precision of the engine, then the lean engine."""

    def methods(engine: Engine) -> Iterator[Line]:
        yield Line("Source", engine)
        if not vit:
            yield Line("BNAdapt", engine)
        yield Line("Tent", engine)
        yield Line("EATA", engine, "masked")
        if engine.compiled and vit:
            yield Line("EATA", engine, "sparse")
        if not vit:
            yield Line("EATA", engine, "replay-subset")
        yield Line("EATAC", engine, "replay-subset")

    table = [*methods(Engine())]
    for precision in precisions:
        table += methods(Engine(precision, channels_last=cuda or not vit, compiled=True))
    if cuda and "fp32" in precisions:
        lean = Engine("fp32", channels_last=True, compiled=True, lean=True)
        table += [Line("Tent", lean), Line("EATA", lean, "sparse" if vit else "masked")]
        table += [Line("EATAC", lean, "replay-subset")]
    return table


METHODS: dict[str, type[Adapter]] = {"Source": Source, "BNAdapt": BNAdapt, "Tent": Tent, "EATA": EATA, "EATAC": EATAC}


def build(
    network: str,
    make: Callable[[], nn.Module],
    x: Tensor,
    line: Line,
    shares: Sequence[float],
) -> list[Entry]:
    """Return an adapter after its first steps, at each share; peak memory is that of steps before recording."""
    method, strategy, engine = line.method, line.strategy, line.engine
    gc.collect()
    before = _allocated(x)
    torch.manual_seed(0)
    options: dict[str, Any] = {"engine": engine}
    if method == "BNAdapt":
        options |= {"prior": 0.0}  # batch statistics only, as in adaptation
    elif method != "Source":
        options |= {"lr": 1e-5}
    if strategy is not None:
        options |= {"strategy": strategy, "select": Share().to(x.device), "source": [x[:8]]}
    adapter = METHODS[method](make().to(x.device).eval(), **options)
    start = time.perf_counter()
    adapter(x)
    _wait(x)
    first = time.perf_counter() - start
    entries = []
    for share in shares if strategy is not None else [None]:
        row = Row(network, method, line.shown, _named(engine), engine.precision, len(x), share, first)
        entry = Entry(row, adapter, x)
        entry.keep()
        adapter(x)
        row.peak_mb = _peak(adapter, x, before)
        entries.append(entry)
    if x.is_cuda and engine.compiled:
        adapter.engine = replace(adapter.engine, graphs=True)
    for _ in range(4):
        adapter(x)
    print(f"{network}: {method} {line.shown} {engine.precision}, first call {first:.0f} s", flush=True)
    return entries


def _allocated(x: Tensor) -> int:
    if not x.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _peak(adapter: Adapter, x: Tensor, before: int) -> float | None:
    """Return the peak memory of a step in MB, including the weights, without other allocations."""
    if not x.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    adapter(x)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _named(engine: Engine) -> str:
    return ("lean" if engine.lean else "compiled") if engine.compiled else "eager"


def measure(entries: Sequence[Entry], repeats: int, steps: int) -> None:
    """Time all entries in turn, repeatedly."""
    for _ in range(repeats):
        for entry in entries:
            entry.row.milliseconds.append(1e3 * seconds(entry, steps))


def seconds(entry: Entry, steps: int) -> float:
    """Return the time of one step, averaged over several in a row."""
    entry.keep()
    entry.adapter(entry.x)
    _wait(entry.x)
    start = time.perf_counter()
    for _ in range(steps):
        entry.adapter(entry.x)
    _wait(entry.x)
    return (time.perf_counter() - start) / steps


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def sweep(entries: Sequence[Entry], repeats: int, steps: int) -> list[dict[str, Any]]:
    """Time EATA against the share of samples kept, on the compiled engine."""
    chosen = [e for e in entries if e.row.method == "EATA" and e.row.engine == "compiled" and e.row.kept == SHARES[0]]
    found: list[dict[str, Any]] = []
    for entry in chosen:
        for kept in SWEEP:
            point = Entry(replace(entry.row, kept=kept), entry.adapter, entry.x)
            times = [1e3 * seconds(point, steps) for _ in range(repeats)]
            where = {"network": entry.row.network, "strategy": entry.row.strategy, "precision": entry.row.precision}
            found.append(where | {"kept": kept, "milliseconds": statistics.median(times)})
    return found


def batches(
    device: str, network: str, make: Callable[[], nn.Module], shape: tuple[int, ...], repeats: int, steps: int
) -> list[dict[str, Any]]:
    """Time inference and EATA against the batch size, in the engine's best precision."""
    vit = "ViT" in network
    engine = Engine("bf16" if device == "cuda" else "fp32", channels_last=device == "cuda" or not vit, compiled=True)
    found = []
    x = torch.rand(max(SIZES), *shape, device=device)
    for line in [Line("Source", engine), Line("EATA", engine, "sparse" if vit else "masked")]:
        (entry,) = build(network, make, x, line, SHARES[:1])
        for size in SIZES:
            entry.x = x[:size]
            for _ in range(4):
                entry.adapter(entry.x)
            times = [1e3 * seconds(entry, steps) for _ in range(repeats)]
            where = {"network": network, "method": line.method, "strategy": line.shown, "precision": engine.precision}
            found.append(where | {"batch": size, "milliseconds": statistics.median(times)})
            print(f"{network}: {line.method}, batch {size}: {found[-1]['milliseconds']:.2f} ms", flush=True)
    return found


NAMES = ("network", "method", "strategy", "engine", "precision", "kept", "ms", "spread", "× infer", "img/s", "MB")


def inference(rows: Sequence[Row], network: str, engine: str, precision: str) -> float:
    """Return milliseconds of inference, with batch statistics where a network has BatchNorm, as in adaptation."""
    same = {r.method: r.median for r in rows if (r.network, r.engine, r.precision) == (network, engine, precision)}
    found = same.get("BNAdapt", same.get("Source"))
    return inference(rows, network, "compiled", precision) if found is None else found


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of the table."""
    out = []
    for row in rows:
        infer = inference(rows, row.network, row.engine, row.precision)
        low, high = row.spread()
        line = [row.network, row.method, row.strategy, row.engine, row.precision]
        line += ["" if row.kept is None else f"{row.kept:.0%}", f"{row.median:.2f}", f"{low:.2f}–{high:.2f}"]
        line += [f"{row.median / infer:.2f}", f"{1e3 * row.batch / row.median:,.0f}"]
        out.append([*line, "" if row.peak_mb is None else f"{row.peak_mb:,.0f}"])
    return out


def text(rows: Sequence[Row]) -> str:
    """Return the table for a terminal."""
    out = [list(NAMES), *cells(rows)]
    widths = [max(len(line[i]) for line in out) for i in range(len(NAMES))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in out)


def table(content: dict[str, Any]) -> Table:
    """Return all rows of a result file."""
    return list(NAMES), cells(read(content))


def speed(content: dict[str, Any]) -> Table:
    """Return milliseconds per batch with 60 % kept: eager in single precision, and the engine in bfloat16."""
    rows = [row for row in read(content) if row.kept in (None, SHARES[0])]
    times = {(r.network, r.method, r.strategy, r.engine, r.precision): r.median for r in rows}
    lines = []
    for network in dict.fromkeys(row.network for row in rows):
        selective = "sparse" if "ViT" in network else "masked"
        chosen = {"inference": ("Source", "", ""), "Tent": ("Tent", "", ""), "EATA": ("EATA", "masked", selective)}
        chosen["EATA-C"] = ("EATAC", "replay-subset", "replay-subset")
        for shown, (method, plain, fast) in chosen.items():
            eager = times[network, method, plain, "eager", "fp32"]
            auto = times[network, method, fast, "compiled", "bf16"]
            lines.append([network, shown, f"{eager:.1f}", f"{auto:.1f}", f"{eager / auto:.1f} ×"])
    return ["network", "", "eager, fp32", "auto, bf16", "faster by"], lines


def gains(content: dict[str, Any]) -> Table:
    """Return how much faster the engine makes EATA in bfloat16, and its time relative to inference."""
    times = {(r.network, r.method, r.strategy, r.engine, r.precision, r.kept): r.median for r in read(content)}
    chosen = [("ResNet-50", "masked", 0.6), ("ViT-Base", "sparse", 0.6), ("ViT-Base", "sparse", 0.18)]
    ours = [times[network, "EATA", strategy, "compiled", "bf16", kept] for network, strategy, kept in chosen]
    eager, dense = (
        [times[network, "EATA", "masked", engine, precision, kept] for network, _, kept in chosen]
        for engine, precision in (("eager", "fp32"), ("compiled", "bf16"))
    )
    infer = [times[n, "BNAdapt" if n == "ResNet-50" else "Source", "", "compiled", "bf16", None] for n, _, _ in chosen]

    def ratios(over: Sequence[float], under: Sequence[float], form: str) -> list[str]:
        return [form.format(a / b) for a, b in zip(over, under, strict=True)]

    return ["EATA in bfloat16, against", "ResNet-50", "ViT-Base, 60 % kept", "ViT-Base, 18 % kept"], [
        ["the plain eager step in single precision", *ratios(eager, ours, "{:.1f} × as fast")],
        ["a dense backward in the same engine", *ratios(dense, ours, "{:.2f} × as fast")],
        ["the same engine's inference", *ratios(ours, infer, "{:.2f} × its time")],
    ]


def read(result: dict[str, Any]) -> list[Row]:
    """Return the rows of a result file."""
    known = {f.name for f in fields(Row)}
    rows = [row for found in result["networks"].values() for row in found["rows"]]
    return [Row(**{name: value for name, value in row.items() if name in known}) for row in rows]


def draw(content: dict[str, Any]) -> Figure:
    """Draw time against the share kept, with the ideal line, per network and precision; then against batch size."""
    sweeps = [point for found in content["networks"].values() for point in found["sweep"]]
    sizes = [point for found in content["networks"].values() for point in found.get("batches", {}).get("points", ())]
    panels = sorted({(p["network"], p["precision"]) for p in sweeps})
    names = sorted({p["network"] for p in sizes})
    lines, columns = 1 + bool(sizes), max(len(panels), len(names))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 3.4 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for axis, (network, precision) in zip(axes[0], panels, strict=False):
            points = [p for p in sweeps if (p["network"], p["precision"]) == (network, precision)]
            _draw_sweep(axis, points, inference(read(content), network, "compiled", precision))
            axis.set(title=f"{network}, {precision}", xlabel="share of samples kept", ylabel="ms per step")
        for axis, network in zip(axes[-1], names, strict=False):
            _draw_sizes(axis, [p for p in sizes if p["network"] == network])
            axis.set(title=network, xlabel="batch size", ylabel="ms per step")
        for axis in axes.flat:
            axis.set_visible(bool(axis.lines))
    return figure


GREY = "#8a8f98"


def _draw_sweep(axis: Any, points: Sequence[dict[str, Any]], infer: float) -> None:
    for strategy, colour in COLOURS.items():
        line = [(p["kept"], p["milliseconds"]) for p in points if p["strategy"] == strategy]
        if line:
            axis.plot(*zip(*line, strict=True), "o-", color=colour, label=strategy, markersize=4)
    dense = max(p["milliseconds"] for p in points if p["strategy"] == "masked")
    axis.plot([0, 1], [infer, dense], "--", color=GREY, label="ideal")
    axis.axhline(infer, color=GREY, linewidth=0.8)
    axis.text(0.99, infer, "inference", ha="right", va="bottom", fontsize=8, color=GREY)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _draw_sizes(axis: Any, points: Sequence[dict[str, Any]]) -> None:
    for method, colour in (("Source", GREY), ("EATA", "#2f6f4f")):
        line = [(p["batch"], p["milliseconds"]) for p in points if p["method"] == method]
        labels = {f"{p['method']}, {p['strategy'] + ', ' if p['strategy'] else ''}{p['precision']}" for p in points}
        label = next(name for name in labels if name.startswith(method))
        axis.plot(*zip(*line, strict=True), "o-", color=colour, label=label, markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.legend(frameon=False)


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed together in each repeat")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[""], help="networks, by a part of their name")
    parser.add_argument("--precisions", nargs="*", help="precisions of the compiled engine")
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="measure these; keep the others from the file"
    )
    arguments = parser.parse_args()
    device, repeats, steps = arguments.device, arguments.repeats, arguments.steps
    precisions = arguments.precisions or (["fp32", "bf16"] if device == "cuda" else ["fp32"])
    file = path("steps", arguments)
    results: dict[str, Any] = json.loads(file.read_text())["networks"] if file.exists() else {}
    larger = {} if device == "cuda" else {"CIFAR-10 ResNet": (cifar10_resnet, (3, 32, 32))}
    for network, (make, shape) in {**networks(device), **larger}.items():
        if not any(part.lower() in network.lower() for part in arguments.only):
            continue
        found, measured = results.setdefault(network, {}), {"origin": origin(torch.device(device)), "seed": 0}
        if "table" in arguments.parts:
            x = torch.rand(arguments.batch, *shape, device=device)
            table = lines(precisions, "ViT" in network, device == "cuda")
            entries = [entry for line in table for entry in build(network, make, x, line, SHARES)]
            measure(entries, repeats, steps)
            print(text([entry.row for entry in entries]), flush=True)
            rows = [asdict(entry.row) for entry in entries]
            found |= measured | {"rows": rows, "sweep": sweep(entries, 3, steps)}
            entries.clear()
        if "batches" in arguments.parts:
            found["batches"] = measured | {"points": batches(device, network, make, shape, 3, steps)}
        write("steps", arguments, {"networks": results}, depth=4)


if __name__ == "__main__":
    main()
