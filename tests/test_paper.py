"""The paper's recipes: what they run, what they write, and that they go on where they stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from acclimate import EATAC, Tent
from acclimate.cli import app
from acclimate.data import DataError, open_suite
from acclimate.evaluate import evaluate
from acclimate.experiment import Run
from acclimate.paper import studies
from acclimate.paper.recipe import Case, Recipe, Shown, reproduce
from acclimate.paper.recipes import RECIPES
from acclimate.paper.scales import SCALES, Scale
from acclimate.plan import Job, PlanError
from acclimate.zoo import NetworkError, load_network

DATA = {"paper": "imagenet-c:/data,/clean", "5k": "imagenet-c-5k:/data,/clean", "cifar10": "cifar10:/data"}
TINY = {"images": 32, "batch_size": 16, "source_images": 16, "probe_images": 16}


def tiny(**fields: Any) -> Scale:
    return replace(SCALES["digits"].on(**{**TINY, **fields}), few={"memo": 1})


@pytest.mark.parametrize("name", SCALES)
def test_every_recipe_has_its_cases_at_every_scale(name: str) -> None:
    scale = SCALES[name].on(data=DATA.get(name))
    counts = {}
    for recipe in RECIPES.values():
        if recipe.name == "imagenet-r":
            with pytest.raises(PlanError, match="imagenet-r:FOLDER"):
                recipe.plans(scale)
            recipe.plans(scale.on(data="imagenet-r:/r"))
            continue
        cases = recipe.plans(scale)
        counts[recipe.name] = sum(len(case.plan.methods) for case in cases)
        assert {case.plan.data for case in cases} == {scale.data}
        assert all(case.plan.model in scale.networks.values() for case in cases)
    assert counts["ablation"] == 26
    assert counts["stability"] == 40
    assert counts["lifelong"] == 25
    assert counts["forgetting"] == 20


def test_a_scale_without_data_says_what_it_needs() -> None:
    with pytest.raises(PlanError, match="the scale paper needs imagenet-c:FOLDER,CLEAN"):
        RECIPES["mixed"].plans(SCALES["paper"])


def test_the_ablation_is_the_papers() -> None:
    cases = {
        case.row: case.plan.overrides for case in RECIPES["ablation"].plans(SCALES["digits"]) if case.column == "vit"
    }
    rate = {"lr": 0.01}
    assert list(cases)[1:4] == ["1: CL", "2: ER", "3: CL ER"]
    assert cases["1: CL"]["eata-c"] == {**rate, "alpha": 0.0, "beta": 0.0, "select": "everything"}
    assert cases["5: ER FR"]["eata-c"] == {**rate, "weight": 0.0, "select": "everything"}
    assert cases["9: CL ER SS"]["eata-c"] == {**rate, "beta": 0.0}
    assert cases["12: CL ER FR SS"]["eata-c"] == rate


def test_epsilon_is_told_for_a_thousand_classes() -> None:
    values = {name: SCALES[name].epsilon(0.05) for name in SCALES}
    assert values == {"paper": 0.05, "5k": 0.05, "cifar10": 0.5, "digits": 0.5}


@pytest.mark.parametrize(
    "name",
    [
        "components",
        "calibration",
        "sweep-fisher",
        "held-out",
        "indicator",
        "parameters",
        "selected",
        "toy",
        "entropy-share",
    ],
)
def test_a_recipe_writes_its_numbers_and_its_form(name: str, tmp_path: Path) -> None:
    written = reproduce(RECIPES[name], tiny(), tmp_path, command="acclimate paper run")
    numbers = json.loads((tmp_path / f"{name}.json").read_text())
    assert numbers["command"] == "acclimate paper run"
    assert numbers["origin"]["torch"] == torch.__version__
    assert len(numbers["cases"]) == len(RECIPES[name].plans(tiny()))
    for case in numbers["cases"]:
        assert case.get("results") or case.get("measured")
    table = (tmp_path / f"{name}.md").read_text().splitlines()
    assert len(table) > 2
    assert len({line.count("|") for line in table}) == 1
    drawn = [file for file in written if file.suffix == ".svg"]
    assert bool(drawn) == (name not in ("components", "indicator", "parameters"))
    assert all("<svg" in file.read_text()[:600] for file in drawn)


@pytest.mark.slow
def test_tables_over_corruptions(tmp_path: Path) -> None:
    scale = tiny(images=16, shifts=("fog", "contrast"))
    reproduce(RECIPES["lifelong"], scale, tmp_path)
    for network, methods in (("resnet", 13), ("vit", 12)):
        lines = (tmp_path / f"lifelong-{network}.md").read_text().splitlines()
        assert lines[0].startswith("| Method |  | fog | contrast | Avg. |")
        assert len(lines) == 2 + 2 * methods
        assert sum(line.startswith("| MEMO") for line in lines) == 1
    for name in ("mixed", "forgetting", "backwards"):
        reproduce(RECIPES[name], scale, tmp_path)
        assert (tmp_path / f"{name}.md").is_file()
    assert "level 3 Acc." in (tmp_path / "mixed.md").read_text()


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    begun: list[str] = []

    def begin(case: Case, _: int, __: Run) -> Any:
        begun.append(case.name)
        return lambda _: None

    few = Recipe("few", "", lambda scale: [*RECIPES["held-out"].cases(scale)][:1], RECIPES["held-out"].show)
    reproduce(few, tiny(), tmp_path, on_case=begin)
    first = json.loads((tmp_path / "few.json").read_text())
    reproduce(few, tiny(), tmp_path, on_case=begin)
    assert begun == ["tent"]
    assert json.loads((tmp_path / "few.json").read_text())["cases"] == first["cases"]
    with pytest.raises(ValueError, match="under another plan"):
        reproduce(few, tiny(seeds=(0,), source_images=8), tmp_path)
    twice = Recipe("twice", "", lambda scale: [*few.cases(scale)] * 2, lambda _: Shown())
    with pytest.raises(ValueError, match="two cases have one name"):
        reproduce(twice, tiny(), tmp_path)


def test_cases_share_their_network_and_their_data(tmp_path: Path) -> None:
    resnet, vit = (Run(tiny().plan(kind, "source"), tmp_path / kind) for kind in ("resnet", "vit"))
    other = Run(tiny().plan("resnet", "tent", severity=3), tmp_path / "other", like=resnet)
    assert other.network is resnet.network
    assert other.suite is resnet.suite
    assert Run(resnet.plan, tmp_path / "vit", like=vit).network.model is not vit.network.model


# Studies -------------------------------------------------------------------------------------------------------------


def run_of(scale: Scale, network: Any, method: str, tmp_path: Path, **arguments: Any) -> tuple[Run, Job]:
    plan = scale.plan(network, method, arguments=arguments, shifts=("gaussian_noise",), probe="none")
    return Run(plan, tmp_path), Job(method, 0)


def test_one_step_a_batch_is_plain_adaptation(tmp_path: Path) -> None:
    run, job = run_of(tiny(), "resnet", "tent", tmp_path, lr=0.3)
    adapter = run.adapter(job)
    plain = evaluate(adapter, run.scenario(0))
    adapter.reset()
    once, thrice = (studies.several_steps(steps)(run, job, print) for steps in (1, 3))
    assert once == {"accuracy": pytest.approx(plain.accuracy), "ece": pytest.approx(plain.ece)}
    assert thrice != once


def test_all_samples_are_the_highest_and_the_lowest(tmp_path: Path) -> None:
    run, job = run_of(tiny(), "resnet", "tent", tmp_path)
    high, low = (studies.entropy_share(which, 100)(run, job, print) for which in ("highest", "lowest"))
    assert high == low
    adapter = run.adapter(job)
    (domain,) = run.scenario(0).domains
    batches = [*domain.on("cpu")]
    for x, _ in batches:
        adapter(x)
    after = torch.cat([adapter.infer(x).argmax(1) == y for x, y in batches])
    assert high["accuracy"] == pytest.approx(float(after.float().mean()))
    adapter.reset()
    assert studies.entropy_share("lowest", 50)(run, job, print) != high


def test_the_indicator_counts_disagreement(tmp_path: Path) -> None:
    run, job = run_of(tiny(images=16, severity=2), "vit", "eata-c", tmp_path, drop=0.9)
    told = studies.indicator(run, job, print)
    assert told["batches"] == [0]
    adapter = run.adapter(job)
    assert isinstance(adapter, EATAC)
    (domain,) = run.scenario(0).domains
    ((x, _),) = domain.on("cpu")
    assert told["uncertain"] == [int(adapter.uncertainty(x).data.sum())]
    assert 0 < told["uncertain"][0] < 16


def test_a_held_out_fifth_is_not_learned_from(tmp_path: Path) -> None:
    run, job = run_of(tiny(images=40, batch_size=8), "resnet", "tent", tmp_path)
    told = studies.held_out(run, job, print)
    assert told["batches"] == [0, 1, 2, 3, 4]
    source = Tent.preset("resnet50", run.network.model, lr=0.0)
    (domain,) = run.scenario(0).domains
    rest = replace(domain, picks=domain.picks[32:])
    right = [source.infer(x).argmax(1) == y for x, y in rest.on("cpu")]
    assert told["accuracy"][0] == pytest.approx(float(torch.cat(right).float().mean()))


# Around them ---------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["paper", "list"])
    assert listed.exit_code == 0, listed.output
    assert all(name in listed.output for name in (*RECIPES, *SCALES))
    out = ["--images", "16", "--batch-size", "8", "--out", str(tmp_path / "out")]
    dry = runner.invoke(app, ["paper", "run", "toy", "calibration", *out, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "images met" in dry.output
    assert not (tmp_path / "out").exists()
    done = runner.invoke(app, ["paper", "run", "calibration", "--seed", "0", "--seed", "1", *out])
    assert done.exit_code == 0, done.output
    assert "| EATAC |" in done.output
    assert "±" in done.output
    assert (tmp_path / "out" / "digits" / "calibration.svg").is_file()
    for words, message in (
        (["nonsense"], "no recipe 'nonsense': choose from lifelong"),
        (["toy", "--scale", "huge"], "no scale 'huge': choose from paper"),
        (["toy", "--scale", "cifar10"], "cannot run: the scale cifar10 needs cifar10:FOLDER"),
    ):
        wrong = runner.invoke(app, ["paper", "run", *words])
        assert wrong.exit_code == 2, wrong.output
        assert message in " ".join(wrong.output.replace("│", " ").split()), wrong.output


def test_cifar10_is_corrupted_on_the_fly(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "clean.npy", images)
    np.save(tmp_path / "labels.npy", np.arange(12) % 10)
    suite = open_suite(f"cifar10:{tmp_path}")
    assert len(suite.shifts) == 15
    x, y = suite.clean().images[11]
    assert torch.equal(x, torch.from_numpy(images[11]).movedim(-1, 0))
    assert y == 1
    (tmp_path / "clean.npy").unlink()
    with pytest.raises(DataError, match=r"there is no clean\.npy"):
        open_suite(f"cifar10:{tmp_path}")


def test_networks_of_ours_come_from_files_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from acclimate.models import cifar10_vit

    halves = {name: tensor.half() for name, tensor in cifar10_vit().state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    net = load_network(f"cifar10-vit={tmp_path / 'w.safetensors'}").model
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert torch.equal(net.head.weight, halves["head.weight"].float())
    with pytest.raises(NetworkError, match="another network's weights"):
        load_network(f"cifar10-resnet={tmp_path / 'w.safetensors'}")
