"""One rank of the processes that `test_parallel.py` starts: runs every method on its part of each batch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, TABLE
from networks import make, stream
from parallel_faults import at_every_rank as faults_at_every_rank
from parallel_guard import at_every_rank
from torch import Tensor

from acclimate import Adapter, Engine, Guard, Ranks, Reliable
from acclimate.parts.augment import Views

DIVIDED = {
    2: [(1, 7), (8, 0), (4, 4), (5, 3)],
    3: [(1, 1, 6), (4, 4, 0), (0, 1, 7), (8, 0, 0)],
}
"""Rows of each batch per rank: uneven, and none for some."""

ROWS = [(name, family) for name, family in TABLE if family != "gn"]
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "noisy views": ("cotta", "bn", {"augment": Views()}),
    "own views": ("cotta", "ln", {"augment": lambda x, g: (x + 0.1 * torch.rand(x.shape, generator=g)).clamp(0, 1)}),
    "teacher loss": ("cotta", "ln", {"loss": "teacher"}),
    "own augmentation": ("memo", "ln", {"augment": lambda x, g: x * torch.rand(len(x), 1, 1, 1, generator=g)}),
    "replay": ("eata", "bn", {"strategy": "replay"}),
    "subset": ("eata", "bn", {"strategy": "replay-subset"}),
    "detached": ("tent", "bn", {"detach_statistics": True}),
    "source statistics": ("tent", "bn", {"statistics": "source"}),
    "per sample": ("eata", "bn", {"fisher": "sample"}),
    "skipped blocks": ("eata-c", "bn", {"per": "batch", "drop": 0.5}),
    "replayed sub-network": ("eata-c", "bn", {"strategy": "replay"}),
    "Adam": ("eata", "ln", {"optimizer": torch.optim.Adam}),
    "limited": ("tent", "ln", {"max_step": 1e-3}),
}
"""Other settings, by what is special about them."""


OF_THREE = [
    *[row for row in ROWS if row[0] in ("tent", "dat", "eata-c")],
    *[(name, "bn") for name in ("source", "bn-adapt", "memo", "sar", "tea", "eta", "eata")],
    *[(name, "ln") for name in ("roid", "rdumb", "eta-c")],
    ("cotta", "seg"),
]
"""What three ranks run: every method, and some on every kind of network."""


def settings(size: int) -> list[tuple[str, str, str, dict[str, Any]]]:
    """What this many ranks run: title, method, network, arguments."""
    rows = OF_THREE if size == 3 else ROWS
    plain = [(f"{name}, {family}", name, family, dict[str, Any]()) for name, family in rows]
    return plain + [(title, *rest) for title, rest in MORE.items() if size == 2]


def build(name: str, family: str, more: dict[str, Any], **options: Any) -> Adapter:
    """A method in double precision, so that only the order of sums differs."""
    case = CASES[name]
    arguments = {**case.arguments(), **({} if not case.learns or "optimizer" in more else {"lr": 0.01}), **more}
    if "source" in arguments:
        arguments["source"] = [x.double() for x in arguments["source"]]
    return case.method(make(family).double(), **arguments, **options)


def batches() -> list[Tensor]:
    return [x.double() for x in stream()]


def outcome(adapter: Adapter, parts: list[Tensor]) -> dict[str, Any]:
    """What must not depend on the number of ranks, and what a rank had of each batch."""
    logits, losses, kept = [], [], []
    for x in parts:
        logits.append(adapter(x))
        losses.append({term: float(value) for term, value in adapter.last.losses.items()})
        kept.append(None if adapter.last.kept is None else int(adapter.last.kept.sum()))
    snapshot = adapter.snapshot()
    return {"logits": logits, "losses": losses, "kept": kept, "state": dict(snapshot.tensors), "repr": repr(adapter)}


def part(x: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return torch.split(x, list(sizes))[rank]


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Careless(Reliable):
    """A selector whose state is of one rank's samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def observe(self, logits: Tensor, keep: Tensor) -> None:
        self.seen = self.seen + len(keep)


