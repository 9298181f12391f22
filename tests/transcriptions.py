"""Plain, slow, literal transcriptions of the formulas in the paper, written without the library: golden numbers.

They follow the authors' released behaviour: batch statistics, SGD with momentum written out, one batch after another.
"""

from __future__ import annotations

import copy
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
    """The tiny ViT's forward pass by hand, both branches of all blocks but the first scaled per sample."""
    tokens = model.patches(x).flatten(2).mT
    for index, block in enumerate(model.blocks):
        attention, mlp = scales[2 * index - 2 : 2 * index].view(2, -1, 1, 1) if index else (1.0, 1.0)
        y = block.norm1(tokens)
        tokens = tokens + attention * block.attention(y, y, y, need_weights=False)[0]
        tokens = tokens + mlp * block.mlp(block.norm2(tokens))
    return model.head(model.norm(tokens).mean(1))


def tiny_resnet_with_branches(model: nn.Module, x: Tensor, scales: Tensor) -> Tensor:
    """The tiny ResNet's forward pass by hand, the branch of all blocks but the first scaled per sample."""
    y = model.stem(x)
    for index, block in enumerate(model.blocks):
        branch = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(y)))))
        y = torch.relu(y + (scales[index - 1].view(-1, 1, 1, 1) if index else 1.0) * branch)
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
    reverse: bool = False,
) -> list[Tensor]:
    """Eq. (10) to (15) with sub-networks sampled from a seed, one row of random numbers per droppable branch.

    Block i of n is dropped at the rate i/(n − 1) · drop. `reverse` is the divergence as Eq. (10) writes it.
    """
    net = Plain(model, lr)
    forward = tiny_vit_with_branches if hasattr(model, "patches") else tiny_resnet_with_branches
    branches, blocks = 2 if hasattr(model, "patches") else 1, len(model.blocks)
    ratios = [[drop * i / (blocks - 1)] for i in range(1, blocks) for _ in range(branches)]
    rates = torch.tensor(ratios, dtype=torch.float64)
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

        stays = torch.rand(len(rates), len(chosen), generator=generator) >= rates
        s = forward(net.model, x[chosen], stays.double() / (1 - rates)).softmax(1)
        loss = torch.zeros((), dtype=torch.float64)
        for row, i in enumerate(chosen):
            target = (y[i] + (1 - q) * s[row]) / (2 - q)
            if reverse:
                loss = loss + (s[row] * (s[row].log() - target.log())).sum()
            else:
                target = target.detach()
                loss = loss + (target * (target.log() - s[row].log())).sum()
            certain = 1.0 if y[i].argmax() == s[row].argmax() else -1.0
            loss = loss + alpha * certain * -(s[row] * s[row].log()).sum()
        loss = loss / len(chosen)
        for f, now, then in zip(fisher, net.free, source, strict=True):
            loss = loss + beta * (f * (now - then) ** 2).sum()
        net.step(loss)
    return outputs


def plain_cosine(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.norm() * b.norm())


