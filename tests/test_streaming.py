"""Streaming: single images that gather to batches, and one state per camera."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import CASES
from networks import images, make, stream
from torch import Tensor

from acclimate import Adapter, Guard, StateError, Tent
from acclimate.online import one_by_one
from acclimate.online.cameras import Streams
from acclimate.online.one_by_one import Learner, Stream

METHODS = [(name, family) for name in ("tent", "eata", "eata-c", "cotta") for family in ("bn", "ln")]
every_method = pytest.mark.parametrize(("name", "family"), METHODS)


def build(name: str = "tent", family: str = "ln") -> Adapter:
    return CASES[name].make(make(family), **({} if name == "cotta" else {"lr": 0.05}))


def state(adapter: Adapter) -> dict[str, Tensor]:
    return dict(adapter.snapshot().tensors)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def until(true: Callable[[], bool]) -> None:
    """Wait for a worker, for at most a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


class Recorded:
    """An adapter that notes what it learns from, and may be slow or fail."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.batches, self.used, self.steps = adapter, [], [], []
        self.go, self.started = threading.Event(), threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, x: Tensor) -> Tensor:
        with self.adapter.sharing:
            self.started.set()
            assert self.go.wait(60)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.batches.append(x)
            return self.adapter(x)

    def predict_only(self, x: Tensor, *, statistics: object = None) -> Tensor:
        self.used.append(statistics)
        self.steps.append(len(self.batches))
        return self.adapter.predict_only(x, statistics=statistics)

    def __getattr__(self, name: str) -> object:
        return getattr(self.adapter, name)


# One by one -----------------------------------------------------------------------------------------------------------


@every_method
def test_single_images_teach_what_their_batches_teach(name: str, family: str) -> None:
    one, other = build(name, family), build(name, family)
    stream_ = Stream(one, size=8, wait=math.inf)
    batches = stream(3)
    for x in torch.cat(batches).split(1):
        stream_(x)
    learned = 0
    for batch in batches:
        other(batch)
        kept = torch.ones(8, dtype=torch.bool) if other.last.kept is None else other.last.kept.view(8, -1).any(1)
        learned += int(kept.sum()) * other.last.updated
    assert same(state(one), state(other))
    assert (stream_.learned, stream_.waiting, stream_.skipped) == (learned, 0, 0)


@pytest.mark.parametrize("guarded", [False, True])
def test_what_is_frozen_learns_from_nothing(guarded: bool) -> None:
    adapter = Guard(Tent(make("ln")), probe=images(64)) if guarded else Tent(make("ln"))
    adapter.frozen = True
    stream_ = Stream(adapter, size=8, wait=math.inf)
    for x in torch.cat(stream(3)).split(1):
        stream_(x)
    assert (stream_.learned, stream_.waiting, int(adapter.passes.backwards)) == (0, 0, 0)
    assert stream_.batch_kept is not None
    assert not stream_.batch_kept.any()


@every_method
def test_predictions_are_of_what_was_learned_before(name: str, family: str) -> None:
    one, other = build(name, family), build(name, family)
    stream_ = Stream(one, size=8, wait=math.inf, momentum=0.25)
    statistics = "source" if other.coupled else None
    for number, batch in enumerate(stream(3)):
        expected = [other.predict_only(x, statistics=statistics) for x in batch.split(2)]
        for x, logits in zip(batch.split(2), expected, strict=True):
            assert torch.equal(stream_(x), logits)
        other(batch)
        if other.coupled:
            new = other.measure_statistics(batch)[1]
            statistics = [a.lerp(b, 0.25) for a, b in zip(statistics, new, strict=True)] if number else new


def _close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether statistics agree but for the order of additions."""
    return len(a) == len(b) > 0 and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


def test_a_small_batch_moves_the_statistics_less() -> None:
    adapter = build(family="bn")
    stream_ = Stream(adapter, size=8, wait=math.inf, momentum=0.75)
    stream_(images(8))
    first, x = stream_._statistics, images(4, 1)
    stream_(x)
    stream_.flush()
    new = adapter.measure_statistics(x)[1]
    expected = [a + 0.5 * (b - a) for a, b in zip(first, new, strict=True)]  # 1 − (1 − 0.75)^(4/8)
    assert _close(stream_._statistics, expected)
    assert not _close(first, expected)