def rejections(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """A part that is wrong on one rank only: all ranks raise, nothing changes, and the next batch works."""
    adapter = build("eata", "bn", {}, ranks="all")
    x, sizes = batches()[0], DIVIDED[size][0]
    own = part(x, sizes, rank)
    adapter(own)
    before = adapter.snapshot()
    bad = own.clone()
    bad[0, 0, 0, 0] = float("nan")
    last = rank == size - 1
    errors = [
        raised(lambda: adapter(bad if last else own)),
        raised(lambda: adapter(own.long() if last else own)),
        raised(lambda: adapter(own[:0])),
    ]
    after = adapter.snapshot()
    unchanged = all(torch.equal(value, after.tensors[name]) for name, value in before.tensors.items())
    adapter(own)
    different = raised(lambda: build("eata", "ln", {"beta": 1.0 + last}, ranks="all")(own))
    careless = build("eta", "ln", {"select": Careless()}, ranks="all")
    careless(own)
    diverged = raised(lambda: careless.save(folder / "never.safetensors"))
    engine = raised(lambda: build("tent", "ln", {}, ranks="all", engine=Engine(compiled=True) if last else "auto"))
    return {"errors": errors, "unchanged": unchanged, "different": different, "diverged": diverged, "engine": engine}


def bytes_of_a_step(adapter: Adapter, x: Tensor) -> dict[str, int]:
    adapter(x)
    world = adapter.world
    assert isinstance(world, Ranks)
    messages, sent = world.messages, world.sent
    adapter(x)
    return {
        "messages": world.messages - messages,
        "bytes": world.sent - sent,
        "gradients": 8 * sum(map(torch.numel, adapter.adapted)),
    }


def silence(x: Tensor, family: str, *, last: bool) -> str:
    """A rank that lives but stops in the middle of a step: the others wait for the timeout of their group, and raise.

    With BatchNorm they wait in the middle of a forward pass.
    """
    group = dist.new_group()
    adapter = build("tent", family, {}, ranks=Ranks(group))
    adapter(x)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)  # not before all is warm
    if last:
        raised(lambda: adapter.admit(x))
        return "RankError"
    return raised(lambda: adapter(x))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for title, name, family, more in settings(size):
        adapter = build(name, family, more, ranks="all")
        parts = [part(x, sizes, rank) for x, sizes in zip(batches(), DIVIDED[size], strict=True)]
        found[title] = outcome(adapter, parts)
        if title == "eata-c, bn":
            adapter.save(folder / f"state-{size}.safetensors")
    found["guards"] = at_every_rank(build, DIVIDED[size], rank, folder)
    found["other guard"] = raised(lambda: Guard(build("tent", "ln", {}, ranks="all"), every=4 + rank))
    found["rejections"] = rejections(folder, rank, size)
    own = part(batches()[0], DIVIDED[size][0], rank)
    found["message"] = bytes_of_a_step(build("eata", "ln", {}, ranks="all"), own)
    found["silence"] = [silence(own, family, last=rank == size - 1) for family in ("ln", "bn")]
    found["faults"] = faults_at_every_rank(folder, raised)
    local = build("tent", "bn", {}, ranks=Ranks(sync_statistics=False))
    found["local statistics"] = outcome(local, [own])
    torch.save(found, folder / f"found-{size}-{rank}.pt")

    adapter = build("eata-c", "bn", {}, ranks="all")
    adapter(own)
    if rank == size - 1:
        os._exit(3)  # killed in the middle of a stream
    lost = raised(lambda: [adapter(own) for _ in range(2)])
    torch.save(lost, folder / f"lost-{size}-{rank}.pt")
    os._exit(0)  # the group is broken


if __name__ == "__main__":
    main(Path(sys.argv[1]))
