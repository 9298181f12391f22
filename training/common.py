"""What the training scripts share: arrays of images, the learning rate, recorded steps, accuracy, the log."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from acclimate.bench.provenance import origin
from acclimate.files import rounded, write_text

__all__ = ["accuracy", "load", "one_cycle", "recorded", "write_log"]


def load(folder: Path, images: str, labels: str, device: str) -> tuple[Tensor, Tensor]:
    """Return images as bytes (N, 3, H, W), and labels."""
    x = torch.from_numpy(np.load(folder / f"{images}.npy")).movedim(-1, 1).contiguous()
    return x.to(device), torch.from_numpy(np.load(folder / f"{labels}.npy")).to(device)


def one_cycle(at: float, rise: float = 0.15) -> float:
    """Return the relative learning rate at a fraction of the training: linear warm-up, cosine decay."""
    return at / rise if at < rise else 0.5 + 0.5 * math.cos(math.pi * (at - rise) / (1 - rise))


def recorded(step: Callable[[], Tensor], generator: Generator) -> Callable[[], Tensor]:
    """Record a step as a CUDA graph, after four warm-up steps at a learning rate of zero."""
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


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy of the network in evaluation mode."""
    model.eval()
    batches = zip(x.split(1000), y.split(1000), strict=True)
    return float(torch.cat([(model(x.float() / 255).argmax(1) == y).float() for x, y in batches]).mean())


def write_log(file: Path, module: str, device: str, **content: Any) -> None:
    """Write how a network was trained: the command, where, and whatever else."""
    command = shlex.join(["python", "-m", f"training.{module}", *sys.argv[1:]])
    content = {"command": command, "origin": origin(torch.device(device)), **content}
    write_text(file, json.dumps(rounded(content, 4), indent=1) + "\n")
