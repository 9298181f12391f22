"""The site: it builds without a warning and without a network, and every page is in it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_reference import LISTED

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with examples that are shown but not run. `make docs` runs them."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("gallery", "generated"))
    for page in ROOT.glob("*.md"):
        shutil.copy(page, root)
    for name in ("src", "tests", "examples", "benchmarks"):
        (root / name).symlink_to(ROOT / name)
    options = ["-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-d", str(root / "cache")]
    command = [sys.executable, "-m", "sphinx", *options, str(root / "docs"), str(root / "built")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "built"


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page
    assert len([*(site / "gallery").glob("*.html")]) > len([*(ROOT / "examples").glob("*.py")])


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]*)|<link[^>]*stylesheet[^>]*href=\"(https?:[^\"]*)"
    )
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text()), page
    assert (site / "searchindex.js").exists()


def uses(example: Path) -> Iterator[str]:
    """The full name of everything of ours that an example imports or names as `acclimate.NAME`."""
    nodes = [*ast.walk(ast.parse(example.read_text()))]
    inner = [node.value for node in nodes if isinstance(node, ast.Attribute)]  # EATA.preset is another name
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("acclimate"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "acclimate" and node not in inner:
            yield ast.unparse(node)


def test_the_reference_links_the_examples(site: Path) -> None:
    pairs = {(name, example.stem) for example in (ROOT / "examples").glob("*.py") for name in uses(example)}
    listed = {(name, stem) for name, stem in pairs if name in LISTED}
    assert ("acclimate.data.load_digits", "01_timm_and_a_folder") in listed
    pages = {name: (site / "api" / "generated" / f"{name}.html").read_text() for name, _ in listed}
    assert {(name, stem) for name, stem in listed if f"{stem}.html" not in pages[name]} == set()


def test_tables_of_text_fit_a_phone(site: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs a browser's driver: pip install playwright")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium: apt install chromium")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = started.new_page(viewport={"width": 390, "height": 844})
        page.goto((site / "choosing.html").as_uri())
        hidden = "document.querySelector('.bd-article table').scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(hidden) < 0
        started.close()