def sar(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    *,
    margin: float,
    rho: float,
    floor: float,
    released: bool = False,
    frozen: tuple[nn.Module, ...] = (),
) -> tuple[list[Tensor], list[tuple[int, int]], int]:
    """Logits, (|R|, |R'|) of each batch, and how often it started over."""
    net = Plain(model, lr)
    held = {id(p) for module in frozen for p in module.parameters()}
    net.free = [p for p in net.free if id(p) not in held]
    net.velocity = [None] * len(net.free)
    source = [p.detach().clone() for p in net.free]
    average: float | None = None
    outputs, counts, recoveries = [], [], 0
    for x in batches:
        z = net.model(x)
        outputs.append(z.detach())
        h = entropy(z.softmax(1))
        e0 = margin * math.log(z.shape[1])
        chosen = [i for i in range(len(x)) if h[i] < e0]
        again: list[int] = []
        if chosen:
            gradients = torch.autograd.grad(sum(h[i] for i in chosen) / len(chosen), net.free)
            length = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            before = [p.detach().clone() for p in net.free]
            with torch.no_grad():
                for p, g in zip(net.free, gradients, strict=True):
                    p += rho * g / length
            h2 = entropy(net.model(x).softmax(1))  # the whole batch, whose statistics it shares
            again = [i for i in chosen if h2[i] < e0]
            second = [torch.zeros_like(p) for p in net.free]  # where none is left, momentum alone
            if again:
                loss = sum(h2[i] for i in again) / len(again)
                second = list(torch.autograd.grad(loss, net.free))
            with torch.no_grad():
                for p, then in zip(net.free, before, strict=True):
                    p.copy_(then)
                for i, (p, g) in enumerate(zip(net.free, second, strict=True)):
                    v = net.velocity[i]
                    net.velocity[i] = v = g.clone() if v is None else 0.9 * v + g
                    p -= lr * v
            if again:
                average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        counts.append((len(chosen), len(again)))
        if average is not None and average < floor:
            recoveries += 1
            with torch.no_grad():
                for p, then in zip(net.free, source, strict=True):
                    p.copy_(then)
            if not released:  # which keeps both
                net.velocity = [None] * len(net.free)
                average = None
    return outputs, counts, recoveries


def nesterov(p: Tensor, g: Tensor, velocity: Tensor | None, lr: float) -> Tensor:
    """torch's: v ← 0.9·v + g, then p ← p − lr·(g + 0.9·v)."""
    v = g.clone() if velocity is None else 0.9 * velocity + g
    with torch.no_grad():
        p -= lr * (g + 0.9 * v)
    return v


def half_cross_entropies(p: Tensor, q: Tensor) -> Tensor:
    return -0.5 * (p * q.log()).sum() - 0.5 * (q * p.log()).sum()


def roid(
    model: nn.Module, batches: list[Tensor], lr: float, view, *, pull: float, prior: str
) -> tuple[list[Tensor], list[int]]:
    """Logits after prior correction, and how many samples each batch kept."""
    net = Plain(model, lr)
    source = [p.detach().clone() for p in net.free]
    outputs, kept = [], []
    mean: Tensor | None = None
    for x in batches:
        z = net.model(x)
        p = z.softmax(1)
        size, classes = z.shape
        mean = torch.full((classes,), 1 / classes, dtype=z.dtype) if mean is None else mean
        diversity = torch.stack([1 - plain_cosine(mean, p[i].detach()) for i in range(size)])
        diversity = (diversity - diversity.min()) / (diversity.max() - diversity.min())
        certain = -entropy(p.detach())
        certain = (certain - certain.min()) / (certain.max() - certain.min())
        chosen = [i for i in range(size) if diversity[i] >= diversity.mean()]
        kept.append(len(chosen))
        q = net.model(view(x[chosen])).softmax(1)
        loss = torch.zeros((), dtype=z.dtype)
        for row, i in enumerate(chosen):
            weight = math.exp(3 * diversity[i] * certain[i])
            clipped = p[i].clamp(max=0.99)
            ratio = -sum(c * torch.log(c / (1 - c) + 1e-5) for c in clipped)
            loss = loss + weight * (ratio + half_cross_entropies(p[i], q[row])) / size
        gradients = torch.autograd.grad(loss, net.free)
        for i, (free, g) in enumerate(zip(net.free, gradients, strict=True)):
            net.velocity[i] = nesterov(free, g, net.velocity[i], lr)
            with torch.no_grad():
                free.copy_(pull * free + (1 - pull) * source[i])
        mean = 0.9 * mean + 0.1 * p.detach().mean(0)
        frequency = p.detach().mean(0)
        smooth = max(1 / size, 1 / classes) / frequency.max()
        frequency = (frequency + smooth) / (1 + smooth * classes)
        outputs.append(z.detach() + frequency.log() if prior == "log" else z.detach() * frequency)
    return outputs, kept


def on_batch_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return model


