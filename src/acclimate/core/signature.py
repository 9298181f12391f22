"""The call that builds an adapter, and the settings that its recorded steps depend on."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine import Engine
from .state import method_modules

__all__ = ["call_text", "settings"]


def call_text(adapter: Any, base: type, *, engine: bool) -> str:
    """Return the call: the arguments that a method adds, and those of the `base` class that are not the default.

    Without `engine`, arguments that only say how passes run are omitted: a state does not depend on them.
    """
    shared = inspect.signature(base).parameters.keys() | {"source", *adapter.without}
    classes = [cls for cls in type(adapter).__mro__ if issubclass(cls, base) and cls is not base]
    own = [p for cls in classes for p in inspect.signature(cls.__init__).parameters.values()]
    names = dict.fromkeys(p.name for p in own if p.kind is p.KEYWORD_ONLY and p.name not in shared)
    if "select" in names:  # the selector includes margin and epsilon
        names = {name: None for name in names if name not in ("margin", "epsilon")}
    arguments = [type(adapter.model).__name__, *(f"{name}={_setting(adapter, name)!r}" for name in names)]
    if adapter.optimizer is not None:
        arguments.append(f"optimizer={_describe(adapter.optimizer)}")
        if adapter.parameters_adapted != adapter.defaults.parameters:
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


def _setting(adapter: Any, name: str) -> Any:
    """Return an argument's value; if a method of the adapter has its name, the attribute ends in an underscore."""
    return getattr(adapter, f"{name}_" if hasattr(adapter, f"{name}_") else name)


def _describe(optimizer: Optimizer) -> str:
    usual = {name: p.default for name, p in inspect.signature(type(optimizer)).parameters.items()}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in usual and name != "params"}
    shown = [f"{name}={value!r}" for name, value in group.items() if name == "lr" or value != usual[name]]
    return f"partial({', '.join([type(optimizer).__name__, *shown])})"


def settings(adapter: nn.Module) -> Iterator[Hashable]:
    """Yield every setting of an adapter and of the modules of its method: a recorded step depends on them."""
    for _, module in method_modules(adapter):
        yield _Same(module)
        for name, value in vars(module).items():
            if name[0] != "_" and name not in ("step", "execution"):
                yield _comparable(value)


def _comparable(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    return _Same(value)


class _Same:
    """An object that equals only itself. It is held, so that no other object gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
