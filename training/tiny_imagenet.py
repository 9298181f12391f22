"""Train a ResNet and a ViT on Tiny-ImageNet-200.

    python -m training.tiny_imagenet unpack tiny-imagenet-200 DATA   # the data set's folder: train, val, wnids.txt
    python -m training.tiny_imagenet train DATA resnet               # about eight minutes on a large GPU; then vit
    acclimate run --model tiny-imagenet-vit --data tiny-imagenet:DATA --device cuda

Of each class, 475 images train a network, 25 are for choosing settings, and the 50 validation images are for judging.
Images are cropped, turned, sheared, mirrored, recoloured, covered in part and mixed with others. The ViT also learns
from the predictions of the trained ResNet for the same images (distillation): from labels alone it overfits. Training
stops at Ctrl-C or after `--minutes` and goes on with the same command. Weights are stored in half precision, under 12
MB each, beside a log of the training.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from acclimate.bench.networks import load_network
from acclimate.bench.own_networks import NETWORKS

from .common import accuracy, load, one_cycle, recorded, write_log

WEIGHTS = Path(__file__).parents[1] / "weights"
HELD_OUT = 475
"""Training images of a class with this number or a higher one are for choosing settings."""


def unpack(source: Path, folder: Path) -> None:
    """Write train.npy, tune.npy and clean.npy, each with its labels. Classes count in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = sorted((source / "wnids.txt").read_text().split())
    train = [(file, i) for i, wnid in enumerate(classes) for file in sorted((source / "train" / wnid).rglob("*.JPEG"))]
    lines = (source / "val" / "val_annotations.txt").read_text().splitlines()
    judged = [(source / "val" / "images" / name, classes.index(wnid)) for name, wnid, *_ in map(str.split, lines)]
    tune = [entry for entry in train if number(entry[0].name) >= HELD_OUT]
    for images, labels, entries in (
        ("train", "train_labels", [entry for entry in train if number(entry[0].name) < HELD_OUT]),
        ("tune", "tune_labels", tune),
        ("clean", "labels", judged),
    ):
        np.save(
            folder / f"{images}.npy", np.stack([np.asarray(Image.open(file).convert("RGB")) for file, _ in entries])
        )
        np.save(folder / f"{labels}.npy", np.array([label for _, label in entries]))
        print(f"{images}: {len(entries):,} images", flush=True)


def number(name: str) -> int:
    """Return the number in the name of a training image, n01443537_123.JPEG."""
    return int(name.removesuffix(".JPEG").rpartition("_")[2])


