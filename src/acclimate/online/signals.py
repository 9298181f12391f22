"""What the guard looks at, each in a few lines, as pure functions of predictions and parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from ..parts.world import Share

__all__ = ["content", "distance", "diversity", "per_sample", "repeated", "shuffle_patches"]

_PIXELS = 4096  # of a segmenter's many pixels, so many are looked at


def per_sample(logits: Tensor, share: Share | None = None) -> Tensor:
    """Return probabilities (n, C): a row per image, or per some of a segmenter's pixels.

    With a share, the pixels are chosen from the batch of all ranks, and those of this rank are returned.
    """
    if logits.dim() == 2:
        return logits.softmax(1)
    rows, pixels = logits.movedim(1, -1).flatten(0, -2), logits[0:1, 0].shape[1:].numel()
    offset, _, total = share or Share(0, len(logits), len(logits))
    step = max(1, total * pixels // _PIXELS)
    return rows[-offset * pixels % step :: step].softmax(1)


def diversity(p: Tensor) -> Tensor:
    """Return the entropy of the mean prediction as a share of the largest that so many confident predictions allow.

    A network that predicts one class for everything has none.

    >>> diversity(torch.eye(4)), diversity(torch.eye(4)[:1].expand(4, 4))
    (tensor(1.), tensor(0.))
    """
    mean = p.mean(0)
    most = math.log(max(2, min(p.shape)))
    return (-(mean * mean.clamp(min=1e-12).log()).sum() / most + 0.0).clamp(max=1.0)


def repeated(x: Tensor) -> Tensor:
    """Return the share of images that equal the one before, pixel by pixel: those of a camera that is stuck.

    >>> float(repeated(torch.ones(5, 3)))
    1.0
    """
    if len(x) < 2:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    images = x.flatten(1)
    if not x.is_cuda:  # where it need not wait for a device, the host compares a few pixels first
        some = images[:, :: images.shape[1] // 32 + 1]  # not one column of each row
        if not bool((some[1:] == some[:-1]).all(1).any()):
            return torch.zeros((), dtype=torch.float64)
    return (images[1:] == images[:-1]).all(1).double().mean()


def content(p: Tensor, shuffled: Tensor) -> Tensor:
    """Return how much confidence a network loses when the patches of its images are shuffled (Lee et al., 2024).

    Nothing is lost by a network that predicts the same whatever it sees.
    """
    top = p.argmax(1, keepdim=True)
    return (p.gather(1, top) - shuffled.gather(1, top)).mean()


def shuffle_patches(x: Tensor, generator: Generator, grid: int = 4) -> Tensor:
    """Return images (B, C, H, W) cut into grid × grid patches, in random order: the same colours, another content.

    Pixels that do not fill a patch are cut off and added as they were. Inputs that are not images are shuffled along
    their last dimension.
    """
    if x.dim() != 4 or min(x.shape[2:]) < grid:
        order = torch.randperm(x.shape[-1], generator=generator).to(x.device)
        return x[..., order]
    height, width = x.shape[2] // grid, x.shape[3] // grid
    inner = x[:, :, : grid * height, : grid * width]
    cut = inner.reshape(*x.shape[:2], grid, height, grid, width)
    patches = cut.transpose(3, 4).flatten(2, 3)
    order = torch.rand(len(x), grid * grid, generator=generator).argsort(1).to(x.device)
    patches = patches.gather(2, order[:, None, :, None, None].expand_as(patches))
    shuffled = x.clone()
    back = patches.reshape(*x.shape[:2], grid, grid, height, width).transpose(3, 4)
    shuffled[:, :, : grid * height, : grid * width] = back.reshape_as(inner)
    return shuffled


def distance(parameters: Sequence[Tensor], source: Sequence[Tensor], importance: Tensor | None) -> Tensor:
    """Return √Σ ω(θ − θ°)², the distance in Fisher norm; without ω relative to the length of θ°."""
    now, before = (torch.cat([t.detach().flatten() for t in tensors]) for tensors in (parameters, source))
    if importance is None:
        return (now - before).square().sum().sqrt() / before.square().sum().sqrt().clamp(min=1e-12)
    return (importance * (now - before).square()).sum().sqrt()
