"""Time of a sub-network's step: `python -m benchmarks.subnetworks [--device cuda] [--out FOLDER]`

Forward and backward pass (norm parameters) of the full network, with branches masked per sample, and with branches
skipped per batch, at the same drop ratios. Repeats are interleaved; medians with the first and third quartile, and the
mean share of branches left. Writes `subnetworks_DEVICE.json`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor, nn

from acclimate import StochasticDepth, norm_parameters
from acclimate.bench.own_networks import SmallResNet, SmallViT
from acclimate.bench.tables import Table

from .command import command, write

DROPS = (0.2, 0.6)


def networks(device: str) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return random networks with a batch: ResNet-50 and ViT-Base on a GPU, small ones elsewhere."""
    if device != "cuda":
        x = torch.rand(64, 1, 32, 32)
        return {"small ResNet": (SmallResNet(), x), "small ViT": (SmallViT(), x)}
    import timm

    x = torch.rand(64, 3, 224, 224, device=device)
    names = {"ResNet-50": "resnet50", "ViT-Base": "vit_base_patch16_224"}
    return {shown: (timm.create_model(name).to(device), x) for shown, name in names.items()}


def seconds(model: nn.Module, x: Tensor, within: AbstractContextManager[None]) -> float:
    """Time one forward and backward pass."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with within:
        loss = model(x).logsumexp(1).mean()
    loss.backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, model: nn.Module, x: Tensor, repeats: int) -> list[dict[str, object]]:
    """Return the rows of one network, all ways interleaved."""
    model.eval().requires_grad_(False)
    for p in norm_parameters(model).values():
        p.requires_grad_(True)
    depth = StochasticDepth(model)
    generator = Generator().manual_seed(0)
    ways: dict[tuple[float, str], list[float]] = {(0.0, "full"): []}
    ways |= {(drop, per): [] for drop in DROPS for per in ("sample", "batch")}
    for repeat in range(repeats + 3):
        for (drop, per), times in ways.items():
            within = nullcontext() if per == "full" else depth.sampled(drop, per=per, generator=generator)  # type: ignore[arg-type]
            spent = seconds(model, x, within)
            if repeat >= 3:
                times.append(1000 * spent)
    full = statistics.median(ways[0.0, "full"])
    rows: list[dict[str, object]] = []
    for (drop, per), times in ways.items():
        low, middle, high = statistics.quantiles(times, n=4)
        left = 1 - statistics.mean(depth.rates(drop))
        rows.append(
            {
                "network": name,
                "drop": drop,
                "per": per,
                "ms": round(middle, 3),
                "quartiles_ms": [round(low, 3), round(high, 3)],
                "ratio_to_full": round(middle / full, 3),
                "branches_left": round(left, 3),
            }
        )
    return rows


def table(content: dict[str, Any]) -> Table:
    """Return the time of each way relative to the full network."""
    rows = content["rows"]
    ratio = {(row["network"], row["drop"], row["per"]): f"{row['ratio_to_full']:.2f}×" for row in rows}
    lines = []
    for row in (row for row in rows if row["per"] == "sample"):
        place = row["network"], row["drop"]
        left = f"{row['branches_left']:.0%}"
        lines.append([place[0], str(place[1]), left, ratio[(*place, "sample")], ratio[(*place, "batch")]])
    return ["network", "drop ratio", "branches left", "masked per sample", "skipped per batch"], lines


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    rows = []
    for name, (model, x) in networks(arguments.device).items():
        rows += measure(name, model, x, arguments.repeats)
        print(*rows, sep="\n", flush=True)
    write("subnetworks", arguments, {"seed": 0, "rows": rows})


if __name__ == "__main__":
    main()
