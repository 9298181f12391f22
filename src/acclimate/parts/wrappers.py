"""Networks inside torch.compile and DataParallel, which put names of their own in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["calls", "is_compiled", "plain_names", "plain_network", "uncompiled"]

_INNER = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the names of torch's wrappers from the name of a module or parameter.

    >>> plain_names(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))("0.module.weight")
    '0.weight'
    """
    wrappers = [
        (f"{path}." if path else "", _INNER[type(module).__name__])
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).__name__ in _INNER
    ]

    def plain(name: str) -> str:
        for path, inner in reversed(wrappers):  # the innermost first
            if name == f"{path}{inner}":
                return path.removesuffix(".")
            if name.startswith(f"{path}{inner}."):
                name = path + name.removeprefix(f"{path}{inner}.")
        return name

    return plain


def plain_network(model: nn.Module) -> nn.Module:
    """Return the network inside torch's wrappers."""
    while (inner := _INNER.get(type(model).__name__)) is not None:
        model = model.get_submodule(inner)
    return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user has compiled a module, by torch.compile(module) or module.compile()."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def calls(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that make a compiled module run compiled code."""
    return {name: vars(module)[name] for name in ("forward", "_compiled_call_impl") if name in vars(module)}


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled modules as they are: compiled code does not notice new hooks on its layers."""
    found = [(module, calls(module)) for module in modules]
    try:
        for module, attributes in found:
            plain = {"forward": plain_network(module).__call__, "_compiled_call_impl": None}
            vars(module).update({name: plain[name] for name in attributes})
        yield
    finally:
        for module, attributes in found:
            vars(module).update(attributes)
