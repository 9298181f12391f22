"""`acclimate check`: run the contract on a method of any package."""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..bench.plan import read_assignment
from ..contract import PROMISES, Promise, Subject, applies, subjects
from ..contract.networks import stream
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
        every = [*subjects(method, read_arguments(settings or []))]
        bad = [bad_argument(subject) for subject in every]
        if bad and all(bad):
            raise ValueError(bad[0])
        fitting = []
        for subject in every:
            if why := applies(subject):
                say(f"{_WHAT[subject.family]}: not tested, {escape(why)}")
            else:
                fitting.append(subject)
        if not fitting:
            raise ValueError(f"{method.__name__} could not be built for any test network; the reasons are above")
    torch.set_num_threads(1)  # the networks are tiny
    count = sum(_test(subject) for subject in fitting)
    if count:
        say(f"[red bold]{count} broken[/]; see the page on methods of your own in acclimate's documentation")
        raise typer.Exit(1)


def find_method(name: str) -> type[Adapter]:
    """Return the class that PACKAGE:CLASS, or the name of a method, means."""
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in METHODS.known():
            raise ValueError(f"{name!r} is not a method: expected PACKAGE:CLASS or one of {', '.join(METHODS.known())}")
        return METHODS[name]
    sys.path.insert(0, str(Path.cwd()))  # as python -m does, so that a file beside you is found
    try:
        imported = import_module(module)
    except (ImportError, SyntaxError) as error:  # these name the module or the line
        raise ImportError(f"{module} cannot be imported: {error}") from error
    except Exception as error:
        file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {file}, line {line}: {error}"
        raise ImportError(f"{module} cannot be imported: {what}") from error
    try:
        method = attrgetter(attribute)(imported)
    except AttributeError as error:
        raise ValueError(f"{name}: {error}") from error
    if not (isinstance(method, type) and issubclass(method, Adapter)):
        raise TypeError(f"{name} is {method!r}: expected a subclass of acclimate.Adapter")
    return method


def read_arguments(settings: list[str]) -> dict[str, Any]:
    """Read `["most=0.5"]` as `{"most": 0.5}`."""
    return dict(map(read_assignment, settings))


def bad_argument(subject: Subject) -> str:
    """Return which argument stops a method before or in its first batch, and why; nothing if it is not just one."""
    why = broken(_adapt_to_a_batch, subject)
    for name, value in subject.arguments.items() if why else ():
        others = {other: subject.arguments[other] for other in subject.arguments if other != name}
        if not broken(_adapt_to_a_batch, replace(subject, arguments=others)):
            return f"--set {name}={value}: {why}"
    return ""


def _adapt_to_a_batch(subject: Subject) -> None:
    subject.make()(stream()[0])


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
