"""Results and states in storage: fsspec's memory and a real S3 server, whose files are whole at any time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import make, stream
from sweeps import OPTIONS, PLAN, numbers_in
from typer.testing import CliRunner

from acclimate import Streams, Tent
from acclimate.bench import preflight
from acclimate.bench.plan import Job, PlanError
from acclimate.bench.result_folder import read_plan, read_results
from acclimate.bench.run import Run
from acclimate.bench.sweep import sweep
from acclimate.bench.workers import Here
from acclimate.cli.main import app
from acclimate.core.snapshot import StateError
from acclimate.files import (
    RemotePath,
    is_file,
    matching,
    read_bytes,
    read_text,
    remove,
    to_path,
    write_bytes,
    write_text,
)
from acclimate.parts.world import World

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install 'acclimate[storage]'")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket on an S3 server of this machine."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
        fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    base = "memory://bucket" if request.param == "memory" else request.getfixturevalue("s3")
    return f"{base}/{tmp_path.name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    sweep([Run(PLAN, out)], Here())
    return out


def test_names_of_this_machine_and_of_storage() -> None:
    assert to_path("a/b") == to_path("file://a/b") == Path("a/b")
    assert to_path("file:///a/b") == Path("/a/b")
    assert to_path(r"C:\a") == Path(r"C:\a")
    for name in ("s3://a/b", "gs://a", "memory://a"):
        assert to_path(name) == RemotePath(name)
    folder = RemotePath("s3://bucket/a/")
    assert (str(folder / "b.json"), (folder / "b.json").name, (folder / "b.json").suffix) == (
        "s3://bucket/a/b.json",
        "b.json",
        ".json",
    )


def test_files(storage: str) -> None:
    folder = RemotePath(storage)
    assert matching(folder, "*") == []
    assert not is_file(folder / "a.json")
    remove(folder / "a.json")
    write_text(folder / "a.json", "one ü")
    write_bytes(folder / "b.txt", b"two")
    write_bytes(folder / "inner" / "c.json", b"three")
    assert matching(folder, "*.json") == [folder / "a.json"]
    assert read_text(folder / "a.json") == "one ü"
    write_text(folder / "a.json", "")
    assert read_bytes(folder / "a.json") == b""
    with pytest.raises(FileNotFoundError):
        read_bytes(folder / "none")
    remove(folder / "a.json")
    assert not is_file(folder / "a.json")


def test_what_another_process_has_written_is_seen(s3: str) -> None:
    """fsspec keeps listings, which would hide it."""
    folder = RemotePath(f"{s3}/seen")
    assert matching(folder, "*") == []
    write_bytes(folder / "first", b"1")
    assert len(matching(folder, "*")) == 1
    code = f"import fsspec; fsspec.filesystem('s3').pipe_file('{folder / 'second'}', b'2')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(matching(folder, "*")) == 2
    assert is_file(folder / "second")


def test_a_state_goes_through_storage_bit_for_bit(storage: str) -> None:
    batches, name = stream(), f"{storage}/tent.safetensors"
    adapter, other = (Tent(make("bn"), lr=1e-2) for _ in range(2))
    for x in batches[:2]:
        adapter(x)
    adapter.save(name)
    other.load(name)
    assert torch.equal(adapter(batches[2]), other(batches[2]))
    write_bytes(to_path(name), read_bytes(to_path(name))[:-9])
    with pytest.raises(StateError):
        other.load(name)
    with pytest.raises(FileNotFoundError, match="no adapter state"):
        other.load(f"{storage}/none.safetensors")


def test_a_run_a_table_and_a_report(storage: str, whole: Path) -> None:
    done = CliRunner().invoke(app, ["run", *OPTIONS, "--out", storage])
    assert done.exit_code == 0, done.stderr
    assert "no locks" in done.stderr
    assert numbers_in(RemotePath(storage)) == numbers_in(whole)
    assert not matching(RemotePath(storage), "*.safetensors"), "states of finished jobs are removed"
    assert not matching(RemotePath(storage), ".*"), "nothing is left of the check for write access"
    assert read_plan(RemotePath(storage)) == read_plan(whole)
    table = CliRunner().invoke(app, ["table", storage, "--format", "csv"])
    assert table.stdout == CliRunner().invoke(app, ["table", str(whole), "--format", "csv"]).stdout
    report = CliRunner().invoke(app, ["report", storage, "--out", f"{storage}/page.html", "--no-pictures"])
    assert report.exit_code == 0, report.stderr
    assert read_text(RemotePath(f"{storage}/page.html")).startswith("<!doctype html>")
    with pytest.raises(FileNotFoundError, match="no finished result"):
        read_results([RemotePath(f"{storage}/empty")])


def test_a_recipe(storage: str) -> None:
    words = ["paper", "run", "calibration", "--method", "tent", "--images", "16", "--out", storage]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    written = [path.name for path in matching(RemotePath(f"{storage}/digits"), "calibration*.*")]
    assert {"calibration.json", "calibration.md", "calibration.svg"} <= {*written}
    assert b"<svg" in read_bytes(RemotePath(f"{storage}/digits/calibration.svg"))


class Stop(Exception):
    pass


def stopped(run: Run, job: Job, after: int) -> None:
    """Carry out a job until some batches are done."""
    batches = iter(range(1, 100))

    def on_batch(batch: object, score: float) -> None:
        if next(batches) > after:
            raise Stop

    with pytest.raises(Stop):
        run.do(job, on_batch)


def test_two_writers_of_one_job(storage: str, whole: Path) -> None:
    """Without locks, whoever writes last, the result is that of one of them, and can be resumed."""
    job, folder, expected = Job("tent", 0), RemotePath(storage), numbers_in(whole)["tent-seed0.json"]
    fast, slow = Run(PLAN, folder), Run(PLAN, folder)
    fast.do(Job("source", 0))
    stopped(fast, job, 5)
    unfinished = read_bytes(folder / "tent-seed0.json")
    assert is_file(folder / "tent-seed0.after1.safetensors"), "another writer may resume from it"
    result, state = slow.folder.find(job)
    assert result is not None
    assert state == folder / "tent-seed0.after2.safetensors"
    fast.do(job)
    slow.folder.write(job, slow.adapter(job), result)
    assert numbers_in(folder)["tent-seed0.json"] == expected, "a finished result stays"
    write_bytes(folder / "tent-seed0.json", unfinished)  # by a writer that had looked just before
    Run(PLAN, folder).do(job)
    assert numbers_in(folder)["tent-seed0.json"] == expected, "it starts again, as its states are gone"


class Second(World):
    """The rank of a pair, of which the first has seen a finished result."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.said: list[int] = []

    def counts(self, *numbers: Any) -> Any:
        self.said += numbers
        return [1]

    def wait(self) -> None:
        raise AssertionError("the other rank does not come here")


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_where_another_writer_was_faster(rank: int) -> None:
    folder, job, world = RemotePath("memory://ranks"), Job("tent", 0), Second(rank)
    run = Run(PLAN, folder)
    unfinished = deepcopy(run.do(job))
    unfinished.done = False
    adapter = SimpleNamespace(world=world, save=lambda _: world.wait())
    run.folder.write(job, adapter, unfinished)
    assert world.said == [1 - rank]


