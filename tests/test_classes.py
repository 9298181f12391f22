"""Which class of the network each folder is, and what is refused because it cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from acclimate.cli.main import app
from acclimate.data import DataError, open_suite
from acclimate.data.classes import class_folders
from acclimate.data.folders import ImageFolder
from acclimate.data.imagenet import ImageNetR

NETWORK = """
from torch import nn
def outputs():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, {outputs}), nn.LayerNorm({outputs}))
"""


def images(root: Path, *names: str) -> Path:
    for shade, name in enumerate(names):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (shade, 99, 9)).save(root / name / "a.png")
    return root


def run(tmp_path: Path, outputs: int, data: str, *options: str) -> tuple[int, str]:
    file = tmp_path / "net.py"
    file.write_text(NETWORK.format(outputs=outputs))
    words = ["run", "--model", f"{file}:outputs", "--data", data, "--method", "source", "--shift", "contrast"]
    done = CliRunner().invoke(app, [*words, *options, "--probe", "none", "--out", str(tmp_path / "out")])
    return done.exit_code, done.stderr


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_thousand_outputs_for_a_few_folders_need_a_mapping(options: tuple[str, ...], tmp_path: Path) -> None:
    root = images(tmp_path / "data", "cat", "dog", "owl")
    code, message = run(tmp_path, 1000, f"folder:{root}", *options)
    assert code == 2
    assert "3 class folders for a network with 1,000 outputs" in message
    assert "classes.json" in message
    (root / "classes.json").write_text(json.dumps({"cat": 281, "dog": 207, "owl": 24, "fox": 277}))
    code, message = run(tmp_path, 1000, f"folder:{root}", *options)
    assert (code, "cat = 281, dog = 207, owl = 24" in message) == (0, True), message
    assert run(tmp_path, 3, f"folder:{root}", "--out", str(tmp_path / "b"))[0] == 2, "more classes than outputs"


def test_as_many_folders_as_outputs_are_counted_by_name(tmp_path: Path) -> None:
    root = images(tmp_path / "data", "ant", "bee", "cat", "dog", "elk")
    code, message = run(tmp_path, 5, f"folder:{root}", "--cache", str(tmp_path / "cache"))
    assert (code, "ant = 0, bee = 1, …, elk = 4" in message) == (0, True), message
    assert run(tmp_path, 4, f"corrupted:folder:{root}", "--out", str(tmp_path / "b"))[0] == 2


def test_folders_named_by_numbers(tmp_path: Path) -> None:
    some = images(tmp_path / "some", "1", "3", "10")
    assert dict(zip(ImageFolder(some).classes, ImageFolder(some).labels, strict=True)) == {"1": 1, "3": 3, "10": 10}
    folders = class_folders([str(i) for i in sorted(map(str, range(12)))], tmp_path)
    folders.check(1000, "data")
    with pytest.raises(DataError, match="torchvision counts"):  # numbers, or the order of names?
        folders.check(12, "data")
    class_folders(["0", "1", "2"], tmp_path).check(3, "data")
    with pytest.raises(DataError, match="3 is class 3, and the network has 3 outputs"):
        class_folders(["1", "2", "3"], tmp_path).check(3, "data")


def test_a_mapping_in_another_file(tmp_path: Path) -> None:
    root, file = images(tmp_path / "data", "n01", "n02"), tmp_path / "index.json"
    file.write_text(json.dumps({"7": ["n02", "shark"], "5": ["n01", "tench"]}))
    suite = open_suite(f"folder:{root},{file}")
    assert suite.clean().images.labels == [5, 7]
    for content, message in (
        ("{", "cannot be read"),
        ("[1]", "holds list"),
        ('{"n01": 1}', "no index for n02"),
        ('{"n01": 1, "n02": true}', "n02 is True"),
        ('{"n01": 1, "n02": -1}', "n02 is -1"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            open_suite(f"folder:{root},{file}")
    with pytest.raises(DataError, match="cannot be read"):
        open_suite(f"folder:{root},{tmp_path / 'no.json'}")


def test_published_layouts_are_counted_in_order(tmp_path: Path) -> None:
    root = images(tmp_path / "r", *(str(i) for i in range(200)))
    (root / "classes.json").write_text("{}")
    assert ImageNetR(root).part("renditions", 5).images.labels == [*range(200)]


@pytest.mark.parametrize("data", ["digits", "demo:8,0"])
def test_data_sets_know_their_classes(data: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(NETWORK.format(outputs=100).replace("Linear(3", "Linear(1"))
    words = ["run", "--model", f"{file}:outputs", "--data", data, "--method", "source", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--images", "8"])
    assert done.exit_code == 2
    assert "networks with 10 outputs, and this one has 100" in done.stderr
    assert not (tmp_path / "out").exists()
