"""Choosing settings: which trial wins, that streams are apart from those that are judged, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from acclimate import DAT, EATA, EATAC, Tent
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.plan import Plan, PlanError
from acclimate.bench.run import Run
from acclimate.bench.tune import (
    FACTORS,
    SEED,
    Trial,
    Tuning,
    choose,
    doubts,
    learning_rate,
    settings_from,
    write_settings,
)
from acclimate.cli.main import app
from acclimate.data.corruptions import BENCHMARK, EXTRA

SMALL = Plan(methods=("tent",), images=8, batch_size=8, probe_images=8, source_images=8)


def trial(accuracy: float, ece: float = 10.0, forgotten: float = 0.0) -> Trial:
    return Trial("tent", {"lr": accuracy}, accuracy, ece, forgotten)


@pytest.mark.parametrize(
    ("trials", "winner"),
    [
        ([trial(50), trial(52), trial(51)], 1),
        ([trial(52.0, ece=12), trial(51.95, ece=9), trial(51.5, ece=1)], 1),  # equal within 0.1 points
        ([trial(50), trial(60, forgotten=1.1)], 0),
        ([trial(50), trial(60, forgotten=100 * (0.74 - 0.73))], 1),  # one point, and a rounding error
        ([trial(60.1, ece=12), trial(60.0, ece=9)], 1),  # 0.1 points, and a rounding error
        ([trial(50, forgotten=3), trial(60, forgotten=9)], 0),  # all forget: the one that forgets least
    ],
)
def test_the_winner(trials: list[Trial], winner: int) -> None:
    assert choose(trials) is trials[winner]
    assert choose([*reversed(trials)]) is trials[winner]


def test_learning_rates_start_from_the_preset() -> None:
    assert learning_rate("tent", "resnet50") == 2.5e-4
    assert learning_rate("memo", "vit-base") == 1e-5, "inside its optimizer"
    assert learning_rate("dat", "resnet50") == DAT.defaults.lr, "no preset"


def test_every_method_has_the_same_trials_on_streams_apart(tmp_path: Path) -> None:
    tuning = Tuning(Plan(**{**SMALL.as_dict(), "methods": ["tent", "eata"]}), tmp_path)
    assert tuning.plan.shifts == EXTRA
    assert not {*EXTRA} & {*BENCHMARK}
    seen: list[str] = []
    trials = [*tuning.trials(on_batch=seen.append)]
    assert len(seen) == tuning.batches
    assert [each.method for each in trials] == ["tent", "eata"] * len(FACTORS)
    rates = {name: [each.settings["lr"] for each in trials if each.method == name] for name in ("tent", "eata")}
    base = Tent.presets["resnet50"]["lr"]
    assert rates["tent"] == pytest.approx([factor * base for factor in FACTORS], rel=1e-2)
    assert {file.name for file in tmp_path.rglob("*.json") if "seed" in file.name} == {
        f"{name}-seed{SEED}.json" for name in ("tent", "eata")
    }
    seen.clear()
    assert [*Tuning(tuning.plan, tmp_path).trials(on_batch=seen.append)] == trials
    assert not seen, "finished trials are read"


def test_each_method_has_a_trial_when_time_is_short(tmp_path: Path) -> None:
    tuning = Tuning(Plan(**{**SMALL.as_dict(), "methods": ["tent", "eta"]}), tmp_path)
    assert [each.method for each in tuning.trials(seconds=0)] == ["tent", "eta"]
    with pytest.raises(PlanError, match="no learning rate"):
        Tuning(Plan(methods=("source",)), tmp_path)


def test_without_labels_the_source_network_is_right_on_clean_images(tmp_path: Path) -> None:
    tuning = Tuning(SMALL, tmp_path, labels="source")
    images = tuning.first.suite.clean().images
    with torch.no_grad():
        logits = digits_resnet()(torch.stack([images[i][0] for i in range(32)]))
    assert [images[i][1] for i in range(32)] == logits.argmax(1).tolist()
    assert tuning.trial("tent", {"lr": 1e-3}).accuracy > 0
    with pytest.raises(PlanError, match="labels="):
        Tuning(SMALL, tmp_path, labels="none")


def test_the_lowest_rate_is_doubted() -> None:
    low, high = Trial("tent", {"lr": 0.1}, 50, 10, 0), Trial("tent", {"lr": 0.5}, 40, 10, 0)
    other = Trial("eata", {"lr": 0.01}, 50, 10, 0)
    assert [text.partition(":")[0] for text in doubts([low, high, other], [low, other])] == ["tent"]
    assert doubts([low, high], [high]) == []


def test_a_file_is_a_preset(tmp_path: Path) -> None:
    tuning, file = Tuning(SMALL, tmp_path / "trials"), tmp_path / "settings.json"
    found = [Trial("tent", {"lr": 0.123}, 50, 10, 0), Trial("tent", {"lr": 0.5}, 40, 10, 0)]
    content, chosen = settings_from(tuning.plan, found, "resnet50")
    assert chosen == found[:1]
    write_settings(file, content, "acclimate tune", {"device": "CPU"})
    net = digits_resnet()
    rate = lambda adapter: adapter.optimizer.param_groups[0]["lr"]  # noqa: E731
    assert rate(Tent.preset(str(file), net)) == 0.123
    assert rate(Tent.preset(str(file), net, lr=0.7)) == 0.7
    assert rate(EATA.preset(str(file), net, beta=0)) == EATA.presets["resnet50"]["lr"], "the preset it starts from"
    run = Run(Plan(**{**SMALL.as_dict(), "preset": str(file)}), tmp_path / "run")
    assert "lr=0.123" in repr(run.adapter(next(iter(run.plan.jobs()))))
    with pytest.raises(FileNotFoundError, match="acclimate tune"):
        EATAC.preset("absent.json", net)
    for content in ("no JSON", "[]", "{}", json.dumps({"start": "resnet51", "methods": {}})):
        file.write_text(content)
        with pytest.raises(ValueError, match="settings|preset"):
            Tent.preset(str(file), net)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    words = ["tune", "--method", "tent", "--method", "eata", "--images", "8", "--batch-size", "8"]
    words += ["--source-images", "8", "--probe-images", "8"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert {*content["methods"]} == {"Tent", "EATA"}
    assert len(content["trials"]) == 2 * len(FACTORS)
    assert (content["protocol"]["data"], content["protocol"]["seed"]) == ("digits", SEED)
    assert str(tmp_path) not in out.read_text(), "no private path"
    used = ["run", "--method", "tent", "--images", "8", "--shift", "fog", "--probe", "none", "--preset", str(out)]
    assert CliRunner().invoke(app, [*used, "--out", str(tmp_path / "run")]).exit_code == 0
    for wrong in (["--labels", "mine"], ["--method", "tnt"], ["--data", "digitz"], ["--preset", "absent.json"]):
        refused = CliRunner().invoke(app, [*words, *wrong, "--out", str(tmp_path / "no.json")])
        assert refused.exit_code == 2, wrong
        assert "Traceback" not in refused.output