@pytest.mark.parametrize("background", [False, True])
def test_a_large_call_is_learned_in_batches(background: bool) -> None:
    adapter = Recorded(build())
    with Stream(adapter, size=4, wait=math.inf, least=2, background=background) as stream_:
        x = images(8 if background else 11)
        assert torch.equal(stream_(x), build().predict_only(x))
        until(lambda: stream_.learned >= 8)
    assert [len(b) for b in adapter.batches] == ([4, 4] if background else [4, 4, 3])
    assert torch.equal(torch.cat(adapter.batches), x)


@pytest.mark.parametrize(("family", "least"), [("ln", 1), ("bn", 8)])
def test_the_oldest_image_waits_no_longer(family: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(one_by_one, "time", SimpleNamespace(monotonic=lambda: now))
    stream_ = Stream(build(family=family), size=20, wait=0.05)
    for x in images(9).split(1):
        stream_(x)
    assert stream_.learned == 0
    now += 0.06
    stream_(images(1))
    assert (stream_.learned, stream_.waiting) == (10, 0)
    for x in images(least).split(1):
        now += 0.06 / least + 0.001
        stream_(x)
    assert stream_.learned >= 10 + least - 1
    assert stream_.least == least


def test_fewer_than_least_wait_longer() -> None:
    stream_ = Stream(build(family="bn"), size=20, wait=0.0)
    for x in images(7).split(1):
        stream_(x)
    assert (stream_.learned, stream_.waiting) == (0, 7)
    stream_(images(1))
    assert (stream_.learned, stream_.waiting) == (8, 0)


def test_the_worker_wakes_up_when_the_time_is_over() -> None:
    with Stream(build(), size=20, wait=0.05, background=True) as stream_:
        start = time.monotonic()
        stream_(images(3))
        until(lambda: stream_.learned == 3)
        assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "bad", [images(2) * math.nan, images(2)[:, :1], images(2)[0], images(2, size=24), images(2).double(), "no images"]
)
def test_refused_images_do_not_gather(bad: Tensor, background: bool) -> None:
    with Stream(build(), size=8, wait=math.inf, background=background) as stream_:
        good = images(8)
        stream_(good[:3])
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            stream_(bad)
        assert (stream_.waiting, stream_.skipped) == (3, 0)
        stream_(good[3:])
        stream_.flush()
        assert stream_.learned == 8


def test_the_first_images_may_be_refused_too() -> None:
    stream_ = Stream(build(), size=4)
    with pytest.raises(ValueError, match="shape"):
        stream_(images(2)[:, :1])
    stream_(images(4))
    assert stream_.learned == 4


def test_images_are_copied() -> None:
    adapter = Recorded(build())
    stream_, x = Stream(adapter, size=4, wait=math.inf), images(2).requires_grad_()
    stream_(x)
    kept = x.detach().clone()
    with torch.no_grad():
        x.zero_()
    with torch.inference_mode():
        stream_(images(2, 1))
    assert torch.equal(adapter.batches[0], torch.cat([kept, images(2, 1)]))


