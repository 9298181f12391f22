"""The paper's numbers beside ours: rounds of ACDC, backward passes, source rows that differ, and normalisation."""

from __future__ import annotations

import csv
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import images, make, stream
from test_segmentation import SEGMENTER, labelled, picture, save
from torch import nn
from typer.testing import CliRunner

from acclimate import EATA, BNAdapt, Normalised, Tent
from acclimate.bench.evaluate import accuracy_of, evaluate, run
from acclimate.bench.networks import NetworkError, load_network
from acclimate.bench.plan import Job, Plan
from acclimate.bench.result import Count, DomainResult, Result
from acclimate.bench.run import Run
from acclimate.bench.stream import Domain, Scenario
from acclimate.bench.tables import paper_table
from acclimate.cli.main import app
from acclimate.data.corruptions import BENCHMARK
from acclimate.paper import studies
from acclimate.paper.layouts import by_domain, whole_table
from acclimate.paper.numbers import Case, Numbers, join
from acclimate.paper.published import compare_source, notes_beside, paper_rows, with_paper
from acclimate.paper.recipes import RECIPES
from acclimate.paper.reproduce import reproduce, show
from acclimate.paper.scales import SCALES
from acclimate.parts import normalised
from acclimate.parts.fisher import Fisher
from acclimate.parts.normalised import IMAGENET

VIT = "timm:vit_base_patch16_224.augreg_in21k_ft_in1k@imagenet"
ROUNDS = [f"{weather}, round {i + 1}" for i in range(10) for weather in ("fog", "night", "rain", "snow")]


def result(method: str, scores: dict[str, float], plan: Plan, miou: bool = False) -> Result:
    """A result with these scores, in per cent."""
    found = Result(method, "Net", f"{method}(Net)", plan.scenario, 0, plan.model, protocol=plan.protocol, done=True)
    for name, score in scores.items():
        domain = DomainResult(name, score / 100, 0.1, 100, 100, 60, 1.0, in_graph=80)
        found.domains.append(replace(domain, miou=score / 100) if miou else domain)
    return found


def on_imagenet_c(method: str, scores: dict[str, float]) -> Result:
    return result(method, scores, Plan(model=VIT, data="imagenet-c:/c", scenario="lifelong"))


SOURCE = next(
    dict(zip(BENCHMARK, row.accuracy, strict=True))
    for row in paper_rows()
    if (row.scenario, row.network, row.method) == ("lifelong", "vit-base", "Source")
)


# Source rows ----------------------------------------------------------------------------------------------------------


def test_source_rows_are_compared_first() -> None:
    assert compare_source([on_imagenet_c("Source", SOURCE)]) == ""
    near = {name: score + 1.9 for name, score in SOURCE.items()}
    assert compare_source([on_imagenet_c("Source", near)]) == ""
    far = {name: score + 16 for name, score in SOURCE.items()}
    warning = compare_source([on_imagenet_c("Tent", near), on_imagenet_c("Source", far)])
    assert "average: 55.8, in the paper 39.8" in warning
    assert "normalisation" in warning
    one = compare_source([on_imagenet_c("Source", {**SOURCE, "fog": SOURCE["fog"] - 2.1})])
    assert "fog: 50.7, in the paper 52.8" in one, "one domain suffices"
    assert "no row Source" in compare_source([on_imagenet_c("Tent", near)])
    digits = result("Source", {"fog": 50.0}, Plan())
    assert compare_source([digits]) == "", "the paper has no such numbers"


def test_tables_with_the_papers_rows_say_where_the_source_differs(tmp_path: Path) -> None:
    far = on_imagenet_c("Source", dict.fromkeys(BENCHMARK, 60.0))
    shown = whole_table([Case("all", Plan(model=VIT, data="imagenet-c:/c"), "vit", results=[far])])
    assert shown.notes["vit"].startswith("Warning")
    assert [row[0] for row in shown.tables["vit"][1]] == ["Source", "", "Source (paper)", ""]
    (tmp_path / "source-seed0.json").write_text(json.dumps(far.as_dict()))
    printed = CliRunner().invoke(app, ["table", str(tmp_path), "--paper"])
    assert "Warning: the source network's accuracy differs from the paper's" in printed.output


