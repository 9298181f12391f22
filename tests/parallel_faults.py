"""Sweeps of several ranks of which one cannot read an image, or cannot write a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from acclimate import Ranks
from acclimate.bench import result_folder
from acclimate.bench.plan import Plan
from acclimate.bench.run import Run
from acclimate.bench.stream import SampledDomain
from acclimate.bench.sweep import sweep
from acclimate.bench.workers import Here
from acclimate.data.types import DataError

PLAN = Plan(methods=("tent", "source"), images=12, batch_size=6, shifts=("contrast", "fog"), probe="none")
read, write_text = SampledDomain._part_on, result_folder.write_text


def unreadable(world: Ranks) -> AbstractContextManager[Any]:
    """The last rank cannot read an image of the second domain, once."""
    failed: list[str] = []

    def on(self: SampledDomain, device: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(read(self, device)):
            if world.rank == world.size - 1 and self.name == "fog" and number == 1 and not failed:
                failed.append(self.name)
                raise DataError("fog/7.png is truncated")
            yield batch

    return patch.object(SampledDomain, "_part_on", on)


def full(world: Ranks) -> AbstractContextManager[Any]:
    """The first rank cannot write the result of the first job."""

    def write(path: Path, text: str) -> None:
        if world.rank == 0 and path.name == "tent-seed0.json":
            raise OSError(28, "No space left on device")
        write_text(path, text)

    return patch.object(result_folder, "write_text", write)


FAULTS = {"unreadable": unreadable, "full": full}


def at_every_rank(folder: Path, raised: Callable[[Callable[[], object]], str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What a sweep with each fault raises, and the numbers after the same sweep without it."""
    found, world = {}, Ranks()
    for name, fault in FAULTS.items():
        out = folder / f"{name}-{world.size}"
        with fault(world):
            error = raised(lambda out=out: sweep([Run(PLAN, out, world=world)], Here(world)))
        done = json.loads((out / "source-seed0.json").read_text())["done"]
        results = sweep([Run(PLAN, out, world=world)], Here(world))
        found[name] = error, {"done": done, "scores": [[each.accuracy for each in r.domains] for r in results]}
    return found
