"""Our corruptions against the package imagecorruptions-imaug: fidelity and speed.

    python -m benchmarks.corruptions                          # fidelity on digits, throughput on the CPU
    python -m benchmarks.corruptions --device cuda            # throughput on a GPU

The reference processes one image at a time on the CPU, ours a batch on the chosen device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acclimate import Normalisation
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.tables import Table
from acclimate.data.corruptions import CORRUPTIONS, corrupt
from acclimate.data.digits import load_digits

from .command import command, write


def reference(x: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """Corrupt RGB images (B, 3, H, W) in [0, 1] with imagecorruptions."""
    import imagecorruptions

    np.random.seed(seed)  # noqa: NPY002
    levels = (x * 255).round().byte().movedim(1, -1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by zero where there is no drop of water
        made = [imagecorruptions.corrupt(image, corruption_name=name, severity=severity) for image in levels]
    return torch.from_numpy(np.stack(made).astype(np.float32)).movedim(-1, 1) / 255


@dataclass(frozen=True)
class Likeness:
    """A family at a severity; each pair has the reference's number first."""

    family: str
    severity: int
    psnr: tuple[float, float]
    mean: tuple[float, float]
    deviation: tuple[float, float]
    accuracy: tuple[float, float]


def psnr(x: Tensor, clean: Tensor) -> float:
    """Return decibels, averaged over images; 60 where nothing changed."""
    error = (x - clean).square().flatten(1).mean(1).clamp(min=1e-6)
    return float((-10 * error.log10()).mean())


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return a network's accuracy on grey images with batch statistics; those of training give chance on most."""
    with Normalisation(net).batch():
        return float((net(x.mean(1, keepdim=True)).argmax(1) == y).float().mean())


def likeness(family: str, severity: int, digits: int, seed: int = 0) -> Likeness:
    """Compare both on the same digits, as RGB images of 32 pixels."""
    _, test = load_digits()
    x, y = test.x[:digits].expand(-1, 3, -1, -1), test.y[:digits]
    both = (
        reference(x, family, severity, seed),
        corrupt(x, family, severity, torch.Generator().manual_seed(seed)),
    )
    net = digits_resnet()

    def pair(measure: Callable[[Tensor], float]) -> tuple[float, float]:
        return measure(both[0]), measure(both[1])

    return Likeness(
        family,
        severity,
        psnr=pair(lambda images: psnr(images, x)),
        mean=pair(lambda images: float(images.mean())),
        deviation=pair(lambda images: float(images.std())),
        accuracy=pair(lambda images: accuracy(net, images, y)),
    )


def pictures(count: int, size: int) -> Tensor:
    """Return smooth shapes with some texture."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 7, 7, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (0.9 * smooth + 0.1 * torch.rand(count, 3, size, size, generator=generator)).clamp(0, 1)


def throughput(family: str, size: int, batch: int, device: str, singles: int) -> dict[str, float]:
    """Return images per second at severity 3; ours is the median of five batches after a warm-up."""
    x = pictures(batch, size)
    reference(x[:2], family, 3, 0)  # numba compiles
    start = time.perf_counter()
    reference(x[:singles], family, 3, 0)
    theirs = singles / (time.perf_counter() - start)
    on_device = x.to(device)
    generator = torch.Generator(device).manual_seed(0)
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        corrupt(on_device, family, 3, generator)
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    ours = batch / sorted(taken[1:])[2]
    return {"size": size, "reference": theirs, "ours": ours, "ratio": ours / theirs}


def table(gpu: dict[str, Any], cpu: dict[str, Any]) -> Table:
    """Return images per second and the ratio to the package, on a GPU and on a CPU."""
    rows = []
    for family, there in gpu["speed"].items():
        here = cpu["speed"][family]
        fast = [f"{there['ours']:,.0f}", f"{there['ratio']:.0f}×"]
        rows.append([family, *fast, f"{here['ours']:,.0f}", f"{here['ratio']:.1f}×"])
    return ["family", "H200 img/s", "against the package", "two cores img/s", "against the package"], rows


def main() -> None:
    """Measure, print and write."""
    parser = command(__doc__)
    parser.add_argument("--digits", type=int, default=300, help="number of digits for the fidelity; 0 skips it")
    parser.add_argument("--size", type=int, default=224, help="image size for the throughput")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--singles", type=int, default=8, help="images for timing the reference")
    arguments = parser.parse_args()

    alike = [
        asdict(likeness(family, severity, arguments.digits))
        for family in CORRUPTIONS
        for severity in range(1, 6)
        if arguments.digits
    ]
    speed = {
        family: throughput(family, arguments.size, arguments.batch, arguments.device, arguments.singles)
        for family in CORRUPTIONS
    }
    print(f"{'family':18} {'ref img/s':>10} {'ours img/s':>11} {'ratio':>7}   mean accuracy %, reference and ours")
    for family, row in speed.items():
        cells = [line["accuracy"] for line in alike if line["family"] == family]
        shown = " ".join(f"{100 * a:3.0f}/{100 * b:3.0f}" for a, b in cells)
        print(f"{family:18} {row['reference']:10.1f} {row['ours']:11.0f} {row['ratio']:6.0f}×   {shown}")
    ratios = sorted(row["ratio"] for row in speed.values())
    print(f"ratio: least {ratios[0]:.1f}, median {ratios[len(ratios) // 2]:.1f}")
    write("corruptions", arguments, {"speed": speed, "likeness": alike})


if __name__ == "__main__":
    main()
