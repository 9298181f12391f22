"""Guarded methods in the benchmark: runs, results, tables, the page, and the recipe of hostile streams."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acclimate import Guard
from acclimate.bench.evaluate import BatchResult
from acclimate.bench.hostile import HOSTILE
from acclimate.bench.plan import Job, Plan, PlanError
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.cli.main import app
from acclimate.paper.layouts import hostile
from acclimate.paper.numbers import Case, Numbers
from acclimate.paper.recipes import HOSTILE_SHIFTS, RECIPES
from acclimate.paper.scales import SCALES

ROOT = Path(__file__).parents[1]
PLAN = Plan(
    methods=("source", "tent"),
    scenario="sorted",
    severity=2,
    shifts=("jpeg_compression", "fog"),
    images=96,
    batch_size=32,
    source_images=64,
    probe_images=32,
    guard=True,
)
TENT = Job("tent", 0)


@pytest.fixture(autouse=True)
def _alarms_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batch")
        yield


def test_all_but_the_source_network_are_guarded(tmp_path: Path) -> None:
    run = Run(PLAN, tmp_path)
    assert isinstance(run.adapter(TENT), Guard)
    assert not isinstance(run.adapter(Job("source", 0)), Guard)
    assert isinstance(run.adapter(TENT).probe.images.shape[0], int)
    assert not isinstance(Run(replace(PLAN, guard=False), tmp_path).adapter(TENT), Guard)


def test_a_result_has_what_the_guard_did(tmp_path: Path) -> None:
    result = Run(PLAN, tmp_path).do(TENT)
    assert result.method == "Tent"
    assert "guarded" in result.label
    assert len(result.along) == 9
    assert result.health["batches"] == 9
    assert result.health["alarms"][0]["signal"] == "skew"
    read = Result.from_dict(result.as_dict())
    assert (read.health, read.along) == (result.health, result.along)
    source = Run(PLAN, tmp_path).do(Job("source", 0))
    assert source.health is None
    assert result.domains[0].accuracy == source.domains[0].accuracy, "sorted clean images: the source answers"


def test_a_guarded_run_that_was_stopped_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    whole = Run(PLAN, tmp_path / "whole").do(TENT)

    def stop(batch: BatchResult, _: float) -> None:
        if batch.domain == "fog":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(PLAN, tmp_path / "part").do(TENT, stop)
    resumed = Run(PLAN, tmp_path / "part").do(TENT)
    assert [d.accuracy for d in resumed.domains] == [d.accuracy for d in whole.domains]
    assert (resumed.health, resumed.along) == (whole.health, whole.along)


def test_guarded_and_bare_results_do_not_share_a_folder(tmp_path: Path) -> None:
    Run(PLAN, tmp_path).do(TENT)
    with pytest.raises(PlanError):
        Run(replace(PLAN, guard=False), tmp_path).do(TENT)
    with pytest.raises(PlanError, match="guard"):
        replace(PLAN, guard="yes")


def test_the_command_and_the_page(tmp_path: Path) -> None:
    words = ["run", "--guard", "--scenario", "one-class", "--severity", "1", "--shift", "fog", "--images", "64"]
    words += ["--method", "tent", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "guarded" in done.output
    page = tmp_path / "page.html"
    assert (
        CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(page), "--no-pictures"]).exit_code == 0
    )
    assert "triangle" in page.read_text()


def test_the_recipe_has_every_stream_with_and_without_a_guard() -> None:
    cases = RECIPES["hostile"].plans(SCALES["digits"])
    streams = {"lifelong", "correlated", *HOSTILE}
    for network in ("resnet", "vit"):
        for row in ("Tent", "TEA", "EATA", "EATAC", "ETA, 20 × the rate"):
            for guard in (False, True):
                own = [c for c in cases if c.row == row + ", guarded" * guard and c.column.startswith(f"{network}, ")]
                assert {case.plan.scenario for case in own} == streams
                assert {case.plan.guard for case in own} == {guard}
                assert {(case.plan.severity, case.plan.shifts) for case in own} == {(3, HOSTILE_SHIFTS)}
    (high,) = {c.plan.overrides["eta"]["lr"] for c in cases if c.row.startswith("ETA, 20") and "vit" in c.column}
    assert high == pytest.approx(20 * SCALES["digits"].setting("vit", "eta", "lr"))
    fewer = {c.plan.images for c in cases if c.row in ("TEA", "Source for TEA") and c.plan.scenario == "sorted"}
    assert len(fewer) == 1, "a slow method is compared with the source on the same images"


def test_its_table_is_against_the_source(tmp_path: Path) -> None:
    cases = []
    for row, method, guard in (("Source", "source", False), ("Tent", "tent", False), ("Tent, guarded", "tent", True)):
        plan = replace(PLAN, methods=(method,), guard=guard)
        result = Run(plan, tmp_path / row).do(Job(method, 0))
        cases.append(Case(row, plan, "resnet, sorted", results=[result]))
    shown = hostile(cases)
    source, bare, guarded = (100 * case.results[0].accuracy for case in cases)
    header, rows = shown.tables["resnet"]
    assert header == ["", "sorted"]
    assert rows == [["Source", f"{source:.1f}"], ["Tent", f"{bare - source:+.1f} → {guarded - source:+.1f}"]]
    assert "resnet-clean" in shown.tables
    assert len(shown.figures["resnet"].axes) == 1
    numbers = Numbers("hostile", "title", "digits", "command", cases)
    again = Numbers.parse(numbers.text())
    assert hostile(again.cases).tables == shown.tables
    assert again.cases[2].results[0].health["alarms"] == cases[2].results[0].health["alarms"]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "batches:" in done.stdout
