"""An adapter as the call that makes it, and the arguments that such a call takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor
from torch.optim import Optimizer

from ..checks import refuse_not_a_number
from ..engine import Engine
from ..parts.wrappers import plain_network

__all__ = ["arguments_of", "call_text", "refuse_wrong_type"]


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
    network = type(plain_network(adapter.model)).__name__
    arguments = [network, *(f"{name}={_setting(adapter, name)!r}" for name in names)]
    if adapter.optimizer is not None:
        arguments.append(f"optimizer={_describe(adapter.optimizer)}")
        if adapter._which != adapter.defaults.parameters:
            named = isinstance(adapter._which, str)
            arguments.append(f"parameters={adapter._which if named else list(adapter.names)!r}")
        shown = [name for name in ("statistics", "strategy") if name not in adapter.without]
        if not engine and adapter.strategy == "sparse":
            shown.remove("strategy")
        arguments += [f"{name}={getattr(adapter, name)!r}" for name in shown]
        if adapter.detach_statistics:
            arguments.append("detach_statistics=True")
        if adapter.max_step is not None:
            arguments.append(f"max_step={adapter.max_step!r}")
    if engine and adapter.runner.asked != Engine():
        arguments.append(f"engine={adapter.runner.asked!r}")
    if engine and adapter.world.size > 1:
        arguments.append(f"ranks={adapter.world!r}")
    if adapter.classes is not None:
        arguments.append(f"classes={adapter._class_list}")
    return f"{type(adapter).__name__}({', '.join([*arguments, f'seed={adapter.seed}'])})"


@cache
def arguments_of(method: Any) -> tuple[str, ...]:
    """Return the keyword arguments that a method takes: its own, and those of its typed options."""
    hints, names = get_type_hints(method.__init__), dict[str, None]()
    for parameter in inspect.signature(method.__init__).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names[parameter.name] = None
        elif parameter.kind is parameter.VAR_KEYWORD:  # **options: Unpack[Options]
            typed = get_args(hints.get(parameter.name))
            names |= dict.fromkeys(typed[0].__annotations__ if typed else arguments_of(method.__mro__[1]))
    return tuple(name for name in names if name not in method.without)


def refuse_wrong_type(method: type, name: str, value: object) -> None:
    """Raise if a setting is not what the method's signature says: a number, a whole number, a function, a choice."""
    kinds, choices = _kinds(method).get(name, (frozenset(), ()))
    if kinds and isinstance(value, Tensor) and value.numel() == 1:
        refuse_not_a_number(method.__name__, name, value.item())
    if not kinds or isinstance(value, Tensor):
        return
    none, whole, number, function, other = (kind in kinds for kind in (type(None), int, float, Callable, object))
    fits = (
        other
        or (value is None and none)
        or (isinstance(value, Integral) and not isinstance(value, bool) and (whole or number))
        or (isinstance(value, Real) and not isinstance(value, Integral) and number)
        or (callable(value) and function)
        or (isinstance(value, str) and value in choices)
    )
    if not fits and choices:
        expected = ", ".join([*choices, *["None"] * none])
        raise ValueError(f"{method.__name__}: {name}={value!r}; expected one of {expected}")
    if not fits:
        expected = "a function" if function else "a number" if number else "a whole number"
        raise TypeError(f"{method.__name__}: {name}={value!r}; expected {expected}{' or None' * none}")


@cache
def _kinds(method: type) -> dict[str, tuple[frozenset[Any], tuple[str, ...]]]:
    """Return which kinds of value each argument may have, and which texts.

    `object` is where anything else than these is possible.
    """
    known = {int: int, float: float, type(None): type(None), Callable: Callable, Literal: Literal}
    found: dict[str, tuple[frozenset[Any], tuple[str, ...]]] = {}
    for cls in reversed(method.__mro__):
        init = vars(cls).get("__init__")
        parameters = inspect.signature(init).parameters.values() if inspect.isfunction(init) else ()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "optimizer"]
        try:
            hints = get_type_hints(init) if named else {}
        except NameError:  # a name that is imported for type checkers only
            hints = {}
        for name in named:
            hint = hints.get(name, object)
            members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            kinds = frozenset(known.get(get_origin(each) or each, object) for each in members)
            texts = tuple(text for each in members if get_origin(each) is Literal for text in get_args(each))
            found[name] = kinds, texts
    return found


def _setting(adapter: Any, name: str) -> Any:
    """Return an argument's value; if a method of the adapter has its name, the attribute ends in an underscore."""
    return getattr(adapter, f"{name}_" if hasattr(adapter, f"{name}_") else name)


def _describe(optimizer: Optimizer) -> str:
    usual = {name: p.default for name, p in inspect.signature(type(optimizer)).parameters.items()}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in usual and name != "params"}
    shown = [f"{name}={value!r}" for name, value in group.items() if name == "lr" or value != usual[name]]
    return f"partial({', '.join([type(optimizer).__name__, *shown])})"
