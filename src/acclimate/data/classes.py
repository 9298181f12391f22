"""Which class of the network each class folder holds: read from a file, or from the folders' names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .types import DataError

__all__ = ["CLASSES_FILE", "ClassFolders", "class_folders"]

CLASSES_FILE = "classes.json"
"""A file beside the class folders with their indices, {"folder": index, …}."""


@dataclass(frozen=True)
class ClassFolders:
    """Class folders, sorted by name, and the index of the network's output for each."""

    names: Sequence[str]
    indices: Sequence[int]
    origin: Literal["file", "numbers", "order"]
    """A file says it, the folders are named by their index, or the order of their names."""

    def __str__(self) -> str:
        """Return the short form: a = 0, b = 1, …, z = 25 (order of names)."""
        pairs = [f"{name} = {index}" for name, index in zip(self.names, self.indices, strict=True)]
        shown = pairs if len(pairs) <= 4 else [*pairs[:2], "…", pairs[-1]]
        origins = {"file": "read from a file", "numbers": "the folders' names", "order": "order of the folders' names"}
        return f"{', '.join(shown)} ({origins[self.origin]})"

    def check(self, outputs: int, what: str) -> None:
        """Raise `DataError` unless these are classes of a network with this many outputs."""
        remedy = (
            f"write each folder's index among the {outputs:,} outputs into {CLASSES_FILE} beside the folders, {{\""
            f'{self.names[0]}": 0, …}}, or name such a file: folder:FOLDER,FILE.json'
        )
        highest = max(self.indices)
        if highest >= outputs:
            name = self.names[[*self.indices].index(highest)]
            raise DataError(
                f"{what}: {name} is class {highest}, and the network has {outputs:,} outputs: is it for other data? "
                f"Else {remedy}"
            )
        if self.origin == "order" and len(self.names) != outputs:
            raise DataError(
                f"{what}: {len(self.names)} class folders for a network with {outputs:,} outputs, and their names do "
                f"not say which: {remedy}"
            )
        if self.origin == "numbers" and len(self.names) == outputs and [*self.indices] != sorted(self.indices):
            raise DataError(
                f"{what}: the folders are named by numbers, which may be their indices or not: in the order of names, "
                f"which torchvision counts by, {max(self.names, key=int)} is not the last. To say which, {remedy}"
            )


def class_folders(names: Sequence[str], root: Path, file: Path | None = None) -> ClassFolders:
    """Return the index of each folder: from the file, from `classes.json` in the root, or from the names."""
    beside = root / CLASSES_FILE
    if file is not None or beside.is_file():
        return ClassFolders(names, _read(file or beside, names), "file")
    if all(name.isdecimal() for name in names) and len({*map(int, names)}) == len(names):
        return ClassFolders(names, [*map(int, names)], "numbers")
    return ClassFolders(names, range(len(names)), "order")


def _read(file: Path, names: Sequence[str]) -> list[int]:
    """Read {"folder": index}, or {"index": ["folder", …]} as ImageNet's imagenet_class_index.json has it."""
    expected = f'expected {{"{names[0]}": 0, …}}, the index of a network\'s output for each folder'
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): {expected}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds {type(content).__name__}: {expected}")
    for key, value in [*content.items()]:
        if key.isdecimal() and isinstance(value, list) and value:
            content[str(value[0])] = int(key)
    if missing := [name for name in names if name not in content]:
        raise DataError(f"{file} has no index for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}: add it")
    for name in names:
        if type(content[name]) is not int or content[name] < 0:
            raise DataError(f"{file}: {name} is {content[name]!r}; {expected}")
    return [content[name] for name in names]
