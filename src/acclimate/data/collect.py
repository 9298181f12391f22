"""Unlabelled in-distribution images out of a mixed stream, for the Fisher regulariser."""

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
    """The `count` images of a stream that look most like what the model was trained on, in batches.

    The paper collects EATA's source images so, by an out-of-distribution score of the source network: `"energy"`,
    lse(z) (Liu et al., 2020), or `"confidence"`, the largest softmax probability; both are high in distribution.
    Images that score below `threshold` are never taken; after `limit` images no more are looked at. The network runs in
    evaluation mode and is left unchanged. A score is only as good as the network: look at what was collected.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r}: expected one of {', '.join(map(repr, _SCORES))}")
    if count < 1:
        raise ValueError(f"count={count}: ask for at least one image")
    images, scores, seen = torch.empty(0), torch.empty(0), 0
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad(), Normalisation(model).source():
        for batch in image_batches(stream, batch_size):
            x = batch.to(device)
            z = _SCORES[score](read_logits(model(x), x))
            value = z.flatten(1).mean(1) if z.dim() > 1 else z
            worth = value > (scores.min() if len(scores) == count else float("-inf"))
            if threshold is not None:
                worth &= value >= threshold
            images = torch.cat([images, x[worth]]) if len(images) else x[worth]
            scores = torch.cat([scores, value[worth]]) if len(scores) else value[worth]
            scores, best = scores.topk(min(count, len(scores)))
            images = images[best]
            seen += len(x)
            if limit is not None and seen >= limit:
                break
    if not len(images):
        raise ValueError("no image was collected: the stream is empty, or threshold is above every score")
    return list(torch.split(images, batch_size))
