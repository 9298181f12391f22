"""The reference: every public name is listed, and has an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import acclimate
from acclimate import functional

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api" / "README.md").read_text()


def listed() -> dict[str, Any]:
    """Everything on the page by its full name."""
    found = {}
    for block in re.findall(r"```\{eval-rst\}\n(.*?)```", PAGE, re.DOTALL):
        module = re.search(r"currentmodule:: (\S+)", block)
        base = module[1] if module else "acclimate"
        for name in re.findall(r"^   (?!:)(\S+)$", block, re.MULTILINE):
            *path, attribute = f"{base}.{name}".split(".")
            found[f"{base}.{name}"] = getattr(importlib.import_module(".".join(path)), attribute)
    return found


LISTED = listed()


def test_every_public_name_is_listed() -> None:
    shown = {thing for thing in LISTED.values() if callable(thing)}
    for name in acclimate.__all__:
        thing = getattr(acclimate, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing in shown, f"{name} is not in docs/api/README.md"
        elif not inspect.ismodule(thing) and name != "__version__":
            assert f".. py:data:: {name}\n" in PAGE, f"{name} is not in docs/api/README.md"
            blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)  # test_docs runs them
            assert any(f"acclimate.{name}" in block for block in blocks), f"{name} has no example"
    assert all(getattr(functional, name) in shown for name in functional.__all__)


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.parametrize("name", LISTED)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    thing = LISTED[name]
    given = {**vars(inspect.getmodule(thing) or acclimate), "torch": torch, "nn": nn, "Generator": torch.Generator}
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs=given)
    assert test.examples, f"{name} has no example"
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0
    assert (thing.__doc__ or "").strip()
