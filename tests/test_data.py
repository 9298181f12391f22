"""Every layout of files on small folders: complete, missing, partly unpacked, broken."""

from __future__ import annotations

import errno
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from acclimate.bench.stream import Part, SampledDomain, _moved
from acclimate.cli.main import app
from acclimate.data import SUITES, DataError, decoded, folders, open_suite
from acclimate.data.cifar import CIFARC
from acclimate.data.corruptions import BENCHMARK
from acclimate.data.decoded import Decoded, DecodedSuite, NoRoomError
from acclimate.data.folders import ImageFolder, Preprocess, read_image
from acclimate.data.imagenet import RENDITIONS, ImageNet, ImageNetC, ImageNetR
from acclimate.data.on_the_fly import Corrupted
from acclimate.data.types import Suite


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (48, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def class_folder(root: Path, classes: int = 3, each: int = 4, suffix: str = "JPEG") -> Path:
    for label in range(classes):
        for number in range(each):
            picture(root / f"n{label:08}" / f"val_{label}{number}.{suffix}", 10 * label + number)
    return root


def test_image_folder_returns_bytes_and_labels(tmp_path: Path) -> None:
    images = ImageFolder(class_folder(tmp_path, suffix="png"), Preprocess(32, 28))
    assert len(images) == 12
    assert images.labels == [0] * 4 + [1] * 4 + [2] * 4
    x, label = images[5]
    assert x.dtype == torch.uint8
    assert x.shape == (3, 28, 28)
    assert label == 1


def test_preprocess_resizes_and_crops_the_centre(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", size=(60, 40))
    whole = read_image(tmp_path / "a.png", Preprocess())
    assert whole.shape == (3, 40, 60)
    assert torch.equal(read_image(tmp_path / "a.png", Preprocess(None, 20)), whole[:, 10:30, 20:40])
    assert read_image(tmp_path / "a.png", Preprocess(20, None)).shape == (3, 20, 30)
    with pytest.raises(DataError, match="60×40 .* crop of 64"):
        read_image(tmp_path / "a.png", Preprocess(None, 64))


@pytest.mark.parametrize("size", [(500, 334), (640, 427), (300, 257), (375, 500), (513, 400)])
def test_resize_and_crop_match_torchvision(size: tuple[int, int], tmp_path: Path) -> None:
    import torchvision.transforms as tv

    picture(tmp_path / "a.png", size=size)
    chain = tv.Compose([tv.Resize(256), tv.CenterCrop(224), tv.PILToTensor()])
    with Image.open(tmp_path / "a.png") as opened:
        expected = chain(opened)
    assert torch.equal(read_image(tmp_path / "a.png", Preprocess(256, 224)), expected)
    squashed = read_image(tmp_path / "a.png", Preprocess(64, None, "bicubic", squash=True))
    assert squashed.shape == (3, 64, 64)


def test_16_bit_grey_and_hidden_files(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 40 * 40).astype(np.uint16).reshape(40, 40)
    (tmp_path / "c").mkdir()
    Image.fromarray(ramp).save(tmp_path / "c" / "deep.png")
    (tmp_path / "c" / "._deep.png").write_bytes(b"written by macOS")
    images = ImageFolder(tmp_path)
    assert len(images) == 1
    assert abs(float(images[0][0].float().mean()) - 127) < 2


def test_broken_image_is_named(tmp_path: Path) -> None:
    class_folder(tmp_path)
    broken = tmp_path / "n00000001" / "val_12.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    images = ImageFolder(tmp_path)
    with pytest.raises(DataError, match=r"val_12\.JPEG cannot be read .* remove it"):
        images[6]
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read"):
        images[6]


def test_missing_packed_and_partly_unpacked_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere/data.* as far as"):
        ImageFolder(tmp_path / "nowhere" / "data")
    (tmp_path / "file.tar").write_bytes(b"")
    with pytest.raises(DataError, match="is a file, not a folder"):
        ImageFolder(tmp_path / "file.tar")
    with pytest.raises(DataError, match=r"no class folder: unpack file\.tar"):
        ImageFolder(tmp_path)
    class_folder(tmp_path / "set")
    with pytest.raises(DataError, match="has 3 class folders, expected 1000"):
        ImageNet(tmp_path / "set").clean()
    (tmp_path / "set" / "n00000009").mkdir()
    with pytest.raises(DataError, match="n00000009 has no image"):
        ImageFolder(tmp_path / "set")


def imagenet_c(root: Path, shifts: tuple[str, ...] = BENCHMARK, each: int = 4) -> Path:
    for shift in shifts:
        for severity in (1, 5):
            class_folder(root / shift / str(severity), each=each)
    return root


def test_imagenet_c_layout(tmp_path: Path) -> None:
    root = imagenet_c(tmp_path / "c")
    suite = ImageNetC(root, Preprocess(None, 32), clean=class_folder(tmp_path / "val"), whole=False)
    assert suite.shifts == BENCHMARK
    part = suite.part("fog", 5)
    assert part.change is None
    assert len(part.images) == 12
    assert part.images[0][0].shape == (3, 32, 32)
    assert len(suite.clean().images) == 12
    with pytest.raises(DataError, match=r"there is no folder .*fog/3"):
        suite.part("fog", 3)
    with pytest.raises(DataError, match="expected 1000"):
        ImageNetC(root).part("fog", 5)
    with pytest.raises(DataError, match="no clean images"):
        ImageNetC(root, whole=False).clean()


def test_a_scan_reads_the_chosen_level_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folder(tmp_path / "fog" / "3")
    suite = ImageNetC(tmp_path, Preprocess(), whole=False)
    monkeypatch.setattr(sys.modules["acclimate.cli.main"], "open_suite", lambda *_: suite)
    done = CliRunner().invoke(app, ["scan", "imagenet-c", "--severity", "3", "--shift", "fog"])
    assert done.exit_code == 0, done.output


def test_fixed_list_is_the_same_for_every_corruption(tmp_path: Path) -> None:
    suite = ImageNetC(imagenet_c(tmp_path, each=9), each=5, whole=False)
    lists = [[path.name for path in suite.part(shift, 5).images.paths] for shift in ("fog", "snow")]
    assert lists[0] == lists[1]
    assert len(lists[0]) == 15
    assert suite.part("fog", 5).images.labels == [0] * 5 + [1] * 5 + [2] * 5


def test_imagenet_c_with_missing_corruptions(tmp_path: Path) -> None:
    imagenet_c(tmp_path / "some", ("fog", "snow"))
    with pytest.raises(DataError, match="lacks gaussian_noise, "):
        ImageNetC(tmp_path / "some")
    assert ImageNetC(tmp_path / "some", whole=False).shifts == ("snow", "fog")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "noise.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"no corruption: unpack noise\.tar"):
        ImageNetC(tmp_path / "packed")


def test_imagenet_r_layout_and_classes(tmp_path: Path) -> None:
    from importlib.resources import files

    assert len(set(RENDITIONS)) == 200
    lists = files("timm.data") / "_info"
    everything, renditions = ((lists / f"{n}_synsets.txt").read_text().split() for n in ("imagenet", "imagenet_r"))
    assert [everything.index(name) for name in sorted(renditions)] == list(RENDITIONS)
    class_folder(tmp_path)
    with pytest.raises(DataError, match="3 class folders, expected 200"):
        ImageNetR(tmp_path).part("renditions", 5)
    suite = ImageNetR(tmp_path, Preprocess(32, 32), whole=False)
    assert len(suite.part("renditions", 5).images) == 12
    with pytest.raises(DataError, match="no clean version"):
        suite.clean()
    with pytest.raises(DataError, match="ImageNet-R has no 'fog'"):
        suite.part("fog", 5)


def cifar(root: Path, shifts: tuple[str, ...] = ("fog", "snow"), each: int = 6) -> Path:
    root.mkdir(exist_ok=True)
    for number, shift in enumerate(shifts):
        images = np.random.default_rng(number).integers(0, 256, (5 * each, 32, 32, 3), dtype=np.uint8)
        np.save(root / f"{shift}.npy", images)
    np.save(root / "labels.npy", np.tile(np.arange(each) % 10, 5))
    return root


def test_cifar_c_layout(tmp_path: Path) -> None:
    suite = CIFARC(cifar(tmp_path))
    assert suite.shifts == ("snow", "fog")
    images = suite.part("fog", 2).images
    assert len(images) == 6
    whole = np.load(tmp_path / "fog.npy")
    x, label = images[1]
    assert torch.equal(x, torch.from_numpy(whole[7]).movedim(-1, 0))
    assert label == 1
    with pytest.raises(DataError, match=r"there is no clean\.npy"):
        suite.clean()


def test_broken_cifar_c(tmp_path: Path) -> None:
    cifar(tmp_path)
    whole = (tmp_path / "fog.npy").read_bytes()
    (tmp_path / "fog.npy").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"fog\.npy cannot be read"):
        CIFARC(tmp_path).part("fog", 1)
    np.save(tmp_path / "fog.npy", np.zeros((3, 3)))
    with pytest.raises(DataError, match="expected uint8 images"):
        CIFARC(tmp_path).part("fog", 1)
    with pytest.raises(DataError, match=r"has no gaussian_noise\.npy"):
        CIFARC(class_folder(tmp_path / "other"))


def test_corruption_on_the_fly(tmp_path: Path) -> None:
    suite = Corrupted("folder", ImageFolder(class_folder(tmp_path), Preprocess(32, 32)))
    assert suite.shifts == BENCHMARK
    part = suite.part("contrast", 5)
    assert part.change is not None
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert float(part.change(x, torch.Generator()).std()) < 0.2 * float(x.std())
    assert suite.clean().change is None


def test_open_suite_by_name(tmp_path: Path) -> None:
    class_folder(tmp_path)
    assert len(open_suite("digits").clean().images) == 2000
    assert len(open_suite(f"folder:{tmp_path}", Preprocess(32, 32)).clean().images) == 12
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    np.save(cifar(tmp_path / "cifar") / "clean.npy", images)
    on_the_fly = open_suite(f"corrupted:cifar10-c:{tmp_path / 'cifar'}")
    assert on_the_fly.shifts == BENCHMARK
    assert len(on_the_fly.part("snow", 1).images) == 6
    assert on_the_fly.like == "cifar-c"
    assert open_suite(f"tiny-imagenet:{tmp_path / 'cifar'}").like == "tiny-imagenet-c"
    assert open_suite("digits").like == "imagenet-c"
    with pytest.raises(DataError, match="ImageNet-C has no clean images"):
        open_suite(f"corrupted:imagenet-c:{imagenet_c(tmp_path / 'c')}")
    with pytest.raises(DataError, match=f"'magic': choose from {', '.join(SUITES)}"):
        open_suite("magic")
    with pytest.raises(DataError, match="needs a folder: imagenet-c:FOLDER"):
        open_suite("imagenet-c")
    with pytest.raises(DataError, match="there is no folder"):
        open_suite(f"imagenet-c-5k:{tmp_path / 'no'}")


def test_images_in_one_array_are_read_in_batches(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.save(tmp_path / "labels.npy", np.arange(50) % 10)
    for shift in ("fog", "contrast"):
        np.save(tmp_path / f"{shift}.npy", generator.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8))
    suite = CIFARC(tmp_path)
    fog, contrast = suite.part("fog", 2), suite.part("contrast", 5)
    for parts, picks in (
        ([fog], [(0, 3), (0, 9), (0, 3), (0, 0), (0, 7)]),
        ([fog, contrast], [(0, 3), (1, 9), (1, 3), (0, 0), (0, 7)]),
    ):
        found = [*SampledDomain("some", parts, picks, batch_size=2).on("cpu")]
        assert [len(y) for _, y in found] == [2, 2, 1]
        x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
        assert y.dtype == torch.int64
        for row, (part, image) in enumerate(picks):
            expected, label = parts[part].images[image]
            assert torch.equal(x[row], expected.float() / 255)
            assert int(y[row]) == label


def test_cached_images_equal_decoded_images(tmp_path: Path) -> None:
    images = ImageFolder(class_folder(tmp_path / "set"), Preprocess(36, 29))  # 2,523 bytes: not a multiple of eight
    fresh = [images[index] for index in range(len(images))]
    for attempt in range(2):
        kept = Decoded(images, tmp_path / "cache")
        x, y = kept.rows([7, 0, 7])
        assert torch.equal(x, torch.stack([fresh[index][0] for index in (7, 0, 7)])), attempt
        assert y.tolist() == [1, 0, 1]
        assert torch.equal(kept[3][0], fresh[3][0])
        assert kept[3][1] == 0
        assert len(kept) == 12
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_each_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageFolder(class_folder(tmp_path / "set"), Preprocess(36, 32))
    opened: list[Path] = []
    monkeypatch.setattr(folders, "read_image", lambda path, how, **_: opened.append(path) or read_image(path, how))
    kept = Decoded(images, tmp_path / "cache")
    stream = SampledDomain("all", [Part(kept)], [(0, index) for index in range(12)], batch_size=5)
    first, again = ([x for x, _ in stream.on("cpu")] for _ in range(2))
    assert sorted(opened) == sorted(images.paths)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    Decoded(images, tmp_path / "cache").rows(range(12))
    assert len(opened) == 12, "a second reader decodes nothing"
    picture(images.paths[0], seed=99)
    Decoded(ImageFolder(tmp_path / "set", Preprocess(36, 32)), tmp_path / "cache").rows([0])
    assert len(opened) == 13, "a changed file is decoded again"
    Decoded(ImageFolder(tmp_path / "set", Preprocess(40, 32)), tmp_path / "cache").rows([0])
    assert len(opened) == 14, "and so is another preprocessing"


@pytest.mark.parametrize("harm", ["torn", "truncated", "removed"])
def test_incomplete_cache_entries_are_decoded_again(harm: str, tmp_path: Path) -> None:
    images = ImageFolder(class_folder(tmp_path / "set"), Preprocess(36, 32))
    kept = Decoded(images, tmp_path / "cache")
    whole, _ = kept.rows(range(12))
    if harm == "torn":
        with kept.file.open("r+b") as file:
            file.seek(5 * 3072 + 1000)
            file.write(bytes(500))
    elif harm == "truncated":
        with kept.file.open("r+b") as file:
            file.truncate(4 * 3072 + 100)
    else:
        kept.file.unlink()
    again = Decoded(images, tmp_path / "cache")
    assert torch.equal(again.rows(range(12))[0], whole)
    assert torch.equal(Decoded(images, tmp_path / "cache").rows([5])[0], whole[5:6])


def test_workers_share_one_cache(tmp_path: Path) -> None:
    spec = f"folder:{class_folder(tmp_path / 'set')}"
    suite = open_suite(spec, Preprocess(36, 32), tmp_path / "cache")
    assert suite.shifts == BENCHMARK
    assert (suite.name, suite.task) == ("folder", "classification")
    foggy, clean = suite.part("fog", 3), suite.clean()
    assert foggy.images is clean.images
    assert foggy.change is not None
    plain = open_suite(spec, Preprocess(36, 32)).clean()
    domains = [SampledDomain("d", [part], [(0, i) for i in range(12)], 4, workers=2) for part in (clean, plain)]
    for (x, y), (expected, labels) in zip(*(domain.on("cpu") for domain in domains), strict=True):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
    assert np.fromfile(clean.images.checksums, np.uint64).all(), "every image was written"


def test_cached_suite_describes_the_wrapped_suite(tmp_path: Path) -> None:
    class Stub(Suite):
        name, shifts, extra, classes = "stub", ("night",), ("fog",), (1, 2)
        graded, task = False, "segmentation"

        def part(self, shift: str, severity: int) -> Part:
            raise NotImplementedError

        def clean(self) -> Part:
            raise NotImplementedError

        def missing(self) -> list[str]:
            return ["night: 3 images"]

    stub = Stub()
    cached = DecodedSuite(stub, tmp_path)
    for name in ("name", "shifts", "extra", "classes", "graded", "task"):
        assert getattr(cached, name) == getattr(stub, name), name
    assert cached.missing() == ["night: 3 images"]
    assert open_suite("digits").missing() == []


def test_images_that_cannot_be_cached_are_passed_through(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "set")
    uncropped = open_suite(f"folder:{root}", Preprocess(), tmp_path / "cache").clean().images
    assert isinstance(uncropped, ImageFolder)
    assert not isinstance(open_suite("digits", None, tmp_path / "cache").clean().images, Decoded)
    with pytest.raises(DataError, match="crop="):
        Decoded(uncropped, tmp_path / "cache")
    assert not (tmp_path / "cache").exists(), "the folder is created on the first read"


def test_cache_without_enough_disk_space_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shift in ("fog", "snow"):
        class_folder(tmp_path / "c" / shift / "5")
    suite = DecodedSuite(ImageNetC(tmp_path / "c", Preprocess(None, 32), whole=False), tmp_path / "cache")
    each = 12 * 3 * 32 * 32
    monkeypatch.setattr(decoded.shutil, "disk_usage", lambda _: SimpleNamespace(free=1.5 * each))
    fog = suite.part("fog", 5).images
    with pytest.raises(NoRoomError, match=r"0\.0 GB more"):
        suite.part("snow", 5)  # would fit alone
    assert not isinstance(NoRoomError(), ValueError), "a ValueError would mean that the images do not exist"
    fog.rows(range(12))
    assert fog.bytes_to_write < each / 2
    assert fog.file.name.startswith("fog-5-")


def test_full_disk_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageFolder(class_folder(tmp_path / "set"), Preprocess(36, 32))
    kept = Decoded(images, tmp_path / "cache")
    kept.rows([0])
    plain = Path.open

    def full(path: Path, mode: str = "r", **how: Any) -> Any:
        if mode == "r+b":
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, mode, **how)

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(UserWarning, match="cache is full") as warned:
        x, _ = kept.rows([0, 1])
    assert warned[0].filename == __file__, "the line of the caller"
    assert torch.equal(x, torch.stack([images[0][0], images[1][0]]))