def test_a_recipe_compares_its_table_with_the_papers(tmp_path: Path) -> None:
    scale = SCALES["digits"].on(images=16, batch_size=16, source_images=16, shifts=("fog",), only=("source",))
    reproduce(RECIPES["mixed"], scale, tmp_path)
    text = (tmp_path / "mixed-paper.md").read_text()
    assert "Warning: the source network's accuracy differs" in text
    assert "level 5 Acc.: " in text or "level 3 Acc.: " in text


@pytest.mark.parametrize(
    ("recipe", "header", "row", "said"),
    [
        ("efficiency", ["", "resnet Acc."], ["Source", "3.7 ± 0.1"], ""),
        ("efficiency", ["", "resnet Acc."], ["Source", "3.9"], "resnet Acc.: 3.9, in the paper 1.8"),
        ("efficiency", ["", "vit Acc."], ["Source", "12.0"], ""),
        ("efficiency", ["", "vit Acc."], ["Tent", "12.0"], "no row Source"),
        ("efficiency", ["", "vit Acc."], ["Source", "–"], "no row Source"),
        ("ablation", ["", "resnet Acc."], ["Source", "18.0"], ""),
        ("ablation", ["", "resnet Acc."], ["Source", "39.8"], "in the paper 17.9"),
        ("indicator", ["", "Source"], ["Sub-network acc. (%)", "20.0"], "in the paper 9.3"),
        ("components", ["", "level 3 Acc."], ["S(x) = 1", "20.0"], ""),
    ],
)
def test_source_rows_of_two_tables(recipe: str, header: list[str], row: list[str], said: str) -> None:
    notes = notes_beside(recipe, (header, [row]))
    assert said in notes
    assert ("Warning" in notes) == ("in the paper" in said)


def test_several_networks_and_seeds_are_compared() -> None:
    other = Plan(model="timm:resnet50", data="imagenet-c:/c", scenario="lifelong")
    far = result("Source", dict.fromkeys(BENCHMARK, 60.0), other)
    near = on_imagenet_c("Source", SOURCE)
    for both in ([near, far], [far, near]):
        assert "average: 60.0, in the paper 17.9" in compare_source(both)
        assert "39.8" not in compare_source(both)
        _, rows = paper_table(both)
        labels = [row[0] for row in with_paper(rows, both) if row[0]]
        assert {f"Source, {VIT} (paper)", "Source, timm:resnet50 (paper)"} <= set(labels)
    seed = replace(on_imagenet_c("Source", {name: score + 16 for name, score in SOURCE.items()}), seed=1)
    assert "average: 47.8, in the paper 39.8" in compare_source([near, seed])


# ACDC -----------------------------------------------------------------------------------------------------------------


def test_acdc_beside_the_papers_rounds(tmp_path: Path) -> None:
    """Table 4 has rounds 1, 4, 7 and 10; the csv has all ten, from Table B with its slips marked."""
    plan = RECIPES["acdc"].plans(SCALES["paper"].on(data="acdc:/acdc,/cityscapes"))[0].plan
    scores = {"Source": [69.1, 40.3, 59.7, 57.8] * 10, "Tent": [50.0] * 40, "CoTTA": [58.4] * 40}
    found = [result(name, dict(zip(ROUNDS, own, strict=True)), plan, miou=True) for name, own in scores.items()]
    numbers = Numbers("acdc", "ACDC", "paper", "", [Case("all", plan, results=found)])
    show(RECIPES["acdc"], numbers, tmp_path)
    table = (tmp_path / "acdc.md").read_text()
    assert "Warning" not in table
    short = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:] for line in table.splitlines()}
    assert short["Method"][:5] == ["1: fog", "1: night", "1: rain", "1: snow", "4: fog"]
    assert short["CoTTA (paper)"][8:17] == ["70.8", "40.5", "62.6", "59.7", "70.8", "40.5", "62.6", "59.7", "58.40"]
    assert short["Tent (paper)"][12:17] == ["62.5", "30.4", "52.6", "48.7", "52.70"]
    rows = [*csv.reader((tmp_path / "acdc.csv").read_text().splitlines())]
    whole = {row[0]: row[2:] for row in rows if row[0]}
    assert len(whole["Method"]) == 40 + 3
    assert whole["CoTTA (paper‡)"][20:24] == ["65.2", "34.3", "56.9", "52.4"], "Tent's round 6"
    assert whole["Tent (paper§)"][36:41] == ["52.7", "30.4", "52.6", "48.7", "52.40"]
    assert whole["Source (paper)"][:4] == ["69.1", "40.3", "59.7", "57.8"]
    assert "repeats Tent's rounds 6 to 10" in table
    read = join([tmp_path / "acdc.json"])
    assert [case.plan for case in read.cases] == [plan]
    far = replace(
        numbers, cases=[Case("all", plan, results=[result("Source", dict.fromkeys(ROUNDS, 60.0), plan, True)])]
    )
    show(RECIPES["acdc"], far, tmp_path / "far")
    assert "Warning" in (tmp_path / "far" / "acdc.md").read_text()


