"""Files are whole at any time, whoever writes, reads or is killed; and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from networks import make, stream

from acclimate import Tent, files
from acclimate.files import write_bytes, write_text

HANGING = """
import os, sys, time
from pathlib import Path
from files import write_bytes

def hang(_):
    print("writing", flush=True)
    time.sleep(60)

os.fsync = hang
write_bytes(Path(sys.argv[1]), b"never finished")
"""

SAVING = """
import sys
sys.path.insert(0, sys.argv[2])
from networks import make, stream
from acclimate import Tent

adapter = Tent(make("bn"), lr=1e-2)
batches = stream()
adapter(batches[0])
for number in range(10**6):
    adapter(batches[number % len(batches)])
    adapter.save(sys.argv[1])
    if not number:
        print("saving", flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a script until it prints its first line."""
    package = Path(files.__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{package}", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "state [1].bin"
    dead, living = start(HANGING, path), start(HANGING, path)
    try:
        kill(dead)
        assert len(names(tmp_path)) == 2
        write_bytes(tmp_path / "another", b"")
        assert len(names(tmp_path)) == 3, "only leftovers of the same path are swept"
        write_bytes(path, b"new")
        (left,) = (name for name in names(tmp_path) if name.endswith(".acclimate-tmp"))
        assert f"-{living.pid}-" in left
    finally:
        kill(living)
    write_bytes(path, b"newer")
    assert names(tmp_path) == ["another", path.name]
    assert path.read_bytes() == b"newer"


def test_a_folder_of_many_files_is_not_listed_for_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1001):
        (tmp_path / str(number)).touch()
    dead = start(HANGING, tmp_path / "another")
    kill(dead)
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: (listed.append(folder), listdir(folder))[1])
    for number in range(20):
        write_bytes(tmp_path / f"state {number}", b"new")
    assert len(listed) == 1
    assert not [name for name in names(tmp_path) if name.startswith(".")], "what was left of any file is swept"
    listed.clear()
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    write_bytes(tmp_path / "later", b"new")
    assert len(listed) == 1


def test_other_files_stay_and_those_of_another_host_for_a_day(tmp_path: Path) -> None:
    path = tmp_path / "a"
    foreign = [".a.tmp", ".a.0123abcd-1-1.acclimate-tmp", "a.0123abcd-1-1-0123abcd.acclimate-tmp"]
    young, old = (f".a.0123abcd-1-{number}-0123abcd.acclimate-tmp" for number in (1, 2))
    for name in (*foreign, young, old):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0) if name != young else None)
    write_bytes(path, b"")
    assert names(tmp_path) == sorted([*foreign, young, "a"])


def test_a_writer_that_was_taken_for_dead_writes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def swept(descriptor: int) -> None:
        for path in tmp_path.glob(".*"):
            path.unlink()
        monkeypatch.setattr(os, "fsync", fsync)

    monkeypatch.setattr(os, "fsync", swept)
    write_bytes(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"
    assert names(tmp_path) == ["a"]


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 120)
    write_bytes(path, b"content")
    assert names(tmp_path) == [path.name]


def test_threads_that_write_and_read_one_path(tmp_path: Path) -> None:
    path, stop, failed = tmp_path / "a", threading.Event(), []
    contents = [bytes([number]) * (100_000 + number) for number in range(4)]
    write_bytes(path, contents[0])

    def until_stopped(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # shown by the test
            failed.append(error)

    def read() -> None:
        assert path.read_bytes() in contents

    works = [*(lambda own=content: write_bytes(path, own) for content in contents), read, read]
    threads = [threading.Thread(target=until_stopped, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert names(tmp_path) == ["a"]


def test_states_load_while_other_processes_save_them_and_are_killed(tmp_path: Path) -> None:
    """A reader that opens the path twice can mix two states, and finds a wrong checksum."""
    path = tmp_path / "tent.safetensors"
    adapter = Tent(make("bn"), lr=1e-2)
    adapter(stream()[0])
    saver = start(SAVING, path, Path(__file__).parent)
    try:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            adapter.load(path)
    finally:
        kill(saver)
    adapter.load(path)
    adapter.save(path)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "No space"), (errno.EROFS, "Read-only")])
def test_a_full_or_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    write_text(tmp_path / "a", "before")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*(os, "fsync") if number == errno.ENOSPC else (Path, "open"), refuse)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=f"{tmp_path}/a .*{reason}.*unchanged") as raised:
            write_text(tmp_path / "a", "after")
    assert raised.value.errno == number
    assert (tmp_path / "a").read_text() == "before"
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_write_that_stops_half_way(tmp_path: Path) -> None:
    import resource

    write_bytes(tmp_path / "a", b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write"):
            write_bytes(tmp_path / "a", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "a").read_bytes() == b"before"
    assert names(tmp_path) == ["a"]
