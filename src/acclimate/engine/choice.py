"""Which engine: what one word, `engine="auto"`, stands for on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

__all__ = ["Engine", "Precision", "choose"]

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class Engine:
    """How passes run. Parameters that adapt, optimizer and losses are in single precision whatever it says.

    Args:
        precision: `"fp32"` leaves torch's settings as they are, `"tf32"` allows TF32 in matrix products, `"bf16"` runs
            the network under autocast, with bfloat16 copies of the weights that do not adapt.
        channels_last: convolutions in the layout that tensor cores read.
        compiled: passes go through torch.compile.
        lean: a compiled backward computes norm layers and activations again instead of saving them: less memory, for
            some more time.
        graphs: steps without a branch on data are recorded as CUDA graphs and replayed. NaN in a batch is then told
            with a later call; the batch is refused at once all the same.
    """

    precision: Precision = "fp32"
    channels_last: bool = False
    compiled: bool = False
    lean: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r}: expected one of {', '.join(get_args(Precision))}")


def choose(
    engine: Engine | Literal["eager", "recorded", "auto"],
    precision: Precision | None,
    model: nn.Module,
    device: torch.device,
    *,
    moved: bool = False,
) -> Engine:
    """The engine that is asked for, on this device."""
    cuda = device.type == "cuda"
    if isinstance(engine, Engine):
        chosen = engine
    elif engine == "eager":
        chosen = Engine()
    elif engine == "recorded":
        chosen = Engine(graphs=cuda)
    elif engine == "auto":
        convolves = any(isinstance(m, nn.Conv2d) and (cuda or m.kernel_size != m.stride) for m in model.modules())
        chosen = Engine(_best(device), channels_last=convolves, compiled=True, graphs=cuda)
    else:
        raise ValueError(f'engine={engine!r}: expected "eager", "recorded", "auto" or an acclimate.Engine')
    if moved and not cuda:
        chosen = replace(chosen, graphs=False)
    if chosen.graphs and not cuda:
        raise ValueError(f"engine={engine!r} records CUDA graphs, and the model is on {device}")
    if device.type == "cpu" and any(isinstance(m, nn.GroupNorm) for m in model.modules()):
        chosen = replace(chosen, channels_last=False)  # torch 2.13's backward of GroupNorm crashes in it
    return chosen if precision is None else replace(chosen, precision=precision)


def _best(device: torch.device) -> Precision:
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