@pytest.mark.parametrize("background", [False, True])
def test_flush_and_close_learn_from_the_rest(background: bool) -> None:
    adapter = build(family="bn")
    stream_ = Stream(adapter, size=64, wait=math.inf, background=background)
    stream_(images(2))
    stream_.flush()
    assert (stream_.learned, stream_.waiting) == (2, 0)
    stream_(images(8))
    stream_.close()
    stream_.close()
    assert (stream_.learned, stream_.waiting, stream_.skipped) == (10, 0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        stream_(images(1))


@pytest.mark.parametrize("background", [False, True])
def test_close_does_not_learn_from_too_few(background: bool) -> None:
    adapter = build(family="bn")
    before = state(adapter)
    with Stream(adapter, size=64, background=background) as stream_:
        stream_(images(7))
    assert (stream_.learned, stream_.waiting, stream_.skipped) == (0, 0, 7)
    assert same(state(adapter), before)


def test_a_failed_batch_is_dropped() -> None:
    adapter = Recorded(build())
    stream_ = Stream(adapter, size=4, wait=math.inf)
    adapter.error = ValueError("bad batch")
    stream_(images(3))
    with pytest.raises(ValueError, match="bad batch"):
        stream_(images(1))
    assert (stream_.learned, stream_.waiting, stream_.skipped) == (0, 0, 4)
    stream_(images(4))
    assert stream_.learned == 4


@pytest.mark.parametrize("how", ["call", "flush", "close"])
def test_an_error_of_the_worker_is_raised_once(how: str) -> None:
    adapter = Recorded(build())
    stream_ = Stream(adapter, size=4, wait=math.inf, background=True)
    adapter.error = ValueError("bad batch")
    stream_(images(4))
    until(lambda: stream_.skipped == 4)
    with adapter.sharing, pytest.raises(ValueError, match="bad batch"):
        stream_(images(1)) if how == "call" else getattr(stream_, how)()
    if how != "close":
        stream_(images(4))
        until(lambda: stream_.learned == 4)
    stream_.close()
    assert not stream_._worker.is_alive()


def test_a_full_queue_skips() -> None:
    adapter = Recorded(build())
    with Stream(adapter, size=4, wait=math.inf, background=True) as stream_:
        with adapter.sharing:  # the worker cannot begin, the caller can predict
            for x in images(10).split(1):
                assert torch.equal(stream_(x), build().predict_only(x))
            assert (stream_.waiting, stream_.skipped) == (8, 2)
        until(lambda: stream_.learned == 8)
        stream_(images(1))
        assert (stream_.waiting, stream_.skipped) == (1, 2)
    assert torch.equal(torch.cat(adapter.batches[:2]), images(10)[:8])


def test_a_prediction_waits_for_one_step_only() -> None:
    adapter = Recorded(build())
    with Stream(adapter, size=2, wait=math.inf, background=True) as stream_:
        adapter.go.clear()
        stream_(images(2))
        assert adapter.started.wait(60)
        stream_._gather(images(4))  # two more batches, so that the worker is always busy
        callers = [threading.Thread(target=stream_, args=[images(1)]) for _ in range(3)]
        for caller in callers:
            caller.start()
        until(lambda: stream_._asking == 3)
        adapter.go.set()
        for caller in callers:
            caller.join(60)
        assert adapter.steps == [0, 1, 1, 1]
        until(lambda: stream_.learned >= 6)


def test_callers_do_not_starve_the_worker() -> None:
    with Stream(build(), size=4, wait=math.inf, background=True) as stream_:
        for x in images(2000, size=8).split(1):
            stream_(x)
            if stream_.learned >= 28:
                break
        assert stream_.learned >= 28


@pytest.mark.parametrize("background", [False, True])
def test_threads_share_a_stream(background: bool) -> None:
    """Nothing is lost or learned twice, and every caller receives its own logits."""
    adapter = Recorded(CASES["tent"].make(make("ln"), lr=0.0))  # predictions stay the same
    fixed, x = build(), images(60)
    with Stream(adapter, size=7, wait=0.01, background=background) as stream_, ThreadPoolExecutor(4) as pool:
        logits = list(pool.map(stream_, x.split(1)))
    assert torch.equal(torch.cat(logits), torch.cat([fixed.predict_only(one) for one in x.split(1)]))
    learned = torch.cat(adapter.batches)
    assert stream_.learned == len(learned) == 60 - stream_.skipped
    assert background or stream_.skipped == 0
    seen = [one.sum().item() for one in learned]
    assert len({*seen}) == len(seen)
    assert {*seen} <= {one.sum().item() for one in x}
    assert max(map(len, adapter.batches)) <= 7


def test_networks_without_batch_statistics_predict_plainly() -> None:
    for adapter in (build(), Tent(make("bn"), statistics="source")):
        recorded = Recorded(adapter)
        stream_ = Stream(recorded, size=3)
        stream_(images(2))
        stream_(images(2))
        assert recorded.used == [None, None]


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"wait": -1}, {"wait": math.nan}, {"momentum": 0}, {"momentum": 1.1}, {"least": 0}]
)
def test_settings_of_a_stream_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Stream(build(), **wrong)


def test_a_program_may_end_while_the_worker_learns() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests'); from test_streaming import *; "
        "s = Stream(build(), size=2, wait=0.0, background=True); [s(x) for x in images(20).split(1)]; print('end')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


# Cameras --------------------------------------------------------------------------------------------------------------

NAMES = ("north gate", "süd/../tor", "☂ " * 100, "a\r\nb")


def batches_of(camera: int, count: int = 3) -> list[Tensor]:
    return stream(count, seed=100 + 10 * camera)