def test_acdc_on_scenes_of_your_own(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / "data" / "images" / f"{i}.png", picture(i))
        save(tmp_path / "data" / "labels" / f"{i}.png", labelled(i))
    (tmp_path / "net.py").write_text(SEGMENTER)
    words = ["paper", "run", "acdc", "--scale", "paper", "--data", f"scenes:{tmp_path / 'data'}", "--rounds", "5"]
    words += ["--segformer", f"{tmp_path / 'net.py'}:make", "--images", "1", "--out", str(tmp_path / "out")]
    for name in ("source", "bn-adapt", "tent"):
        words += ["--method", name]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    header = (tmp_path / "out" / "paper" / "acdc.md").read_text().splitlines()[0]
    assert [f"{i}: fog" in header for i in range(1, 6)] == [True, False, False, True, True]
    assert "2: fog,2: night" in (tmp_path / "out" / "paper" / "acdc.csv").read_text()
    assert "paper)" not in (tmp_path / "out" / "paper" / "acdc.md").read_text()
    every = CliRunner().invoke(app, [*words[:2], "all", *words[3:], "--dry-run"])
    assert "acdc" in every.output
    assert "lifelong" not in every.output, "`all` runs what fits the data"
    missing = CliRunner().invoke(app, ["paper", "run", "acdc", "--data", "scenes:/none"])
    assert "the scale digits has no segformer" in " ".join(missing.output.split())


def test_eata_gets_twenty_scenes(tmp_path: Path) -> None:
    """The paper uses 20 samples on ACDC."""
    for i in range(24):
        save(tmp_path / "data" / "images" / f"{i}.png", picture(i))
        save(tmp_path / "data" / "labels" / f"{i}.png", labelled(i))
    (tmp_path / "net.py").write_text(SEGMENTER)
    plan = Plan(methods=("eata",), model=f"{tmp_path / 'net.py'}:make", data=f"scenes:{tmp_path / 'data'}")
    seen: list[int] = []

    def estimate(_: object, images: Any, __: str) -> Fisher:
        seen.append(sum(map(len, images)))
        return Fisher()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fisher, "estimate", estimate)
        Run(plan, tmp_path / "out").adapter(Job("eata", 0))
    assert seen == [20]


def test_bn_adapt_on_acdc_uses_the_statistics_of_one_image() -> None:
    net = make("seg")
    x = images(1)
    adapter = BNAdapt.preset("segformer-b5", net)
    ours = adapter(x)
    trained = make("seg")
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    torch.testing.assert_close(ours, trained(x))
    assert not torch.allclose(ours, make("seg")(x), atol=1e-2), "not the source network under another name"
    blended = BNAdapt(make("seg"), prior=64)(x)
    assert (blended - make("seg")(x)).abs().max() < 0.3 * (ours - make("seg")(x)).abs().max()


# Backward passes ------------------------------------------------------------------------------------------------------


