"""Whether adaptation waits for images: `python -m benchmarks.loading [--device cuda] [--out FOLDER]`.

Images a second that EATA takes (compiled, 18 % kept; ViT-Base on a GPU, a small ViT elsewhere) when they are in memory
already, and JPEG files: read alone, and read for it, by a growing number of workers that have started. Files of 224
pixels, as ImageNet-C has them, and photographs that are resized.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from acclimate import EATA
from acclimate.data.folders import ImageFolder, Preprocess
from acclimate.models import SmallViT
from acclimate.scenarios import drawn
from acclimate.stream import Drawn, Part

from .command import command, write
from .steps import Share, networks

KINDS = {"224×224": (224, 224), "500×375, resized": (500, 375)}
BATCH = 64
KEPT = 0.18


def make(device: str) -> EATA:
    """On images of 224 pixels, with a fixed share of samples kept."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.AvgPool2d(7), SmallViT(width=128, depth=6, channels=3))
    model = networks(device)["ViT-Base"][0]() if device == "cuda" else small
    return EATA(model.to(device).eval(), beta=0, select=Share(KEPT).to(device), engine="auto")


def files(folder: Path, size: tuple[int, int], count: int) -> ImageFolder:
    """Smooth pictures, each saved once."""
    coarse = np.random.default_rng(0).integers(0, 256, (16, 12, 16, 3), dtype=np.uint8)
    folder.mkdir(parents=True)
    for i in range(count):
        Image.fromarray(coarse[i % 16]).resize(size, Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=90)
    return ImageFolder(folder.parent, Preprocess() if size[0] == size[1] else Preprocess(256, 224))


def stream(images: ImageFolder, workers: int, batches: int) -> Drawn:
    """The images again and again, `batches` and those that are under way when the time starts."""
    once = drawn("images", Part(images), batch_size=BATCH, workers=workers)
    total = BATCH * (batches + ahead(workers))
    return replace(once, picks=([*once.picks] * (-(-total // len(images))))[:total])


def ahead(workers: int) -> int:
    """Batches that are asked for at once, and one."""
    return 2 * workers + 1


def rate(batches: Iterable[tuple[Tensor, Tensor]], skipped: int, use: Callable[[Tensor], object]) -> float:
    """Images a second after the first `skipped` batches."""
    count, start = 0, 0.0
    for index, (x, _) in enumerate(batches):
        use(x)
        if index + 1 > skipped:
            count += len(x)
        elif index + 1 == skipped:
            _wait(x)
            start = time.perf_counter()
    _wait(x)
    return count / (time.perf_counter() - start)


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(device: str, count: int, batches: int) -> dict[str, Any]:
    """From memory, then from files."""
    adapter = make(device)
    x, y = torch.rand(BATCH, 3, 224, 224, device=device), torch.zeros(BATCH)
    memory = rate(((x, y) for _ in range(batches + 8)), 8, adapter)
    rows = []
    cores = os.cpu_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        for kind, size in KINDS.items():
            images = files(Path(folder) / kind.split(",")[0] / "class", size, count)
            for workers in sorted({0, *(n for n in (2, 4, 8, cores - 1) if 0 < n < cores)}):
                told = stream(images, workers, batches)
                read, fed = (rate(told.on(device), ahead(workers), use) for use in (Tensor.size, adapter))
                rows.append({"files": kind, "workers": workers, "read": read, "fed": fed})
                print(rows[-1], flush=True)
    return {"cores": cores, "batch": BATCH, "kept": KEPT, "memory": memory, "rows": rows}


def markdown(file: Path) -> str:
    """The table of a page."""
    content = json.loads(file.read_text())
    lines = [["images a second", "workers", "read alone", "EATA, reading"], ["---", "---:", "---:", "---:"]]
    lines.append(["in memory", "", "", f"{content['memory']:,.0f}"])
    lines += [[r["files"], str(r["workers"]), f"{r['read']:,.0f}", f"{r['fed']:,.0f}"] for r in content["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure, print, write."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=1024, help="files of each kind")
    parser.add_argument("--batches", type=int, default=100, help="that are timed")
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.images, arguments.batches)
    write("loading", arguments, {"seed": 0, **found})


if __name__ == "__main__":
    main()
