"""Which parameters adapt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Parameters", "choose_parameters", "is_norm", "norm_parameters"]

Parameters: TypeAlias = Literal["norm", "all"] | Iterable[str] | Callable[[str, Parameter], bool]
"""`"norm"`: the affine parameters of the normalisation layers; `"all"`; names; or a test of (name, parameter)."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer with an affine weight.

    Torch's own layers are; so is any other that calls itself a norm and scales by a vector (timm, transformers).
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Parameter):
        return False
    return isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and weight.dim() == 1)


def norm_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Weight and bias of every normalisation layer, by name, in the model's own order."""
    owned = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_norm(module)
        for name, _ in module.named_parameters(recurse=False)
        if name in ("weight", "bias")
    }
    return {name: p for name, p in model.named_parameters() if name in owned}


def choose_parameters(model: nn.Module, which: Parameters) -> dict[str, Parameter]:
    """The parameters that `which` asks for, by name. Raises where it asks for what the model does not have."""
    everything = dict(model.named_parameters())
    if which == "norm":
        return norm_parameters(model)
    if which == "all":
        return everything
    if isinstance(which, str):
        raise ValueError(f'parameters={which!r}: expected "norm", "all", a list of names or a function')  # noqa: TRY004
    if callable(which):
        return {name: p for name, p in everything.items() if which(name, p)}
    names = set(which)
    if unknown := sorted(names - everything.keys()):
        raise ValueError(f"parameters= names what the model does not have: {', '.join(unknown[:5])}")
    return {name: p for name, p in everything.items() if name in names}