def test_backward_passes_are_counted_as_the_paper_does() -> None:
    """The paper counts B + |kept| for ROID, samples with a gradient for all others."""
    plan = Plan(scenario="lifelong")
    both = [result(method, {"fog": 50.0}, plan) for method in ("ROID", "EATA")]
    ways: tuple[Count, ...] = ("paper", "gradient", "graph")
    counted = {count: [row[-1] for row in paper_table(both, count=count)[1][::2]] for count in ways}
    assert counted == {"paper": ["80", "60"], "gradient": ["60", "60"], "graph": ["80", "80"]}
    both[0].domains[0].in_graph = None
    assert [row[-1] for row in paper_table(both)[1][::2]] == ["–", "60"]


def test_the_other_count_on_request(tmp_path: Path) -> None:
    (tmp_path / "roid-seed0.json").write_text(json.dumps(result("ROID", {"fog": 50.0}, Plan()).as_dict()))
    assert "| 100 | 80 |" in CliRunner().invoke(app, ["table", str(tmp_path)]).output
    assert "| 100 | 60 |" in CliRunner().invoke(app, ["table", str(tmp_path), "--count", "gradient"]).output
    wrong = CliRunner().invoke(app, ["table", str(tmp_path), "--count", "many"])
    assert wrong.exit_code == 2


# Forgetting and memory ------------------------------------------------------------------------------------------------


def test_the_upper_bound_is_tent_on_clean_images_alone() -> None:
    clean = Domain("clean", [(x, torch.zeros(len(x), dtype=torch.long)) for x in stream(3, seed=7)])
    shifted = Domain("fog", [(x, torch.zeros(len(x), dtype=torch.long)) for x in stream(3)])
    scenario = Scenario("lifelong", [shifted], clean_between=clean)
    found = evaluate(Tent(make("bn"), lr=0.1), scenario)
    assert found.clean_before == accuracy_of(Tent(make("bn"), lr=0.1), clean)
    adapter, plain = Tent(make("bn"), lr=0.1), Tent(make("bn"), lr=0.1)
    evaluate(adapter, scenario)
    for batch in run(plain, scenario):
        last = batch.logits
    assert torch.equal(adapter.last.logits, last), "the probe leaves the stream unchanged"

    found.protocol = Plan(probe="readapt").protocol
    cases = [Case("Tent", Plan(probe="readapt"), "level 5, lifelong", results=[found])]
    shown = by_domain("forgetting")(cases)
    assert "tested using Tent" in shown.notes[""]
    assert shown.tables[""][1][0][-1] == f"{100 * found.clean_before:.1f}"
    (axes,) = shown.figures[""].axes
    bound = [line for line in axes.lines if line.get_label() == "upper bound, tested using Tent"]
    assert bound[0].get_ydata()[0] == pytest.approx(100 * found.clean_before)
    found.clean_before = None
    assert "is not drawn" in by_domain("forgetting")(cases).notes[""]
    source = [*cases, replace(cases[0], row="Source")]
    assert "dashed line of Source" in by_domain("forgetting")(source).notes[""]


def test_memory_of_the_fisher_regulariser() -> None:
    """Two single-precision numbers per adapted parameter: its importance and its source value."""
    adapter = EATA(make("bn"), source=stream(1), margin=1.0, epsilon=None)
    adapted = sum(p.numel() for p in adapter.adapted)
    domain = Domain("noise", [(x, torch.zeros(len(x))) for x in stream(2)])
    before = adapter.regulariser
    found = studies.regulariser(adapter, domain, print)  # type: ignore[arg-type]
    assert found == {"memory": 2 * 4 * adapted / 2**20}
    assert adapter.regulariser is before
    with pytest.raises(TypeError, match="Tent has no Fisher regulariser"):
        studies.regulariser(Tent(make("bn")), domain, print)  # type: ignore[arg-type]