RUN = "import sys; sys.argv[0] = 'acclimate'; from acclimate.cli.main import main; main()"


def test_a_killed_run_resumes_from_s3(s3: str, whole: Path) -> None:
    out = f"{s3}/killed"
    command = [sys.executable, "-c", RUN, "run", *OPTIONS, "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not matching(RemotePath(out), "*.safetensors") and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = [json.loads(read_text(path)) for path in matching(RemotePath(out), "*-seed0.json")]
    assert all(result["done"] or result["domains"] for result in found), "every file is whole"
    sweep([Run(PLAN, RemotePath(out))], Here())
    assert numbers_in(RemotePath(out)) == numbers_in(whole)


def test_storage_that_moves_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file is seen while it is written, such as over SFTP, a temporary one is moved."""
    from fsspec.implementations.local import LocalFileSystem

    class Disk(LocalFileSystem):
        protocol = "disk"

    fsspec.register_implementation("disk", Disk, clobber=True)
    path = RemotePath(f"disk://{tmp_path}/inner/a")
    write_text(path, "before")
    monkeypatch.setattr(Disk, "pipe_file", half_written)
    with pytest.raises(OSError, match="cannot write.*No space"):
        write_text(path, "after")
    assert read_text(path) == "before"
    assert [each.name for each in (tmp_path / "inner").iterdir()] == ["a"]


def half_written(self: Any, path: str, value: bytes, **_: Any) -> None:
    Path(path).write_bytes(value[:2])
    raise OSError(28, "No space left on device")


def test_errors_name_the_address(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="s3://nosuch/a cannot be written"):
        preflight.check(Run(PLAN, RemotePath("s3://nosuch/a")))
    refused = CliRunner().invoke(app, ["run", *OPTIONS, "--out", "nosuch://a/b"])
    assert refused.exit_code == 2
    assert "nosuch" in refused.stderr
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"\[storage\]"):
        write_text(RemotePath("s3://bucket/a"), "")
    write_text(to_path(f"file://{tmp_path}/a"), "paths of this machine need no fsspec")
    assert is_file(tmp_path / "a")


def test_states_of_cameras_in_storage() -> None:
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))

    def cameras() -> Streams:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
        return Streams(Tent(net, lr=0.1), most=1, folder="memory://cameras")

    first, alone = cameras(), Streams(cameras().adapter)
    expected = [alone("north gate", part) for part in x.split(4)]
    assert torch.equal(first("north gate", x[:4]), expected[0])
    first("south gate", x[:4])  # the other one makes room
    assert torch.equal(cameras()("north gate", x[4:]), expected[1])
    first.reset("north gate")
    assert cameras().keys() == []
