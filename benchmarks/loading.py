"""Does adaptation wait for images? `python -m benchmarks.loading [--device cuda] [--out FOLDER]`

Images per second of EATA (compiled, 18 % kept; ViT-Base on a GPU, a small ViT elsewhere) with images in memory and with
images from files: JPEGs, or decoded pixels from `--cache`. Reading is also timed alone. Files have 224 pixels, as in
ImageNet-C, smooth or noisy; photographs are resized. The number of workers varies.
"""

from __future__ import annotations

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
from acclimate.bench.tables import Table
from acclimate.data.decoded import Decoded
from acclimate.data.folders import ImageFolder, Preprocess
from acclimate.data.types import ImageSet, Part

from .command import command, write
from .steps import Share, networks

KINDS = {"224×224, smooth": (224, 224, 0), "224×224, noisy": (224, 224, 60), "500×375, resized": (500, 375, 15)}
"""Width, height, and standard deviation of the noise."""
WINDOWS = 3
BATCH = 64
KEPT = 0.18


def make(device: str) -> EATA:
    """Return EATA for images of 224 pixels that keeps a fixed share of the samples."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.AvgPool2d(7), SmallViT(width=128, depth=6, channels=3))
    model = networks(device)["ViT-Base"][0]() if device == "cuda" else small
    return EATA(model.to(device).eval(), beta=0, select=Share(KEPT).to(device), engine="auto")


def files(folder: Path, size: tuple[int, int], noise: float, count: int) -> ImageFolder:
    """Write pictures as JPEGs of ImageNet-C's quality and open the folder."""
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
    """Repeat the images for all windows of `batches`, plus the batches read before the clock starts."""
    once = sample_domain("images", Part(images), batch_size=BATCH, workers=workers)
    total = BATCH * (WINDOWS * batches + ahead(workers))
    return replace(once, picks=([*once.picks] * (-(-total // len(images))))[:total])


def ahead(workers: int) -> int:
    """Return the number of batches that workers prefetch, plus one."""
    return 2 * workers + 1


def rates(
    batches: Iterable[tuple[Tensor, Tensor]], skipped: int, window: int, use: Callable[[Tensor], object]
) -> list[float]:
    """Return images per second in each window of batches, after the first `skipped`."""
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
    """Measure from memory, then from files."""
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
                    batched = stream(some, workers, batches)
                    for what, use in (("read", Tensor.size), ("fed", adapter)):
                        row[name + what] = rates(batched.on(device), ahead(workers), batches, use)
                rows.append(row)
                print(row, flush=True)
    memory += from_memory()  # again: the speed of a shared machine changes
    return {"cores": cores, "batch": BATCH, "kept": KEPT, "memory": memory, "rows": rows}


COLUMNS = {
    "read": "decoded",
    "fed": "EATA, decoding",
    "kept_read": "from the cache",
    "kept_fed": "EATA, from the cache",
}


def table(content: dict[str, Any]) -> Table:
    """Return medians with their ranges."""
    rows = []
    for row in content["rows"]:
        kind = f"{row['files']}, {row['bytes'] / 1e3:.0f} kB"
        rows.append([kind, str(row["workers"]), *(_spread(row[name]) for name in COLUMNS)])
    memory = _spread(content["memory"])
    rows.append(["in memory", "", "", memory, "", memory])
    return ["images per second", "workers", *COLUMNS.values()], rows


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=1024, help="files of each kind")
    parser.add_argument("--batches", type=int, default=100, help="batches in each of the three timed windows")
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.images, arguments.batches)
    write("loading", arguments, {"seed": 0, **found})


if __name__ == "__main__":
    main()
