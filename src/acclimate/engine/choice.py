"""Which engine: what `engine="auto"` stands for on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

__all__ = ["TESTED_TORCH", "Engine", "Precision", "choose", "without_recording"]

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]

TESTED_TORCH = ("2.11", "2.13")
"""Versions of torch that the compiled engine is tested on. On others it falls back to eager where torch differs."""


@dataclass(frozen=True)
class Engine:
    """How passes run. Adapted parameters, optimizer and losses are in single precision in every engine.

    >>> Engine("bf16", channels_last=True).compiled
    False

    Args:
        precision: `"fp32"` leaves torch's settings as they are, `"tf32"` allows TF32 in matrix products, `"bf16"` runs
            the network under autocast, with bfloat16 copies of the frozen weights.
        channels_last: run convolutions in the memory format of tensor cores.
        compiled: run passes through torch.compile.
        lean: recompute norm layers and activations in a compiled backward instead of saving them. This saves memory and
            takes more time.
        graphs: record steps that do not branch on data as CUDA graphs. A batch with NaN is then rejected at once, but
            the exception is raised by a later call.
        background: answer eagerly from the first batch, and compile in a thread, on a copy of the network. The compiled
            passes take over between two steps; numbers change a little there. `adapter.last.engine` says which ran.
        overlap: with `graphs`, learn from a batch on a stream of its own, so that its logits can be read before that
            has ended. Numbers are the same. The next call waits; call `settle()` before you read the network yourself.
    """

    precision: Precision = "fp32"
    channels_last: bool = False
    compiled: bool = False
    lean: bool = False
    graphs: bool = False
    background: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r}: expected one of {', '.join(get_args(Precision))}")
        if self.overlap and not self.graphs:
            raise ValueError("overlap=True is for recorded steps: give graphs=True, too")


def choose(
    engine: Engine | Literal["eager", "recorded", "auto"],
    precision: Precision | None,
    model: nn.Module,
    device: torch.device,
    *,
    moved: bool = False,
) -> Engine:
    """Return the engine for this device; a model that `moved` off the GPU no longer uses CUDA graphs."""
    cuda = device.type == "cuda"
    if isinstance(engine, Engine):
        chosen = engine
    elif engine == "eager":
        chosen = Engine()
    elif engine == "recorded":
        chosen = Engine(graphs=cuda)
    elif engine == "auto":
        convolves = any(isinstance(m, nn.Conv2d) and (cuda or m.kernel_size != m.stride) for m in model.modules())
        chosen = Engine(_best_precision(device), channels_last=convolves, compiled=True, graphs=cuda)
    else:
        raise ValueError(f'engine={engine!r}: expected "eager", "recorded", "auto" or an acclimate.Engine')
    if moved and not cuda:
        chosen = replace(chosen, graphs=False, overlap=False)
    if chosen.graphs and not cuda:
        raise ValueError(f"engine={engine!r} records CUDA graphs, and the model is on {device}")
    if device.type == "cpu" and any(isinstance(m, nn.GroupNorm) for m in model.modules()):
        chosen = replace(chosen, channels_last=False)  # the backward of GroupNorm in torch 2.13 crashes in this format
    return chosen if precision is None else replace(chosen, precision=precision)


def without_recording(method: str, asked: Engine | Literal["eager", "recorded", "auto"], chosen: Engine) -> Engine:
    """Return an engine for several ranks, whose messages are neither compiled nor recorded; raise if that was asked."""
    if asked != "auto" and (chosen.compiled or chosen.graphs):
        raise ValueError(
            f"{method}: engine={asked!r} compiles or records passes, and those of several ranks send messages: use "
            'engine="eager", or "auto", which keeps the precision'
        )
    return replace(chosen, compiled=False, graphs=False, overlap=False)


def _best_precision(device: torch.device) -> Precision:
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
