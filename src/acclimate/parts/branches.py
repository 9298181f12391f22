"""Find the residual branches of a network: f in x + f(x).

A table lists the blocks of known libraries (`known_blocks`). For other networks the user names the modules whose output
is added to x (`branches`; of several in a row, the last one), or those that return x + f(x) (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from .known_blocks import BLOCKS, SWITCHES
from .wrappers import plain_names

__all__ = ["Branch", "Names", "find_branches"]

Names: TypeAlias = str | Sequence[str]
"""A pattern of module names, with `*` for any text between two dots, such as `"layers.*.mlp"`; or a list of them."""


@dataclass(frozen=True)
class Branch:
    """A residual branch f of x + f(x)."""

    name: str
    """The module's name, or the block's if the table was used."""
    block: int
    """The index of the block that the branch belongs to."""
    modules: tuple[nn.Module, ...]
    """The modules that compute f, in order; the output of the last one is added to x."""
    whole: bool = False
    """The only module is a block that returns x + f(x)."""

    @property
    def first(self) -> nn.Module:
        """The module that takes x."""
        return self.modules[0]

    @property
    def last(self) -> nn.Module:
        """The module that returns f(x)."""
        return self.modules[-1]


def find_branches(model: nn.Module, branches: Names | None = None, blocks: Names | None = None) -> list[Branch]:
    """Return the residual branches of a network in order, or raise if none is known."""
    if branches is not None or blocks is not None:
        return _find_named(model, branches, blocks)
    found: list[Branch] = []
    block = 0
    for path, module in model.named_modules():
        if own := list(_in_block(path, module, block)):
            found += own
            block += 1
    if not found:
        raise ValueError(
            f"no residual branch is known in {type(model).__name__}. Name the modules whose output is "
            'added to x, branches="layers.*.mlp" (of several in a row, the last one), or those that return x + f(x), '
            'blocks="layers.*"'
        )
    return found


def _in_block(path: str, module: nn.Module, block: int) -> Iterator[Branch]:
    if any(_attribute(module, switch, True) in (None, False) for switch in SWITCHES):
        return
    for cls in type(module).__mro__:
        known = ((where, cls.__name__) for where in (cls.__module__, cls.__module__.split(".")[0]))
        for version in (version for key in known for version in BLOCKS.get(key, ())):
            branches = [_modules(module, names) for names in version]
            if all(branches):
                for modules in branches:
                    yield Branch(path, block, modules)
                return


def _modules(block: nn.Module, names: str) -> tuple[nn.Module, ...]:
    """Return the named modules, or an empty tuple if a required one is absent."""
    modules = []
    for name in names.split():
        found = _attribute(block, name.removesuffix("?"))
        if isinstance(found, nn.Module):
            modules.append(found)
        elif not name.endswith("?"):
            return ()
    return tuple(modules)


def _attribute(module: nn.Module, name: str, default: object = None) -> object:
    """Return an attribute, perhaps of an attribute, as in `"output.dense"`."""
    found: object = module
    for each in name.split("."):
        found = getattr(found, each, default)
    return found


def _find_named(model: nn.Module, branches: Names | None, blocks: Names | None) -> list[Branch]:
    patterns = [(pattern, False) for pattern in _as_list(branches)] + [(pattern, True) for pattern in _as_list(blocks)]
    plain = plain_names(model)
    modules = {plain(name): module for name, module in model.named_modules()}  # the module inside a wrapper
    patterns = [(plain(pattern), whole) for pattern, whole in patterns]
    for pattern, _ in patterns:
        if not any(_matches(name, pattern) for name in modules):
            some = ", ".join([*modules][1:6])
            raise ValueError(f"{type(model).__name__} has no module {pattern!r}; it has {some}, …")
    parents: dict[str, int] = {}
    found = []
    for name, module in modules.items():
        for pattern, whole in patterns:
            if _matches(name, pattern):
                parent = name if whole else name.rpartition(".")[0]
                found.append(Branch(name, parents.setdefault(parent, len(parents)), (module,), whole))
                break
    if not found:
        raise ValueError("branches= and blocks= name no module: give at least one pattern")
    return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches, where `*` does not match a dot."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _as_list(names: Names | None) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or ()
