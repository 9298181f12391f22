"""The README says what is true: its blocks run, its table is the committed result, its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from networks import make, stream

from acclimate import METHODS
from acclimate.evaluate import Result
from acclimate.report import markdown

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {"net": make("bn"), "clean_batches": stream(3, seed=500), "stream": stream()}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "state.safetensors").exists()


def test_the_readme_names_every_method() -> None:
    assert all(f"`{method.__name__}`" in README for method in METHODS.values())


def test_the_readme_table_is_the_committed_result() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    assert markdown([Result.from_dict(r) for r in committed["results"]]) in README
    assert committed["command"].startswith("acclimate demo")
    assert all(r["origin"]["commit"] for r in committed["results"])


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/faithful.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
