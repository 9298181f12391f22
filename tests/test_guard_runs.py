"""Guarded methods in the benchmark: runs, results, tables, the page, and the recipe of hostile streams."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from acclimate import POLICIES, Guard
from acclimate.bench.evaluate import BatchResult
from acclimate.bench.hostile import HOSTILE
from acclimate.bench.plan import Job, Plan, PlanError
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.cli.main import app
from acclimate.paper.cases import HOSTILE_SHIFTS
from acclimate.paper.layouts import hostile
from acclimate.paper.numbers import Case, Numbers
from acclimate.paper.recipes import RECIPES
from acclimate.paper.scales import SCALES
from benchmarks.guard_thresholds import CHOICES, best, threshold

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
    held_out = run.adapter(TENT).probe.images
    source = torch.cat([x for x, _ in run._source(0).on("cpu")])
    assert len(held_out) == 512
    assert len(source) == 64
    assert not {x.numpy().tobytes() for x in held_out} & {x.numpy().tobytes() for x in source}
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


def test_the_options_of_a_guard_are_set_as_those_of_a_method(tmp_path: Path) -> None:
    plan = replace(PLAN, guard=True, overrides={"guard": {"tolerated": 0.2, "pause": 7}})
    guard = Run(plan, tmp_path).adapter(TENT)
    assert (guard._options["pause"], guard._options["tolerated"]) == (7, 0.2)
    assert plan.arguments(TENT)["guard"] == {"tolerated": 0.2, "pause": 7}
    with pytest.raises(PlanError, match="guard"):
        replace(PLAN, guard=False, overrides={"guard": {"pause": 7}})
    with pytest.raises(PlanError, match="pauze"):
        replace(PLAN, guard=True, overrides={"guard": {"pauze": 7}})


def test_the_defaults_are_those_that_the_rule_has_chosen() -> None:
    stored = json.loads((ROOT / "benchmarks/results/guard_thresholds_cpu.json").read_text())
    undone = {policy.signal: policy.above for policy in POLICIES if policy.action != "leave"}
    assert {name: undone[name] for name in ("skew", "collapse", "harm")} == pytest.approx(stored["chosen"])
    assert stored["novelty"] < inspect.signature(Guard).parameters["familiar"].default


def test_the_rule_of_the_choices() -> None:
    def choice(above: float, worst: float, mean: float, hostile: float, clean: float) -> dict[str, Any]:
        return {"harm": above, "honest": [worst, mean], "hostile": hostile, "hostile clean": clean}

    harmless = [choice(0.1, 0, 1, -3, -1), choice(0.2, -0.05, 2, -1, -2), choice(0.3, 0, 3, -2.01, 0)]
    harmful = [choice(0.4, -0.5, 9, 0, 0), choice(0.5, -0.2, 1, -9, 0)]
    assert best([*harmless, *harmful])["harm"] == 0.3, "of the harmless ones; two are equal, and this one gains more"
    assert best(harmful)["harm"] == 0.5, "the least harmful"
    stored = json.loads((ROOT / "benchmarks/results/guard_thresholds_cpu.json").read_text())
    assert best(stored["choices"]).items() >= {name: stored["chosen"][name] for name in CHOICES[0]}.items()


def test_the_rule_of_a_threshold() -> None:
    honest = [{"skew": value, "harmed": False} for value in (0.05, 0.11)] + [{"skew": 0.5, "harmed": True}]
    hostile = [{"skew": value, "harmed": True} for value in (0.1, 0.3, None)] + [{"skew": 0.9, "harmed": False}]
    found = threshold("skew", honest, hostile)
    assert (found["chosen"], found["largest"]) == (pytest.approx(0.12), 0.11)
    assert found["found"] == pytest.approx(2 / 3)
