"""Segmenters: methods against literal transcriptions, layouts on disk, metrics, and a run from folder to page."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transcriptions as plain
from networks import make, stream
from PIL import Image
from torch import Generator, Tensor, nn
from torch.optim import Adam
from typer.testing import CliRunner

from acclimate import DAT, EATA, METHODS, CoTTA, Tent
from acclimate.bench.evaluate import evaluate
from acclimate.bench.metrics import Confusion, Scores
from acclimate.bench.networks import load_network
from acclimate.bench.plan import Plan
from acclimate.bench.scenarios import rounds
from acclimate.bench.stream import Domain, Scenario
from acclimate.cli.main import app
from acclimate.data import DataError, open_suite
from acclimate.data.scenes import CITYSCAPES, read_labels
from acclimate.data.weather import WEATHER, weather
from acclimate.functional import entropy

SINGLE = [x[:1].double() for x in stream(6)]
FEW = (0.5, 1.0, 1.5)


class Coarse(nn.Module):
    """A segmenter that answers at a lower resolution, as SegFormer does; sharp, so that some pixels are sure."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make("seg")

    def forward(self, x: Tensor) -> Tensor:
        return 4 * nn.functional.avg_pool2d(self.net(x), 2)


# Methods --------------------------------------------------------------------------------------------------------------


def test_cotta_on_pixels() -> None:
    theirs = plain.cotta_for_pixels(Coarse().double(), SINGLE, 1e-3, FEW, threshold=0.5, momentum=0.7)
    adapter = CoTTA(
        Coarse().double(),
        optimizer=partial(Adam, lr=1e-3),
        threshold=0.5,
        momentum=0.7,
        restoration=0,
        ratios=FEW,
        statistics="source",
    )
    for x, labels in zip(SINGLE, theirs, strict=True):
        logits = adapter(x)
        assert logits.shape[-2:] == x.shape[-2:]
        assert torch.equal(logits.argmax(1), labels)
        assert adapter.last.forwards == 2 * len(FEW) + 2, "each view once, the anchor, the student"
        assert int(adapter.last.backwards) == 1
    torch.testing.assert_close(logits.logsumexp(1), torch.zeros_like(logits[:, 0]), rtol=0, atol=1e-9)


def test_dat() -> None:
    domains = [SINGLE[:3], SINGLE[3:]]
    theirs, names = plain.dat(Coarse().double(), domains, 2e-3, FEW, search=2, top=2, momentum=0.7)
    model = Coarse().double()
    tensors = len([*model.parameters()])
    adapter = DAT(model, lr=2e-3, share=2.5 / tensors, search=2, ratios=FEW, momentum=0.7, statistics="source")
    place = 0
    for domain in domains:
        adapter.new_domain()
        for x in domain:
            assert torch.equal(adapter(x).argmax(1), theirs[place])
            chosen = [name for name, own in zip(adapter.names, adapter.chosen.tolist(), strict=True) if own]
            assert sorted(chosen) == names[place]
            place += 1
    assert names[1] == names[2], "nothing joins after the search"
    assert 0 < len(names[-1]) < tensors
    assert adapter.last.forwards == 2 * len(FEW) + 4


def test_dat_halves_its_rate_each_round_and_starts_a_domain_anew() -> None:
    adapter = DAT(Coarse(), lr=0.01, ratios=(1.0,), certain=0.1, uncertain=0.2)
    x = stream()[0][:1]

    def furthest() -> float:
        """An Adam's first step is its rate, for every element with a gradient."""
        before = [p.detach().clone() for p in adapter.adapted]
        adapter(x)
        return max(float((p.detach() - b).abs().max()) for p, b in zip(adapter.adapted, before, strict=True))

    adapter.new_domain(round=3)  # before the source is remembered
    assert furthest() == pytest.approx(0.01 / 4, rel=1e-3)
    assert adapter.chosen.any()
    assert not [name for name in adapter.snapshot().tensors if name.startswith("optimizer/")], "no image uses it again"
    adapter.new_domain(round=2)
    assert not adapter.chosen.any()
    assert int(adapter.seen) == 0
    assert furthest() == pytest.approx(0.01 / 2, rel=1e-3)
    adapter.reset()
    assert furthest() == pytest.approx(0.01, rel=1e-3)
    assert "lr=0.01" in repr(adapter)


def test_invalid_ratios_of_views_raise() -> None:
    for method in (CoTTA, DAT):
        with pytest.raises(ValueError, match="ratios="):
            method(Coarse(), ratios=(0.0, 1.0))


