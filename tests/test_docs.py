"""The README says what is true: its blocks run, its table is the committed result, its links lead somewhere."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import pytest
import torch
from acclimate.paper.numbers import join, show

from acclimate import METHODS, Source
from acclimate.bench.evaluate import Result
from acclimate.bench.networks import load_network
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.report import markdown
from acclimate.bench.result_folder import read_results
from acclimate.bench.tables import FORMATS
from acclimate.data.digits import load_digits
from acclimate.methods.presets import hyper_parameters
from acclimate.paper.published import paper_rows
from acclimate.paper.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    digits = load_digits()[1].x
    names: dict[str, object] = {
        "net": digits_resnet(),
        "clean_batches": digits[:128].split(64),
        "stream": digits[128:256].split(64),
        "generator": torch.Generator(),
    }
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize("page", ["benchmark", "corruptions", "engine", "paper", "segmentation"])
def test_the_code_in_the_pages_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    counts = {"benchmark": ("results", 2), "corruptions": ("foggy", 8), "engine": ("logits", 8)}
    counts["paper"] = ("written", 5)
    name, count = counts.get(page, ("logits", 1))
    assert len(names[name]) == count


def test_the_cost_of_steps_is_the_committed_result() -> None:
    from benchmarks import loading, overheads, precision, steps

    page, results = (ROOT / "docs" / "engine.md").read_text(), ROOT / "benchmarks" / "results"
    for device in ("cpu", "h200"):
        assert steps.markdown(results / f"steps_{device}.json") in page
    costs = [
        f"{row.median:.1f} ms"
        for row in steps.read(json.loads((results / "steps_h200.json").read_text()))
        if (row.method, row.kept) == ("EATA", 0.6)
        and (row.engine, row.precision) in (("eager", "fp32"), ("compiled", "bf16"))
        and (row.network, row.strategy, row.engine) != ("ViT-Base", "masked", "compiled")
        and row.strategy != "sparse, detached"
    ]
    assert len(costs) == 4
    assert all(cost in README for cost in costs)
    assert steps.gains(results / "steps_h200.json") in page
    for device in ("cpu", "h200"):
        assert overheads.markdown(results / f"overheads_{device}.json") in page
        assert precision.markdown(results / f"precision_{device}.json") in page
        assert loading.markdown(results / f"loading_{device}.json") in page
    two = json.loads((results / "loading_cpu.json").read_text())
    for row in two["rows"][:2]:
        assert min(two["memory"]) <= median(row["kept_fed"]) <= max(two["memory"])
        assert median(row["fed"]) < min(two["memory"])
    told = json.loads((results / "loading_h200.json").read_text())
    speed = median(told["memory"])
    smooth, noisy, large = (
        {name: median(row[name]) / speed for name in loading.COLUMNS} for row in told["rows"] if row["workers"] == 15
    )
    (busy,) = (
        1e3 * row.batch / row.median
        for row in steps.read(json.loads((results / "steps_h200.json").read_text()))
        if (row.network, row.method, row.strategy, row.precision, row.kept)
        == ("ViT-Base", "EATA", "sparse", "bf16", 0.6)
    )
    flat = " ".join(page.split())
    assert min(smooth["read"], noisy["read"]) > 1.25
    assert f"it runs at {100 * noisy['fed']:.0f} % of its speed" in flat
    assert all(kind["kept_fed"] <= kind["fed"] for kind in (smooth, noisy))
    (few,) = (r["fed"] for r in told["rows"] if (r["files"], r["workers"]) == ("224×224, noisy", 4))
    assert f"Four workers feed it noisy files at {100 * median(few) / speed:.0f} %." in flat
    assert f"With 60 % kept it takes {round(busy, -2):,.0f} a second" in flat
    assert 0.3 < large["fed"] < 0.4
    assert f"from the cache at {100 * large['kept_fed']:.0f} %" in flat
    vit = {
        (row.method, row.kept): row.median
        for row in steps.read(json.loads((results / "steps_h200.json").read_text()))
        if (row.network, row.engine, row.precision, row.batch) == ("ViT-Base", "compiled", "bf16", 64)
        and row.strategy in ("", "replay-subset")
    }
    source, tent = (next(time for key, time in vit.items() if key[0] == name) for name in ("Source", "Tent"))
    low, high = (vit["EATAC", share] for share in (0.18, 0.6))
    assert low < tent < high
    assert f"meets Tent's time at {18 + 42 * (tent - low) / (high - low):.0f} %" in page
    again = 0.6 * tent
    assert f"{source:.1f} + 0.6 · {tent:.1f} = {source + again:.1f} ms" in page
    assert f"14.1 to {source + 0.9 * again:.1f}, and the {high:.1f} measured to {high - 0.1 * again:.1f}" in page


def test_the_cost_of_segmenters_is_the_committed_result() -> None:
    from benchmarks import segmentation

    file = ROOT / "benchmarks" / "results" / "segmentation_h200.json"
    assert segmentation.markdown(file) in (ROOT / "docs" / "segmentation.md").read_text()
    assert max(row["peak_mb"] for row in json.loads(file.read_text())["rows"]) < 24 * 1024


@pytest.mark.parametrize("method", ["sar", "rdumb", "eata-c"])
def test_methods_that_select_keep_a_fixed_share_there(method: str) -> None:
    """Random networks are sure of nothing: left to themselves, they would have nothing to learn from."""
    from benchmarks import methods

    x = torch.rand(10, 1, 32, 32)
    adapter = methods.make(method, "small ViT", x, "eager")
    adapter(x)
    assert int(adapter.last.kept.sum()) == 6
    assert adapter.last.updated


@pytest.mark.parametrize("method", ["source", "eata"])
def test_the_cost_of_a_method_is_measured(method: str) -> None:
    from benchmarks import methods

    row = methods.measure(method, "small ResNet", torch.rand(8, 1, 32, 32), "eager", 3)
    assert row["method"] == METHODS[method].__name__
    assert 0 < row["low"] <= row["milliseconds"] <= row["high"]
    assert row["seconds"] == pytest.approx(row["milliseconds"] * 50_000 / 8 / 1e3)


def test_reading_is_timed_after_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import loading

    images = loading.files(tmp_path / "files" / "class", (40, 30), 20, 3)
    told = loading.stream(images, workers=2, batches=4)
    assert (len(told), told.workers, loading.ahead(2)) == (17, 2, 5)
    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    used: list[int] = []
    batches = [(torch.zeros(size, 3, 2, 2), torch.zeros(size)) for size in (5, 5, 4, 2, 6, 3)]
    assert loading.rates(batches, 2, 2, lambda x: used.append(len(x))) == [(4 + 2) / 2.0, (6 + 3) / 3.0]
    assert used == [5, 5, 4, 2, 6, 3]


def test_the_scenes_are_the_committed_results() -> None:
    from acclimate.bench.result_folder import read_results
    from acclimate.bench.tables import paper_table

    folder, page = ROOT / "benchmarks" / "results" / "camvid", (ROOT / "docs" / "segmentation.md").read_text()
    results = read_results([folder])
    assert {stored.result.method for stored in results} >= {"Source", "Tent", "CoTTA", "DAT", "EATA", "EATAC"}
    assert all(stored.result.origin["commit"] for stored in results)
    assert FORMATS["markdown"](*paper_table(results)) in page
    clean = json.loads((folder / "scores.json").read_text())["miou"]
    assert f"{100 * clean['val']:.1f} on validation and {100 * clean['test']:.1f} on these" in page


def test_the_networks_for_cifar10_are_as_accurate_as_is_said() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    told = {}
    for name in ("resnet", "vit"):
        (stored,) = (
            stored
            for stored in read_results([ROOT / "benchmarks" / "results" / "cifar10" / name])
            if stored.result.method == "Source"
        )
        assert stored.content["arguments"]["probe_images"] == 10_000
        assert stored.content["fingerprint"]["weights"] == Source(load_network(f"cifar10-{name}").model).fingerprint()
        told[name] = f"{100 * stored.result.clean_before:.1f}"
    assert f"the ResNet is right in {told['resnet']} % and the ViT in {told['vit']} %" in page


def images(result: dict[str, Any]) -> int:
    """Of each domain."""
    return round(result["images_per_second"] * result["seconds"] / len(result["domains"]))


def cases(recipe: str) -> list[dict[str, Any]]:
    """Of a committed file of numbers."""
    content = json.loads((ROOT / "benchmarks" / "results" / "paper" / f"{recipe}.json").read_text())
    found: list[dict[str, Any]] = content["cases"]
    return found


Measured = dict[str, dict[str, dict[str, list[float]]]]


def measured(recipe: str) -> Measured:
    """Of each network and method, a number a seed, in per cent."""
    found: Measured = {}
    for case in cases(recipe):
        methods = found.setdefault(case["column"], {})
        for name in {result["method"] for result in case["results"]}:
            own = [result for result in case["results"] if result["method"] == name]
            assert sorted(result["seed"] for result in own) == [0, 1, 2]
            assert all(result["origin"]["commit"] and len(result["domains"]) == 15 for result in own)
            assert all("H200" in result["origin"]["device"] for result in own)
            methods[name] = {key: [100 * r[key] for r in own] for key in ("accuracy", "ece", "kept")}
            methods[name]["forwards"] = [r["forwards"] / (images(r) * len(r["domains"])) for r in own]
    return found


def test_the_page_of_results_is_filled_from_them(tmp_path: Path) -> None:
    from benchmarks.paper import PAGE, RESULTS, filled

    page = PAGE.read_text()
    assert page.count("<!-- end -->") == 17
    assert filled(page) == page
    recipes = [*RESULTS.glob("*.json")]
    assert len(recipes) == 14
    for file in recipes:
        drawn = show(RECIPES[file.stem], join([file]), tmp_path)
        assert (tmp_path / file.name).read_text() == file.read_text()
        for table in (path for path in drawn if path.suffix == ".md"):
            assert table.read_text() == (RESULTS / table.name).read_text(), table.name


def test_committed_results_are_of_todays_presets() -> None:
    """A preset that changes leaves results behind that its command does not come to any more."""
    checked = set()
    for file in sorted((ROOT / "benchmarks" / "results" / "paper").glob("*.json")):
        pairs = [(case, result) for case in cases(file.stem) for result in case["results"]]
        for case, result in pairs:
            usual = hyper_parameters(result["method"], case["plan"]["preset"])
            if "optimizer" in usual:
                usual["lr"] = usual.pop("optimizer").keywords["lr"]
            (own,) = case["plan"]["overrides"].values() or [{}]  # where there are any, they are of one method
            given = usual | own
            for name in ("lr", "drop", "alpha", "beta", "views", "threshold", "restoration", "floor"):
                if name in given:
                    assert f"{name}={given[name]}" in result["call"], (file.name, case["row"], case["x"])
                    checked.add((result["method"], name))
    assert checked >= {("EATAC", "drop"), ("EATA", "beta"), ("CoTTA", "lr"), ("TEA", "lr"), ("SAR", "floor")}


def test_what_is_said_to_hold_on_cifar10_does() -> None:
    """Each phrase is made from the results; each comparison is made again."""
    lifelong, single = measured("lifelong"), measured("single-domain")

    def told(found: Measured, network: str, method: str, key: str = "accuracy") -> float:
        return mean(found[network][method][key])

    def over(one: str, other: str, found: Measured, key: str = "accuracy") -> list[float]:
        """By how much one has more than the other, on both networks."""
        return [told(found, network, one, key) - told(found, network, other, key) for network in ("resnet", "vit")]

    ahead = [over("CoTTA", "EATAC", found)[0] for found in (lifelong, single)]

    for found in (lifelong, single):
        assert [len(methods) for methods in found.values()] == [13, 12]
        resnet, vit = found["resnet"], found["vit"]
        others = [name for name in resnet if name not in ("EATAC", "ETAC", "CoTTA", "TEA")]
        assert min(resnet["CoTTA"]["accuracy"]) > max(max(v["accuracy"]) for n, v in resnet.items() if n != "CoTTA")
        assert min(resnet["EATAC"]["accuracy"]) > max(max(resnet[name]["accuracy"]) for name in others)
        for ours in ("EATAC", "ETAC"):
            assert max(resnet[ours]["ece"]) < min(min(resnet[name]["ece"]) for name in others)
        assert (mean(resnet["TEA"]["accuracy"]) < 40) == (found is lifelong)
        assert min(vit, key=lambda name: mean(vit[name]["ece"])) == "EATAC"
        assert max(vit, key=lambda name: mean(vit[name]["accuracy"])) == "ROID"
        assert all(told(found, network, "EATA") > told(found, network, "Tent") for network in found)
        for network, methods in found.items():  # but for one, by more than the seeds differ
            clear = min(methods["EATAC"]["accuracy"]) > max(methods["EATA"]["accuracy"])
            assert clear != (found is single and network == "vit")
        assert all(mean(methods["EATA"]["kept"]) < 100 for methods in found.values())
    for name in ("Tent", "SAR", "RDumb", "ETA", "EATA"):
        assert told(lifelong, "vit", name, "ece") > told(lifelong, "vit", "Source", "ece")
    rows = [row for row in paper_rows() if (row.data, row.method) == ("imagenet-c", "EATAC")]
    paper = {(row.scenario, row.network): row.average[1] for row in rows}
    for network, theirs, low, high in (("resnet", "resnet50", 1.5, 2.3), ("vit", "vit-base", 3.0, 5.4)):
        for scenario, found in (("lifelong", lifelong), ("single-domain", single)):
            assert low < told(found, network, "EATAC", "ece") / paper[scenario, theirs] < high

    rows = [row for row in paper_rows() if (row.data, row.scenario, row.method) == ("imagenet-c", "lifelong", "EATA")]
    kept = {row.network: 100 * (row.backwards or 0) / (row.forwards or 1) for row in rows}
    seeds = lifelong["vit"]["ETA"]["accuracy"]
    sources = [told(lifelong, network, "Source", "ece") for network in ("resnet", "vit")]
    gained = [told(lifelong, "resnet", name) - told(lifelong, "resnet", "Source") for name in ("BNAdapt", "EATAC")]
    rows = [row for row in paper_rows() if (row.data, row.network) == ("imagenet-c", "resnet50")]
    averages = {(row.method, row.scenario): row.average[0] for row in rows}
    gaps = {round(averages["CoTTA", s] - averages["EATAC", s]) for s in ("lifelong", "single-domain")}
    assert gaps == {-11}

    def passes(*methods: str) -> list[float]:
        return [mean(lifelong["resnet"][name]["forwards"]) for name in methods]

    def alone(corruption: str) -> list[float]:
        """CoTTA and the source on one corruption."""
        on_vit = [result for case in cases("single-domain") if case["column"] == "vit" for result in case["results"]]
        found = {
            name: [
                d["accuracy"] for r in on_vit if r["method"] == name for d in r["domains"] if d["name"] == corruption
            ]
            for name in ("CoTTA", "Source")
        }
        return [100 * mean(accuracies) for accuracies in found.values()]

    phrases = (
        "{:.1f} lifelong and {:.1f} single-domain:".format(*(told(f, "resnet", "EATAC") for f in (lifelong, single))),
        "by {:.1f} and {:.1f} points of ECE lifelong".format(*over("EATA", "EATAC", lifelong, "ece")),
        "by {:.1f} and {:.1f} single-domain. On the ViT".format(*over("EATA", "EATAC", single, "ece")),
        "by {:.1f} and {:.1f} points lifelong and".format(*over("EATAC", "EATA", lifelong)),
        "and by {:.1f} and {:.1f} single-domain; the last".format(*over("EATAC", "EATA", single)),
        "gains {:.1f} and {:.1f} points by it lifelong".format(*over("EATAC", "ETAC", lifelong)),
        f"loses {told(single, 'vit', 'ETA') - told(lifelong, 'vit', 'ETA'):.1f} points of accuracy",
        f"its seeds lie {max(seeds) - min(seeds):.1f} points apart",
        f"its ECE rises by {told(lifelong, 'vit', 'EATA', 'ece') - told(single, 'vit', 'EATA', 'ece'):.1f}",
        f"to {told(lifelong, 'vit', 'Tent'):.1f} %, which is chance",
        "{:.1f} of the {:.1f} points that EATA-C gains".format(*gained),
        f"leads it: {told(lifelong, 'vit', 'ROID'):.1f} lifelong and {told(single, 'vit', 'ROID'):.1f} single-domain,",
        f"where EATA-C has {told(lifelong, 'vit', 'EATAC'):.1f} and {told(single, 'vit', 'EATAC'):.1f}.",
        f"from {told(lifelong, 'resnet', 'EATA', 'kept'):.0f} % and {told(lifelong, 'vit', 'EATA', 'kept'):.0f} % of",
        "the paper's from {:.0f} % and {:.0f} %:".format(*(kept[name] for name in ("resnet50", "vit-base"))),
        f"{told(lifelong, 'vit', 'SAR'):.1f} lifelong, where the source has {told(lifelong, 'vit', 'Source'):.1f}",
        "{:.1f} and {:.1f} where the paper's have".format(*sources),
        "it is eleven points behind",
        "{} forward passes an image, where EATA-C takes {:.0f}".format(*(round(p) for p in passes("CoTTA", "EATAC"))),
        "takes {:.0f} forward and 22 backward passes".format(*passes("TEA")),
        "leads it by {:.1f} points lifelong and {:.1f} single-domain".format(*ahead),
        "an ECE of {:.1f} and {:.1f};".format(*(told(f, "resnet", "CoTTA", "ece") for f in (lifelong, single))),
        "lifelong they have {:.1f} and {:.1f}".format(*(told(lifelong, "vit", name) for name in ("CoTTA", "TEA"))),
        "single-domain {:.1f} and {:.1f}, where".format(*(told(single, "vit", name) for name in ("CoTTA", "TEA"))),
        "CoTTA has {:.1f} at 1e-5 and TEA {:.1f} at 1e-4".format(*(told(lifelong, "vit", n) for n in ("CoTTA", "TEA"))),
        "on Gaussian noise they bring it to {:.1f}, where the source has {:.1f}".format(*alone("gaussian_noise")),
        "in defocus blur to {:.1f}, where the source has {:.1f}".format(*alone("defocus_blur")),
        "{:.1f} and {:.1f} on a tenth".format(*(told(lifelong, network, "MEMO") for network in ("resnet", "vit"))),
        "{:.1f} and {:.1f} on all;".format(*(told(lifelong, network, "Source") for network in ("resnet", "vit"))),
    )
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    for phrase in phrases:
        assert phrase in page, phrase
    assert told(single, "vit", "EATA") <= told(lifelong, "vit", "EATA")
    tenth = [
        100 * result["domains"][9]["accuracy"]
        for case in cases("lifelong")
        for result in case["results"]
        if (case["column"], result["method"]) == ("resnet", "TEA")
    ]
    assert {f"{accuracy:.0f}" for accuracy in tenth} == {"11"}
    said("to 11 % on the tenth corruption")
    assert mean(lifelong["vit"]["CoTTA"]["forwards"]) > 0.97 * 35  # views of almost every batch
    assert abs(told(single, "resnet", "TEA") - told(single, "resnet", "EATAC")) < 0.1
    assert abs(told(single, "vit", "ETAC", "ece") - told(single, "vit", "EATAC", "ece")) < 0.1


Key: TypeAlias = "str | float | None"


def over_seeds(recipe: str, *by: str, seeds: int = 3, device: str = "H200") -> dict[tuple[Key, ...], dict[str, float]]:
    """Means over the seeds, in per cent, of each case; cases by row, column or x."""
    found = {}
    for case in cases(recipe):
        results = case["results"]
        assert all(result["origin"]["commit"] and device in result["origin"]["device"] for result in results)
        assert sorted(result["seed"] for result in results) == [*range(seeds)]
        told = {key: [r[key] or 0 for r in results] for key in ("accuracy", "ece", "clean_after", "backwards", "kept")}
        found[tuple(case[key] for key in by)] = {key: 100 * mean(values) for key, values in told.items()}
    assert len(found) == len(cases(recipe))
    return found


def said(*phrases: str) -> None:
    """On the page of results."""
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    for phrase in phrases:
        assert phrase in page, phrase


def test_what_is_said_of_the_parts_holds() -> None:
    found = {(int(r.split(":")[0]), n): v for (r, n), v in over_seeds("ablation", "row", "column").items() if ":" in r}

    def gain(network: str, without: int, part: int, key: str = "accuracy") -> float:
        return found[part, network][key] - found[without, network][key]

    for network, entropy in product(("resnet", "vit"), (2, 5, 8, 11)):
        assert gain(network, entropy, entropy - 1) > 0 > gain(network, entropy, entropy - 1, "ece")
    for network, key, row in product(("resnet", "vit"), ("accuracy", "ece"), (1, 2, 3, 7, 8, 9)):
        assert abs(gain(network, row, row + 3, key)) < 0.25
    selected = {
        (network, key): [gain(network, row, row + 6, key) for row in range(1, 7)]
        for network, key in product(("resnet", "vit"), ("accuracy", "ece"))
    }
    assert all(abs(change) < 0.25 for key in ("accuracy", "ece") for change in selected["resnet", key])
    accuracy, ece = selected["vit", "accuracy"], selected["vit", "ece"]
    saved = {network: [100 - found[row, network]["kept"] for row in range(7, 13)] for network in ("resnet", "vit")}
    said(
        f"gains {gain('resnet', 10, 12):.1f} points of accuracy on the ResNet and {gain('vit', 10, 12):.1f} on the ViT",
        f"ECE rises by {gain('resnet', 10, 12, 'ece'):.1f} and {gain('vit', 10, 12, 'ece'):.1f}.",
        f"costs the ViT {-gain('vit', 4, 6):.1f} points, and ECE rises by {gain('vit', 4, 6, 'ece'):.1f}.",
        f"gains {min(accuracy):.1f} to {max(accuracy):.1f} points and lowers ECE by {-max(ece):.1f} to {-min(ece):.1f}",
        f"{min(saved['resnet']):.0f} % to {max(saved['resnet']):.0f} % on the ResNet",
        f"and {min(saved['vit']):.0f} % to {max(saved['vit']):.0f} % on the ViT",
    )


def test_what_is_said_of_mixed_streams_and_of_forgetting_holds() -> None:
    mixed = over_seeds("mixed", "row", "column")
    ahead = [
        [mixed["EATAC", f"level {level}"][key] - mixed["EATA", f"level {level}"][key] for level in (3, 5)]
        for key in ("accuracy", "ece")
    ]
    assert all(
        mixed["Tent", level]["accuracy"] < mixed["Source", level]["accuracy"] for level in ("level 3", "level 5")
    )
    said(
        f"by {ahead[0][0]:.1f} points over EATA at level 3 and {ahead[0][1]:.1f} at level 5",
        f"its ECE is lower by {-ahead[1][0]:.1f} and {-ahead[1][1]:.1f}.",
    )
    forgetting = cases("forgetting")
    clean = {
        (case["row"], case["column"]): [100 * domain["clean_accuracy"] for domain in case["results"][0]["domains"]]
        for case in forgetting
    }
    assert all(case["plan"]["probe_images"] == 10_000 for case in forgetting)
    tent, eata, source = (clean[name, "level 5, lifelong"][-1] for name in ("Tent", "EATA", "Source"))
    (still,) = (
        stored.result
        for stored in read_results([ROOT / "benchmarks" / "results" / "cifar10" / "resnet"])
        if stored.result.method == "BNAdapt"
    )
    assert "prior=0" in still.call
    said(
        f"Tent has {tent:.1f} % of the clean images right, EATA {eata:.1f} %, and the source {source:.1f} %",
        f"without any adaptation, it has {100 * (still.clean_before or 0):.1f} %",
    )
    fog = {row: told for (row,), told in over_seeds("calibration", "row").items()}
    assert min(fog, key=lambda row: fog[row]["ece"]) == "EATAC"
    assert max(fog, key=lambda row: fog[row]["accuracy"]) == "EATAC"
    seeds = {case["row"]: sorted(100 * r["accuracy"] for r in case["results"]) for case in cases("calibration")}
    said(f"its seeds lie {seeds['EATAC'][-1] - seeds['EATAC'][0]:.1f} points apart")
    assert seeds["EATAC"][0] < seeds["EATA"][0] < seeds["EATA"][-1] < seeds["EATAC"][1]
    for case in cases("calibration"):
        assert all(sum(r["bins"]["confident"]) > sum(r["bins"]["correct"]) for r in case["results"])


def test_what_is_said_of_the_sweeps_holds() -> None:
    e0, epsilon, alpha, beta, drop = (
        {x: told for (x,), told in over_seeds(f"sweep-{name}", "x").items()}
        for name in ("e0", "epsilon", "alpha", "beta", "drop")
    )
    assert [*e0] == sorted(e0, key=lambda x: e0[x]["accuracy"])
    said(f"by {e0[0.55]['accuracy'] - e0[0.4]['accuracy']:.1f} points over 0.4")
    stable = [told["accuracy"] for x, told in epsilon.items() if x >= 0.04]
    assert max(stable) - min(stable) < 0.2
    assert all(epsilon[x]["kept"] < 1 for x in (0.01, 0.02))
    by_ece = sorted(alpha, key=lambda x: alpha[x]["ece"])
    assert (by_ece[0], by_ece[-1]) == (0, 0.3)
    assert all(abs(told["accuracy"] - alpha[0.1]["accuracy"]) < 0.25 for x, told in alpha.items() if x >= 0.1)
    said(
        f"accuracy rises by {alpha[0.1]['accuracy'] - alpha[0]['accuracy']:.1f} points up to 0.1 and stays",
        "lowest, {:.1f}, without the min-max entropy, {:.1f} at 0.1 and highest, {:.1f}, at 0.3".format(
            *(alpha[x]["ece"] for x in (0, 0.1, 0.3))
        ),
    )
    assert max(told["accuracy"] for told in beta.values()) - beta[0]["accuracy"] < 0.25
    assert max(r["accuracy"] for r in beta.values()) - min(r["accuracy"] for r in beta.values()) < 1
    clean = {x: told["clean_after"] for x, told in beta.items()}
    assert clean[0] == min(clean.values())
    said(f"it gains up to {max(clean.values()) - clean[0]:.1f} points")
    assert [*drop] == sorted(drop, key=lambda x: drop[x]["accuracy"]) == sorted(drop, key=lambda x: -drop[x]["ece"])
    gained = [abs(drop[0.4][key] - drop[0.2][key]) for key in ("accuracy", "ece")]
    said("{:.1f} points of accuracy and {:.1f} of ECE over its 0.2".format(*gained))
    found = over_seeds("drop-rates", "row", "column", "x", seeds=1)
    pairs = {key[:2]: (told, found[(*key[:2], 0.4)]) for key, told in found.items() if key[2] == 0.2}
    assert len(pairs) == 6
    assert all(four["ece"] < two["ece"] for two, four in pairs.values())
    assert sum(four["accuracy"] > two["accuracy"] for two, four in pairs.values()) == 5
    usual = [pairs["1 × the rate", network] for network in ("resnet", "vit")]
    said(
        "gains {:.1f} points lifelong on the ResNet and {:.1f} on the ViT over 0.2".format(
            *(four["accuracy"] - two["accuracy"] for two, four in usual)
        ),
        "its ECE falls by {:.1f} and {:.1f}".format(*(two["ece"] - four["ece"] for two, four in usual)),
    )
    for network in ("resnet", "vit"):
        by_drop = {key[2]: told["accuracy"] for key, told in found.items() if key[:2] == ("1 × the rate", network)}
        assert by_drop[0.4] == max(by_drop.values())
        assert by_drop[0.8] < by_drop[0.6]
    assert found["1 × the rate", "vit", 0.8]["accuracy"] < mean(measured("lifelong")["vit"]["Source"]["accuracy"])


def test_what_is_said_of_the_rates_holds() -> None:
    found = over_seeds("rates", "row", "column", "x", seeds=1)

    def best(method: str, network: str) -> Key:
        own = {key[2]: told["accuracy"] for key, told in found.items() if key[:2] == (method, network)}
        return max(own, key=lambda x: own[x])

    assert best("EATAC", "resnet") == best("EATA", "vit") == 1
    others = (("EATA", "resnet"), ("EATAC", "vit"))
    assert all(best(*other) == 5 for other in others)
    more = {key: [found[(*other, 5)][key] - found[(*other, 1)][key] for other in others] for key in ("accuracy", "ece")}
    drops = over_seeds("drop-rates", "row", "column", "x", seeds=1)
    usual, thrice = (drops[f"{times} × the rate", "vit", 0.4] for times in (1, 3))
    three = {key: thrice[key] - usual[key] for key in ("accuracy", "ece")}
    fallen = found["EATA", "vit", 1]["accuracy"] - found["EATA", "vit", 5]["accuracy"]
    said(
        "gains {:.1f} points at five times its rate, EATA-C on the ViT {:.1f} (".format(*more["accuracy"]),
        "ECE rises by {:.1f} and {:.1f} ({:.1f})".format(*more["ece"], three["ece"]),
        f"at three times, by the sweep of drop ratios, {three['accuracy']:.1f})",
        f"EATA falls by {fallen:.1f} points on the ViT",
    )
    source = mean(measured("lifelong")["vit"]["Source"]["accuracy"])
    assert all(told["accuracy"] < source for key, told in found.items() if key[:2] == ("Tent", "vit"))
    thirty = {key[:2]: told["accuracy"] for key, told in found.items() if key[2] == 30}
    assert {key for key, accuracy in thirty.items() if accuracy < 20} == {
        ("EATAC", "resnet"),
        ("EATAC", "vit"),
        ("EATA", "vit"),
        ("Tent", "vit"),
    }


def test_what_is_said_of_slow_methods_holds() -> None:
    found = over_seeds("slow-rates", "row", "column", "x", seeds=1)
    assert {case["plan"]["images"] for case in cases("slow-rates")} == {2000}
    accuracy = {key: told["accuracy"] for key, told in found.items()}
    lifelong, single = ("vit, lifelong", "vit, single-domain")
    falling = [accuracy["CoTTA", lifelong, lr] for lr in (1e-6, 1e-5, 1e-4, 1e-3)]
    assert falling == sorted(falling, reverse=True)
    assert abs(accuracy["CoTTA", lifelong, 1e-6] - accuracy["CoTTA", single, 1e-6]) < 0.5
    for scenario, lr in ((lifelong, 1e-5), (single, 1e-4)):
        own = {key[2]: value for key, value in accuracy.items() if key[:2] == ("TEA", scenario)}
        assert max(own, key=lambda x: own[x]) == lr
        assert own[lr] - own[1e-6] < 0.5
    most = [max(v for key, v in accuracy.items() if key[:2] == (name, single)) for name in ("CoTTA", "TEA")]
    said(
        "none brings CoTTA above {:.1f} or TEA above {:.1f}.".format(*most),
        f"where they have {accuracy['CoTTA', lifelong, 1e-5]:.1f} and {accuracy['TEA', lifelong, 1e-4]:.1f} on a fifth",
    )


def test_the_seconds_of_the_engine_are_those_of_its_steps() -> None:
    from benchmarks import methods, steps

    rows = steps.read(json.loads((ROOT / "benchmarks" / "results" / "steps_h200.json").read_text()))
    fast = {
        (row.network, row.strategy, row.kept): f"{row.median * methods.IMAGES / 64 / 1e3:.1f} s"
        for row in rows
        if (row.method, row.engine, row.precision, row.batch) == ("EATA", "compiled", "bf16", 64)
    }
    resnet, vit = fast["ResNet-50", "masked", 0.6], fast["ViT-Base", "sparse", 0.6]
    said(f"EATA takes {resnet} and {vit}, and with 18 % kept", f"{fast['ViT-Base', 'sparse', 0.18]} on ViT-Base")


def test_the_speeds_are_the_committed_results() -> None:
    page = (ROOT / "docs" / "corruptions.md").read_text()
    gpu, cpu = (
        json.loads((ROOT / "benchmarks" / "results" / f"corruptions_{name}.json").read_text())["speed"]
        for name in ("h200", "cpu")
    )
    for family, on_gpu in gpu.items():
        there, here = on_gpu, cpu[family]
        fast = f"{there['ours']:,.0f} | {there['ratio']:.0f}× | {here['ours']:,.0f} | {here['ratio']:.1f}×"
        line = f"| {family} | {fast} |"
        assert line in page, line


def test_gpu_tests_that_are_asked_for_are_not_skipped_in_silence(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As CONTRIBUTING has it, `pytest -m gpu`: without a GPU it fails."""
    import conftest

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(request.config.option, "markexpr", "gpu")
    with pytest.raises(pytest.UsageError, match="none here"):
        conftest.pytest_collection_modifyitems(request.config, [])