def cotta(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    view,
    *,
    momentum: float,
    restoration: float,
    threshold: float,
    views: int,
    seed: int,
    symmetric: bool = True,
) -> tuple[list[Tensor], list[bool]]:
    """The teacher's logits, and whether each batch was looked at in views. Three whole networks."""
    student, teacher, anchor = (on_batch_statistics(copy.deepcopy(model).eval()) for _ in range(3))
    generator = torch.Generator().manual_seed(seed)
    velocity: dict[str, Tensor | None] = dict.fromkeys(dict(student.named_parameters()))
    outputs, looked = [], []
    for x in batches:
        with torch.no_grad():
            unsure = bool(anchor(x).softmax(1).max(1).values.mean() < threshold)
            z_t = torch.stack([teacher(view(x)) for _ in range(views)]).mean(0) if unsure else teacher(x)
        outputs.append(z_t)
        looked.append(unsure)
        p_t, p = z_t.softmax(1), student(x).softmax(1)
        one_way = [-(p_t[i] * p[i].log()).sum() for i in range(len(x))]
        both = [half_cross_entropies(p[i], p_t[i]) for i in range(len(x))]
        gradients = torch.autograd.grad(sum(both if symmetric else one_way) / len(x), list(student.parameters()))
        for (name, p), g in zip(student.named_parameters(), gradients, strict=True):
            velocity[name] = nesterov(p, g, velocity[name], lr)
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.copy_(momentum * mine + (1 - momentum) * theirs)
            for mine, then in zip(student.parameters(), anchor.parameters(), strict=True):
                back = torch.rand(mine.shape, generator=generator) < restoration
                mine[back] = then[back]
    return outputs, looked


class BlendedNorm(nn.Module):
    """A BatchNorm layer with N/(N+1) of its running statistics and 1/(N+1) of the batch's (Bessel-corrected)."""

    def __init__(self, norm: nn.BatchNorm2d, prior: float) -> None:
        super().__init__()
        self.norm, self.prior = norm, prior

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            old, new = self.prior / (self.prior + 1), 1 / (self.prior + 1)
            mean = old * self.norm.running_mean + new * x.mean((0, 2, 3))
            var = old * self.norm.running_var + new * x.var((0, 2, 3), unbiased=True)
        x = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + self.norm.eps).sqrt()
        return x * self.norm.weight.view(1, -1, 1, 1) + self.norm.bias.view(1, -1, 1, 1)


def blend(model: nn.Module, prior: float) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, BlendedNorm(child, prior))
    return model


def memo(model: nn.Module, x: Tensor, lr: float, views, *, prior: float) -> Tensor:
    """Each image with a network of its own: a step on its views, then its logits."""
    logits = []
    for i in range(len(x)):
        net = blend(copy.deepcopy(model).eval(), prior)
        mean = net(views(x[i : i + 1])).softmax(1).mean(0)
        for p, g in zip(
            net.parameters(), torch.autograd.grad(-(mean * mean.log()).sum(), list(net.parameters())), strict=True
        ):
            with torch.no_grad():
                p -= lr * g
        with torch.no_grad():
            logits.append(net(x[i : i + 1]))
    return torch.cat(logits)


