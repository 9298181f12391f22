"""The call that makes an adapter, as text: what results and files say of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..engine import Engine

if TYPE_CHECKING:
    from .adapter import Adapter

__all__ = ["call_of"]


def call_of(adapter: Adapter, *, engine: bool) -> str:
    """The arguments that a method adds, and what every method takes where it is not as usual.

    Without `engine`, what only says how passes run is left out: a state does not depend on it.
    """
    from .adapter import Adapter

    shared = inspect.signature(Adapter.__init__).parameters.keys() | {"source", *adapter.without}
    classes = [cls for cls in type(adapter).__mro__ if issubclass(cls, Adapter) and cls is not Adapter]
    own = [p for cls in classes for p in inspect.signature(cls.__init__).parameters.values()]
    names = dict.fromkeys(p.name for p in own if p.kind is p.KEYWORD_ONLY and p.name not in shared)
    if "select" in names:  # which says it all
        names = {name: None for name in names if name not in ("margin", "epsilon")}
    arguments = [type(adapter.model).__name__, *(f"{name}={_setting(adapter, name)!r}" for name in names)]
    if adapter.optimizer is not None:
        arguments.append(f"optimizer={_describe(adapter.optimizer)}")
        if adapter.parameters_adapted != adapter.default_parameters:
            named = isinstance(adapter.parameters_adapted, str)
            arguments.append(f"parameters={adapter.parameters_adapted if named else list(adapter.names)!r}")
        shown = [name for name in ("statistics", "strategy") if name not in adapter.without]
        if not engine and adapter.strategy == "sparse":
            shown.remove("strategy")
        arguments += [f"{name}={getattr(adapter, name)!r}" for name in shown]
        if adapter.detach_statistics:
            arguments.append("detach_statistics=True")
    if engine and adapter.engine != Engine():
        arguments.append(f"engine={adapter.engine!r}")
    if adapter.classes is not None:
        arguments.append(f"classes={adapter.class_list}")
    return f"{type(adapter).__name__}({', '.join([*arguments, f'seed={adapter.seed}'])})"


def _setting(adapter: Adapter, name: str) -> Any:
    """An argument's value; where a method of the adapter has its name, it is kept with an underscore."""
    return getattr(adapter, f"{name}_" if hasattr(adapter, f"{name}_") else name)


def _describe(optimizer: Optimizer) -> str:
    usual = {name: p.default for name, p in inspect.signature(type(optimizer)).parameters.items()}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in usual and name != "params"}
    told = [f"{name}={value!r}" for name, value in group.items() if name == "lr" or value != usual[name]]
    return f"partial({', '.join([type(optimizer).__name__, *told])})"
