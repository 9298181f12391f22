"""The scripts in training/: arrays, a training that is interrupted, converted weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from acclimate.bench.networks import NetworkError, load_network
from acclimate.data import DataError, open_suite
from training.imagenet_resnet50 import convert, torch_name
from training.tiny_imagenet import Augment, Training, unpack

CLASSES = ("n01", "n00")


def tiny(root: Path) -> Path:
    """A folder in the layout of Tiny-ImageNet, with two classes."""
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(CLASSES))
    shade = 0
    for wnid in CLASSES:
        (root / "train" / wnid / "images").mkdir(parents=True)
        for number in (0, 1, 474, 475, 499):
            shade += 1
            Image.new("RGB", (64, 64), (shade, 0, 0)).save(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG")
    lines = []
    for number, wnid in enumerate(("n00", "n01", "n01")):
        Image.new("L", (64, 64), 200 + number).save(root / "val" / "images" / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t63\t63")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines))
    return root


def test_tiny_imagenet_is_split_by_the_numbers_of_its_images(tmp_path: Path) -> None:
    unpack(tiny(tmp_path / "tiny"), tmp_path / "data")
    arrays = {path.stem: np.load(path) for path in (tmp_path / "data").iterdir()}
    assert {name: len(array) for name, array in arrays.items()} == {
        "train": 6, "train_labels": 6, "tune": 4, "tune_labels": 4, "clean": 3, "labels": 3,
    }  # fmt: skip
    assert arrays["labels"].tolist() == [0, 1, 1]
    assert arrays["tune_labels"].tolist() == [0, 0, 1, 1]
    suite, held_out = (open_suite(f"tiny-imagenet:{tmp_path / 'data'}{part}") for part in ("", ",tune"))
    assert (len(suite.clean().images), len(held_out.clean().images), suite.outputs) == (3, 4, 200)


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_a_training_goes_on_where_it_stopped(name: str, tmp_path: Path) -> None:
    unpack(tiny(tmp_path / "tiny"), tmp_path / "data")
    assert Training(tmp_path / "data", name, tmp_path, epochs=2, seed=0).run(minutes=0) is None
    assert not list(tmp_path.glob("*.safetensors"))
    found = Training(tmp_path / "data", name, tmp_path, epochs=2, seed=0).run(minutes=None)
    assert found is not None
    log = json.loads((tmp_path / f"tiny_imagenet_{name}.json").read_text())
    assert [entry["epoch"] for entry in log["log"]] == [1, 2]
    file = tmp_path / f"tiny_imagenet_{name}.safetensors"
    assert {t.dtype for t in load_file(file).values()} <= {torch.float16, torch.int64}
    assert file.stat().st_size < 12e6
    load_network(f"tiny-imagenet-{name}={file}")
    with pytest.raises(SystemExit, match="2 epochs"):
        Training(tmp_path / "data", name, tmp_path, epochs=3, seed=0).run(minutes=None)


def test_augmented_images_stay_images() -> None:
    x = torch.rand(16, 3, 64, 64)
    augment = Augment(torch.Generator().manual_seed(0))
    y, others, share = augment.mix(augment(x), torch.arange(16), mixup=0.5)
    assert y.shape == x.shape
    assert 0 <= float(y.min()) <= float(y.max()) <= 1
    assert sorted(others.tolist()) == [*range(16)]
    assert 0 <= float(share) <= 1


def test_keras_names() -> None:
    assert torch_name("conv1/kernel") == "conv1.weight"
    assert torch_name("bn_conv1/moving_variance") == "bn1.running_var"
    assert torch_name("res5c_branch2b/kernel") == "layer4.2.conv2.weight"
    assert torch_name("bn4f_branch2c/beta") == "layer3.5.bn3.bias"
    assert torch_name("bn2a_branch1/moving_mean") == "layer1.0.downsample.1.running_mean"
    with pytest.raises(ValueError, match="not a weight"):
        torch_name("dense/kernel")


def test_keras_weights() -> None:
    """A convolution with a bias and the BatchNorm after it equal one without, whose mean is lower by that bias."""
    kernel, bias = torch.randn(3, 3, 3, 4), torch.randn(4)
    weights = {"conv1/kernel": kernel, "conv1/bias": bias, "bn_conv1/moving_mean": torch.ones(4)}
    made = convert({**weights, "fc1000/kernel": torch.randn(4, 2), "fc1000/bias": torch.zeros(2)})
    x = torch.randn(1, 3, 8, 8)
    theirs = torch.conv2d(x.flip(1), kernel.permute(3, 2, 0, 1), bias) - 1
    ours = torch.conv2d(x, made["conv1.weight"]) - made["bn1.running_mean"].view(-1, 1, 1)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert made["fc.weight"].shape == (2, 4)
    with pytest.raises(NetworkError, match="keras-resnet50=FILE"):
        load_network("keras-resnet50")


def test_imagenet_5k(tmp_path: Path) -> None:
    root = tmp_path / "ILSVRC2012_img_val_subset"
    Image.new("RGB", (48, 32)).save(tmp_path / "image.png")
    for label in range(1000):
        (root / str(label)).mkdir(parents=True)
        for number in range(5):
            (root / str(label) / f"ILSVRC2012_val_{number}.JPEG").hardlink_to(tmp_path / "image.png")
    parts = {part: open_suite(f"imagenet-5k:{tmp_path}{part}").clean().images for part in ("", ",tune", ",judge")}
    assert {part: len(images) for part, images in parts.items()} == {"": 5000, ",tune": 1000, ",judge": 4000}
    assert not {*parts[",tune"].paths} & {*parts[",judge"].paths}
    assert all(int(path.parent.name) == label for path, label in zip(parts[""].paths, parts[""].labels, strict=True))
    assert sorted(parts[",tune"].labels) == [*range(1000)]
    open_suite(f"imagenet-5k:{tmp_path}").check_classes(1000)
    with pytest.raises(DataError, match="has 10"):
        open_suite(f"imagenet-5k:{tmp_path}").check_classes(10)
    (root / "7" / "ILSVRC2012_val_0.JPEG").unlink()
    with pytest.raises(DataError, match="expected 5"):
        open_suite(f"imagenet-5k:{tmp_path}")
