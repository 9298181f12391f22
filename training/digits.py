"""Train the demo's networks on clean digits and write their weights into the package.

    python -m training.digits             # both networks
    python -m training.digits vit

The ResNet takes two minutes on two CPU cores; the ViT takes two minutes on a GPU. A seed gives the same weights on the
same machine with the same version of torch. We trained the ResNet on a CPU and the ViT on an H200.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from acclimate.bench.own_networks import SmallResNet, SmallViT
from acclimate.data.digits import Images, load_digits

WEIGHTS = Path(__file__).parents[1] / "src" / "acclimate" / "weights"


def jiggle(x: Tensor, generator: Generator) -> Tensor:
    """Apply small random rotations, shears, scalings and shifts, as handwriting varies."""
    offset = 0.12 * (2 * torch.rand(len(x), 2, 3, generator=generator) - 1)
    grid = F.affine_grid((torch.eye(2, 3) + offset).to(x.device), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Return the accuracy of the network in evaluation mode."""
    model.eval()
    return float((model(images.x).argmax(1) == images.y).float().mean())


def train(model: nn.Module, images: Images, *, epochs: int, lr: float, seed: int, batch: int = 64) -> None:
    """Train with AdamW and a one-cycle learning rate."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(images), generator=generator)
        for index in order.split(batch)[: len(images) // batch]:
            loss = F.cross_entropy(model(jiggle(images.x[index], generator)), images.y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}/{epochs}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Train, print the test accuracy, and write the weights."""
    parser = argparse.ArgumentParser(
        prog="python -m training.digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="resnet|vit", help="networks to train (default: both)")
    networks = parser.parse_args().networks or ["resnet", "vit"]
    if unknown := set(networks) - {"resnet", "vit"}:
        parser.error(f"no network {', '.join(sorted(unknown))}: expected resnet or vit")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, test = (Images(part.x.to(device), part.y.to(device)) for part in load_digits())
    for name in networks:
        torch.manual_seed(0)
        model, epochs, lr = (SmallResNet(), 30, 3e-3) if name == "resnet" else (SmallViT(), 200, 2e-3)
        train(model.to(device), training, epochs=epochs, lr=lr, seed=0)
        print(f"{name}: accuracy on {len(test)} test digits: {100 * accuracy(model, test):.2f} %")
        WEIGHTS.mkdir(exist_ok=True)
        save_file(model.cpu().state_dict(), WEIGHTS / f"digits_{name}.safetensors")


if __name__ == "__main__":
    main()
