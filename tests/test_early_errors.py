"""What would stop a run later is said before its first job, also by `--dry-run`; unknown names bring a suggestion."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from acclimate.bench import preflight
from acclimate.bench.networks import NetworkError, load_network
from acclimate.bench.plan import Plan, PlanError
from acclimate.bench.run import Run
from acclimate.checks import no_such
from acclimate.cli.main import app
from acclimate.core.signature import arguments_of
from acclimate.methods import METHODS
from acclimate.service.settings import Settings, SettingsError

SMALL = ["--images", "8", "--shift", "contrast", "--probe", "none"]


def run(*words: str, out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["run", "--method", "source", *SMALL, *words, "--out", str(out)])
    assert not list(out.glob("*-seed*.json")) or done.exit_code == 0, "a job has started"
    return done.exit_code, done.stderr


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "eata", "--set", "eata.bta=5"), "eata has no argument 'bta': did you mean beta?"),
        (("--set", "eata.bta=5"), "did you mean beta?"),  # of a method that does not run
        (("--method", "eta", "--set", "eta.beta=5"), "eta has no argument 'beta'"),
        (("--method", "tent", "--set", "tent.lr=-1"), "tent with lr=-1 cannot be built"),
        (("--method", "tent", "--set", "tent.lr=fast"), "tent with lr='fast' cannot be built"),
        (("--method", "eata", "--set", "eata.beta=-1"), "eata with beta=-1 cannot be built"),
        (("--method", "eata-c", "--set", "eata-c.drop=2"), "eata-c with drop=2 cannot be built"),
        (("--method", "tent", "--set", "tent.seed=2"), "--seed"),
        (("--method", "eata", "--source", "digit"), "did you mean digits?"),
        (("--method", "tnt"), "did you mean tent?"),
        (("--set", "tnt.lr=1"), "did you mean tent?"),
        (("--model", "digits-resnt"), "did you mean digits-resnet?"),
        (("--data", "digitz"), "did you mean digits?"),
        (("--shift", "gausian_noise"), "did you mean gaussian_noise?"),
        (("--scenario", "livelong"), "did you mean lifelong?"),
        (("--preset", "resnet-50"), "did you mean resnet50?"),
        (("--method", "tent", "--set", "tent.lr=nan"), "lr=nan is not a number"),
        (("--device", "cudaa"), "expected cpu, cuda"),
        (("--device", "cuda:99"), "CUDA device"),
    ],
)
def test_before_the_first_job(words: tuple[str, ...], message: str, dry: tuple[str, ...], tmp_path: Path) -> None:
    code, said = run(*words, *dry, out=tmp_path / "out")
    assert code == 2
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_folder_that_cannot_be_written(dry: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, said = run(*dry, out=out)
        assert (code, "choose another --out" in said) == (2, True), said
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_network_for_other_images(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\ndef rgb():\n    return nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())\n")
    code, said = run("--model", f"{file}:rgb", out=tmp_path / "out")
    assert code == 2
    assert "does not take images of 1×32×32" in said


def test_finished_jobs_need_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(out=tmp_path)[0] == 0
    monkeypatch.setattr("acclimate.bench.networks._ours", None)  # nothing can be loaded any more
    plan = Plan(methods=("source",), images=8, shifts=("contrast",), probe="none")
    preflight.check(Run(plan, tmp_path))


def test_checks_leave_the_network_as_it_was(tmp_path: Path) -> None:
    plan = Plan(methods=[name for name in METHODS if name != "dat"], images=8, shifts=("contrast",))
    checked = Run(plan, tmp_path / "a")
    before = {name: value.clone() for name, value in checked.network.model.state_dict().items()}
    preflight.check(checked)
    assert all(value.equal(before[name]) for name, value in checked.network.model.state_dict().items())
    assert not any(module._forward_hooks for module in checked.network.model.modules())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablaton"], "did you mean ablation?"),
        (["toy", "--scale", "digit"], "did you mean digits?"),
        (["toy", "--method", "eata-d"], "did you mean eata-c?"),
        (["toy", "--network", "resnt"], "did you mean resnet?"),
    ],
)
def test_names_in_recipes(words: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", "run", *words, "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_recipes_are_checked_as_a_whole(dry: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of its cases cannot be built: no case runs."""
    from acclimate.paper import cases

    monkeypatch.setitem(cases.LEFT_OUT, "SS", {"select": "nothing"})
    words = ["paper", "run", "ablation", "--images", "8", "--network", "resnet", "--out", str(tmp_path / "out"), *dry]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "cannot be built" in done.stderr) == (2, True), done.output
    assert not (tmp_path / "out").exists()