def test_equal_pixels_share_a_cache_file(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "set")

    def file(preprocess: Preprocess) -> Path:
        return Decoded(ImageFolder(root, preprocess), tmp_path / "cache").file

    assert file(Preprocess(None, 32)) == file(Preprocess(None, 32, "bicubic"))
    assert file(Preprocess(36, 32)) != file(Preprocess(36, 32, "bicubic"))
    suite = open_suite(f"folder:{root}", Preprocess(36, 32), tmp_path / "cache")
    assert suite.clean().images is suite.part("snow", 2).images


def test_next_batch_is_copied_while_this_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the order of stream operations with fake streams and batches."""
    log: list[str] = []

    class Batch:
        def __init__(self, name: str) -> None:
            self.name = name

        def to(self, _: torch.device, *, non_blocking: bool) -> Batch:
            assert non_blocking
            log.append(f"copy {self.name}")
            return self

        def record_stream(self, stream: Stream) -> None:
            assert stream is main
            log.append(f"used {self.name}")

    class Stream:
        def record_event(self) -> str:
            return log[-1].replace("copy", "wait")

        def wait_event(self, event: str) -> None:
            assert self is main
            log.append(event)

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    for x, _, _ in _moved([(Batch(name), None, [0]) for name in "abc"], torch.device("cuda")):  # type: ignore[misc]
        log.append(f"work {x.name}")
    expected = "copy a, wait a, used a, copy b, work a, wait b, used b, copy c, work b, wait c, used c, work c"
    assert log == expected.split(", ")


@pytest.mark.gpu
def test_batches_copied_on_a_side_stream_are_complete() -> None:
    sizes = (3, 30_000_000, 3, 30_000_000, 5)  # large copies are unfinished when the batch is requested
    made = [torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory() for size in sizes]
    square = torch.rand(4096, 4096, device="cuda")
    for busy in (False, True):  # with a busy device, memory in use must not be overwritten
        found = []
        for x, _, _ in _moved([(x, x, [0]) for x in made], torch.device("cuda")):
            if busy:
                square = (square @ square).clamp(0, 1)
            found.append(x.clone())
        assert all(torch.equal(x.cpu(), y) for x, y in zip(found, made, strict=True))


def test_cifar10_has_images_apart_for_choosing_settings(tmp_path: Path) -> None:
    images = np.arange(20, dtype=np.uint8).repeat(32 * 32 * 3).reshape(20, 32, 32, 3)
    np.save(tmp_path / "clean.npy", images)
    np.save(tmp_path / "labels.npy", np.arange(20) % 10)
    parts = {part: open_suite(f"cifar10:{tmp_path},{part}").clean().images for part in ("tune", "judge")}
    seen = {part: [(int(own[i][0][0, 0, 0]), own[i][1]) for i in range(len(own))] for part, own in parts.items()}
    assert seen["tune"] == [(0, 0), (5, 5), (10, 0), (15, 5)]
    assert seen["judge"] == [(i, i % 10) for i in range(20) if i % 5]
    assert len(open_suite(f"cifar10:{tmp_path}").clean().images) == 20


def test_digits_have_images_apart_for_choosing_settings() -> None:
    whole, tune, judge = (open_suite(f"digits{part}").clean().images for part in ("", ":tune", ":judge"))
    assert (len(whole), len(tune), len(judge)) == (2000, 400, 1600)
    assert torch.equal(tune[1][0], whole[5][0])
    assert torch.equal(judge[4][0], whole[6][0])
    with pytest.raises(DataError, match="digits:tune"):
        open_suite("digits:some")
