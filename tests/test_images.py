"""Image files of every kind and state: converted, refused in one line, left out, or listed by a scan."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from acclimate.bench import preflight
from acclimate.bench.plan import Plan, PlanError
from acclimate.bench.run import Run
from acclimate.bench.scenarios import lifelong
from acclimate.bench.stream import SampledDomain
from acclimate.cli.main import app
from acclimate.data import DataError, folders, open_suite
from acclimate.data.folders import ImageFolder, Preprocess, read_image
from acclimate.data.imagenet import ImageNet
from acclimate.data.scan import image_files, scan
from acclimate.data.types import BrokenImageError, Part

NETWORK = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, 2))
"""


def noise(size: tuple[int, ...] = (32, 32, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def pixels(path: Path) -> Tensor:
    return read_image(path, Preprocess())


def bomb(path: Path) -> None:
    """Write a small PNG that says it has 20,000 × 20,000 pixels."""
    Image.new("1", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 20_000, 20_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(bytes(content))


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Two classes with 8 sound images each, 4 unusual ones, 3 broken ones and a GIF."""
    root = tmp_path / "set"
    for seed, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(noise(seed=10 * seed + number)).save(root / name / f"sound{number}.jpg")
    whole = (root / "a" / "sound0.jpg").read_bytes()
    (root / "a" / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    bomb(root / "a" / "bomb.png")
    Image.fromarray(noise((32, 32, 4))).convert("CMYK").save(root / "a" / "cmyk.jpg")
    Image.fromarray(np.linspace(0, 65535, 1024).astype(np.uint16).reshape(32, 32)).save(root / "a" / "deep.png")
    Image.fromarray(np.linspace(0, 5, 1024, dtype=np.float32).reshape(32, 32)).save(root / "b" / "float.tif")
    Image.fromarray(np.linspace(0, 1, 1024, dtype=np.float32).reshape(32, 32)).save(root / "b" / "unit.tif")
    Image.fromarray(noise()).quantize(16).save(root / "b" / "palette.png", transparency=bytes(range(16)))
    Image.new("P", (32, 32)).save(root / "b" / "moving.gif")
    return root


BROKEN = {"truncated.jpg", "bomb.png", "float.tif"}


def test_more_than_eight_bits_are_scaled_or_refused(tmp_path: Path) -> None:
    def stored(name: str, values: list[float], kind: type) -> Path:
        Image.fromarray(np.array([values], dtype=kind)).save(tmp_path / name)
        return tmp_path / name

    levels = [0, 128, 129, 32767, 65406, 65407, 65535]
    for name in ("deep.png", "deep.tif"):
        assert pixels(stored(name, levels, np.uint16))[0, 0].tolist() == [0, 0, 1, 127, 254, 255, 255]
    assert pixels(stored("unit.tif", [0, 0.25, 0.5, 1], np.float32))[2, 0].tolist() == [0, 64, 128, 255]
    for name, values, kind, why in (
        ("bright.tif", [0, 255], np.float32, "from 0 to 255"),
        ("dark.tif", [-0.1, 1], np.float32, "from -0.1 to 1"),
        ("nan.tif", [0, float("nan")], np.float32, "expected 0 to 1"),
        ("long.tif", [0, 70_000], np.int32, "range is unknown"),
    ):
        with pytest.raises(BrokenImageError, match=f"{name} cannot be read .*{why}"):
            pixels(stored(name, values, kind))


def test_other_modes_are_converted_as_pillow_does(tmp_path: Path) -> None:
    colours = Image.fromarray(noise((8, 8, 4)))
    images = {
        "grey.png": colours.convert("L"),
        "alpha.png": colours,
        "grey_alpha.png": colours.convert("LA"),
        "bits.png": colours.convert("1"),
        "palette.png": colours.convert("RGB").quantize(16),
        "cmyk.tif": colours.convert("RGB").convert("CMYK"),
    }
    for name, image in images.items():
        image.save(tmp_path / name)
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        assert pixels(tmp_path / name).tolist() == expected.tolist(), name
    images["palette.png"].save(tmp_path / "p.png", transparency=bytes(range(16)))
    assert torch.equal(pixels(tmp_path / "p.png"), pixels(tmp_path / "palette.png")), "and Pillow does not warn"


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
def test_images_are_turned_as_exif_says(tmp_path: Path, suffix: str) -> None:
    upright = Image.fromarray(np.repeat(np.arange(0, 256, 16, dtype=np.uint8)[None, :], 24, 0)).convert("RGB")
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / f"a.{suffix}", exif=exif)
    found = pixels(tmp_path / f"a.{suffix}")
    assert found.shape == (3, 24, 16)
    assert (found[0].int() - torch.from_numpy(np.array(upright))[..., 0].int()).abs().max() <= 3


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [
        *(("png", mode) for mode in ("L", "P", "RGBA", "I;16")),
        *(("tif", m) for m in ("L", "P", "RGBA", "CMYK", "I;16")),
    ],
)
def test_images_of_other_modes_are_turned_as_well(tmp_path: Path, suffix: str, mode: str) -> None:
    corner = np.zeros((4, 6), np.uint8)
    corner[0, 0] = 255
    picture = Image.fromarray(corner.astype(np.uint16) * 257 if mode == "I;16" else corner)
    exif = Image.Exif()
    exif[0x0112] = 6
    (picture if mode in ("L", "I;16") else picture.convert(mode)).save(tmp_path / f"a.{suffix}", exif=exif)
    found = pixels(tmp_path / f"a.{suffix}")
    assert found.shape == (3, 6, 4)
    assert (found[0] > 128).nonzero().tolist() == [[0, 3]]


def test_the_first_images_of_a_run_may_be_broken(tmp_path: Path) -> None:
    for label in range(10):
        (tmp_path / f"{label}").mkdir()
        for number in range(4):
            Image.fromarray(noise()).save(tmp_path / f"{label}" / f"{number}.png")
    plan = Plan(
        methods=("eata",),
        model="cifar10-resnet",
        data=f"folder:{tmp_path}",
        shifts=("fog",),
        batch_size=8,
        source_images=8,
        probe="none",
        skip_broken=True,
    )
    run = Run(plan, tmp_path / "out")
    (domain,) = run.scenario(0).domains
    paths = domain.parts[0].images.paths
    for _, index in [*domain.picks[:2], *run._source(0).picks[:2]]:
        paths[index].write_text("junk")
    preflight.check(run)
    assert run.outputs == 10
    with pytest.raises(DataError, match="cannot be read"):
        preflight.check(Run(Plan(**{**plan.as_dict(), "skip_broken": False}), tmp_path / "other"))


def test_published_data_is_read_without_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "n0").mkdir()
    Image.fromarray(noise((16, 24, 3))).save(tmp_path / "n0" / "a.jpg", exif=exif)
    assert ImageFolder(tmp_path)[0][0].shape == (3, 24, 16)
    assert ImageNet(tmp_path, Preprocess(), whole=False).clean().images[0][0].shape == (3, 16, 24)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # by Pillow, when it opens the file
@pytest.mark.parametrize("data", [b"II*\0\x08\0\0\0\x05\0\x12\x01\x03", b"no TIFF header"])
def test_damaged_exif_data_is_ignored(tmp_path: Path, data: bytes) -> None:
    Image.fromarray(noise()).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + data)
    assert pixels(tmp_path / "a.jpg").shape == (3, 32, 32)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_file_is_one_line(hostile: Path, workers: int, name: str) -> None:
    for other in BROKEN - {name}:
        next(hostile.glob(f"*/{other}")).unlink()
    scenario = lifelong(open_suite(f"folder:{hostile}"), shifts=["fog"], batch_size=8, workers=workers)
    with pytest.raises(DataError) as raised:
        [*scenario.domains[0].on("cpu")]
    assert str(raised.value).count(name) == 1
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_sizes_that_do_not_fit_are_one_line_with_workers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for side in (8, 9):
        Image.new("RGB", (side, side)).save(tmp_path / "a" / f"{side}.png")
    domain = SampledDomain("d", [Part(ImageFolder(tmp_path))], [(0, 0), (0, 1)], workers=1)
    with pytest.raises(DataError, match="cannot be one batch") as raised:
        [*domain.on("cpu")]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("workers", "cached"), [(0, False), (2, False), (0, True)])
def test_broken_files_are_left_out_and_noted(hostile: Path, tmp_path: Path, workers: int, cached: bool) -> None:
    cache = tmp_path / "cache" if cached else None
    suite = open_suite(f"folder:{hostile}", Preprocess(crop=32), cache)
    broken: dict[Path, str] = {}
    scenario = lifelong(suite, shifts=["fog", "contrast"], batch_size=4, workers=workers, broken=broken)
    for domain in scenario.domains:
        assert sum(len(x) for x, _ in domain.on("cpu")) == 20
    assert {path.name for path in broken} == BROKEN
    assert all(broken.values())


def test_batches_without_any_sound_image(hostile: Path) -> None:
    suite = open_suite(f"folder:{hostile}")
    (ones,) = lifelong(suite, shifts=["fog"], batch_size=1, broken={}).domains
    assert [len(x) for x, _ in ones.on("cpu")] == [1] * 20
    for path in hostile.glob("*/*.*"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="fog: no image can be read, such as"):
        [*lifelong(suite, shifts=["fog"], broken={}).domains[0].on("cpu")]


def test_a_file_that_is_absent_is_not_left_out(hostile: Path) -> None:
    (domain,) = lifelong(open_suite(f"folder:{hostile}"), shifts=["fog"], broken={}).domains
    (hostile / "a" / "sound3.jpg").unlink()
    with pytest.raises(DataError, match="sound3.*No such file"):
        [*domain.on("cpu")]


def test_an_error_of_a_broken_file_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BrokenImageError(Path("a.png"), "why")))
    assert (error.path, error.reason) == (Path("a.png"), "why")


def test_each_file_is_opened_once(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, opened, plain = open_suite(f"folder:{hostile}"), [], Image.open
    monkeypatch.setattr(Image, "open", lambda path: opened.append(path) or plain(path))
    [*lifelong(suite, shifts=["fog"], broken={}).domains[0].on("cpu")]
    assert len(opened) == len({*opened}) == 23


@pytest.mark.parametrize("workers", [0, 2])
def test_scan_lists_every_broken_file(hostile: Path, workers: int) -> None:
    files = image_files(open_suite(f"folder:{hostile}", Preprocess()))
    assert len(files) == 23
    found = dict(scan(files, workers))
    assert {path.name for path, why in found.items() if why} == BROKEN


def test_a_folder_and_a_link_to_nothing_are_broken(tmp_path: Path) -> None:
    (tmp_path / "a" / "folder.png").mkdir(parents=True)
    (tmp_path / "a" / "link.png").symlink_to(tmp_path / "nothing")
    Image.new("RGB", (32, 32)).save(tmp_path / "a" / "image.png")
    suite, broken = open_suite(f"folder:{tmp_path}"), {}
    assert {path.name for path, why in scan(image_files(suite)) if why} == {"folder.png", "link.png"}
    assert sum(len(x) for x, _ in lifelong(suite, shifts=["fog"], broken=broken).domains[0].on("cpu")) == 1
    assert {path.name for path in broken} == {"folder.png", "link.png"}


def test_scan_reads_labels_as_well(tmp_path: Path) -> None:
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
        Image.new("RGB" if name == "images" else "L", (8, 8)).save(tmp_path / name / "a.png")
    files = image_files(open_suite(f"scenes:{tmp_path}", Preprocess()))
    assert not any(why for _, why in scan(files))
    (tmp_path / "labels" / "a.png").write_bytes(b"no image")
    assert [path.parent.name for path, why in scan(files) if why] == ["labels"]


def test_the_commands(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    out, runner = tmp_path / "out", CliRunner()
    command = ["run", "--model", f"{tmp_path}/net.py:net", "--data", f"folder:{hostile}", "--shift", "fog"]
    command += ["--method", "source", "--workers", "2", "--probe", "none", "--out", str(out)]
    stopped = runner.invoke(app, command)
    assert stopped.exit_code == 2
    assert "Traceback" not in stopped.output
    assert len(stopped.output) < 1500
    assert stopped.output.count("1 .gif") == 1
    shown = runner.invoke(app, ["scan", f"folder:{hostile}"])
    assert shown.exit_code == 1
    assert {name for name in BROKEN if name in shown.output} == BROKEN
    assert "1 .gif" in shown.stderr

    assert runner.invoke(app, ["table", str(out)]).exit_code == 2, "no result yet"
    finished = runner.invoke(app, [*command[:1], "--skip-broken", *command[1:]])
    assert finished.exit_code == 0, finished.output
    assert "3 broken" in finished.output
    result = json.loads((out / "source-seed0.json").read_text())
    assert result["domains"][0]["skipped"] == result["summary"]["skipped"] == 3
    assert result["domains"][0]["images"] == 20
    assert result["protocol"]["skip_broken"] is True
    mixed = runner.invoke(app, command)
    assert mixed.exit_code == 2
    assert "skip_broken" in mixed.output

    for path in image_files(open_suite(f"folder:{hostile}")):
        if path.name in BROKEN:
            path.unlink()
    assert runner.invoke(app, ["scan", f"folder:{hostile}"]).exit_code == 0
    assert runner.invoke(app, ["scan", "digits"]).exit_code == 2


def test_the_field_of_a_plan() -> None:
    assert "skip_broken" not in Plan().protocol, "results without it keep their protocol"
    assert Plan(skip_broken=True).protocol["skip_broken"]
    with pytest.raises(PlanError, match="skip_broken='yes'"):
        Plan.from_dict({"skip_broken": "yes"})


def test_files_that_are_not_images(hostile: Path) -> None:
    (hostile / "b" / "notes.TXT").touch()
    assert ImageFolder(hostile).unread == {".gif": 1, ".txt": 1}
    assert folders.unread_files([ImageFolder(hostile)] * 2).startswith("not read in class folders: 1 .gif, 1 .txt")
    (hostile / "c").mkdir()
    (hostile / "c" / "x.gif").touch()
    with pytest.raises(DataError, match="c has no image: only 1 .gif"):
        ImageFolder(hostile)
