"""Plans: what they refuse, that a killed run ends with the same numbers, and the commands around them."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

from acclimate import METHODS
from acclimate.bench import own_networks
from acclimate.bench import run as bench_run
from acclimate.bench.networks import NetworkError, load_network
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.plan import Plan, PlanError, combine, read_overrides
from acclimate.bench.result_folder import read_results
from acclimate.bench.run import Run
from acclimate.bench.tables import differences, paper_table
from acclimate.cli.main import app
from acclimate.data import DataError, open_suite
from acclimate.data.corruptions import BENCHMARK
from acclimate.paper.published import paper_rows

SMALL = {"images": 32, "batch_size": 16, "shifts": ("contrast", "fog", "shot_noise"), "probe_images": 16}
VOLATILE = {"seconds", "process_memory", "images_per_second", "origin"}


def plan(**changes: Any) -> Plan:
    return Plan(**{"methods": ("source", "tent"), "source_images": 32, **SMALL, **changes})


def numbers(content: Any) -> Any:
    """A result without what differs from run to run."""
    if isinstance(content, dict):
        return {key: numbers(value) for key, value in content.items() if key not in VOLATILE}
    return [numbers(value) for value in content] if isinstance(content, list) else content


def carry_out(plan: Plan, out: Path) -> dict[str, Any]:
    run = Run(plan, out)
    for job in plan.jobs():
        run.do(job)
    return {path.name: numbers(json.loads(path.read_text())) for path in sorted(out.glob("*-seed*.json"))}


def test_results_are_written_per_method_and_seed(tmp_path: Path) -> None:
    found = carry_out(plan(seeds=(0, 1)), tmp_path)
    assert list(found) == ["source-seed0.json", "source-seed1.json", "tent-seed0.json", "tent-seed1.json"]
    first = found["tent-seed0.json"]
    assert [domain["name"] for domain in first["domains"]] == list(SMALL["shifts"])
    assert first["done"]
    assert first["clean_before"] is not None
    assert all(domain["clean_accuracy"] is not None for domain in first["domains"])
    assert first["protocol"]["data"] == "digits"
    source = {domain["name"]: domain["accuracy"] for domain in found["source-seed0.json"]["domains"]}
    assert first["source_accuracy"] == source
    assert found["tent-seed0.json"]["domains"] != found["tent-seed1.json"]["domains"]
    assert not list(tmp_path.glob("*.safetensors")), "states of finished runs are gone"
    assert not list(tmp_path.glob("**/.*.tmp")), "no temporary file is left"


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    carry_out(plan(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed*.json")}
    run = Run(plan(methods=("source", "tent", "eta")), tmp_path)
    seen = [run.do(job).method for job in run.plan.jobs()]
    assert seen == ["Source", "Tent", "ETA"]
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())


def test_a_run_on_a_gpu_leaves_no_adapter_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recorded steps would keep gigabytes until Python collects, which it does by objects, not by their size."""
    made, run = list[weakref.ref[Any]](), Run(plan(methods=("tent",)), tmp_path)
    monkeypatch.setattr(
        Run, "adapter", lambda run, job, make=Run.adapter: made.append(weakref.ref(a := make(run, job))) or a
    )
    gc.disable()
    try:
        run.do(next(run.plan.jobs()))
        assert made[0]() is not None, "it refers to itself"
        run.plan = replace(run.plan, device="cuda")
        run.free()
        assert made[0]() is None
    finally:
        gc.enable()