def tea(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    *,
    steps: int,
    step_size: float,
    noise: float,
    buffer: int,
    renewal: float,
    seed: int,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Logits after each step, and the images in the buffer. Numbers are drawn in the order of the library."""
    net = Plain(model, lr)
    generator = torch.Generator().manual_seed(seed)
    store: dict[int, Tensor] = {}
    outputs = []
    for x in batches:
        hits = torch.randint(buffer, (len(x),), generator=generator).tolist()
        anew = torch.rand(len(x), generator=generator) < renewal
        fake = 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1
        places: list[int] = []
        known = set(store)
        for row, hit in enumerate(hits):
            if hit in known:
                places.append(hit)
                if hit in store and not anew[row]:
                    fake[row] = store[hit]
            else:  # an image that was not seen before gets the next free number
                places.append(len(known))
                known.add(len(known))
        for _ in range(steps):
            fake = fake.detach().requires_grad_()
            energy = net.model(fake).exp().sum(1).log().sum()
            (slope,) = torch.autograd.grad(energy, fake)
            fake = fake + step_size * slope + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        fake = fake.detach()
        real = net.model(x).exp().sum(1).log().mean()
        net.step(net.model(fake).exp().sum(1).log().mean() - real)
        for row, place in enumerate(places):
            store[place] = fake[row]
        with torch.no_grad():
            outputs.append(net.model(x))
    return outputs, store


def bilinear(x: Tensor, size: tuple[int, int]) -> Tensor:
    return nn.functional.interpolate(x, size=size, mode="bilinear", align_corners=False)


def seen_at(model: nn.Module, x: Tensor, ratio: float, mirrored: bool) -> Tensor:
    """A view's probabilities at the image's own size: resize, mirror, predict, resize, softmax, mirror back."""
    size = (x.shape[2], x.shape[3])
    view = bilinear(x, (int(size[0] * ratio), int(size[1] * ratio)))
    if mirrored:
        view = view.flip(3)
    p = bilinear(model(view), size).softmax(1)
    return p.flip(3) if mirrored else p


def pixel_labels(teacher: nn.Module, anchor: nn.Module, x: Tensor, ratios, threshold: float) -> tuple[Tensor, Tensor]:
    """Hard labels as CoTTA's segmentation program has them, and the anchor's mean confidence at 1, 1.25 and 1.5."""
    views = [seen_at(teacher, x, ratio, mirrored) for ratio in ratios for mirrored in (False, True)]
    alone, everything = seen_at(teacher, x, 1.0, False).argmax(1), torch.stack(views).mean(0).argmax(1)
    sure = [seen_at(anchor, x, ratio, False).max(1).values for ratio in (1.0, 1.25, 1.5)]
    mask = (sure[0] > threshold).long()
    return mask * alone + (1 - mask) * everything, torch.stack(sure).mean(0)


def pixelwise(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    log_p = bilinear(model(x), (x.shape[2], x.shape[3])).log_softmax(1)
    return -log_p.gather(1, labels[:, None])[:, 0]


def cotta_for_pixels(
    model: nn.Module, batches: list[Tensor], lr: float, ratios, threshold: float, momentum: float
) -> list[Tensor]:
    """Labels along the stream; without restoration. Three whole networks and torch's Adam."""
    student, teacher, anchor = (copy.deepcopy(model).eval() for _ in range(3))
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.9, 0.999))
    out = []
    for x in batches:
        with torch.no_grad():
            labels, _ = pixel_labels(teacher, anchor, x, ratios, threshold)
        out.append(labels)
        optimizer.zero_grad()
        pixelwise(student, x, labels).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.copy_(momentum * mine + (1 - momentum) * theirs)
    return out


def dat(
    model: nn.Module, domains: list[list[Tensor]], lr: float, ratios, *, search: int, top: int, momentum: float
) -> tuple[list[Tensor], list[list[str]]]:
    """Labels along the stream, and the names of the chosen tensors after each image; one image at a time."""
    student, teacher, anchor = (copy.deepcopy(model).eval() for _ in range(3))
    out, names = [], []
    for domain in domains:
        chosen: list[str] = []
        for i, x in enumerate(domain):
            with torch.no_grad():
                labels, u = pixel_labels(teacher, anchor, x, ratios, 0.69)
            out.append(labels)
            losses = pixelwise(student, x, labels)
            parameters = dict(student.named_parameters())
            for mask in (u < 0.85, u > 0.99):
                gradients = torch.autograd.grad((mask * losses).mean(), list(parameters.values()), retain_graph=True)
                felt = {name: float(g.abs().sum()) for name, g in zip(parameters, gradients, strict=True)}
                if i < search:
                    ranked = sorted(felt, key=lambda name: felt[name], reverse=True)
                    chosen += [name for name in ranked[:top] if name not in chosen and felt[name] > 0]
            for name, g in zip(parameters, gradients, strict=True):
                parameters[name].grad = g if name in chosen else None
            if chosen:
                torch.optim.Adam([parameters[name] for name in chosen], lr=lr, betas=(0.9, 0.999)).step()
            names.append(sorted(chosen))
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.copy_(momentum * mine + (1 - momentum) * theirs)
    return out, names
