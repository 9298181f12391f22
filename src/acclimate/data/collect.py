"""Select unlabelled in-distribution images from a mixed stream, for the Fisher regulariser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..checks import read_logits
from ..functional import confidence, free_energy
from ..parts.batchnorm import Normalisation
from ..parts.fisher import Images, image_batches

__all__ = ["collect_in_distribution"]

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "energy": free_energy,
    "confidence": confidence,
}


def collect_in_distribution(
    model: nn.Module,
    stream: Images,
    *,
    count: int = 2000,
    score: Literal["energy", "confidence"] = "energy",
    threshold: float | None = None,
    batch_size: int = 64,
    limit: int | None = None,
) -> list[Tensor]:
    """Return, in batches, the `count` images of a stream that look most like the training data.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    >>> [len(batch) for batch in collect_in_distribution(net, torch.rand(32, 3, 2, 2), count=10, batch_size=8)]
    [8, 2]

    The paper collects the source images of EATA in this way. The network runs in evaluation mode and is left unchanged.
    A score is only as good as the network: look at the images that were collected.

    Args:
        model: the source network.
        stream: images, or batches of images.
        count: how many images to collect at most.
        score: the out-of-distribution score, high for in-distribution images: `"energy"`, lse(z) (Liu et al., 2020), or
            `"confidence"`, the largest softmax probability.
        threshold: never collect images that score below it.
        batch_size: images per returned batch.
        limit: stop after this many images of the stream.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r}: expected one of {', '.join(map(repr, _SCORES))}")
    if count < 1:
        raise ValueError(f"count={count}: expected at least one image")
    images, scores, seen = torch.empty(0), torch.empty(0), 0
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad(), Normalisation(model).source():
        for batch in image_batches(stream, batch_size):
            x = batch.to(device)
            z = _SCORES[score](read_logits(model(x), x))
            value = z.flatten(1).mean(1) if z.dim() > 1 else z
            keep = value > (scores.min() if len(scores) == count else float("-inf"))
            if threshold is not None:
                keep &= value >= threshold
            images = torch.cat([images, x[keep]]) if len(images) else x[keep]
            scores = torch.cat([scores, value[keep]]) if len(scores) else value[keep]
            scores, best = scores.topk(min(count, len(scores)))
            images = images[best]
            seen += len(x)
            if limit is not None and seen >= limit:
                break
    if not len(images):
        raise ValueError(f"no image was collected: the stream is empty, or threshold={threshold} is above every score")
    return list(torch.split(images, batch_size))
