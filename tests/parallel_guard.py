"""Guards that `parallel_worker.py` runs as one of several ranks, and `test_parallel.py` in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from networks import images
from torch import Tensor

from acclimate import POLICIES, Adapter, Guard, Policy
from acclimate.parts.world import Share

PROBE = images(64, seed=900).double()
WIDE = 48  # images of a batch that is judged on its own


@dataclass(frozen=True)
class Watched:
    """A stream for a guarded method."""

    method: str
    family: str
    sizes: Sequence[int]
    lr: float = 1e-4
    poisoned: int | None = None
    """The batch before which a parameter becomes NaN."""
    nan: dict[int, Sequence[int]] = field(default_factory=dict)
    """Images with NaN, by batch."""
    stuck: bool = False
    """Whether most images are the same."""
    probe: bool = True
    unlike: bool = False
    """Whether images are unlike the held-out ones: with BatchNorm, nothing is learned from others."""
    policies: Sequence[Policy] = POLICIES

    def batches(self) -> list[Tensor]:
        """Return the whole batches."""
        return [self._batch(number, size) for number, size in enumerate(self.sizes)]

    def _batch(self, number: int, size: int) -> Tensor:
        x = images(size, seed=number).double()
        x[[*self.nan.get(number, ())], 0, 0, 0] = torch.nan
        if self.unlike:
            x = 3 * x
        if self.stuck:
            x[: 2 * size // 3] = x[:1]
        return x


WATCHED = {
    "honest, bn": Watched("eata", "bn", [WIDE] * 3, unlike=True),
    "familiar, bn": Watched("eata", "bn", [WIDE] * 3),
    "honest, ln": Watched("eata-c", "ln", [WIDE, 20, WIDE, 50, 16], lr=1e-7),
    "collapse, bn": Watched("tent", "bn", [WIDE] * 7, lr=3.0, unlike=True),
    "harm, ln": Watched("tent", "ln", [WIDE] * 5, lr=3.0),
    "forgetting, ln": Watched("tent", "ln", [WIDE] * 5, lr=3.0, policies=POLICIES[-1:]),
    "pixels": Watched("tent", "seg", [8] * 3, lr=3.0, probe=False),
    "few images, ln": Watched("tent", "ln", [7, 5, 6] * 6, lr=0.3),
    "few images, bn": Watched("tent", "bn", [7, 5, 6] * 3, probe=False),
    "each image alone": Watched("memo", "bn", [4, 6], probe=False),
    "divergence": Watched("eata", "bn", [WIDE] * 3, poisoned=1, probe=False),
    "divergence of few images": Watched("tent", "ln", [7] * 9, poisoned=7, probe=False),
    "broken images": Watched("tent", "bn", [WIDE] * 4, nan={0: [0], 1: [5, 47], 2: range(WIDE)}, probe=False),
    "stuck camera": Watched("tent", "bn", [WIDE, 40], stuck=True, probe=False),
    "no probe": Watched("roid", "ln", [WIDE] * 3, probe=False),
}
"""What the guard meets, by name."""
OF_THREE = ("honest, ln", "collapse, bn", "few images, ln", "broken images", "stuck camera")
"""What three ranks meet."""


def titles(ranks: int) -> Sequence[str]:
    """Return what this many ranks run."""
    return OF_THREE if ranks == 3 else [*WATCHED]


Build = Callable[..., Adapter]


def guarded(build: Build, watched: Watched, **options: Any) -> Guard:
    """Return a method in double precision with its guard."""
    adapter = build(watched.method, watched.family, {"lr": watched.lr}, **options)
    return Guard(adapter, probe=PROBE if watched.probe else None, policies=watched.policies, pause=2, every=4)


def watch(guard: Guard, watched: Watched, cut: Callable[[Tensor, int], Tensor] = lambda x, _: x) -> dict[str, Any]:
    """Return what must not depend on the number of ranks."""
    logits, health = [], []
    for number, x in enumerate(watched.batches()):
        if watched.poisoned == number:
            with torch.no_grad():
                guard.adapted[0].fill_(torch.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits.append(guard(cut(x, number)))
        health.append(guard.health.as_dict())
    return {"logits": logits, "health": health, "state": dict(guard.snapshot().tensors)}


def divided(total: int, eighths: Sequence[int], rank: int) -> Share:
    """Return a rank's rows of a batch that is divided by eighths."""
    first, last = (total * sum(eighths[:end]) // 8 for end in (rank, rank + 1))
    return Share(first, last - first, total)


def at_every_rank(build: Build, eighths: Sequence[Sequence[int]], rank: int, folder: Path) -> dict[str, Any]:
    """Run all streams as one of the ranks; keep the state of one in a file."""

    def cut(x: Tensor, number: int) -> Tensor:
        return divided(len(x), eighths[number % len(eighths)], rank).of(x)

    found = {}
    for title in titles(len(eighths[0])):
        watched = WATCHED[title]
        guard = guarded(build, watched, ranks="all")
        found[title] = watch(guard, watched, cut)
        guard.save(file := folder / f"guard-{len(eighths[0])}.safetensors")
        guard.load(file)
        found[title]["loaded"] = dict(guard.snapshot().tensors)
    return found
