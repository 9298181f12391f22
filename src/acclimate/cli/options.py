"""Command-line options derived from the fields of `Plan`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..bench.plan import Plan, read_overrides
from .terminal import one_line_errors

Command = Callable[..., None]


def plan_options(
    *names: str, of: type = Plan, about: Mapping[str, str] | None = None, usual: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Give a command the options of these fields of a plan, or of all; its first parameter receives those given.

    Args:
        names: the fields.
        of: another dataclass with the same metadata.
        about: help that replaces a field's own.
        usual: defaults in words that replace the plan's in `--help`; an empty text shows none.
    """
    chosen = {f.metadata["name"] or f.name: f for f in fields(of) if not names or f.name in names}
    hints, about, usual = get_type_hints(of), about or {}, usual or {}
    derived = [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type(hints[f.name]) | None, _option(f, about.get(f.name), usual.get(f.name))],
        )
        for option, f in chosen.items()
    ]

    def decorate(command: Command) -> Command:
        own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]

        @functools.wraps(command)
        def parsed(**values: Any) -> None:
            given = {f.name: values.pop(option) for option, f in chosen.items()}
            with one_line_errors("cannot run"):
                content = {name: _value(name, value) for name, value in given.items() if value not in (None, [])}
            command(content, **values)

        every = [*derived, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        parsed.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return parsed

    return decorate


def _option(field: Field[Any], about: str | None, usual: str | None) -> Any:
    described = field.metadata
    choices = f" One of {', '.join(described['choices'])}." if described["choices"] and field.name != "methods" else ""
    shown = isinstance(field.default, (str, int)) and not isinstance(field.default, bool)
    default = described["usual"] or (str(field.default) if shown else False)
    name = (described["name"] or field.name).replace("_", "-")
    return typer.Option(
        f"--{name}/--no-{name}" if field.default is True else f"--{name}",
        min=described["least"],
        max=described["most"],
        help=(about or described["help"]) + choices,
        show_default=default if usual is None else usual or False,
    )


def _type(hint: Any) -> Any:
    """Return the type of an option: a list for a sequence, and for a mapping, which is given as assignments."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    if get_origin(kinds[0]) is Sequence:
        return list[get_args(kinds[0])[0]]  # type: ignore[misc]
    return list[str] if get_origin(kinds[0]) is Mapping else kinds[0]


def _value(name: str, value: Any) -> Any:
    return read_overrides(value) if name == "overrides" else tuple(value) if isinstance(value, list) else value