def test_a_view_that_gives_nan_changes_nothing() -> None:
    class Fragile(Coarse):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            return z if x.shape[-1] <= 16 else z * torch.nan

    for adapter in (CoTTA(Fragile(), ratios=FEW, threshold=2.0), DAT(Fragile(), ratios=FEW, threshold=2.0)):
        before = [p.detach().clone() for p in adapter.adapted]
        with pytest.raises(ValueError, match="NaN"):
            adapter(stream()[0][:1])
        assert all(torch.equal(p, b) for p, b in zip(adapter.adapted, before, strict=True))


def test_presets_keep_what_is_not_overridden() -> None:
    cotta = CoTTA.preset("segformer-b5", Coarse(), lr=1e-5)
    assert isinstance(cotta.optimizer, Adam)
    assert cotta.optimizer.param_groups[0]["lr"] == 1e-5
    assert repr(EATA.preset("segformer-b5", Coarse(), beta=0, margin=0.2).select) == "Reliable(0.2)"


def test_pixels_are_selected_one_by_one() -> None:
    adapter = EATA.preset("segformer-b5", Coarse(), beta=0)
    x = stream()[0][:1]
    logits = adapter(x)
    keep = entropy(logits) < 0.1 * np.log(logits.shape[1])
    assert torch.equal(adapter.last.kept, keep)
    assert 0 < keep.float().mean() < 1


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.task != "classification"])
def test_segformers_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_labels=5, depths=[1] * 4, hidden_sizes=[8, 16, 16, 16], decoder_hidden_size=16, num_attention_heads=[1] * 4
    )
    torch.manual_seed(0)
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path)
    transformers.SegformerImageProcessorPil().save_pretrained(tmp_path)
    loaded = load_network(f"hf:{tmp_path}")
    arguments = {"source": [torch.rand(2, 3, 64, 96)]} if name in ("eata", "eata-c") else {}
    if name in ("cotta", "dat"):
        arguments["ratios"] = FEW
    try:
        adapter = METHODS[name].preset("segformer-b5", loaded.model, **arguments)
    except ValueError as error:
        assert "no preset of" in str(error)  # noqa: PT017
        adapter = METHODS[name](loaded.model, **arguments)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        logits = adapter(torch.rand(1, 3, 64, 96, generator=generator))
    coarse = (1, 5, 16, 24)
    assert logits.shape == ((1, 5, 64, 96) if name in ("cotta", "dat") else coarse)
    assert logits.isfinite().all()


# Metrics --------------------------------------------------------------------------------------------------------------


def test_iou_is_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(0)
    ours, theirs = Confusion(6), torchmetrics.MulticlassJaccardIndex(6, average="none", ignore_index=255)
    for _ in range(3):
        predicted = torch.randint(0, 5, (2, 9, 7), generator=generator)
        targets = torch.where(torch.rand(2, 9, 7, generator=generator) < 0.5, predicted, predicted.flip(0)).byte()
        targets[torch.rand(2, 9, 7, generator=generator) < 0.1] = 255
        ours.update(predicted, targets)
        theirs.update(predicted, targets.long())
    expected = theirs.compute().double()
    torch.testing.assert_close(ours.iou[:5], expected[:5], rtol=0, atol=1e-6)
    assert ours.iou[5].isnan(), "a class that never comes up does not count"
    assert ours.miou == pytest.approx(float(expected[:5].mean()))


def test_scores_are_taken_at_the_labels_resolution_without_ignored_pixels() -> None:
    labels = torch.zeros(1, 8, 8, dtype=torch.uint8)
    labels[:, :, 4:] = 1
    labels[:, 0] = 255
    logits = torch.tensor([8.0, -8.0]).view(1, 2, 1, 1).expand(1, 2, 2, 2).clone()
    logits[:, :, :, 1] *= -1
    scores = Scores()
    scores.update(logits, labels)
    assert scores.meter.total == 56
    assert scores.score == scores.confusion.miou == 1.0
    assert scores.as_dict()["iou"] == [1.0, 1.0]


def test_the_score_of_a_segmenter_is_its_miou() -> None:
    x, y = stream()[0], torch.randint(0, 10, (8, 16, 16), generator=Generator().manual_seed(0))
    result = evaluate(Tent(make("seg")), Scenario("fog", [Domain.of("fog", x, y, 1)]))
    (domain,) = result.domains
    assert domain.miou == result.miou == result.score
    assert len(domain.iou) == 10
    assert domain.images == 8
    with pytest.raises(ValueError, match="no pixel has a label that counts"):
        evaluate(Tent(make("seg")), Scenario("fog", [Domain.of("fog", x, torch.full_like(y, 255), 1)]))
    strange = y.clone()
    strange[6, 0, 0] = -100
    with pytest.raises(ValueError, match="1 pixels .* 10 classes"):
        evaluate(Tent(make("seg")), Scenario("fog", [Domain.of("fog", x, strange, 1)]))
    with pytest.raises(ValueError, match="labels go up to 12"):
        evaluate(Tent(make("seg")), Scenario("fog", [Domain.of("fog", x, y + 3, 1)]))
    with pytest.raises(ValueError, match="another task"):
        evaluate(Tent(make("bn")), Scenario("fog", [Domain.of("fog", x, y, 8)]))


