"""Change the code in one place at a time and see whether a test fails: `python -m benchmarks.mutations [GROUP ...]`

A mutation changes a number, a comparison, a sign or a word, or drops the last entry of a list. If all tests still pass
it is printed: a promise without a test, or a change that makes no difference. Tests run on a copy of the package.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "acclimate"

LETTER = ["tests/test_to_the_letter.py", "tests/test_published.py", "tests/test_paper.py"]
STEPS = ["golden", "equations", "eata_c", "compared", "fidelity", "segmentation", "to_the_letter", "errors", "contract"]
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "recipes": (["paper/cases.py", "paper/recipes.py", "paper/scales.py"], LETTER),
    "studies": (["paper/studies.py"], LETTER),
    "numbers": (["paper/published.json"], LETTER[:1]),
    "methods": (["methods", "functional.py"], [f"tests/test_{name}.py" for name in STEPS]),
    "selection": (["parts/selection.py", "parts/fisher.py"], [f"tests/test_{name}.py" for name in STEPS]),
}
"""What is changed, and the tests that should notice."""

WORDS = {
    "lifelong": "single-domain",
    "single-domain": "lifelong",
    "mixed": "lifelong",
    "rounds": "lifelong",
    "readapt": "snapshot",
    "snapshot": "none",
    "none": "snapshot",
    "fog": "snow",
    "gaussian_noise": "shot_noise",
    "resnet": "vit",
    "vit": "resnet",
    "tent": "eata",
    "eata": "eta",
    "eta": "eata",
    "eata-c": "eta-c",
    "source": "batch",
    "batch": "source",
    "linear": "uniform",
    "sample": "batch",
    "symmetric": "teacher",
    "replay-subset": "replay",
    "masked": "replay",
    "forward": "reverse",
    "log": "released",
    "empty": "released",
    "everything": "reliable",
    "reliable": "everything",
    "highest": "lowest",
    "lowest": "highest",
    "all": "norm",
}
"""Words and the ones that replace them."""
OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*"}


@dataclass(frozen=True)
class Mutation:
    """A changed file."""

    file: Path
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line}: {self.before} → {self.after}"


def of_python(file: Path) -> Iterator[Mutation]:
    """Yield every mutation of a Python file."""
    content = file.read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutation(first: tuple[int, int], last: tuple[int, int], after: str) -> Mutation:
        start, end = starts[first[0] - 1] + first[1], starts[last[0] - 1] + last[1]
        text = (content[:start] + after.encode() + content[end:]).decode()
        return Mutation(file, first[0], content[start:end].decode().strip(), after.strip(), text)

    tree = ast.parse(content)
    tree.body = [part for part in tree.body if not (isinstance(part, ast.Assign) and "__all__" in ast.dump(part))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and not isinstance(node.value, (bool, bytes)):
            where = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            if isinstance(node.value, (int, float)):
                yield mutation(*where, repr(2 * node.value + (1 if node.value in (0, 1) else 0)))
            elif isinstance(node.value, str) and node.value in WORDS:
                yield mutation(*where, f'"{WORDS[node.value]}"')
        elif isinstance(node, (ast.Compare, ast.BinOp)):
            left, right = (node.left, node.comparators[0]) if isinstance(node, ast.Compare) else (node.left, node.right)
            where = (left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset)
            operator = mutation(*where, "").before.strip("() \n")
            if operator in OPERATORS:
                yield mutation(*where, mutation(*where, "").before.replace(operator, f" {OPERATORS[operator]} "))
        elif isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) > 2 and isinstance(node.ctx, ast.Load):
            before, last = node.elts[-2:]
            where = (
                (before.end_lineno or 0, before.end_col_offset or 0),
                (last.end_lineno or 0, last.end_col_offset or 0),
            )
            yield mutation(*where, "")


def of_json(file: Path) -> Iterator[Mutation]:
    """Yield a change of each number."""
    content = file.read_text()
    for found in re.finditer(r"(?<=[\s\[\"])\d[\d,]*\.?\d*(?=[,\]\"])", content):
        digit = str((int(found[0][-1]) + 1) % 10)
        text = content[: found.end() - 1] + digit + content[found.end() :]
        yield Mutation(file, content.count("\n", 0, found.start()) + 1, found[0], found[0][:-1] + digit, text)


def mutations(names: Sequence[str]) -> list[Mutation]:
    """Return every mutation of these files and folders."""
    paths = [
        path for name in names for path in ([SOURCE / name] if "." in name else sorted((SOURCE / name).glob("*.py")))
    ]
    return [each for path in paths for each in (of_json(path) if path.suffix == ".json" else of_python(path))]


def survives(mutation: Mutation | None, tests: Sequence[str]) -> bool:
    """Return whether all tests pass on a mutated copy of the package; on a plain copy without a mutation."""
    with TemporaryDirectory() as folder:
        package = Path(folder) / "src" / "acclimate"
        (Path(folder) / "weights").symlink_to(ROOT / "weights")  # where a checkout has them
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            (package / mutation.file.relative_to(SOURCE)).write_text(mutation.text)
        environment = {
            **os.environ,
            "PYTHONPATH": str(package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=900, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> None:
    """Try a sample of mutations of each group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=[*GROUPS], help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--most", type=int, default=60, help="mutations of a group, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the mutations that survived")
    arguments = parser.parse_args()
    survived: dict[str, list[str]] = {}
    for group in arguments.groups:
        names, tests = GROUPS[group]
        if not survives(None, tests):
            sys.exit(f"{group}: the tests fail without any mutation: {', '.join(tests)}")
        every = mutations(names)
        chosen = random.Random(arguments.seed).sample(every, min(arguments.most, len(every)))  # noqa: S311
        with ThreadPoolExecutor(arguments.processes) as pool:
            alive = pool.map(lambda mutation, tests=tests: survives(mutation, tests), chosen)
            survived[group] = []
            for mutation, lives in zip(chosen, alive, strict=True):
                if lives:
                    survived[group].append(str(mutation))
                    print(f"survived: {mutation}", flush=True)
        print(f"{group}: {len(survived[group])} of {len(chosen)} survived, of {len(every)} in all", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(survived, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
