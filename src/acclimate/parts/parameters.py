"""Which parameters adapt. Their names are those of the plain network, without torch's wrappers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from .wrappers import plain_names

__all__ = [
    "Parameters",
    "adapted_parameters",
    "choose_parameters",
    "early_norm_parameters",
    "is_norm",
    "norm_parameters",
]

Parameters: TypeAlias = Literal["norm", "early-norm", "all"] | Iterable[str] | Callable[[str, Parameter], bool]
"""`"norm"`: weight and bias of the normalisation layers; `"early-norm"`: without those of the last stage; `"all"`;
names; or a function of (name, parameter) that returns whether it adapts."""

_LAST_STAGE = re.compile(
    r"(^|\.)(layer4|encoder\.stages\.3)\."  # ResNet
    r"|(^|\.)(blocks\.|layer\.|layers\.|encoder_layer_)(9|10|11)\."  # ViT
    r"|^(model\.)?(norm|fc_norm|encoder\.ln|vit\.layernorm)\."  # its final norm
)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer with an affine weight.

    This covers torch's own layers, and any other that has "norm" in its class name and scales by a vector (timm,
    transformers).
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Parameter):
        return False
    return isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and weight.dim() == 1)


def norm_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return weight and bias of every normalisation layer by name, in the model's order.

    >>> list(norm_parameters(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))))
    ['1.weight', '1.bias']
    """
    owned = {
        id(p)
        for module in model.modules()
        if is_norm(module)
        for name, p in module.named_parameters(recurse=False)
        if name in ("weight", "bias")
    }
    return {name: p for name, p in _named(model).items() if id(p) in owned}


def early_norm_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return `norm_parameters` without those of the last stage, where the names show which stage is the last.

    These are ResNet's `layer4`, and blocks 9 to 11 and the final norm of a ViT, as in SAR's program, under the names of
    timm, torchvision and transformers.
    """
    return {name: p for name, p in norm_parameters(model).items() if not _LAST_STAGE.search(name)}


def choose_parameters(model: nn.Module, which: Parameters) -> dict[str, Parameter]:
    """Return the chosen parameters by name; raise for names that the model does not have."""
    everything = _named(model)
    if which == "norm":
        return norm_parameters(model)
    if which == "early-norm":
        return early_norm_parameters(model)
    if which == "all":
        return everything
    if isinstance(which, str):
        raise ValueError(f'parameters={which!r}: expected "norm", "early-norm", "all", a list of names or a function')  # noqa: TRY004
    if callable(which):
        return {name: p for name, p in everything.items() if which(name, p)}
    names = set(map(plain_names(model), which))
    if unknown := sorted(names - everything.keys()):
        raise ValueError(f"parameters= has names that the model does not have: {', '.join(unknown[:5])}")
    return {name: p for name, p in everything.items() if name in names}


def _named(model: nn.Module) -> dict[str, Parameter]:
    """Return all parameters by the names that they have in the plain network."""
    plain = plain_names(model)
    return {plain(name): p for name, p in model.named_parameters()}


def adapted_parameters(method: str, model: nn.Module, which: Parameters | None) -> dict[str, Parameter]:
    """Return the parameters that a method adapts; raise if there are none."""
    if which is None:
        return {}
    if not (adapted := choose_parameters(model, which)):
        norms = which in ("norm", "early-norm")
        why = "the model has no normalisation layer with weights" if norms else "none matches"
        raise ValueError(f'{method} found no parameter to adapt: {why}. parameters="all" adapts every one')
    return adapted
