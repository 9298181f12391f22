"""Metrics against torchmetrics and by hand; the run loop; the demo and its command, as a user calls them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from networks import images, make, stream
from torch import Tensor
from typer.testing import CliRunner

from acclimate import ETA, MEMO, METHODS, Source, Tent, __version__
from acclimate.bench.demo import demo_plans
from acclimate.bench.evaluate import evaluate, run
from acclimate.bench.metrics import Meter, Scores
from acclimate.bench.plan import PlanError
from acclimate.bench.result import Result
from acclimate.bench.run import Run
from acclimate.bench.stream import Domain, Scenario
from acclimate.bench.tables import mean_and_deviation
from acclimate.cli.main import app
from acclimate.data import DataError, open_suite
from acclimate.data.corruptions import corrupt
from acclimate.data.demo_digits import DemoDigits
from acclimate.data.digits import load_digits


def test_calibration_against_torchmetrics() -> None:
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2000, 7, generator=generator)
    targets = torch.randint(7, (2000,), generator=generator)
    meter = Meter()
    for z, y in zip(logits.split(64), targets.split(64), strict=True):
        meter.update(z, y)
    assert meter.accuracy == pytest.approx(float(multiclass_accuracy(logits, targets, 7, average="micro")))
    assert meter.ece == pytest.approx(
        float(multiclass_calibration_error(logits.softmax(1), targets, 7, n_bins=15)), abs=1e-6
    )


def test_calibration_by_hand() -> None:
    """Two predictions of 0.8, one right: |0.5 − 0.8| = 0.3; one of 0.6, right: 0.4. ECE = ⅔·0.3 + ⅓·0.4."""
    meter = Meter()
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)
    meter.update(p.log(), torch.tensor([0, 1, 0]))
    assert meter.ece == pytest.approx(2 / 3 * 0.3 + 1 / 3 * 0.4)
    assert meter.accuracy == pytest.approx(2 / 3)
    assert meter.nll == pytest.approx(-(math.log(0.8) + math.log(0.2) + math.log(0.6)) / 3)
    assert meter.brier == pytest.approx((2 * 0.04 + 2 * 0.64 + 2 * 0.16) / 3)


def test_bins_are_closed_on_the_right() -> None:
    meter = Meter()
    p = torch.tensor([0.6, 0.6000001, 2 / 3, 1.0], dtype=torch.float64)  # 9/15 and 10/15 belong below
    meter.update(torch.stack([p, 1 - p], 1).log().clamp(min=-800), torch.zeros(4))
    assert meter.bins[0].nonzero().flatten().tolist() == [8, 9, 14]
    assert meter.bins[0][9] == 2


def predictions(count: int = 3000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return logits, torch.where(
        torch.rand(count, generator=generator) < 0.7,
        logits.argmax(1),
        torch.randint(5, (count,), generator=generator),
    )


def test_the_other_metrics_by_their_definitions() -> None:
    """Over sorted predictions, which the meter does not keep."""
    logits, y = predictions()
    meter = Meter()
    for z, t in zip(logits.split(100), y.split(100), strict=True):
        meter.update(z, t)
    p = logits.softmax(1)
    sure, predicted = p.max(1)
    right = (predicted == y).double()
    assert meter.nll == pytest.approx(float(-p.log()[torch.arange(len(y)), y].mean()))
    one_hot = torch.nn.functional.one_hot(y, 5)
    assert meter.brier == pytest.approx(float((p - one_hot).square().sum(1).mean()))
    order = sure.argsort(descending=True)
    risk = (1 - right[order]).cumsum(0) / torch.arange(1, len(y) + 1)
    assert meter.aurc == pytest.approx(float(risk.mean()), rel=5e-3)
    groups = order.flip(0).split(len(y) // 15)
    adaptive = sum(float((right[g] - sure[g]).sum().abs()) for g in groups) / len(y)
    assert meter.adaptive_ece == pytest.approx(adaptive, rel=5e-3)


def test_metrics_of_very_confident_predictions() -> None:
    """Predictions in the last bin of confidence are still distinguished, and metrics finite."""
    z = torch.tensor([[40.0, 0.0], [60.0, 0.0], [50.0, 0.0], [45.0, 0.0]])
    meter = Meter()
    meter.update(z, torch.tensor([0, 0, 0, 1]))
    assert meter.accuracy == 0.75
    assert all(math.isfinite(value) for value in meter.as_dict().values())
    assert meter.nll == pytest.approx(45 / 4)


def test_meters_add_up() -> None:
    logits, y = predictions()
    whole, first, second = Meter(), Meter(), Meter()
    whole.update(logits, y)
    first.update(logits[:1000], y[:1000])
    second.update(logits[1000:], y[1000:])
    assert (first + second).as_dict() == pytest.approx(whole.as_dict())


def test_pixels_count_one_by_one_and_some_not_at_all() -> None:
    meter = Meter()
    y = torch.zeros(2, 4, 5)
    y[0, 0] = 255
    meter.update(torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)), y, ignore=255)
    assert meter.total == 35


def scenario(resets: bool = False) -> Scenario:
    batches = [(x, torch.zeros(len(x), dtype=torch.long)) for x in stream(6)]
    return Scenario("test", [Domain("one", batches[:3]), Domain("two", batches[3:])], "domain" if resets else "never")


def test_run_is_the_plain_loop() -> None:
    adapter, again = Tent(make("bn"), lr=1e-2), Tent(make("bn"), lr=1e-2)
    batches = list(run(adapter, scenario()))
    assert [b.domain for b in batches] == ["one"] * 3 + ["two"] * 3
    assert all(torch.equal(b.logits, again(x)) for b, x in zip(batches, stream(6), strict=True))


def test_resets_start_each_domain_from_the_source() -> None:
    adapter, fresh = Tent(make("bn"), lr=1e-2), Tent(make("bn"), lr=1e-2)
    batches = list(run(adapter, scenario(resets=True)))
    assert all(torch.equal(b.logits, fresh(x)) for b, x in zip(batches[3:], stream(6)[3:], strict=True))


def test_the_clean_probe_leaves_the_stream_untouched() -> None:
    clean = Domain("clean", [(x, torch.zeros(len(x), dtype=torch.long)) for x in stream(2, seed=900)])
    probed = evaluate(ETA(make("bn"), lr=1e-2), scenario(), clean=clean)
    plain = evaluate(ETA(make("bn"), lr=1e-2), scenario())
    assert [d.accuracy for d in probed.domains] == [d.accuracy for d in plain.domains]
    assert [d.ece for d in probed.domains] == [d.ece for d in plain.domains]
    assert probed.forwards == plain.forwards == 48
    assert probed.clean_before is not None
    assert all(d.clean_accuracy is not None for d in probed.domains)
    assert plain.clean_before is plain.clean_after is None


def test_a_result_carries_its_origin() -> None:
    result = evaluate(Source(make("bn")), scenario()).as_dict()
    assert result["origin"]["torch"] == torch.__version__
    assert result["weights"] == Source(make("bn")).fingerprint()
    assert result["call"] == "Source(ConvNet, seed=0)"
    assert result["summary"]["accuracy"] == pytest.approx(sum(d["accuracy"] for d in result["domains"]) / 2)
    json.dumps(result)


def test_a_result_is_read_back_as_it_was_written() -> None:
    result = evaluate(Tent(make("bn"), lr=1e-2), scenario())
    assert result.done
    assert Result.from_dict(json.loads(json.dumps(result.as_dict()))) == result, "bit for bit"
    assert sum(result.bins["count"]) == sum(d.images for d in result.domains) == 48
    assert sum(result.bins["correct"]) == pytest.approx(48 * result.accuracy)
    result.protocol = {"images": None, "severity": 5}
    compact = result.compact()
    assert "clean_before" not in compact
    assert "miou" not in compact["domains"]
    assert compact["protocol"] == {"images": None, "severity": 5}
    read = Result.from_dict(json.loads(json.dumps(compact)))
    assert read.ece == pytest.approx(result.ece, rel=1e-5)
    assert (read.miou, read.gpu_memory, read.protocol) == (None, None, result.protocol)
    assert read.compact() == compact
    with pytest.raises(ValueError, match="magic"):
        Result.from_dict({**compact, "magic": 1})


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert mean_and_deviation([1234.0], ",.0f") == "1,234"
    assert mean_and_deviation([1.0, None]) == mean_and_deviation([]) == "–"


def test_an_empty_domain_is_refused_and_nothing_is_reported_of_it() -> None:
    one = [(images(4, 1), torch.zeros(4, dtype=torch.long))]
    seen: list[list[str]] = []
    with pytest.raises(ValueError, match="empty"):
        evaluate(
            Source(make("bn")),
            Scenario("test", [Domain("a", one), Domain("empty", []), Domain("c", one)]),
            on_domain=lambda result: seen.append([d.name for d in result.domains]),
        )
    assert seen == [["a"]]


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_domain_ends_with_its_batches_whatever_it_says_of_its_length(length: int) -> None:
    class Says(Domain):
        def __len__(self) -> int:
            return length

    batches = [(images(4, i), torch.zeros(4, dtype=torch.long)) for i in range(3)]
    result = evaluate(Source(make("bn")), Scenario("test", [Says("a", batches), Says("b", batches[:2])]))
    assert [(d.name, d.images) for d in result.domains] == [("a", 12), ("b", 8)]
    assert result.done


def test_the_demo_from_the_command_line(tmp_path: Path) -> None:
    arguments = [
        "demo",
        "--network",
        "resnet",
        "--images",
        "64",
        "--out",
        str(tmp_path / "demo"),
        "--method",
        "source",
        "--method",
        "eata",
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "Source" in shown.output
    assert "report.html" in shown.output.replace("\n", "")
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<figure>") == 6
    assert not re.findall(r"(?:src|href)=\"https?:", page), "the page needs no other file"
    written = json.loads((tmp_path / "demo" / "results.json").read_text())
    source, eata = (result["summary"] for result in written["results"])
    assert eata["accuracy"] > source["accuracy"] + 0.1
    assert 0 < eata["backwards"] < eata["forwards"]
    assert written["command"].startswith("acclimate demo --severity 4 --images 64")


def test_the_demos_stream_is_made_in_order(tmp_path: Path) -> None:
    """One generator through all corruptions, batch by batch; test digits, probe and source images in their order."""
    training, test = load_digits()
    generator = torch.Generator().manual_seed(3)
    (plan,) = demo_plans(("eata",), ("vit",), images=70, seed=3, severity=2)
    job = Run(plan, tmp_path)
    domains = job.scenario(3).domains
    assert [domain.name for domain in domains] == [*DemoDigits.shifts]
    for domain in domains:
        for (x, y), part in zip(domain.on("cpu"), (slice(64), slice(64, 70)), strict=True):
            assert torch.equal(x, corrupt(test.x[part], domain.name, 2, generator))
            assert torch.equal(y, test.y[part])
    assert torch.equal(torch.cat([x for x, _ in job.clean(3).on("cpu")]), test.x[-128:])
    assert torch.equal(torch.cat([x for x, _ in job._source(3).on("cpu")]), training.x[:1000])
    assert "lr=0.003" in repr(job.adapter(next(plan.jobs())))
    assert [plan.model for plan in demo_plans(("bn-adapt",), images=8, seed=0)] == ["digits-resnet"]
    with pytest.raises(PlanError, match="BatchNorm"):
        demo_plans(("bn-adapt",), ("vit",), images=8, seed=0)
    with pytest.raises(DataError, match="demo:IMAGES,SEED"):
        open_suite("demo:many")


def test_every_method_is_compared_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DemoDigits, "shifts", ("fog", "contrast"))
    arguments = ["compare", "--network", "resnet", "--images", "8", "--out", str(tmp_path)]
    chosen = {name: m for name, m in METHODS.items() if name not in ("memo", "tea") and m.task != "segmentation"}
    refused = CliRunner().invoke(app, [*arguments, "--method", "dat"])
    assert "segmenters" in refused.output
    for name in chosen:
        arguments += ["--method", name]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    table = shown.output[shown.output.index("method") :]
    for method in chosen.values():
        assert re.search(rf"^ +{method.__name__} .*\d", table, re.MULTILINE), method
    written = json.loads((tmp_path / "results.json").read_text())
    assert [r["method"] for r in written["results"]] == [method.__name__ for method in chosen.values()]
    assert written["command"].startswith("acclimate compare --severity 4 --images 8")


def test_an_episodic_method_is_probed_once() -> None:
    clean = Domain("clean", [(x, torch.zeros(len(x), dtype=torch.long)) for x in stream(1, size=2, seed=900)])
    result = evaluate(MEMO(make("bn"), views=2), scenario(), clean=clean)
    assert {d.clean_accuracy for d in result.domains} == {result.clean_before}


def test_the_other_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    assert __version__ in runner.invoke(app, ["--version"]).output
    listed = runner.invoke(app, ["methods"]).output
    assert all(name in listed for name in METHODS)
    wrong = runner.invoke(app, ["demo", "--method", "magic", "--out", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "choose from" in wrong.output.replace("\n", " ").replace("│", "").replace("  ", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batches", [1, 15, 16, 37])
def test_scores_of_many_batches_are_those_of_each(batches: int) -> None:
    generator = torch.Generator().manual_seed(batches)
    logits = [3 * torch.randn(5, 4, generator=generator) for _ in range(batches)]
    targets = [torch.randint(0, 4, (5,), generator=generator) for _ in range(batches)]
    scores, meter = Scores(), Meter()
    for z, y in zip(logits, targets, strict=True):
        scores.update(z, y)
        meter.update(z, y)
    assert (
        scores.score
        == meter.accuracy
        == pytest.approx(float((torch.cat(logits).argmax(1) == torch.cat(targets)).float().mean()))
    )
    assert torch.equal(scores.meter.fine, meter.fine), "bit for bit, in whatever groups they come"
    assert scores.meter.total == 5 * batches
