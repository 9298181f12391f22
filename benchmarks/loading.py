"""Whether adaptation waits for images: `python -m benchmarks.loading [--device cuda] [--out FOLDER]`.

Images a second that EATA takes (compiled, 18 % kept; ViT-Base on a GPU, a small ViT elsewhere) when they are in memory
already, and when they come from files: JPEGs, or pixels that were decoded before (`--cache`); read alone, and read for
it, by a growing number of workers that have started. Files of 224 pixels, as ImageNet-C has them, smooth or full of
noise, and photographs that are resized.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from acclimate import EATA
from acclimate.bench.own_networks import SmallViT
from acclimate.bench.scenarios import sample_domain
from acclimate.bench.stream import SampledDomain
from acclimate.data.decoded import Decoded
from acclimate.data.folders import ImageFolder, Preprocess
from acclimate.data.types import ImageSet, Part

from .command import command, write
from .steps import Share, networks

KINDS = {"224×224, smooth": (224, 224, 0), "224×224, noisy": (224, 224, 60), "500×375, resized": (500, 375, 15)}
"""Width, height, and the deviation of their noise."""
WINDOWS = 3
BATCH = 64
KEPT = 0.18


def make(device: str) -> EATA:
    """On images of 224 pixels, with a fixed share of samples kept."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.AvgPool2d(7), SmallViT(width=128, depth=6, channels=3))
    model = networks(device)["ViT-Base"][0]() if device == "cuda" else small
    return EATA(model.to(device).eval(), beta=0, select=Share(KEPT).to(device), engine="auto")


def files(folder: Path, size: tuple[int, int], noise: float, count: int) -> ImageFolder:
    """Pictures as JPEGs of ImageNet-C's quality."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    some = []
    for coarse in draw.integers(0, 256, (16, 12, 16, 3), dtype=np.uint8):
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
        some.append((smooth + noise * draw.standard_normal(smooth.shape, np.float32)).clip(0, 255).astype(np.uint8))
    for i in range(count):
        Image.fromarray(some[i % 16]).save(folder / f"{i}.jpg", quality=85, optimize=True)
    return ImageFolder(folder.parent, Preprocess(256, 224) if size[0] != size[1] else Preprocess(crop=size[0]))


def stream(images: ImageSet, workers: int, batches: int) -> SampledDomain:
    """The images again and again: windows of `batches`, and those that are under way when the time starts."""
    once = sample_domain("images", Part(images), batch_size=BATCH, workers=workers)
    total = BATCH * (WINDOWS * batches + ahead(workers))
    return replace(once, picks=([*once.picks] * (-(-total // len(images))))[:total])


def ahead(workers: int) -> int:
    """Batches that are asked for at once, and one."""
    return 2 * workers + 1


def rates(
    batches: Iterable[tuple[Tensor, Tensor]], skipped: int, window: int, use: Callable[[Tensor], object]
) -> list[float]:
    """Images a second in each window of so many batches, after the first `skipped`."""
    found: list[float] = []
    count, start = 0, 0.0
    for index, (x, _) in enumerate(batches, 1):
        use(x)
        count += len(x)
        if index >= skipped and (index - skipped) % window == 0:
            _wait(x)
            now = time.perf_counter()
            if index > skipped:
                found.append(count / (now - start))
            count, start = 0, now
    return found


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(device: str, count: int, batches: int) -> dict[str, Any]:
    """From memory, then from files."""
    adapter = make(device)
    x, y = torch.rand(BATCH, 3, 224, 224, device=device), torch.zeros(BATCH)

    def from_memory() -> list[float]:
        return rates(((x, y) for _ in range(WINDOWS * batches + 8)), 8, batches, adapter)

    memory, rows = from_memory(), []
    cores = os.cpu_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        for kind, (width, height, noise) in KINDS.items():
            images = files(Path(folder) / kind / "class", (width, height), noise, count)
            kept = Decoded(images, Path(folder) / "cache")
            kept.rows(range(count))
            size = sum(path.stat().st_size for path in images.paths) / count
            for workers in sorted({n for n in (4, 8, cores - 1) if n < cores}):
                row: dict[str, Any] = {"files": kind, "bytes": size, "workers": workers}
                for name, some in (("", images), ("kept_", kept)):
                    told = stream(some, workers, batches)
                    for what, use in (("read", Tensor.size), ("fed", adapter)):
                        row[name + what] = rates(told.on(device), ahead(workers), batches, use)
                rows.append(row)
                print(row, flush=True)
    memory += from_memory()  # before and after: a machine with others on it may be faster or slower by then
    return {"cores": cores, "batch": BATCH, "kept": KEPT, "memory": memory, "rows": rows}


COLUMNS = {
    "read": "decoded",
    "fed": "EATA, decoding",
    "kept_read": "from the cache",
    "kept_fed": "EATA, from the cache",
}


def markdown(file: Path) -> str:
    """The table of a page: medians, and the lowest and the highest."""
    content = json.loads(file.read_text())
    lines = [["images a second", "workers", *COLUMNS.values()], ["---"] + ["---:"] * (1 + len(COLUMNS))]
    for row in content["rows"]:
        kind = f"{row['files']}, {row['bytes'] / 1e3:.0f} kB"
        lines.append([kind, str(row["workers"]), *(_spread(row[name]) for name in COLUMNS)])
    memory = _spread(content["memory"])
    lines.append(["in memory", "", "", memory, "", memory])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


def main() -> None:
    """Measure, print, write."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=1024, help="files of each kind")
    parser.add_argument("--batches", type=int, default=100, help="in each of three windows that are timed")
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.images, arguments.batches)
    write("loading", arguments, {"seed": 0, **found})


if __name__ == "__main__":
    main()
