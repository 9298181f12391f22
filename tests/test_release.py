"""What a release needs: extras that exist, a doctor who says what is missing, completion, networks for torch.hub."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import torch
from typer.testing import CliRunner

from acclimate import __version__
from acclimate.bench.networks import load_network
from acclimate.cli import app, doctor

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_doctor_finds_a_healthy_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", doctor.PACKAGES[:4])  # the others take seconds to import
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert f"torch {torch.__version__}" in done.output
    assert "✓ cpu" in done.output
    assert all(each.package in done.output for each in doctor.PACKAGES)


def test_the_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    for each in doctor.PACKAGES:
        found, text = doctor.find_package(each)
        assert not found
        assert each.wanted_by in text
        assert f"[{each.extra}]" in text if each.extra else f"pip install {each.package}" in text


def test_the_doctor_finds_builds_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor, "import_module", broken)
    found, text = doctor.find_package(next(each for each in doctor.PACKAGES if each.package == "torchvision"))
    assert not found
    assert "nms" in text


def test_the_doctor_imports_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers itself can be imported beside a torchvision that cannot."""
    lazy = ModuleType("transformers")

    def broken(name: str) -> None:
        raise ModuleNotFoundError(f"Could not import {name}") from RuntimeError("torchvision::nms does not exist")

    lazy.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "transformers", lazy)
    found, text = doctor.find_package(next(each for each in doctor.PACKAGES if each.package == "transformers"))
    assert not found
    assert "nms" in text


def test_the_doctor_tests_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(doctor, "_adapts", lambda _: seen.append(torch.get_num_threads()) or True)
    torch.set_num_threads(2)
    try:
        assert doctor.self_test("cpu")
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(threads)


def test_the_doctor_finds_a_sick_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ())
    monkeypatch.setattr(doctor.EATAC, "reset", lambda _: None)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "✗ cpu" in done.output


def test_extras_exist_and_are_explained() -> None:
    for each in doctor.PACKAGES:
        if each.extra:
            assert each.package in {re.split(r"[\[>=<]", need)[0] for need in EXTRAS[each.extra]}
    page = (ROOT / "docs" / "start.md").read_text()
    assert all(f"`{extra}`" in page for extra in EXTRAS if extra not in ("dev", "docs"))


def test_the_command_line_completes() -> None:
    command = "from acclimate.cli import main; main()"
    variables = {"_ACCLIMATE_COMPLETE": "complete_bash", "COMP_WORDS": "acclimate do", "COMP_CWORD": "1"}
    program = f"import os, sys; os.environ.update({variables!r}); sys.argv = ['acclimate']; {command}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["doctor"]


@pytest.mark.parametrize("name", ["digits_resnet", "cifar10_vit"])
def test_networks_come_through_torch_hub(name: str) -> None:
    own = load_network(name.replace("_", "-")).model.state_dict()
    found = torch.hub.load(str(ROOT), name, source="local").state_dict()
    assert own.keys() == found.keys()
    assert all(torch.equal(own[key], found[key]) for key in own)


def test_the_citation_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert content["cff-version"] == "1.2.0"
    assert f"## {content['version']} ({content['date-released']})" in (ROOT / "CHANGELOG.md").read_text()
    assert content["version"] == __version__
    assert content["preferred-citation"]["url"].startswith("https://arxiv.org/abs/")
    for file in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(file.read_text())
