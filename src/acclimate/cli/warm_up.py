"""The command `acclimate warm-up`: compile ahead of time, into a file to ship."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ..bench.networks import Loaded, load_network
from ..bench.plan import Plan, combine
from ..core.adapter import Adapter
from ..methods import METHODS
from .options import plan_options
from .terminal import one_line_errors, say


@plan_options(
    *("methods", "model", "batch_size", "preset", "overrides", "device", "precision"),
    about={"methods": "A method to compile for; repeat for more."},
    usual={"methods": "eata"},
)
def warm_up(
    options: dict[str, Any],
    image: Annotated[str | None, typer.Option(help="Shape of an image, such as 3x224x224.")] = None,
    out: Annotated[Path, typer.Option(help="The file of compiled code.")] = Path("acclimate-compiled.bin"),
) -> None:
    """Compile a network for methods ahead of time, into a file for machines of the same kind.

    `adapter.load_compiled(FILE)` uses it.
    """
    with one_line_errors("cannot warm up"):
        plan = combine({"methods": ["eata"], "engine": "auto"}, options)
        network = load_network(plan.model, plan.device)
        shape = (plan.batch_size, *image_shape(network, image))
        for name in plan.methods:
            start = time.perf_counter()
            adapter = build(plan, network, name, shape)
            adapter.warm_up(shape)
            compiled = adapter.runner.compiler.compiled_passes
            say(f"{name}: {compiled} passes compiled in {time.perf_counter() - start:.0f} s")
        adapter.save_compiled(out)
    say(f"\nCompiled code: [bold]{out}[/]; `adapter.load_compiled(FILE)` before the first batch uses it")


def build(plan: Plan, network: Loaded, name: str, shape: tuple[int, ...]) -> Adapter:
    """Return a method around the network; its passes depend on neither images nor importance."""
    arguments: dict[str, Any] = {"engine": plan.engine, "precision": plan.precision, **plan.overrides.get(name, {})}
    if "source" in inspect.signature(METHODS[name]).parameters and arguments.get("beta") != 0:
        arguments["source"] = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(plan.device)
    return METHODS[name].preset(plan.preset or network.family, network.model, **arguments)


def image_shape(network: Loaded, given: str | None) -> tuple[int, ...]:
    """Return the shape of an image: the given one, or that of the network's crop."""
    if given is not None:
        sizes = given.lower().split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise ValueError(f"--image {given}: expected channels, height and width, such as 3x224x224")
        return tuple(map(int, sizes))
    crop = None if network.preprocess is None else network.preprocess.crop
    if crop is None:
        raise ValueError(f"{network.name} takes images of any size: say which, such as --image 3x224x224")
    first = next((module.in_channels for module in network.model.modules() if isinstance(module, nn.Conv2d)), 3)
    return first, crop, crop
