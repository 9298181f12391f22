"""`acclimate check`: run the contract on a method of any package."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..bench.plan import read_assignment
from ..contract import PROMISES, Promise, Subject, applies, subjects
from ..core.adapter import Adapter
from ..methods import METHODS
from .terminal import console, one_line_errors, say

_WHAT = {
    "bn": "a network with BatchNorm",
    "ln": "a network with LayerNorm",
    "gn": "a network with GroupNorm",
    "seg": "a network for segmentation",
}


def check(
    name: Annotated[str, typer.Argument(help="PACKAGE:CLASS, or the name of a method or plug-in.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="ARGUMENT=VALUE; repeat for more.")] = None,
) -> None:
    """Test what every method promises on a method of your own. The exit code is 1 if a promise is broken."""
    with one_line_errors("cannot check"):
        method = find_method(name)
        arguments = read_arguments(settings or [])
        fitting = []
        for subject in subjects(method, arguments):
            if why := applies(subject):
                say(f"{_WHAT[subject.family]}: not tested, {escape(why)}")
            else:
                fitting.append(subject)
        if not fitting:
            raise ValueError(f"{method.__name__} could be built around none of the tiny networks: see above")
    torch.set_num_threads(1)  # the networks are tiny
    count = sum(_test(subject) for subject in fitting)
    if count:
        say(f"[red bold]{count} broken[/]; docs/own-method.md says how a method keeps its promises")
        raise typer.Exit(1)


def find_method(name: str) -> type[Adapter]:
    """Return the class that PACKAGE:CLASS, or the name of a method, means."""
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in METHODS.known():
            raise ValueError(f"{name!r} is no method: expected PACKAGE:CLASS or one of {', '.join(METHODS.known())}")
        return METHODS[name]
    sys.path.insert(0, str(Path.cwd()))  # as python -m does, so that a file beside you is found
    method = getattr(import_module(module), attribute, None)
    if not (isinstance(method, type) and issubclass(method, Adapter)):
        raise TypeError(f"{name} is {method!r}: expected a subclass of acclimate.Adapter")
    return method


def read_arguments(settings: list[str]) -> dict[str, Any]:
    """Read `["most=0.5"]` as `{"most": 0.5}`."""
    return dict(map(read_assignment, settings))


def _test(subject: Subject) -> int:
    """Print a line per promise; return how many are broken."""
    console.print(f"[bold]{subject.method.__name__}[/] on {_WHAT[subject.family]}")
    reasons = {name: broken(promise, subject) for name, promise in PROMISES.items()}
    for name, why in reasons.items():
        line = f"  [red]✗[/] {name}: {escape(why)}" if why else f"  [green]✓[/] {name}"
        console.print(line, highlight=False, soft_wrap=True)
    return sum(map(bool, reasons.values()))


def broken(promise: Promise, subject: Subject) -> str:
    """Return how a method breaks a promise, or nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            promise(subject)
    except AssertionError as error:
        return str(error)
    except Exception as error:  # whatever a method raises is a broken promise
        return f"{type(error).__name__}: {error}"
    return ""
