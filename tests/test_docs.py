"""The pages: their code runs, their tables are current, their links lead somewhere, their results fit the presets."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from acclimate import EATA, EATAC, METHODS, Source
from acclimate.bench.networks import load_network
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.result_folder import read_results
from acclimate.bench.tune import Trial, choose
from acclimate.cli import app
from acclimate.core.settings_file import is_settings_file, read_settings
from acclimate.data.digits import load_digits
from acclimate.paper.numbers import Numbers
from acclimate.paper.recipes import RECIPES
from benchmarks import docs_tables, loading, methods

ROOT = Path(__file__).parents[1]
PAGES = [str(page.relative_to(ROOT)) for page in (*docs_tables.pages(), ROOT / "CONTRIBUTING.md")]
RECIPE_FILES = sorted(
    file
    for folder in (docs_tables.RECIPE_FILES, docs_tables.IMAGENET, docs_tables.DIGITS, docs_tables.CPU)
    for file in folder.rglob("*.json")
    if not file.name.startswith("settings-")
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:.*many workers")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does for one process
    test = load_digits()[1]
    digits, labels = test.x, test.y
    names: dict[str, object] = {
        "net": digits_resnet(),
        "other_net": digits_resnet(),
        "clean_batches": digits[:128].split(64),
        "stream": digits[128:256].split(64),
        "labels": labels[128:256].split(64),
        "model": Source(digits_resnet()),
        "generator": torch.Generator(),
        "held_out": digits[256:512],
        "x": digits[:64],
        "image": digits[:1],
    }
    for block in blocks(page):
        exec(block, names)


def commands(page: str) -> list[str]:
    """What follows `acclimate` in the page's shell blocks."""
    found = re.findall(r"^```(\S*).*?\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    shell = "\n".join(block for kind, block in found if kind in ("", "bash")).replace("\\\n", " ")
    return re.findall(r"^ *(?:torchrun .* -m )?acclimate (.*)", shell, re.MULTILINE)


def unknown(line: str) -> set[str]:
    """Names in a command line that are neither commands nor options. Nothing is run."""
    command, words = typer.main.get_command(app), shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        if words[0] not in command.commands:
            return {words[0]}
        command = command.commands[words.pop(0)]
    known = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
    return {name[0] for word in words if (name := re.match(r"--[a-z][a-z-]*(?==|$)", word))} - known


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_shell_commands_exist(page: str) -> None:
    assert [(line, names) for line in commands(page) if (names := unknown(line))] == []


def test_unknown_commands_are_found() -> None:
    assert unknown("walk --method eata") == {"walk"}
    assert unknown("paper run lifelong --speed=3 --scale digits $gpu  # --more") == {"--speed"}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_current(page: str) -> None:
    """`make docs-tables` writes them; an unknown name is an error."""
    text = (ROOT / page).read_text()
    assert docs_tables.filled(text) == text
    assert text.count("\n<!-- table ") == text.count("\n<!-- end -->") == len(docs_tables.BLOCK.findall(text))


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        docs_tables.filled("<!-- table nonsense -->\n<!-- end -->")
    page = "before\n<!-- table summary -->\nof yesterday\n<!-- end -->\nafter"
    new = docs_tables.filled(page)
    assert "of yesterday" not in new
    assert new.startswith("before\n<!-- table summary -->\n| method |")
    assert new.endswith("<!-- end -->\nafter")
    assert docs_tables.filled(new) == new


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_figure_is_shown_and_nothing_else_is_committed() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert [name for name in docs_tables.FIGURES if f"images/{name}.svg" not in text] == []
    files = [file for file in (ROOT / "benchmarks" / "results").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json"}
    assert sum(file.stat().st_size for file in files) < 4_200_000


def test_every_method_has_a_page() -> None:
    listed = (ROOT / "docs" / "methods" / "README.md").read_text()
    for method in METHODS.values():
        row = re.search(rf"\[`{method.__name__}`\]\(([a-z-]+\.md)\)", listed)
        assert row, method
        assert f"acclimate.{method.__name__}(" in (ROOT / "docs" / "methods" / row[1]).read_text()


# Committed results


@pytest.mark.parametrize("file", RECIPE_FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_committed_numbers_are_complete(file: Path) -> None:
    numbers = Numbers.read(file)
    assert numbers.recipe == file.stem in RECIPES
    assert numbers.text() == file.read_text(), "compact"
    on_gpu = file.parent in (docs_tables.RECIPE_FILES, docs_tables.IMAGENET)
    for case in numbers.cases:
        for result in case.results:
            assert result.origin["commit"]
            assert "H200" in str(result.origin["device"]) or not on_gpu
            assert result.seed in case.plan.seeds
    prefix = "imagenet-" if file.parent == docs_tables.IMAGENET else "cpu-" if docs_tables.CPU in file.parents else ""
    shown = {name.removesuffix("-resnet") for name in docs_tables.TABLES}
    assert prefix + file.stem in shown, "no page shows it"


TUNED = [
    *[(folder, network) for folder in (docs_tables.TINY, docs_tables.SEVERE) for network in docs_tables.NETWORKS],
    (docs_tables.IMAGENET_BF16, "resnet"),
]


@pytest.mark.parametrize(("folder", "network"), TUNED, ids=lambda each: getattr(each, "name", each))
def test_tuned_results_have_the_rates_that_were_chosen(folder: Path, network: str) -> None:
    settings = json.loads((folder / f"settings-{network}.json").read_text())["methods"]
    found = docs_tables.by_method(folder / "tuned" / "lifelong.json", network)
    judged = [result for results in found.values() for result in results if result.method in settings]
    assert len({result.method for result in judged}) >= 4
    for result in judged:
        assert re.search(rf"\blr={re.escape(str(settings[result.method]['lr']))}[,)]", result.call), result.call
        assert result.origin["commit"]
        assert "H200" in str(result.origin["device"])


@pytest.mark.parametrize("folder", [docs_tables.TINY, docs_tables.IMAGENET_BF16], ids=lambda folder: folder.name)
def test_corrected_settings_are_what_the_rule_chooses_from_the_same_trials(folder: Path) -> None:
    first, corrected = (json.loads((folder / f"settings-resnet{part}.json").read_text()) for part in ("", "-corrected"))
    assert corrected["trials"] == first["trials"]
    trials = [Trial(**trial) for trial in first["trials"]]
    for name, method in METHODS.items():
        if own := [trial for trial in trials if trial.method == name]:
            assert corrected["methods"][method.__name__] == choose(own).settings
    assert corrected["methods"] != first["methods"]


@pytest.mark.parametrize("name", ["lifelong", "single-domain"])
def test_every_method_was_compared_with_three_seeds(name: str) -> None:
    for network, count in (("resnet", 13), ("vit", 12)):
        found = docs_tables.by_method(docs_tables.RECIPE_FILES / f"{name}.json", network)
        assert len(found) == count
        for results in found.values():
            assert sorted(result.seed for result in results) == [0, 1, 2]
            assert {len(result.domains) for result in results} == {15}


def test_committed_results_have_the_settings_of_the_presets() -> None:
    """A changed preset must not leave results behind that its command no longer reproduces."""
    names = {method.__name__: name for name, method in METHODS.items()}
    checked = set()
    for file in RECIPE_FILES:
        for case in Numbers.read(file).cases:
            (own,) = case.plan.overrides.values() or [{}]  # at most one method has overrides
            for result in case.results:
                start, chosen = case.plan.preset or "", {}
                if is_settings_file(start):
                    start, chosen = read_settings(docs_tables.CPU / start, result.method)
                usual = dict(METHODS[names[result.method]].presets[start])
                if "optimizer" in usual:
                    usual["lr"] = usual.pop("optimizer").keywords["lr"]
                given = usual | chosen | own
                for name in ("lr", "drop", "alpha", "beta", "views", "threshold", "restoration", "floor"):
                    if name in given:
                        assert f"{name}={given[name]}" in result.call, (file.name, *case.place)
                        checked.add((result.method, name))
    assert checked >= {("EATAC", "drop"), ("EATA", "beta"), ("CoTTA", "lr"), ("TEA", "lr"), ("SAR", "floor")}


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_committed_results_are_of_the_networks_in_the_repository(name: str) -> None:
    results = read_results([ROOT / "benchmarks" / "results" / "cifar10" / name])
    weights = Source(load_network(f"cifar10-{name}").model).fingerprint()
    assert {result.weights for result in results} == {weights}
    lifelong = docs_tables.by_method(docs_tables.RECIPE_FILES / "lifelong.json", name)
    assert {result.weights for own in lifelong.values() for result in own} == {weights}


def test_committed_results_on_camvid_are_of_todays_presets_and_network() -> None:
    """Every argument: a result's call is the preset's `repr`."""
    net = load_network(f"hf:{ROOT / 'weights' / 'camvid'}").model
    assert all(p.dtype == torch.float32 for p in net.parameters())
    results = {result.method: result for result in read_results([ROOT / "benchmarks" / "results" / "camvid"])}
    assert len(results) == 7
    for method in (method for method in METHODS.values() if method.__name__ in results):
        source = {"source": [torch.rand(1, 3, 64, 96)]} if method in (EATA, EATAC) else {}
        adapter = method.preset("segformer-b5", net, **source)
        assert repr(adapter) == results[method.__name__].call
        assert adapter.fingerprint() == results[method.__name__].weights
        assert results[method.__name__].protocol["rounds"] == 3


# Measuring commands


@pytest.mark.parametrize("method", ["sar", "rdumb", "eata-c"])
def test_selecting_methods_keep_a_fixed_share(method: str) -> None:
    """Random networks are sure of nothing, so that without it there would be nothing to learn from."""
    x = torch.rand(10, 1, 32, 32)
    adapter = methods.make(method, "small ViT", x, "eager")
    adapter(x)
    assert int(adapter.last.kept.sum()) == 6
    assert adapter.last.updated


@pytest.mark.parametrize("method", ["source", "eata"])
def test_the_cost_of_a_method_is_measured(method: str) -> None:
    row = methods.measure(method, "small ResNet", torch.rand(8, 1, 32, 32), "eager", 3)
    assert row["method"] == METHODS[method].__name__
    assert 0 < row["low"] <= row["milliseconds"] <= row["high"]
    assert row["seconds"] == pytest.approx(row["milliseconds"] * 50_000 / 8 / 1e3)


def test_reading_is_timed_after_the_prefetched_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = loading.files(tmp_path / "files" / "class", (40, 30), 20, 3)
    stream = loading.stream(images, workers=2, batches=4)
    assert (len(stream), stream.workers, loading.ahead(2)) == (17, 2, 5)
    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    used: list[int] = []
    batches = [(torch.zeros(size, 3, 2, 2), torch.zeros(size)) for size in (5, 5, 4, 2, 6, 3)]
    assert loading.rates(batches, 2, 2, lambda x: used.append(len(x))) == [(4 + 2) / 2.0, (6 + 3) / 3.0]
    assert used == [5, 5, 4, 2, 6, 3]


def test_gpu_tests_without_a_gpu_fail(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """`pytest -m gpu` must not skip them silently."""
    import conftest

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(request.config.option, "markexpr", "gpu")
    with pytest.raises(pytest.UsageError, match="none here"):
        conftest.pytest_collection_modifyitems(request.config, [])
