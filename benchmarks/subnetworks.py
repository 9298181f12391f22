"""What a sub-network's step costs: `python -m benchmarks.subnetworks [--device cuda] [--out FILE.json]`.

A forward and backward pass (norm parameters) of the full network, of one whose branches are masked sample by sample,
and of one whose dropped branches are skipped for the batch, at the same drop rates. Repeats are interleaved; the median
and the spread (first to third quartile) are shown, and the share of branches that is left on average.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from acclimate import StochasticDepth, norm_parameters
from acclimate.bench.own_networks import SmallResNet, SmallViT
from acclimate.bench.provenance import origin

DROPS = (0.2, 0.6)


def networks(device: str) -> dict[str, tuple[nn.Module, Tensor]]:
    """ResNet-50 and ViT-Base at the paper's batch on a GPU; small ones elsewhere. Random weights."""
    if device != "cuda":
        x = torch.rand(64, 1, 32, 32)
        return {"small ResNet": (SmallResNet(), x), "small ViT": (SmallViT(), x)}
    import timm

    x = torch.rand(64, 3, 224, 224, device=device)
    names = {"ResNet-50": "resnet50", "ViT-Base": "vit_base_patch16_224"}
    return {shown: (timm.create_model(name).to(device), x) for shown, name in names.items()}


def seconds(model: nn.Module, x: Tensor, within: AbstractContextManager[None]) -> float:
    """One forward and backward pass."""
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
    """Rows of one network, all ways interleaved."""
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    rows = [
        row
        for name, (model, x) in networks(arguments.device).items()
        for row in measure(name, model, x, arguments.repeats)
    ]
    print(f"{'network':14}{'drop':>6}  {'per':8}{'ms':>9}{'quartiles':>18}{'ratio':>8}{'branches left':>15}")
    for row in rows:
        low, high = row["quartiles_ms"]  # type: ignore[misc]
        print(
            f"{row['network']:14}{row['drop']:>6}  {row['per']:8}{row['ms']:>9}{f'{low}–{high}':>18}"
            f"{row['ratio_to_full']:>8}{row['branches_left']:>15}"
        )
    if arguments.out:
        command = f"python -m benchmarks.subnetworks --device {arguments.device} --repeats {arguments.repeats}"
        content = {"command": command, "origin": origin(torch.device(arguments.device)), "seed": 0, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