def test_every_method_has_a_row_and_a_page() -> None:
    for method in METHODS.values():
        row = re.search(rf"\| \[`{method.__name__}`\]\((docs/methods/[a-z-]+\.md)\)", README)
        assert row, method
        page = (ROOT / row[1]).read_text()
        assert f"acclimate.{method.__name__}(" in page
        for heading in ("Idea", "Objective", "Defaults", "Cost", "When to use it", "What goes wrong"):
            assert f"**{heading}.**" in page, (row[1], heading)


@pytest.mark.parametrize("name", ["demo", "compare"])
def test_the_readme_tables_are_the_committed_results(name: str) -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    results = [Result.from_dict(r) for r in committed["results"]]
    networks = {r.network for r in results}
    assert networks == {"SmallResNet", "SmallViT"}
    for network in networks:
        assert markdown([r for r in results if r.network == network]) in README
    assert committed["command"].startswith(f"acclimate {name}")
    assert all(r.origin["commit"] for r in results)


def test_the_savings_are_the_committed_results() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "subnetworks_h200.json").read_text())["rows"]
    ratio = {(r["network"], r["drop"], r["per"]): r["ratio_to_full"] for r in rows}
    for network, drop in {(network, drop) for network, drop, per in ratio if per == "batch"}:
        shown = f"{ratio[network, drop, 'sample']:.2f}× | {ratio[network, drop, 'batch']:.2f}×"
        assert re.search(rf"\| {network} \| {drop} \| \d+% \| {shown} \|", README), (network, drop)


PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