def test_what_a_failed_run_held_is_gone_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its error is on its way, the traceback holds the adapter: freeing then is too early."""
    seen = list[weakref.ref[Any]]()

    def fails(adapter: Any, *_: Any, **__: Any) -> None:
        assert [ref() for ref in seen] == [None] * len(seen)
        seen.append(weakref.ref(adapter))
        raise torch.OutOfMemoryError("the GPU is full")

    monkeypatch.setattr(bench_run, "evaluate", fails)
    monkeypatch.setattr(Run, "free", lambda _: gc.collect())  # as on a GPU
    run = Run(plan(methods=("tent",)), tmp_path)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                run.do(next(run.plan.jobs()))
    finally:
        gc.enable()
    assert len(seen) == 2


@pytest.mark.parametrize("method", ["eata", "eata-c", "roid", "cotta", "rdumb", "tea", "memo"])
def test_an_interrupted_run_ends_with_the_same_numbers(method: str, tmp_path: Path) -> None:
    settings = {
        "memo": {"views": 2},
        "tea": {"steps": 2},
        "cotta": {"views": 2, "threshold": 2.0},
        "rdumb": {"every": 3},
    }
    chosen = plan(methods=(method,), overrides={method: settings[method]} if method in settings else {})
    whole = carry_out(chosen, tmp_path / "whole")

    class Stop(Exception):
        pass

    batches = 0

    def stop_in_the_third_domain(batch: object, score: float) -> None:
        nonlocal batches
        batches += 1
        if batches == 6:
            raise Stop

    run = Run(chosen, tmp_path / "stopped")
    with pytest.raises(Stop):
        run.do(next(iter(chosen.jobs())), on_batch=stop_in_the_third_domain)
    half = json.loads((tmp_path / "stopped" / f"{method}-seed0.json").read_text())
    assert not half["done"]
    assert len(half["domains"]) == 2
    assert carry_out(chosen, tmp_path / "stopped") == whole


def test_a_killed_run_ends_with_the_same_numbers(tmp_path: Path) -> None:
    """With SIGKILL, in the middle: nothing has time to tidy up."""
    options = ["--method", "roid", "--images", "64", "--batch-size", "16", "--probe", "none", "--severity", "4"]
    for shift in ("gaussian_noise", "defocus_blur", "motion_blur", "fog", "contrast", "pixelate"):
        options += ["--shift", shift]

    command = [sys.executable, "-m", "acclimate.cli.main", "run", *options, "--out", str(tmp_path / "killed")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)
    file = tmp_path / "killed" / "roid-seed0.json"
    deadline = time.monotonic() + 120
    while not file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    half = json.loads(file.read_text())
    assert not half["done"]
    assert 1 <= len(half["domains"]) < 6
    for out in ("killed", "whole"):
        done = CliRunner().invoke(app, ["run", *options, "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    results = [numbers(json.loads((tmp_path / out / "roid-seed0.json").read_text())) for out in ("killed", "whole")]
    assert results[0] == results[1]
    assert results[0]["done"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(methods=("tent",))
    writes = 0
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal writes
        writes += 1
        if writes > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            carry_out(chosen, tmp_path / "full")
    assert not list((tmp_path / "full").glob("**/.*.tmp"))
    assert carry_out(chosen, tmp_path / "full") == carry_out(chosen, tmp_path / "fresh")


def test_another_plan_is_not_mixed_in(tmp_path: Path) -> None:
    carry_out(plan(), tmp_path)
    with pytest.raises(PlanError, match="severity was 5, and is 3 now"):
        Run(plan(severity=3), tmp_path)
    other = Run(plan(overrides={"tent": {"lr": 0.1}}), tmp_path)
    with pytest.raises(PlanError, match="was made with other settings"):
        carry_out(other.plan, tmp_path)
    damaged = tmp_path / "tent-seed0.json"
    damaged.write_text(damaged.read_text()[:100])
    with pytest.raises(PlanError, match=r"tent-seed0\.json is damaged"):
        carry_out(plan(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("magic",)}, "no method 'magic': choose from source"),
        ({"methods": ()}, "at least one method"),
        ({"scenario": "magic"}, "no scenario 'magic': choose from lifelong"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"probe": "magic"}, "no probe 'magic'"),
        ({"overrides": {"magic": {}}}, "no method 'magic'"),
        ({"images": 0}, "images=0: expected a number of at least 1"),
        ({"source_images": "many"}, "source_images='many'"),
        ({"severity": 6}, "severity=6: expected a number from 1 to 5"),
    ],
)
def test_invalid_plans_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**changes)


def test_overrides_are_read_and_reach_the_adapter(tmp_path: Path) -> None:
    read = read_overrides(["eata.beta=500", "eata.fisher=sample", "roid.prior=None", "tent.lr=1e-3"])
    assert read == {"eata": {"beta": 500, "fisher": "sample"}, "roid": {"prior": None}, "tent": {"lr": 1e-3}}
    with pytest.raises(PlanError, match="expected METHOD.ARGUMENT=VALUE"):
        read_overrides(["beta=500"])
    chosen = plan(methods=("eata",), overrides=read)
    adapter = Run(chosen, tmp_path).adapter(next(iter(chosen.jobs())))
    assert (adapter.beta, adapter.fisher) == (500, "sample")
    assert Plan.from_dict(chosen.as_dict()).as_dict() == chosen.as_dict()
    with pytest.raises(PlanError, match="a plan has no field 'magic': choose from methods"):
        Plan.from_dict({"magic": 1})
    with pytest.raises(PlanError, match="seeds=3: expected a list"):
        Plan.from_dict({"seeds": 3})


def test_the_probe_does_not_show_what_the_fisher_importance_saw(tmp_path: Path) -> None:
    run = Run(plan(probe_images=200, source_images=500), tmp_path)
    assert not set(run.clean(0).picks) & set(run._source(0).picks)
    assert len(run._source(0).picks) == 500


@pytest.mark.parametrize("scenario", ["single-domain", "mixed", "correlated", "episodic"])
@pytest.mark.parametrize("probe", ["none", "readapt"])
def test_plans_of_other_scenarios(scenario: str, probe: str, tmp_path: Path) -> None:
    found = carry_out(plan(methods=("tent",), scenario=scenario, probe=probe), tmp_path)["tent-seed0.json"]
    assert "clean" not in [domain["name"] for domain in found["domains"]]
    assert all((domain["clean_accuracy"] is None) == (probe == "none") for domain in found["domains"])


def test_half_precision_runs(tmp_path: Path) -> None:
    found = carry_out(plan(methods=("tent", "eata-c"), precision="bf16"), tmp_path)
    assert all(0 <= result["summary"]["accuracy"] <= 1 for result in found.values())


def test_a_report_ignores_a_plan_outside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out(plan(methods=("eata",)), tmp_path / "run")
    (tmp_path / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["report", "run"])
    assert shown.exit_code == 0, shown.output


def test_tables_in_the_papers_layout(tmp_path: Path) -> None:
    carry_out(plan(seeds=(0, 1)), tmp_path / "a")
    results = read_results([tmp_path / "a"])
    header, rows = paper_table(results)
    assert header == ["Method", "", "contrast", "fog", "shot noise", "Avg.", "#Forwards", "#Backwards"]
    assert [row[:2] for row in rows] == [["Source", "Acc."], ["", "ECE"], ["Tent", "Acc."], ["", "ECE"]]
    both = [result for result in results if result.method == "Tent"]
    assert rows[2][2] == f"{50 * sum(r.domains[0].accuracy for r in both):.1f}"
    assert "±" in rows[2][5]
    assert rows[2][6:] == ["32", "32"]
    assert not differences(results)
    results[-1].source_accuracy["fog"] += 0.1
    assert any("source accuracy on fog differs" in message for message in differences(results))

    runner = CliRunner()
    for layout, sign in (("markdown", "| Method |"), ("latex", r"\toprule"), ("csv", "Method,,contrast")):
        shown = runner.invoke(app, ["table", str(tmp_path / "a"), "--format", layout])
        assert shown.exit_code == 0, shown.output
        assert sign in shown.output
    from acclimate.bench.tables import as_latex

    assert r"50 \% & $\epsilon$ = 1 $\pm$ 2 & a\_b" in as_latex(["", "", ""], [["50 %", "ε = 1 ± 2", "a_b"]])
    carry_out(plan(severity=3), tmp_path / "b")
    mixed = runner.invoke(app, ["table", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "these results are not comparable: their severity differs: 3, 5" in mixed.output.replace("\n", " ")
    assert "Tent | Acc." in mixed.output
    assert mixed.output.count("| Tent | Acc. |") == 2, "different settings are not averaged"
    assert runner.invoke(app, ["table", str(tmp_path / "no")]).exit_code == 2
    twice = runner.invoke(app, ["table", str(tmp_path / "a"), str(tmp_path / "a")])
    assert twice.output == runner.invoke(app, ["table", str(tmp_path / "a")]).output
    (tmp_path / "a" / "x-seed0.json").write_text("{")
    assert "is damaged" in runner.invoke(app, ["table", str(tmp_path / "a")]).output


def test_the_run_command(tmp_path: Path) -> None:
    runner = CliRunner()
    out = str(tmp_path / "run")
    config = tmp_path / "plan.json"
    config.write_text(json.dumps({"methods": ["source"], "images": 16, "shifts": ["contrast"], "severity": 2}))
    arguments = ["run", "--config", str(config), "--severity", "4", "--set", "tent.lr=0.01", "--out", out]
    arguments += ["--probe-images", "32"]
    shown = runner.invoke(app, [*arguments, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "1 domains, 1 batches" in shown.output
    assert "try --preset cifar-resnet" in shown.output.replace("\n", " ")
    assert not Path(out).exists()
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (written["severity"], written["images"], written["methods"]) == (4, 16, ["source"])
    assert written["probe_images"] == 32
    assert "Source" in done.output
    for options, message in (
        (["--data", "imagenet-c:/no/such/folder"], "cannot run: ImageNet-C: there is no folder"),
        (["--data", "folder:/tmp/[/b]"], "there is no folder /tmp/[/b]"),
        (["--set", "tent.bogus=1", "--method", "tent"], "bogus"),
        (["--device", "foo"], "foo"),
        (["--shift", "contrast", "--shift", "nonsense"], "digits: no shift 'nonsense': choose from gaussian_noise"),
        (["--model", "digits-vit", "--method", "bn-adapt"], "bn-adapt does not fit: it needs BatchNorm"),
    ):
        wrong = runner.invoke(app, ["run", "--images", "8", *options, "--out", out + "2"])
        assert wrong.exit_code == 2, wrong.output
        assert message in wrong.output.replace("\n", " "), wrong.output
    config.write_text(json.dumps({"methods": ["tent"], "overrides": {"tent": {"lr": 0.5}}, "images": 8}))
    merged = ["run", "--config", str(config), "--set", "tent.statistics=source", "--shift", "contrast"]
    assert runner.invoke(app, [*merged, "--out", out + "3"]).exit_code == 0
    call = json.loads((Path(out + "3") / "tent-seed0.json").read_text())["call"]
    assert "lr=0.5" in call
    assert "statistics='source'" in call
    listed = runner.invoke(app, ["list"]).output
    assert all(name in listed for name in ("eata-c", "timm:NAME", "imagenet-r", "correlated"))


def test_options_are_the_fields_of_a_plan() -> None:
    parameters = {p.name: p for p in get_command(app).commands["run"].params}
    names = {f.metadata["name"] or f.name: f for f in fields(Plan)}
    assert parameters.keys() == {*names, "config", "out", "dry_run", "on", "processes", "cpus_per_run", "gpus_per_run"}
    for name, f in names.items():
        assert parameters[name].opts == [f"--{name.replace('_', '-')}"]
        assert parameters[name].default is None, "an option that was not given says nothing"
        assert parameters[name].help.startswith(f.metadata["help"])
    assert CliRunner().invoke(app, ["run", "--severity", "6"]).exit_code == 2
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert all(text in shown for text in ("snapshot, readapt, none", "64; 1 for street scenes", "eata.beta=500"))


def test_options_override_a_configuration() -> None:
    config = {"methods": ["tent"], "severity": 3, "overrides": {"tent": {"lr": 1, "statistics": "source"}}}
    both = combine(config, {"severity": 4, "overrides": {"tent": {"lr": 5}, "eata": {"beta": 0}}})
    assert (both.methods, both.severity, both.workers, both.precision) == (("tent",), 4, 0, "fp32")
    assert both.overrides == {"tent": {"lr": 5, "statistics": "source"}, "eata": {"beta": 0}}
    assert combine({}, {"device": "cuda"}).workers >= 1
    assert combine({"engine": "auto"}, {"device": "cuda:1"}).precision == "bf16"
    assert combine({"engine": "auto", "precision": "fp32"}, {"device": "cuda"}).precision == "fp32"
    assert combine({"engine": "auto"}, {}).precision == "fp32"


def test_the_papers_numbers_stand_beside_ours_where_the_setting_is_the_same(tmp_path: Path) -> None:
    rows = paper_rows()
    assert len(rows) == 55 + 2 * 7
    assert {row.method for row in rows} <= {method.__name__ for method in METHODS.values()}
    for row in (r for r in rows if r.data != "acdc"):
        assert sum(row.accuracy) / len(row.accuracy) == pytest.approx(row.average[0], abs=0.06)
        assert sum(row.ece) / len(row.ece) == pytest.approx(row.average[1], abs=0.06)
    best = next(r for r in rows if (r.scenario, r.network, r.method) == ("lifelong", "resnet50", "EATAC"))
    assert (best.accuracy[0], best.ece[-1], best.average, best.backwards) == (37.2, 3.9, [49.48, 5.74], 33312)

    carry_out(plan(methods=("tent",)), tmp_path)
    runner = CliRunner()
    assert "the paper has no results" in runner.invoke(app, ["table", str(tmp_path), "--paper"]).output
    file = tmp_path / "tent-seed0.json"
    content = json.loads(file.read_text())
    content["protocol"] |= {"data": "imagenet-c:/data", "images": None, "shifts": None}
    content["model"] = "timm:resnet50"
    content["domains"] = [{**content["domains"][0], "name": name} for name in BENCHMARK]
    file.write_text(json.dumps(content))
    shown = runner.invoke(app, ["table", str(tmp_path), "--paper"]).output
    assert "| Tent (paper†) | Acc. | 28.0 | 30.1 |" in shown
    assert "† single-domain adaptation" in shown

    content["protocol"] |= {"data": "acdc:/data", "scenario": "rounds", "rounds": 10}
    content["model"] = "hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"
    names = [f"{weather}, round {i + 1}" for i in range(10) for weather in ("fog", "night", "rain", "snow")]
    content["domains"] = [{**content["domains"][0], "name": name, "miou": i / 40} for i, name in enumerate(names)]
    file.write_text(json.dumps(content))
    shown = runner.invoke(app, ["table", str(tmp_path), "--paper"]).stdout.splitlines()
    header, ours, _, theirs = (line.split(" | ") for line in (shown[0], *shown[2:5]))
    assert header[2:7] == ["1: fog", "1: night", "1: rain", "1: snow", "4: fog"]
    assert header[14:18] == ["10: fog", "10: night", "10: rain", "10: snow"]
    assert ours[1:3] == ["mIoU", "0.0"]
    assert ours[6] == "30.0"
    assert theirs[0].endswith("Tent (paper)")
    assert theirs[1:3] == ["mIoU", "69.0"]
    assert theirs[17:19] == ["48.7", "52.70"]
    assert len({len(ours), len(theirs), len(header)}) == 1
    whole = runner.invoke(app, ["table", str(tmp_path), "--format", "csv"]).output
    assert "2: fog,2: night" in whole


def test_the_report_is_one_page(tmp_path: Path) -> None:
    carry_out(plan(methods=("source", "eata")), tmp_path / "run")
    page = tmp_path / "report.html"
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(page)])
    assert shown.exit_code == 0, shown.output
    text = page.read_text()
    assert text.count("<figure>") == 6
    assert "What was learned from" in text
    assert not re.findall(r"(?:src|href)=\"https?:", text), "the page needs no other file"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "no")]).exit_code == 2


# Networks by name -----------------------------------------------------------------------------------------------------


def test_timm_networks_from_a_file(tmp_path: Path) -> None:
    import timm

    net = timm.create_model("test_resnet", num_classes=1000)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_network(f"timm:test_resnet={tmp_path / 'weights.safetensors'}")
    config = timm.data.resolve_model_data_config(net)
    assert loaded.preprocess.crop == config["input_size"][-1]
    assert loaded.family == "resnet50"
    assert loaded.model.mean.flatten().tolist() == pytest.approx(config["mean"])
    x = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(loaded.model(x), net.eval()((x - mean) / std))
    with pytest.raises(NetworkError, match="holds another network's weights"):
        load_network(f"timm:test_vit={tmp_path / 'weights.safetensors'}")
    with pytest.raises(NetworkError, match="there is no file of weights"):
        load_network(f"timm:test_resnet={tmp_path / 'no.pt'}")
    with pytest.raises(NetworkError, match="timm has no network 'magic'"):
        load_network("timm:magic")
    next(buffer for name, buffer in net.named_buffers() if name.endswith("running_var"))[0] = 8e4
    save_file({name: t.half() for name, t in net.state_dict().items()}, tmp_path / "half.safetensors")
    with pytest.raises(NetworkError, match=r"infinity in .*running_var.*half precision"):
        load_network(f"timm:test_resnet={tmp_path / 'half.safetensors'}")


def test_torchvision_networks_from_a_file(tmp_path: Path) -> None:
    import torchvision

    net = torchvision.models.resnet18()
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, tmp_path / "weights.pth")
    loaded = load_network(f"torchvision:resnet18={tmp_path / 'weights.pth'}")
    assert (loaded.preprocess.resize, loaded.preprocess.crop) == (256, 224)
    assert torch.equal(loaded.model.model.fc.weight, net.fc.weight)


def test_transformers_networks_from_a_folder(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    small = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, num_labels=10
    )
    ViTForImageClassification(small).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    loaded = load_network(f"hf:{tmp_path}")
    assert loaded.preprocess.crop == 32
    assert loaded.family == "vit-base"
    assert loaded.model(torch.rand(2, 3, 32, 32)).logits.shape == (2, 10)
    with pytest.raises(NetworkError, match="transformers could not load"):
        load_network(f"hf:{tmp_path / 'nothing'}")


def test_networks_from_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from acclimate.bench.own_networks import digits_resnet\n"
        "def make():\n    return digits_resnet()\n"
        "wrong = list\n"
    )
    loaded = load_network(f"{file}:make")
    assert loaded.name == "mine.py:make"
    assert isinstance(loaded.model, nn.Module)
    assert torch.equal(loaded.model.head.weight, digits_resnet().head.weight)
    for spec, message in (
        (f"{file}:other", "has no function 'other'"),
        (f"{file}:wrong", "returned list, not a torch.nn.Module"),
        (f"{tmp_path / 'no.py'}:make", "there is no file"),
        ("magic", "no network 'magic': choose from digits-resnet"),
    ):
        with pytest.raises(NetworkError, match=message):
            load_network(spec)


def test_weights_that_are_not_in_the_package_are_found_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(own_networks.__file__).parents[1]
    assert own_networks.weights("digits-resnet").parent == package / "weights"
    assert own_networks.weights("cifar10-resnet").parent == package.parents[1] / "weights"
    monkeypatch.setattr(own_networks, "__file__", "/no/where/lib/acclimate/bench/own_networks.py")
    with pytest.raises(NetworkError, match=r"cifar10-vit=FILE.*training\.cifar10"):
        load_network("cifar10-vit")


def test_the_package_is_small() -> None:
    package = Path(own_networks.__file__).parents[1]
    data = [file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")]
    assert sum(file.stat().st_size for file in data) < 2_000_000


def test_a_cache_goes_to_all_data_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str | None]] = []

    def open_noted(data: str, preprocess: Any, cache: str | None) -> Any:
        opened.append((data, cache))
        return open_suite(data, preprocess, cache)

    monkeypatch.setattr(bench_run, "open_suite", open_noted)
    words = ["run", "--method", "eata", "--source", "digits", "--shift", "fog", "--images", "16", "--probe", "none"]
    folder = str(tmp_path / "pixels")
    done = CliRunner().invoke(app, [*words, "--cache", folder, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert set(opened) == {("digits", folder)}
    assert "--cache makes no difference here" in done.output
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["cache"] == folder
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 0, "no other protocol"


def test_a_result_of_an_earlier_version_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "eata-seed0.json").write_text(json.dumps({"method": "EATA", "fingerprint": {}, "job": {}}))
    with pytest.raises(PlanError, match="earlier version"):
        read_results([tmp_path])


@pytest.mark.parametrize("field", ["batch_size", "source_images", "images", "rounds"])
def test_a_plan_refuses_a_number_of_zero(field: str) -> None:
    with pytest.raises(PlanError, match=f"{field}=0"):
        Plan(**{field: 0})


@pytest.mark.parametrize("images", [0, 1873])
def test_the_stream_of_the_demo_leaves_the_digits_of_its_probe_out(images: int) -> None:
    with pytest.raises(DataError, match="1 to 1872"):
        open_suite(f"demo:{images},0")