# Data -----------------------------------------------------------------------------------------------------------------


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def picture(seed: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def labelled(seed: int, height: int = 40, width: int = 60, classes: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, (height, width), dtype=np.uint8)


@pytest.fixture
def acdc(tmp_path: Path) -> Path:
    for condition in WEATHER:
        for i in range(3):
            stem = f"GOPR0001_frame_{i:06}"
            save(tmp_path / "rgb_anon" / condition / "train" / "GOPR0001" / f"{stem}_rgb_anon.png", picture(i))
            save(tmp_path / "gt" / condition / "train" / "GOPR0001" / f"{stem}_gt_labelTrainIds.png", labelled(i))
    return tmp_path


def test_acdc(acdc: Path) -> None:
    suite = open_suite(f"acdc:{acdc}")
    scenario = rounds(suite, times=2, batch_size=1)
    assert [domain.name for domain in scenario.domains][::4] == ["fog, round 1", "fog, round 2"]
    assert [domain.round for domain in scenario.domains] == [1] * 4 + [2] * 4
    assert [index for _, index in scenario.domains[0].picks] == [0, 1, 2], "in the order of the recording"
    first, second = (next(domain.on("cpu"))[0] for domain in scenario.domains[::4])
    assert torch.equal(first, second)
    x, y = next(scenario.domains[1].on("cpu"))
    assert x.shape == (1, 3, 540, 810)
    assert y.shape == (1, 40, 60)
    assert y.dtype == torch.uint8
    with pytest.raises(DataError, match="name Cityscapes"):
        suite.clean()
    assert not suite.graded
    assert suite.missing()[0] == "ACDC, fog: 3 images, and 400 were published: only partly unpacked?"
    (acdc / "gt" / "rain" / "train" / "GOPR0001" / "GOPR0001_frame_000001_gt_labelTrainIds.png").unlink()
    with pytest.raises(DataError, match=r"rain: 1 of 3 images have no label, such as .*000001_gt_labelTrainIds"):
        suite.part("rain", 5)
    with pytest.raises(DataError, match="there is no folder"):
        open_suite(f"acdc:{acdc / 'nowhere'}")


def test_cityscapes_ids_are_translated(tmp_path: Path) -> None:
    ids = np.array([[7, 8, 26, 33], [0, 1, 4, 255]], dtype=np.uint8)
    save(tmp_path / "leftImg8bit" / "val" / "ulm" / "ulm_000000_000019_leftImg8bit.png", picture(0))
    save(tmp_path / "gtFine" / "val" / "ulm" / "ulm_000000_000019_gtFine_labelIds.png", ids)
    suite = open_suite(f"cityscapes:{tmp_path}")
    _, labels = suite.clean().images[0]
    assert labels.tolist() == [[0, 1, 13, 18], [255] * 4]
    assert [*CITYSCAPES][13] == "car"
    save(tmp_path / "gtFine" / "val" / "ulm" / "ulm_000000_000019_gtFine_labelTrainIds.png", labelled(0))
    _, labels = open_suite(f"cityscapes:{tmp_path}").clean().images[0]
    assert int(labels.max()) == 3
    acdc = tmp_path / "acdc"
    acdc.mkdir()
    assert len(open_suite(f"acdc:{acdc},{tmp_path}").clean().images) == 1


def test_labels_must_be_class_numbers(tmp_path: Path) -> None:
    save(tmp_path / "colours.png", picture(0))
    with pytest.raises(DataError, match="RGB pixels"):
        read_labels(tmp_path / "colours.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot be read"):
        read_labels(tmp_path / "broken.png")


def test_weather_is_the_same_in_every_round(tmp_path: Path) -> None:
    for part, make_one in (("images", picture), ("labels", labelled)):
        save(tmp_path / part / "0.png", make_one(0))
    scenario = rounds(open_suite(f"corrupted:scenes:{tmp_path}"), times=2, batch_size=1)
    first, second = (next(domain.on("cpu"))[0] for domain in scenario.domains[::4])
    assert torch.equal(first, second)
    assert Plan(data=f"corrupted:scenes:{tmp_path}").batch_size == 1


@pytest.mark.parametrize("name", WEATHER)
def test_weather(name: str) -> None:
    x = torch.rand(2, 3, 48, 64, generator=Generator().manual_seed(0))
    one, same, weak = (weather(x, name, s, Generator().manual_seed(1)) for s in (5, 5, 1))
    assert torch.equal(one, same)
    assert one.shape == x.shape
    assert one.min() >= 0
    assert one.max() <= 1
    assert (one - x).abs().mean() > (weak - x).abs().mean() > 0.01
    if name == "night":
        assert one.mean() < 0.5 * x.mean()
    with pytest.raises(ValueError, match="expected 1 to 5"):
        weather(x, name, 6, Generator())


# From a folder to a page ----------------------------------------------------------------------------------------------

SEGMENTER = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))
"""


def test_a_run_on_scenes(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / "data" / "images" / f"{i}.png", picture(i))
        save(tmp_path / "data" / "labels" / f"{i}.png", labelled(i))
    (tmp_path / "net.py").write_text(SEGMENTER)
    out = tmp_path / "out"
    command = ["run", "--model", f"{tmp_path / 'net.py'}:make", "--data", f"scenes:{tmp_path / 'data'}"]
    command += [
        "--scenario",
        "rounds",
        "--set",
        "eata.beta=0",
        "--set",
        "eata.margin=0.995",
        "--probe",
        "none",
        "--images",
        "1",
        "--out",
        str(out),
    ]
    methods = [word for name in ("source", "tent", "eata") for word in ("--method", name)]
    done = CliRunner().invoke(app, [*command, *methods])
    assert done.exit_code == 0, done.output
    assert "mIoU" in done.output
    content = json.loads((out / "tent-seed0.json").read_text())
    assert content["protocol"]["batch_size"] == 1
    assert [domain["name"] for domain in content["domains"]][:5] == [
        *(f"{w}, round 1" for w in WEATHER),
        "fog, round 2",
    ]
    assert 0 < content["summary"]["miou"] < 1
    assert content["call"].count("statistics='source'") == 1
    table = CliRunner().invoke(app, ["table", str(out)])
    assert "| Tent | mIoU |" in table.output
    page = tmp_path / "page.html"
    told = CliRunner().invoke(app, ["report", str(out), "--out", str(page)])
    assert told.exit_code == 0, told.output
    assert "of the source network, and of EATA" in page.read_text()
    refused = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "other"), "--method", "memo"])
    assert refused.exit_code == 2
    assert "memo does not fit: it is for classification, and the data for segmentation" in refused.output


@pytest.mark.parametrize("classes", [5, 19])
def test_a_deeplab_of_torchvision_from_a_file(classes: int, tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    name = "lraspp_mobilenet_v3_large" if classes == 5 else "deeplabv3_mobilenet_v3_large"
    options = {} if classes == 5 else {"aux_loss": True}
    net = models.get_model(name, weights=None, weights_backbone=None, num_classes=classes, **options)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    loaded = load_network(f"torchvision:{name}={tmp_path / 'weights.pt'}")
    x = torch.rand(1, 3, 48, 64, generator=Generator().manual_seed(0))
    adapter = Tent.preset("segformer-b5", loaded.model)
    assert adapter(x).shape == (1, classes, 48, 64)


def test_camvid_is_unpacked_and_jiggled(tmp_path: Path) -> None:
    import io
    import zipfile

    from training import camvid

    with zipfile.ZipFile(tmp_path / "c.zip", "w") as packed:
        for part in ("train", "test"):
            for i in range(5):
                for kind, suffix, pixels in (("images", "jpg", picture(i)), ("labels", "png", labelled(i, classes=12))):
                    file = io.BytesIO()
                    Image.fromarray(pixels).save(file, "jpeg" if suffix == "jpg" else "png")
                    packed.writestr(f"{part}/{kind}/{i}.{suffix}", file.getvalue())
    camvid.unpack(tmp_path / "c.zip", tmp_path / "data", every=2)
    assert [len(open_suite(f"scenes:{tmp_path / 'data' / part}").clean().images) for part in ("train", "test")] == [
        5,
        3,
    ]
    x, y = camvid.load(tmp_path / "data" / "train")
    whole = torch.from_numpy(np.stack([labelled(i, classes=12) for i in range(5)])).long()
    assert torch.equal(y.long(), torch.where(whole == camvid.VOID, 255, whole)), "void does not count"
    for seed in range(6):
        images, labels = camvid.jiggle(x, y, torch.Generator().manual_seed(seed))
        assert images.shape == x.shape
        assert labels.shape == y.shape
        assert 0 <= float(images.min()) <= float(images.max()) <= 1
        assert set(labels.unique().tolist()) <= {*range(11), 255}
