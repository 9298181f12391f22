"""What a step costs: `python -m benchmarks.steps [--device cuda] [--out FOLDER]`.

Methods, strategies and precisions side by side, on random networks with the share of kept samples held fixed: the
median of interleaved repeats and their spread (first to third quartile), the ratio to the same engine's inference, and
the peak memory of a step. Then the share is swept, and the batch size. Writes `steps_DEVICE.json` and draws the sweep.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acclimate import EATA, EATAC, Adapter, Engine, Selector, Source, Tent
from acclimate.engine import Precision
from acclimate.evaluate import origin
from acclimate.files import write_text
from acclimate.models import SmallResNet, SmallViT

SHARES = (0.6, 0.18)
SWEEP = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
SIZES = (1, 4, 16, 64, 256)


class Share(Selector):
    """Keeps a fixed share of a batch, spread over it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(1.0))

    def forward(self, logits: Tensor) -> Tensor:
        """One for the kept."""
        ends = (torch.arange(len(logits) + 1, device=logits.device) * self.share - 1e-4).ceil()
        return ends.diff().to(logits.dtype)

    def watch(self, keep: Tensor) -> None:
        """No alarm: the share is what is asked for."""


@dataclass
class Row:
    """One line of the table."""

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
        """Of the repeats."""
        return statistics.median(self.milliseconds)

    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        quartiles = statistics.quantiles(self.milliseconds, n=4)
        return quartiles[0], quartiles[2]


@dataclass
class Entry:
    """An adapter that is being measured."""

    row: Row
    adapter: Adapter
    x: Tensor

    def keep(self) -> None:
        """The share that is its row's."""
        if self.row.kept is not None:
            self.adapter.get_buffer("select.share").fill_(self.row.kept)


def networks(device: str) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """ResNet-50 and ViT-Base on a GPU; small ones elsewhere."""
    if device != "cuda":
        return {
            "small ResNet": (SmallResNet, (1, 32, 32)),
            "small ViT": (lambda: SmallViT(width=128, depth=6), (1, 32, 32)),
        }
    import timm

    names = {"ResNet-50": "resnet50", "ViT-Base": "vit_base_patch16_224"}
    return {shown: (lambda name=name: timm.create_model(name), (3, 224, 224)) for shown, name in names.items()}


def lines(precisions: Sequence[Precision], vit: bool) -> list[tuple[str, str | None, Engine]]:
    """Method, strategy, engine. The first four are PyTorch as it comes."""
    eager = Engine()
    engines = [Engine(precision, channels_last=not vit, compiled=True) for precision in precisions]
    table: list[tuple[str, str | None, Engine]] = [
        ("Source", None, eager),
        ("Tent", None, eager),
        ("EATA", "masked", eager),
        ("EATAC", "replay-subset", eager),
    ]
    for engine in engines:
        table += [("Source", None, engine), ("Tent", None, engine), ("EATA", "masked", engine)]
        if vit:
            table.append(("EATA", "sparse", engine))
        table.append(("EATAC", "replay-subset", engine))
    return table


METHODS: dict[str, type[Adapter]] = {"Source": Source, "Tent": Tent, "EATA": EATA, "EATAC": EATAC}


def build(
    network: str,
    make: Callable[[], nn.Module],
    x: Tensor,
    line: tuple[str, str | None, Engine],
    shares: Sequence[float],
) -> list[Entry]:
    """An adapter that has taken its first steps, at each share; peak memory is measured before steps are recorded."""
    method, strategy, engine = line
    gc.collect()
    before = _allocated(x)
    torch.manual_seed(0)
    options: dict[str, Any] = {"engine": engine}
    if method != "Source":
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
        row = Row(network, method, adapter.strategy, _named(engine), engine.precision, len(x), share, first)
        entry = Entry(row, adapter, x)
        entry.keep()
        adapter(x)
        row.peak_mb = _peak(adapter, x, before)
        entries.append(entry)
    if x.is_cuda and engine.compiled:
        adapter.engine = replace(adapter.engine, graphs=True)
    for _ in range(4):
        adapter(x)
    print(f"{network}: {method} {strategy or ''} {engine.precision}, first call {first:.0f} s", flush=True)
    return entries


def _allocated(x: Tensor) -> int:
    if not x.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _peak(adapter: Adapter, x: Tensor, before: int) -> float | None:
    """Of a step, in MB, with the network's weights and without whatever else is there."""
    if not x.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    adapter(x)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _named(engine: Engine) -> str:
    return "compiled" if engine.compiled else "eager"


def measure(entries: Sequence[Entry], repeats: int, steps: int) -> None:
    """All in turn, again and again."""
    for _ in range(repeats):
        for entry in entries:
            entry.row.milliseconds.append(1e3 * seconds(entry, steps))


def seconds(entry: Entry, steps: int) -> float:
    """Of one step, from several back to back."""
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
    """EATA's cost against the share of samples kept, in the compiled engine."""
    chosen = [e for e in entries if e.row.method == "EATA" and e.row.engine == "compiled" and e.row.kept == SHARES[0]]
    found: list[dict[str, Any]] = []
    for entry in chosen:
        for kept in SWEEP:
            point = Entry(replace(entry.row, kept=kept), entry.adapter, entry.x)
            times = [1e3 * seconds(point, steps) for _ in range(repeats)]
            told = {"network": entry.row.network, "strategy": entry.row.strategy, "precision": entry.row.precision}
            found.append(told | {"kept": kept, "milliseconds": statistics.median(times)})
    return found