def test_networks_of_libraries() -> None:
    for spec, message in (
        ("timm:resnet5o", "timm has no network 'resnet5o': did you mean resnet50"),
        ("timn:resnet50", "did you mean timm:resnet50?"),
        ("resnet50", "did you mean timm:resnet50?"),
        ("torchvision:resnet5O", "did you mean resnet5"),
    ):
        with pytest.raises(NetworkError) as raised:
            load_network(spec)
        assert message in str(raised.value)


def test_arguments_are_those_that_a_method_takes() -> None:
    assert {"beta", "fisher", "margin", "lr", "seed", "engine"} <= {*arguments_of(METHODS["eata"])}
    assert {"beta", "fisher", "source"}.isdisjoint(arguments_of(METHODS["eta"]))
    assert "every" in arguments_of(METHODS["rdumb"])
    assert {"lr", "model"}.isdisjoint(arguments_of(METHODS["source"]))
    assert all(arguments_of(method) for method in METHODS.values())


def test_suggestions() -> None:
    assert no_such("fruit", "aple", ["apple", "pear"]) == (
        "no fruit 'aple': did you mean apple? Otherwise choose from apple, pear"
    )
    assert no_such("fruit", "xyz", ["apple", "pear"]) == "no fruit 'xyz': choose from apple, pear"
    assert no_such("fruit", "xyz", map(str, range(100))) == "no fruit 'xyz'", "too many to list"


def test_named_twice_counts_once() -> None:
    plan = Plan(methods=["source", "tent", "source"], seeds=[1, 0, 1])
    assert (plan.methods, plan.seeds) == (("source", "tent"), (1, 0))
    assert len([*plan.jobs()]) == 4
    with pytest.raises(PlanError, match="arguments by name"):
        Plan(overrides={"tent": 5})


def test_a_setting_of_a_method_that_does_not_run(tmp_path: Path) -> None:
    code, said = run("--set", "eta.lr=0.1", "--dry-run", out=tmp_path / "out")
    assert (code, "--set of eta has no effect" in said) == (0, True)


def test_a_dry_run_of_a_network_without_norm_layers(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))\n"
    )
    code, said = run("--model", f"{file}:net", "--dry-run", out=tmp_path / "out")
    assert code == 0, said


def test_a_missing_kornia_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia.enhance", None)
    run = Run(Plan(methods=("source", "roid"), images=8), tmp_path)
    with pytest.raises(ImportError, match="kornia"):
        preflight.check(run)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("cifar10-resnet", False),
        ("FILE.py:make", True),
        ("torchvision:resnet50=x", False),
        ("timm:vit_base_patch16", False),
    ],
)
def test_a_preset_of_another_network_is_pointed_out(
    model: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Plan(methods=("tent",), model="digits-resnet"), tmp_path)
    monkeypatch.setattr(run, "plan", replace(run.plan, model=model))
    outputs = 10 if model.startswith("cifar10") else 1000
    for name, value in {"network": load_network("digits-resnet"), "outputs": outputs}.items():
        monkeypatch.setitem(vars(run), name, value)
    hints = " ".join(preflight.hints(run))
    assert ("which is another network" in hints) == said
    assert ("cifar-resnet" in hints) == (outputs == 10)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"guard": "no"}, "guard='no'"),
        ({"cameras": True}, "cameras=True"),
        ({"name": "a/b"}, "a/b"),
        ({"name": ".."}, "name="),
        ({"name": "my model"}, "my model"),
        ({"name": ""}, "name="),
        ({"allow_host": "tta.example.org"}, "allow_host='tta.example.org'"),
        ({"allow_host": ["a.org", "https://b.org"]}, "https://b.org"),
        ({"allow_host": [["a.org"]]}, "allow_host"),
        ({"overrides": {"eata": {"lr": 1}}}, "eata has settings"),
        ({"overrides": {"nosuch": {"a": 1}}}, "no method 'nosuch'"),
        ({"overrides": {"eata-c": {"foo": 1}}}, "no argument 'foo'"),
        ({"overrides": {"eata-c": {"engine": "auto"}}}, "--engine"),
    ],
)
def test_a_server_checks_its_settings_as_a_plan_does(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings(**wrong)


def test_a_wrong_assignment_for_check_shows_the_right_form() -> None:
    done = CliRunner().invoke(app, ["check", "tent", "--set", "most"])
    assert done.exit_code == 2
    assert "METHOD" not in done.stderr
    assert "most" in done.stderr
