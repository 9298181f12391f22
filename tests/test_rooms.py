"""The house: rooms import only what lies below them, and no module imports itself in a circle."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "acclimate"
BELOW = {
    "_version": (),
    "files": ("extras",),
    "functional": (),
    "checks": (),
    "extras": (),
    "parts": ("functional", "checks", "extras"),
    "engine": ("functional", "checks", "parts"),
    "core": ("_version", "files", "functional", "checks", "parts", "engine"),
    "methods": ("functional", "checks", "parts", "engine", "core"),
    "data": ("files", "functional", "checks", "extras", "parts", "core"),
    "online": ("files", "functional", "checks", "parts", "engine", "core"),
    "contract": ("core",),
    "integrations": ("extras",),
    "bench": (
        *("_version", "files", "functional", "checks", "extras", "parts", "engine", "core", "methods", "data"),
        "online",
    ),
    "paper": ("files", "functional", "checks", "parts", "engine", "core", "methods", "data", "online", "bench"),
    "service": ("_version", "files", "functional", "checks", "core", "methods", "data", "online", "bench"),
    "cli": (
        *("_version", "files", "checks", "extras", "engine", "core", "methods", "data", "contract", "bench", "paper"),
        "service",
    ),
}
"""What each room may import, also for types and inside functions. The package itself re-exports, and may import all."""


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of ours that a module imports, anywhere in its file."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            name = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{name}.{alias.name}".lstrip(".")
                yield inner if inner in known else name
        elif isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] == "acclimate"]
            yield from (name.removeprefix("acclimate").lstrip(".") for name in ours)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "acclimate":
            yield (node.module or "").removeprefix("acclimate").lstrip(".")


GRAPH = {name: set(imports(name, path, modules())) - {name} for name, path in modules().items()}


@pytest.mark.parametrize("module", [name for name in GRAPH if name not in ("", "__main__")])
def test_imports_go_down(module: str) -> None:
    room = module.split(".")[0]
    for target in GRAPH[module]:
        assert target, f"{module} imports the package itself"
        below = target.split(".")[0]
        assert below == room or below in BELOW[room], f"{module} imports {target}, and {room} lies below {below}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Inside a room the package's `__init__` only re-exports: a module below it must not import it."""
    try:
        tuple(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(error.args[1])}")


def test_few_modules_lie_outside_the_rooms() -> None:
    assert len([*ROOT.glob("*.py")]) <= 8


def test_importing_acclimate_brings_no_benchmark(tmp_path: Path) -> None:
    import subprocess

    heavy = (
        "matplotlib",
        "typer",
        "rich",
        "kornia",
        "torchvision",
        "timm",
        "transformers",
        "lightning",
        "acclimate.bench",
        "acclimate.contract",
    )
    program = f"import sys, acclimate; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