def test_efficiency_has_both_strategies_and_the_regulariser(tmp_path: Path) -> None:
    scale = SCALES["digits"].on(images=16, batch_size=16, source_images=16, only=("eata",), within=("resnet",))
    reproduce(RECIPES["efficiency"], scale, tmp_path)
    lines = (tmp_path / "efficiency.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    names = [row[0].removeprefix("| ") for row in rows[2:]]
    again = ["EATA, ε = 0.02", "EATA, replay-subset, ε = 0.02", "EATA", "EATA, replay-subset"]
    assert names == [*again, "Fisher regulariser"]
    assert float(rows[-1][-1].rstrip(" |")) > 0
    assert "EATA, replay-subset" in (tmp_path / "efficiency-paper.md").read_text()


@pytest.mark.parametrize(("scale", "drop"), [("digits", 0.2), ("cifar10", 0.4), ("paper", 0.2)])
def test_the_kl_column_has_the_drop_ratio_that_adapts(scale: str, drop: float) -> None:
    cases = RECIPES["parameters"].plans(SCALES[scale].on(data=SCALES[scale].data or "x:/y"))
    assert {case.measure.keywords["drop"] for case in cases} == {drop}  # type: ignore[union-attr]


# Normalisation --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalised, "_WARNED", set())


def test_a_normalisation_in_the_name(tmp_path: Path) -> None:
    import timm

    file = tmp_path / "weights.pt"
    net = timm.create_model("test_vit", num_classes=10)
    own = net.pretrained_cfg["mean"], net.pretrained_cfg["std"]
    assert own != IMAGENET
    torch.save(timm.create_model("test_vit").state_dict(), file)
    with pytest.warns(UserWarning, match="its own are"):
        loaded = load_network(f"timm:test_vit={file}@imagenet")
    assert loaded.name == "timm:test_vit@imagenet"
    assert loaded.model.mean.flatten().tolist() == pytest.approx(IMAGENET[0])
    assert loaded.model.std.flatten().tolist() == pytest.approx(IMAGENET[1])
    with pytest.warns(UserWarning, match="its own are"):
        other = load_network(f"timm:test_vit={file}@0.1,0.2,0.3/0.4,0.5,0.6")
    assert other.model.std.flatten().tolist() == pytest.approx([0.4, 0.5, 0.6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = load_network(f"timm:test_vit={file}")
        mean, std = (",".join(map(str, values)) for values in own)
        same = load_network(f"timm:test_vit={file}@{mean}/{std}")
    assert torch.equal(plain.model.mean, same.model.mean)
    once = load_network(f"timm:test_vit={file}@imagenet")  # warned about before
    assert torch.equal(once.model.mean, loaded.model.mean)
    one = load_network(f"timm:test_vit={file}@0.5/0.5")
    assert one.model.mean.flatten().tolist() == [0.5] * 3
    for wrong, why in (("0.5,/0.5", "@MEAN/STD"), ("imagnet", "after @ expected"), ("0.5,0.5/0.5,0.5", "3 channels")):
        with pytest.raises(NetworkError, match=why):
            load_network(f"timm:test_vit={file}@{wrong}")
    with pytest.raises(NetworkError, match="above 0"), pytest.warns(UserWarning, match="its own are"):
        load_network(f"timm:test_vit={file}@0.5/0.0")
    at = tmp_path / "w@imagenet"
    at.write_bytes(file.read_bytes())
    assert torch.equal(load_network(f"timm:test_vit={at}").model.mean, plain.model.mean)


def test_another_normalisation_is_reported_for_every_library(tmp_path: Path) -> None:
    import timm
    import torchvision
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "w.pt")
    load_network(f"torchvision:resnet18={tmp_path / 'w.pt'}@imagenet")  # its own: no warning
    with pytest.warns(UserWarning, match="resnet18 is used with mean"):
        load_network(f"torchvision:resnet18={tmp_path / 'w.pt'}@0.5,0.5,0.5/0.5,0.5,0.5")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**small, image_size=32, num_labels=10)).save_pretrained(tmp_path / "hf")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "hf")
    with pytest.warns(UserWarning, match="is used with mean"):
        load_network(f"hf:{tmp_path / 'hf'}@imagenet")
    with pytest.warns(UserWarning, match="VisionTransformer is used with mean"):
        Normalised(timm.create_model("test_vit"), *IMAGENET)
    Normalised(timm.create_model("test_vit", in_chans=1), (0.13,), (0.31,))  # other channels need other values