def batches(
    device: str, network: str, make: Callable[[], nn.Module], shape: tuple[int, ...], repeats: int, steps: int
) -> list[dict[str, Any]]:
    """Cost against batch size: inference and EATA in the engine's best precision."""
    vit = "ViT" in network
    engine = Engine("bf16" if device == "cuda" else "fp32", channels_last=not vit, compiled=True)
    found = []
    x = torch.rand(max(SIZES), *shape, device=device)
    for line in [("Source", None, engine), ("EATA", "sparse" if vit else "masked", engine)]:
        (entry,) = build(network, make, x, line, SHARES[:1])
        for size in SIZES:
            entry.x = x[:size]
            for _ in range(4):
                entry.adapter(entry.x)
            times = [1e3 * seconds(entry, steps) for _ in range(repeats)]
            told = {"network": network, "method": line[0], "strategy": line[1], "precision": engine.precision}
            found.append(told | {"batch": size, "milliseconds": statistics.median(times)})
            print(f"{network}: {line[0]}, batch {size}: {found[-1]['milliseconds']:.2f} ms", flush=True)
    return found


NAMES = ("network", "method", "strategy", "engine", "precision", "kept", "ms", "spread", "× infer", "img/s", "MB")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table, a list a line."""
    out = []
    for row in rows:
        base = [r for r in rows if r.method == "Source" and (r.network, r.engine, r.precision) == _same(row)]
        low, high = row.spread()
        line = [row.network, row.method, row.strategy if row.method != "Source" else "", row.engine, row.precision]
        line += ["" if row.kept is None else f"{row.kept:.0%}", f"{row.median:.2f}", f"{low:.2f}–{high:.2f}"]
        line += [f"{row.median / base[0].median:.2f}", f"{1e3 * row.batch / row.median:,.0f}"]
        out.append([*line, "" if row.peak_mb is None else f"{row.peak_mb:,.0f}"])
    return out


def told(rows: Sequence[Row]) -> str:
    """The table as people read it."""
    out = [list(NAMES), *cells(rows)]
    widths = [max(len(line[i]) for line in out) for i in range(len(NAMES))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in out)


def markdown(path: Path) -> str:
    """The table of a result file, for a page."""
    known = {f.name for f in fields(Row)}
    content = json.loads(path.read_text())["rows"]
    rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in content]
    lines = [list(NAMES), ["---"] * 6 + ["---:"] * 5, *cells(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _same(row: Row) -> tuple[str, str, str]:
    return row.network, row.engine, row.precision


def draw(result: dict[str, Any], path: Path) -> None:
    """Cost against the share kept, one panel a network and precision, with the ideal line."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    panels = sorted({(p["network"], p["precision"]) for p in result["sweep"]})
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False)
    for axis, (network, precision) in zip(axes[0], panels, strict=True):
        points = [p for p in result["sweep"] if (p["network"], p["precision"]) == (network, precision)]
        infer = next(
            r["median"]
            for r in result["rows"]
            if (r["network"], r["precision"], r["method"], r["engine"]) == (network, precision, "Source", "compiled")
        )
        for strategy, colour in (("masked", "#e07b39"), ("sparse", "#2f6f4f")):
            line = [(p["kept"], p["milliseconds"]) for p in points if p["strategy"] == strategy]
            if line:
                axis.plot(*zip(*line, strict=True), "o-", color=colour, label=strategy, markersize=4)
        dense = max(p["milliseconds"] for p in points if p["strategy"] == "masked")
        axis.plot([0, 1], [infer, dense], "--", color="#8a8f98", label="ideal")
        axis.axhline(infer, color="#8a8f98", linewidth=0.8)
        axis.text(0.99, infer, "inference", ha="right", va="bottom", fontsize=8, color="#8a8f98")
        axis.set(title=f"{network}, {precision}", xlabel="share of samples kept", ylabel="ms a step")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="timed together in one repeat")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", nargs="*", help="networks by a part of their name")
    parser.add_argument("--precisions", nargs="*", help="of the compiled engine")
    parser.add_argument("--build-only", action="store_true", help="compile, to fill the compiler's cache, and stop")
    parser.add_argument("--no-batches", action="store_true", help="leave the batch sizes out")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    device, repeats, steps = arguments.device, arguments.repeats, arguments.steps
    precisions = arguments.precisions or (["fp32", "bf16"] if device == "cuda" else ["fp32"])
    found = networks(device)
    found = {
        n: v for n, v in found.items() if not arguments.only or any(o.lower() in n.lower() for o in arguments.only)
    }
    rows: list[Row] = []
    sweeps: list[dict[str, Any]] = []
    sizes: list[dict[str, Any]] = []
    for network, (make, shape) in found.items():
        x = torch.rand(arguments.batch, *shape, device=device)
        entries = [e for line in lines(precisions, "ViT" in network) for e in build(network, make, x, line, SHARES)]
        if arguments.build_only:
            continue
        measure(entries, repeats, steps)
        rows += [entry.row for entry in entries]
        print(told([entry.row for entry in entries]), flush=True)
        sweeps += sweep(entries, 3, steps)
        entries.clear()
        if not arguments.no_batches:
            sizes += batches(device, network, make, shape, 3, steps)
    if arguments.build_only:
        return
    print("\n" + told(rows))
    result = {
        "command": f"python -m benchmarks.steps --device {device}",
        "origin": origin(torch.device(device)),
        "seed": 0,
        "rows": [asdict(row) | {"median": row.median, "spread": row.spread()} for row in rows],
        "sweep": sweeps,
        "batches": sizes,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out / f"steps_{'h200' if device == 'cuda' else 'cpu'}.json", json.dumps(result, indent=1))
    draw(result, arguments.out / f"steps_{'h200' if device == 'cuda' else 'cpu'}.svg")


if __name__ == "__main__":
    main()