class Augment:
    """Change a batch of images (B, 3, 64, 64) at random, on their device; no noise, blur or weather."""

    def __init__(self, generator: Generator, area: float = 0.35, colour: float = 0.3, distorted: float = 0.0) -> None:
        self.generator, self.area, self.colour, self.distorted = generator, area, colour, distorted

    def uniform(self, size: int, low: float, high: float) -> Tensor:
        """Return random numbers, one per image."""
        return low + (high - low) * torch.rand(size, generator=self.generator, device=self.generator.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the changed images."""
        x = self.recolour(self.warp(x)).clamp(0, 1)
        return self.cover(self.distort(x) if self.distorted else x)

    def warp(self, x: Tensor) -> Tensor:
        """Crop a part of at least `area`, mirror, and turn or shear half of the images by up to 15 degrees."""
        n = len(x)
        side, aspect = (
            self.uniform(n, self.area, 1.0).sqrt(),
            self.uniform(n, math.log(3 / 4), math.log(4 / 3)).exp().sqrt(),
        )
        width, height = (side * aspect).clamp(max=1), (side / aspect).clamp(max=1)
        mirrored = torch.where(self.uniform(n, 0, 1) < 0.5, -1.0, 1.0)
        angle, shear = (
            self.uniform(n, -math.pi / 12, math.pi / 12) * (self.uniform(n, 0, 1) < 0.5).float() for _ in range(2)
        )
        across = torch.stack([width * mirrored * angle.cos(), height * (shear - angle.sin())], 1)
        down = torch.stack([width * mirrored * angle.sin(), height * angle.cos()], 1)
        at = [(1 - extent) * self.uniform(n, -1, 1) for extent in (width, height)]
        matrix = torch.stack([torch.cat([across, at[0][:, None]], 1), torch.cat([down, at[1][:, None]], 1)], 1)
        grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    def recolour(self, x: Tensor) -> Tensor:
        """Change brightness, contrast and saturation by up to `colour`."""
        bright, contrast, colour = (
            self.uniform(len(x), 1 - self.colour, 1 + self.colour)[:, None, None, None] for _ in range(3)
        )
        x = x * bright
        grey = x.mean(1, keepdim=True)
        x = grey + colour * (x - grey)
        middle = x.mean((1, 2, 3), keepdim=True)
        return middle + contrast * (x - middle)

    def distort(self, x: Tensor) -> Tensor:
        """Make a share of the images grey, solarise, posterise or stretch them to the full range: one of the four."""
        which = (self.uniform(len(x), 0, 4 / self.distorted)).long()[:, None, None, None]
        threshold, levels = (self.uniform(len(x), low, high)[:, None, None, None] for low, high in ((0.3, 1), (4, 16)))
        low, high = (extreme(x, (2, 3), keepdim=True) for extreme in (torch.amin, torch.amax))
        changed = (
            x.mean(1, keepdim=True).expand_as(x),
            torch.where(x < threshold, x, 1 - x),
            (x * levels).floor() / levels,
            (x - low) / (high - low).clamp(min=0.05),
        )
        for number, images in enumerate(changed):
            x = torch.where(which == number, images, x)
        return x.clamp(0, 1)

    def cover(self, x: Tensor) -> Tensor:
        """Cover a square of up to 24 pixels in a quarter of the images."""
        n, positions = len(x), torch.arange(64, device=x.device)
        side = self.uniform(n, 8, 24) * (self.uniform(n, 0, 1) < 0.25).float()
        near = [((positions - self.uniform(n, 0, 64)[:, None]).abs() < side[:, None] / 2) for _ in range(2)]
        return x.masked_fill((near[0][:, :, None] & near[1][:, None, :])[:, None], 0.5)

    def mix(self, x: Tensor, y: Tensor, mixup: float) -> tuple[Tensor, Tensor, Tensor]:
        """Paste a part of another image (CutMix, half of the batches) or blend with it (Mixup, a share of them).

        Return images, the labels of the others, and their share.
        """
        chance, area, top, left = torch.rand(4, generator=self.generator, device=x.device)
        side, positions = (64 * area.sqrt()).floor(), torch.arange(64, device=x.device)
        rows, columns = (
            (positions >= first) & (positions < first + side)
            for first in ((at * (65 - side)).floor() for at in (top, left))
        )
        pasted = (rows[:, None] & columns).float()
        other = torch.where(chance < 0.5, pasted, (chance < 0.5 + mixup) * area)
        order = torch.rand(len(x), generator=self.generator, device=x.device).argsort()
        return x + other * (x[order] - x), y[order], other.mean()


SETTINGS: dict[str, dict[str, Any]] = {
    "resnet": {"epochs": 120, "lr": 0.4, "mixup": 0.0, "area": 0.35, "colour": 0.3, "distorted": 0.0},
    "vit": {"epochs": 105, "lr": 1e-3, "mixup": 0.3, "area": 0.25, "colour": 0.3, "distorted": 0.0},
}
"""With patches of one convolution, an area of 0.35 and labels alone, the ViT overfitted: 48.2 % after 255 epochs."""
TEACHERS = {"vit": "tiny-imagenet-resnet"}
BATCH = 512


class Training:
    """The training of one network, which can be interrupted."""

    def __init__(self, data: Path, name: str, out: Path, epochs: int | None, seed: int) -> None:
        settings = SETTINGS[name]
        self.data, self.name, self.out, self.seed = data, name, out, seed
        self.epochs, self.rate, self.mixup = epochs or settings["epochs"], settings["lr"], settings["mixup"]
        torch.manual_seed(seed)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cuda = self.device == "cuda"
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.augment = Augment(self.generator, settings["area"], settings["colour"], settings["distorted"])
        self.x, self.y = load(data, "train", "train_labels", self.device)
        self.model: nn.Module = NETWORKS[f"tiny-imagenet-{name}"]().to(self.device)
        if self.cuda and name == "resnet":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.teacher = self._teacher()
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = self._optimizer()
        self.average = {key: t.detach().clone() for key, t in self.model.state_dict().items() if t.is_floating_point()}
        """The moving average of the weights, which is what is stored."""
        self.epoch = 0
        self.log: list[dict[str, float]] = []
        self.seconds = 0.0

    def _teacher(self) -> nn.Module | None:
        """Return the network whose predictions the student learns from, if there is one."""
        if self.name not in TEACHERS:
            return None
        teacher = load_network(TEACHERS[self.name], self.device).model.eval().requires_grad_(False)
        return teacher.to(memory_format=torch.channels_last) if self.cuda else teacher

    def _optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        decay = 5e-4 if self.name == "resnet" else 0.05
        groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        if self.name == "resnet":
            return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True, fused=self.cuda)
        return torch.optim.AdamW(groups, lr=self.lr, fused=self.cuda, capturable=self.cuda)

    def run(self, minutes: float | None) -> float | None:
        """Train, from where the last run stopped; return the accuracy, or None if it is not finished."""
        self._resume()
        size = min(BATCH, len(self.x))
        index, net, teacher = torch.arange(size, device=self.device), self.model, self.teacher
        if self.cuda:
            net, teacher = torch.compile(net), teacher and torch.compile(teacher)
        current, average = self.model.state_dict(), [*self.average.values()]
        tracked = [current[key] for key in self.average]

        def step() -> Tensor:
            labels = self.y[index]
            images, others, share = self.augment.mix(self.augment(self.x[index].float() / 255), labels, self.mixup)
            if self.cuda and self.name == "resnet":
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                logits = net(images)
            first, second = (
                F.cross_entropy(logits.float(), target, label_smoothing=0.1) for target in (labels, others)
            )
            loss: Tensor = (1 - share) * first + share * second
            if teacher is not None:
                with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                    taught = teacher(images.contiguous(memory_format=torch.channels_last)).float().softmax(1)
                loss = (loss + F.cross_entropy(logits.float(), taught)) / 2
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            torch._foreach_lerp_(average, tracked, 0.001)
            return loss.detach()

        self.model.train()
        run = recorded(step, self.generator) if self.cuda else step  # the host would be slower than the device
        steps, start = max(len(self.x) // size, 1), time.monotonic()
        try:
            while self.epoch < self.epochs:
                total = torch.zeros((), device=self.device)
                order = torch.randperm(len(self.x), generator=self.generator, device=self.device)
                for i, chosen in enumerate(order.split(size)[:steps]):
                    index.copy_(chosen)
                    self.lr.fill_(self.rate * one_cycle((self.epoch * steps + i) / (self.epochs * steps), rise=0.05))
                    total += run()
                self.epoch += 1
                if self.epoch % 10 == 0 or self.epoch in (1, self.epochs):
                    self._note(float(total) / steps, self.seconds + time.monotonic() - start)
                if minutes is not None and time.monotonic() - start > 60 * minutes and self.epoch < self.epochs:
                    break
        except KeyboardInterrupt:
            print("interrupted: the same command goes on")
        self.seconds += time.monotonic() - start
        self._keep()
        return self._finish() if self.epoch == self.epochs else None

    def _note(self, loss: float, seconds: float) -> None:
        """Add a line to the log: the loss, and the accuracy on the training images that were held out."""
        found = self._accuracy("tune", "tune_labels")
        self.log.append({"epoch": self.epoch, "loss": loss, "accuracy": found, "seconds": seconds})
        print(
            f"{self.name}, epoch {self.epoch}/{self.epochs}: loss {loss:.3f}, {100 * found:.2f} % of the held-out "
            f"images, {seconds:.0f} s",
            flush=True,
        )

    def _accuracy(self, images: str, labels: str, *, half: bool = False) -> float:
        """Return the accuracy of the averaged weights, perhaps after rounding to half precision."""
        network = NETWORKS[f"tiny-imagenet-{self.name}"]().to(self.device)
        rounded = {key: t.half() if half else t for key, t in self.average.items()}
        network.load_state_dict({**self.model.state_dict(), **rounded})
        return accuracy(network, *load(self.data, images, labels, self.device))

    @property
    def _kept(self) -> Path:
        return self.data / f"{self.name}-seed{self.seed}.checkpoint"

    def _keep(self) -> None:
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "average": self.average,
            "generator": self.generator.get_state(),
            "rest": {"epoch": self.epoch, "epochs": self.epochs, "log": self.log, "seconds": self.seconds},
        }
        temporary = self._kept.with_suffix(".writing")
        torch.save(parts, temporary)
        temporary.replace(self._kept)

    def _resume(self) -> None:
        if not self._kept.is_file():
            return
        parts = torch.load(self._kept, map_location=self.device, weights_only=True)
        rest = parts["rest"]
        if rest["epochs"] != self.epochs:
            raise SystemExit(f"{self._kept} is of a training of {rest['epochs']} epochs: remove it to start another")
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": parts["optimizer"]})
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        for key, value in parts["average"].items():
            self.average[key].copy_(value)
        self.generator.set_state(parts["generator"].cpu())
        self.epoch, self.log, self.seconds = rest["epoch"], rest["log"], rest["seconds"]

    def _finish(self) -> float:
        """Write weights and log; return the accuracy on the validation images."""
        self.out.mkdir(parents=True, exist_ok=True)
        halves = {key: t.half().contiguous().cpu() for key, t in self.average.items()}
        rest = {key: t.cpu() for key, t in self.model.state_dict().items() if key not in halves}
        save_file({**halves, **rest}, self.out / f"tiny_imagenet_{self.name}.safetensors")
        result = self._accuracy("clean", "labels", half=True)
        write_log(
            self.out / f"tiny_imagenet_{self.name}.json",
            "tiny_imagenet",
            self.device,
            network=f"tiny-imagenet-{self.name}",
            teacher=TEACHERS.get(self.name),
            parameters=sum(p.numel() for p in self.model.parameters()),
            images=len(self.x),
            epochs=self.epochs,
            seed=self.seed,
            seconds=round(self.seconds),
            accuracy=result,
            log=self.log,
        )
        print(f"{self.name}: {100 * result:.2f} % of the validation images, with weights in half precision")
        return result


def main() -> None:
    """Unpack or train."""
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_imagenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    unpacking = tasks.add_parser("unpack", help="write the images and labels as arrays")
    unpacking.add_argument("source", type=Path, help="the folder tiny-imagenet-200")
    unpacking.add_argument("folder", type=Path, help="where to write the arrays")
    training = tasks.add_parser("train", help="train a network, or go on with it")
    training.add_argument("folder", type=Path, help="the folder of arrays")
    training.add_argument("network", choices=("resnet", "vit"))
    training.add_argument("--out", type=Path, default=WEIGHTS, help="folder for the weights (default: weights/)")
    training.add_argument("--epochs", type=int, help="default: 120 for the ResNet, 105 for the ViT")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--minutes", type=float, help="stop after the epoch in which this time is over")
    arguments = parser.parse_args()
    if arguments.task == "unpack":
        unpack(arguments.source, arguments.folder)
    else:
        job = Training(arguments.folder, arguments.network, arguments.out, arguments.epochs, arguments.seed)
        job.run(arguments.minutes)


if __name__ == "__main__":
    main()
