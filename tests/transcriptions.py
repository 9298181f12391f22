"""Plain, slow, literal transcriptions of the formulas in the paper, written without the library: golden numbers.

They follow the authors' released behaviour: batch statistics, SGD with momentum written out, one batch after another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(1)


class Plain:
    """A network with its norm parameters free and its BatchNorm layers on batch statistics, by brute force."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model, self.lr = model.eval(), lr
        for p in model.parameters():
            p.requires_grad_(False)
        self.free: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
                module.track_running_stats = False
                module.running_mean = module.running_var = None
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)):
                self.free += [module.weight.requires_grad_(True), module.bias.requires_grad_(True)]
        self.velocity: list[Tensor | None] = [None] * len(self.free)

    def step(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, self.free)
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(self.free, gradients, strict=True)):
                v = self.velocity[i]
                self.velocity[i] = v = g.clone() if v is None else 0.9 * v + g
                p.sub_(self.lr * v)


def tent(model: nn.Module, batches: list[Tensor], lr: float) -> list[Tensor]:
    net, outputs = Plain(model, lr), []
    for x in batches:
        z = net.model(x)
        outputs.append(z.detach())
        net.step(entropy(z.softmax(1)).mean())
    return outputs


def fisher_by_batch(model: nn.Module, source: list[Tensor]) -> list[Tensor]:
    net = Plain(model, 0.0)
    total = [torch.zeros_like(p) for p in net.free]
    for x in source:
        z = net.model(x)
        loss = torch.nn.functional.cross_entropy(z, z.argmax(1))
        for t, g in zip(total, torch.autograd.grad(loss, net.free), strict=True):
            t += g**2
    return [t / len(source) for t in total]


def fisher_by_sample(model: nn.Module, source: list[Tensor]) -> list[Tensor]:
    net = Plain(model, 0.0)
    total = [torch.zeros_like(p) for p in net.free]
    for x in source:
        for q in range(len(x)):
            z = net.model(x)[q : q + 1]
            loss = torch.nn.functional.cross_entropy(z, z.argmax(1))
            for t, g in zip(total, torch.autograd.grad(loss, net.free), strict=True):
                t += g**2
    count = sum(len(x) for x in source)
    return [t / count for t in total]


def eata(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    *,
    margin: float,
    epsilon: float,
    beta: float = 0.0,
    fisher: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[int]]:
    """Logits of each batch, and how many samples each learned from."""
    net = Plain(model, lr)
    source = [p.detach().clone() for p in net.free]
    mean: Tensor | None = None
    outputs, kept = [], []
    for x in batches:
        z = net.model(x)
        outputs.append(z.detach())
        p = z.softmax(1)
        h = entropy(p)
        e0 = margin * math.log(z.shape[1])
        chosen = []
        for i in range(len(z)):
            if not h[i] < e0:
                continue
            if mean is not None and not abs(mean @ p[i] / (mean.norm() * p[i].norm())) < epsilon:
                continue
            chosen.append(i)
        kept.append(len(chosen))
        if not chosen:
            continue
        average = torch.stack([p[i].detach() for i in chosen]).mean(0)
        mean = average if mean is None else 0.9 * mean + 0.1 * average
        loss = sum(torch.exp(e0 - h[i].detach()) * h[i] for i in chosen) / len(chosen)
        if fisher is not None:
            for f, p_now, p_then in zip(fisher, net.free, source, strict=True):
                loss = loss + beta * (f * (p_now - p_then) ** 2).sum()
        net.step(loss)
    return outputs, kept


def tiny_vit_with_branches(model: nn.Module, x: Tensor, scales: Tensor) -> Tensor:
    """The tiny ViT's forward pass by hand, each branch of its second block scaled a sample: (2, B)."""
    tokens = model.patches(x).flatten(2).mT
    for index, block in enumerate(model.blocks):
        attention, mlp = scales.view(2, -1, 1, 1) if index == 1 else (1.0, 1.0)
        y = block.norm1(tokens)
        tokens = tokens + attention * block.attention(y, y, y, need_weights=False)[0]
        tokens = tokens + mlp * block.mlp(block.norm2(tokens))
    return model.head(model.norm(tokens).mean(1))


def tiny_resnet_with_branches(model: nn.Module, x: Tensor, scales: Tensor) -> Tensor:
    """The tiny ResNet's forward pass by hand, the branch of its second block scaled a sample: (1, B)."""
    y = model.stem(x)
    for index, block in enumerate(model.blocks):
        branch = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(y)))))
        y = torch.relu(y + (scales.view(-1, 1, 1, 1) if index == 1 else 1.0) * branch)
    return model.head(y).mean((2, 3))


def eata_c(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    *,
    margin: float,
    epsilon: float,
    alpha: float,
    beta: float,
    drop: float,
    q: float,
    fisher: list[Tensor],
    seed: int,
) -> list[Tensor]:
    """Eq. (10) to (15) with sub-networks drawn from a seed, one row of chances a branch that may be dropped."""
    net = Plain(model, lr)
    forward = tiny_vit_with_branches if hasattr(model, "patches") else tiny_resnet_with_branches
    branches = 2 if hasattr(model, "patches") else 1
    generator = torch.Generator().manual_seed(seed)
    source = [p.detach().clone() for p in net.free]
    mean: Tensor | None = None
    outputs = []
    for x in batches:
        with torch.no_grad():
            z = net.model(x)
        outputs.append(z)
        y = z.softmax(1)
        h = entropy(y)
        chosen = []
        for i in range(len(x)):
            reliable = h[i] < margin * math.log(z.shape[1])
            if reliable and (mean is None or abs(mean @ y[i] / (mean.norm() * y[i].norm())) < epsilon):
                chosen.append(i)
        if not chosen:
            continue
        average = torch.stack([y[i] for i in chosen]).mean(0)
        mean = average if mean is None else 0.9 * mean + 0.1 * average

        stays = torch.rand(branches, len(chosen), generator=generator) >= drop
        s = forward(net.model, x[chosen], stays.double() / (1 - drop)).softmax(1)
        loss = torch.zeros((), dtype=torch.float64)
        for row, i in enumerate(chosen):
            target = ((y[i] + (1 - q) * s[row]) / (2 - q)).detach()
            loss = loss + (target * (target.log() - s[row].log())).sum()
            certain = 1.0 if y[i].argmax() == s[row].argmax() else -1.0
            loss = loss + alpha * certain * -(s[row] * s[row].log()).sum()
        loss = loss / len(chosen)
        for f, now, then in zip(fisher, net.free, source, strict=True):
            loss = loss + beta * (f * (now - then) ** 2).sum()
        net.step(loss)
    return outputs