def alone(name: str, family: str, camera: int, count: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The logits of a camera that has an adapter of its own, and its last state."""
    adapter = build(name, family)
    return [adapter(x) for x in batches_of(camera, count)], state(adapter)


@every_method
@pytest.mark.parametrize("most", [1, 2, 10])
def test_cameras_learn_as_if_alone(name: str, family: str, most: int, tmp_path: Path) -> None:
    cameras = Streams(build(name, family), most=most, folder=tmp_path)
    found: dict[str, list[Tensor]] = {key: [] for key in NAMES}
    for turn in range(3):
        for number, key in enumerate(NAMES):
            found[key].append(cameras(key, batches_of(number)[turn]))
            assert cameras.current == key
            assert len(cameras._states) <= most
    for number, key in enumerate(NAMES):
        logits, last = alone(name, family, number)
        assert all(torch.equal(a, b) for a, b in zip(found[key], logits, strict=True))
        x = images(4)
        expected = build(name, family)
        [expected(batch) for batch in batches_of(number)]
        assert torch.equal(cameras.predict_only(key, x), expected.predict_only(x))
        assert same(state(cameras.adapter), last)


@pytest.mark.parametrize("most", [1, 3, 10])
@pytest.mark.parametrize("name", ["eata", "cotta"])
def test_threads_share_cameras(name: str, most: int, tmp_path: Path) -> None:
    cameras = Streams(build(name, "bn"), most=most, folder=tmp_path)

    def run(number: int) -> list[Tensor]:
        return [cameras(NAMES[number], x) for x in batches_of(number)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    for number in range(4):
        logits, last = alone(name, "bn", number)
        assert all(torch.equal(a, b) for a, b in zip(found[number], logits, strict=True))
        cameras.predict_only(NAMES[number], images(2))
        assert same(state(cameras.adapter), last)


@every_method
def test_states_survive_a_restart(name: str, family: str, tmp_path: Path) -> None:
    with Streams(build(name, family), most=2, folder=tmp_path / "new" / "folder") as cameras:
        for number, key in enumerate(NAMES):
            cameras(key, batches_of(number)[0])
    again = Streams(build(name, family), folder=tmp_path / "new" / "folder")
    assert sorted(again.keys()) == sorted(NAMES)
    assert len(again) == 4
    assert not again._states, "states are read when they are needed"
    for number, key in enumerate(NAMES):
        assert key in again
        assert torch.equal(again(key, batches_of(number)[1]), alone(name, family, number)[0][1])


@every_method
def test_single_images_go_on_in_another_process(name: str, family: str, tmp_path: Path) -> None:
    one, other = Stream(build(name, family), size=8, wait=math.inf), Stream(build(name, family), size=8, wait=math.inf)
    x = images(30)
    for image in x[:20].split(1):
        one(image)
    one.save(tmp_path / "state.safetensors")
    other.restore(other.read(tmp_path / "state.safetensors"))  # this adapter has seen nothing yet
    for image in x[20:].split(1):
        assert torch.equal(one(image), other(image))


def test_a_kill_loses_only_what_was_not_written(tmp_path: Path) -> None:
    cameras = Streams(build(), most=1, folder=tmp_path)
    cameras("a", images(4))
    cameras("b", images(4))  # "a" is written
    (tmp_path / "0123.txt").write_text("c")  # killed between the name and the state
    (tmp_path / "other.safetensors").write_bytes(b"")  # a file that is not of a camera
    again = Streams(build(), folder=tmp_path)
    assert again.keys() == ["a"]
    adapter = build()
    adapter(images(4))
    assert torch.equal(again("a", images(4, 1)), adapter(images(4, 1)))


def test_save_writes_what_changed(tmp_path: Path) -> None:
    cameras = Streams(build(), folder=tmp_path)
    written: list[str] = []
    save = cameras.adapter.save

    def note(path: Path, snapshot: object) -> None:
        written.append(Path(path).with_suffix(".txt").read_text())
        save(path, snapshot)

    cameras.adapter.save = note  # type: ignore[method-assign]
    for key in "abc":
        cameras(key, images(4))
    cameras.save()
    assert written == ["a", "b", "c"]
    cameras.save()
    assert written == ["a", "b", "c"]
    cameras.predict_only("a", images(4))
    cameras("b", images(4))
    cameras.save()
    assert written == ["a", "b", "c", "b"]
    cameras.adapter(images(4, 1))  # outside: it is "b" that learns
    cameras.predict_only("c", images(4))
    cameras.save()
    assert written == ["a", "b", "c", "b", "b"]


def test_learning_outside_belongs_to_the_current_camera() -> None:
    adapter = build()
    cameras = Streams(adapter)
    cameras("a", images(4))
    adapter(images(4, 1))
    after = state(adapter)
    cameras("b", images(4))
    cameras.predict_only("a", images(4))
    assert same(state(adapter), after)


def test_every_camera_starts_from_what_was_learned_before() -> None:
    adapter = build()
    source = state(adapter)
    adapter(images(4))
    start = state(adapter)
    cameras = Streams(adapter)
    for key in "ab":
        cameras(key, images(4, 1))
    cameras.reset("b")
    assert same(state(adapter), start)
    assert not same(start, source)


@every_method
def test_a_refused_batch_leaves_the_camera(name: str, family: str) -> None:
    adapter = build(name, family)
    cameras = Streams(adapter)
    for key in "ab":
        cameras(key, images(4))
    before = state(adapter)
    for bad in (images(4) * math.nan, images(4)[:, :1], images(4)[:0]):
        for key in ("b", "a", "new"):
            with pytest.raises((ValueError, RuntimeError)):
                cameras(key, bad)
    assert sorted(cameras.keys()) == ["a", "b"]
    for key in "ab":
        cameras.predict_only(key, images(4))
        assert same(state(adapter), before)
    assert torch.equal(cameras("new", images(4)), build(name, family)(images(4)))


def test_prediction_makes_no_camera() -> None:
    cameras = Streams(build())
    cameras("a", images(4))
    assert torch.equal(cameras.predict_only("b", images(4)), build().predict_only(images(4)))
    assert cameras.keys() == ["a"]
    assert "b" not in cameras


def test_reset_forgets_a_camera(tmp_path: Path) -> None:
    cameras = Streams(build(), folder=tmp_path)
    fresh = cameras("a", images(4))
    cameras("b", images(4))
    cameras("a", images(4, 1))
    cameras.save()
    for key in ("a", "b", "never seen"):
        cameras.reset(key)
        assert key not in cameras
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert torch.equal(cameras("a", images(4)), fresh)
    assert len(cameras) == 1


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    cameras = Streams(build(), most=2, folder=tmp_path)
    for key in "aba":
        cameras(key, images(4))
    cameras("c", images(4))
    assert [*cameras._states] == ["a", "c"]


def test_without_a_folder_states_are_forgotten() -> None:
    cameras = Streams(build(), most=1)
    first = cameras("a", images(4))
    with pytest.warns(UserWarning, match="folder="):
        cameras("b", images(4))
    assert torch.equal(cameras("a", images(4)), first)  # no second warning
    assert cameras.keys() == ["a"]
    with pytest.raises(ValueError, match="folder="):
        cameras.save()
    with cameras:
        pass


def test_memory_is_that_of_the_states(tmp_path: Path) -> None:
    adapter = build("eata", "bn")
    cameras = Streams(adapter, most=3, folder=tmp_path)
    start = cameras.nbytes
    for key in "abcdef":
        cameras(key, images(4))
    cameras.save()
    assert cameras.nbytes == start + 3 * adapter.snapshot().nbytes


def test_a_full_disk_loses_no_state(tmp_path: Path) -> None:
    adapter = build()
    cameras = Streams(adapter, most=1, folder=tmp_path)
    cameras("a", images(4))
    before, save = state(adapter), adapter.save

    def full(*_: object) -> None:
        raise OSError("no space left")

    adapter.save = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space"):
        cameras("b", images(4))
    adapter.save = save  # type: ignore[method-assign]
    cameras("b", images(4))
    cameras.predict_only("a", images(4))
    assert same(state(adapter), before)


def test_a_failed_restore_mixes_no_states() -> None:
    adapter = build()
    cameras = Streams(adapter)
    for key in "ab":
        cameras(key, images(4))
    before, restore = state(adapter), adapter.restore

    def interrupted(snapshot: object) -> None:
        restore(snapshot)
        raise KeyboardInterrupt

    adapter.restore = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cameras("c", images(4))
    adapter.restore = restore  # type: ignore[method-assign]
    assert sorted(cameras.keys()) == ["a", "b"]
    cameras.predict_only("b", images(4))
    assert same(state(adapter), before)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with Streams(build(), folder=tmp_path) as cameras:
        cameras("a", images(4))
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    again = Streams(build(), folder=tmp_path)
    again("b", images(4))
    before = state(again.adapter)
    with pytest.raises(StateError):
        again("a", images(4))
    assert again.current == "b"
    assert same(state(again.adapter), before)
    again.reset("a")
    again("a", images(4))


@pytest.mark.parametrize("key", ["", 3, None, "\ud800"])
def test_names_of_cameras_are_checked(key: str) -> None:
    cameras = Streams(build())
    with pytest.raises(ValueError):  # noqa: PT011
        cameras(key, images(4))
    assert len(cameras) == 0


def test_settings_of_cameras_are_checked() -> None:
    with pytest.raises(ValueError, match="most"):
        Streams(build(), most=0)


# With a guard ---------------------------------------------------------------------------------------------------------


def test_cameras_of_a_guard_come_back_bit_for_bit(tmp_path: Path) -> None:
    def guard() -> Guard:
        return Guard(Tent(make("ln"), lr=1e-5), probe=images(64, 900))

    alone = {key: guard() for key in "ab"}
    cameras = Streams(guard(), most=1, folder=tmp_path)
    for number in range(4):
        for key, own in alone.items():
            x = images(48, 10 * number + ord(key))
            assert torch.equal(cameras(key, x), own(x))
    assert cameras.adapter.health == alone["b"].health


@pytest.mark.parametrize("family", ["bn", "ln"])
def test_a_stream_of_single_images_through_a_guard(family: str) -> None:
    guard = Guard(Tent(make(family), lr=1e-5), policies=())
    stream = Stream(guard, size=16, wait=60)
    logits = [stream(x) for x in images(40).split(1)]
    assert (stream.learned, stream.waiting, guard.health.batches) == (32, 8, 2)
    assert all(z.shape == (1, logits[0].shape[1]) for z in logits)


# State of a stream ----------------------------------------------------------------------------------------------------


def single(adapter: Learner) -> Stream:
    return Stream(adapter, size=4, wait=math.inf)


@pytest.mark.parametrize("kind", ["ln", "bn"])
def test_a_stream_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """What waits and the moving statistics are part of a state, in memory and in a file."""
    first = single(CASES["tent"].make(make(kind)))
    for x in images(7).split(1):
        first(x)
    assert first.waiting == 3
    first.save(tmp_path / "state.safetensors")
    expected = [first(x) for x in images(6).split(1)]
    again = single(CASES["tent"].make(make(kind)))
    again.restore(again.read(tmp_path / "state.safetensors"))
    assert (again.waiting, again.learned) == (3, 4)
    assert all(torch.equal(again(x), z) for x, z in zip(images(6).split(1), expected, strict=True))
    assert again.learned == first.learned == 12


def test_cameras_have_streams_of_their_own() -> None:
    """Two cameras that take turns predict as two streams apart."""
    x = images(20)
    cameras = Streams(single(CASES["tent"].make(make("bn"))))
    mixed = {key: [] for key in "ab"}
    for one in x.split(1):
        for key in "ab":
            mixed[key].append(cameras(key, one if key == "a" else 1 - one))
    for key in "ab":
        alone = single(CASES["tent"].make(make("bn")))
        assert torch.equal(
            torch.cat(mixed[key]), torch.cat([alone(one if key == "a" else 1 - one) for one in x.split(1)])
        )


def test_a_full_batch_is_one_step_of_the_adapter() -> None:
    x = images(8)
    stream_, plain = single(CASES["eata"].make(make("bn"))), CASES["eata"].make(make("bn"))
    for batch in x.split(4):
        assert torch.equal(stream_(batch), plain(batch))
        assert torch.equal(stream_.kept, plain.last.kept & plain.last.updated)
    assert stream_.waiting == 0
    stream_(x[:1])
    assert stream_.kept is None


def test_two_processes_can_hand_a_camera_over(tmp_path: Path) -> None:
    """A released camera continues elsewhere as if it had stayed, and one that was never written starts anew."""
    x = images(12)
    here, there = (Streams(CASES["tent"].make(make("ln")), folder=tmp_path, shared=True) for _ in range(2))
    alone = Streams(CASES["tent"].make(make("ln")))
    expected = [alone("a", batch) for batch in x.split(4)]
    assert torch.equal(here("a", x[:4]), expected[0])
    here.release("a")
    assert torch.equal(there("a", x[4:8]), expected[1])
    assert not torch.equal(there("b", x[4:8]), expected[1])
    there.release("a")
    assert torch.equal(here("a", x[8:]), expected[2])


@pytest.mark.parametrize("place", ["folder", "storage"])
def test_a_stale_copy_does_not_undo_what_another_process_has_learned(place: str, tmp_path: Path) -> None:
    if place == "storage":
        pytest.importorskip("fsspec")
    folder = tmp_path if place == "folder" else f"memory://{tmp_path.name}"
    x = images(24)

    def cameras() -> Streams:
        return Streams(CASES["tent"].make(make("ln")), folder=folder, shared=True)

    here, there, alone = cameras(), cameras(), Streams(CASES["tent"].make(make("ln")))
    expected = [alone("a", batch) for batch in x.split(4)]
    here("a", x[:4])
    here.save()
    assert torch.equal(there("a", x[4:8]), expected[1])
    there.save()
    assert torch.equal(here.predict_only("a", x[8:12]), cameras().predict_only("a", x[8:12])), "the copy is read again"
    assert torch.equal(here("a", x[8:12]), expected[2]), "one batch strays here"
    here.save()
    assert torch.equal(there("a", x[12:16]), expected[3])
    here("a", x[:4])  # both learn, and one writes first
    there.save()
    here.save()
    assert torch.equal(cameras()("a", x[16:20]), expected[4]), "a copy that was read before is not written"
    assert torch.equal(here("a", x[16:20]), expected[4])
    there.reset("a")
    assert torch.equal(here("a", x[:4]), expected[0]), "what another process has reset is gone"


# One process in a folder ----------------------------------------------------------------------------------------------

SECOND = """
import sys, torch, acclimate
from pathlib import Path
net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
try:
    cameras = acclimate.Streams(acclimate.Tent(net), folder=sys.argv[1])
except RuntimeError as error:
    sys.exit(str(error))
print("ready", flush=True)
sys.stdin.read()
"""


def second_process(folder: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SECOND, str(folder)], text=True, **pipes)


def test_a_second_process_is_kept_out_of_a_folder(tmp_path: Path) -> None:
    with Streams(build(), folder=tmp_path) as cameras:
        cameras("a", images(8))
        Streams(build(), folder=tmp_path)  # the same process may
        other = second_process(tmp_path)
        _, error = other.communicate(timeout=300)
        assert other.returncode == 1
        assert f"process {os.getpid()}" in error
    other = second_process(tmp_path)
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(RuntimeError, match=f"process {other.pid}"):
            Streams(build(), folder=tmp_path)
        with pytest.raises(RuntimeError, match="in use"), cameras:
            pass
    finally:
        other.kill()
        other.communicate(timeout=300)
    with Streams(build(), folder=tmp_path) as again:
        assert again.keys() == ["a"]


def test_dropped_cameras_free_their_folder(tmp_path: Path) -> None:
    cameras = Streams(build(), folder=tmp_path)
    del cameras
    gc.collect()
    other = second_process(tmp_path)
    out, error = other.communicate("", timeout=300)
    assert (out, error) == ("ready\n", "")


def test_what_others_have_written_is_read_when_a_folder_is_entered(tmp_path: Path) -> None:
    here, there = (Streams(CASES["tent"].make(make("ln")), folder=tmp_path) for _ in range(2))
    alone = Streams(CASES["tent"].make(make("ln")))
    x = images(12)
    expected = [alone("a", batch) for batch in x.split(4)]
    with here:
        here("a", x[:4])
    with there:
        assert there.keys() == ["a"]
        assert torch.equal(there("a", x[4:8]), expected[1])
    with here:
        assert torch.equal(here("a", x[8:]), expected[2]), "a state of before the folder was left"
    with there:
        there.reset("a")
    assert torch.equal(here("a", x[:4]), expected[0]), "a call enters again"


def test_a_full_disk_leaves_no_folder_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = Streams(build(), folder=tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cameras("a", images(4))
    learned = cameras.adapter.snapshot().tensors
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"), cameras:
        patch.setattr("os.fsync", full)
    other = second_process(tmp_path)
    out, error = other.communicate("", timeout=300)
    assert (out, error) == ("ready\n", "")
    with cameras, cameras.using("a"):  # what could not be written is still there
        assert all(torch.equal(t, learned[name]) for name, t in cameras.adapter.snapshot().tensors.items())
