"""The settings that a recorded step depends on: a change makes it record again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["settings"]

_PER_STEP = {
    "step",
    "execution",
    "frozen",
    "_last",
    "_claimed",
    "_compared",
    "_report",
    "_statistics",
    "_trusted",
}
"""Attributes of an adapter that change from step to step, and that no recorded operation depends on."""
_MODULE = vars(nn.Module()).keys() - {"training"}


def settings(modules: Iterator[tuple[str, nn.Module]]) -> Iterator[Hashable]:
    """Yield every attribute of a method's modules, by value where it is plain, and the addresses of its constants."""
    for _, module in modules:
        yield _Same(module)
        for name, value in vars(module).items():
            if name not in _MODULE and name not in _PER_STEP:
                yield _comparable(value)
        constants = module._non_persistent_buffers_set
        yield from (_comparable(buffer) for name, buffer in module._buffers.items() if name in constants)


def _comparable(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(each)) for key, each in value.items())
    return _Same(value)


class _Same:
    """An object that equals only itself. It is held, so that no other object gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
