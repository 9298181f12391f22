"""Two processes on one folder of results: one writes, the other gets a clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acclimate.bench.locks import InUseError, locked
from acclimate.bench.plan import Job, Plan, PlanError
from acclimate.bench.run import Run
from acclimate.cli.main import app
from acclimate.paper.recipes import RECIPES
from acclimate.paper.reproduce import claimed

SMALL = ["--images", "8", "--shift", "contrast", "--probe", "none"]
PLAN = Plan(methods=("source", "tent"), images=8, shifts=("contrast",), probe="none")


def test_a_second_command_names_the_first(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["run", "--method", "source", *SMALL, "--out", str(out)]
    with locked(out):
        refused = CliRunner().invoke(app, command)
        assert CliRunner().invoke(app, [*command, "--dry-run"]).exit_code == 0, "looking is not writing"
    assert refused.exit_code == 2
    assert f"process {os.getpid()} on" in refused.stderr
    assert "another --out" in refused.stderr
    assert not list(out.glob("*.json"))
    assert CliRunner().invoke(app, command).exit_code == 0
    with locked(out):
        assert CliRunner().invoke(app, ["table", str(out)]).exit_code == 0, "reading needs no lock"


@pytest.mark.parametrize("command", [["demo"], ["compare"]])
def test_reports_have_one_writer(command: list[str], tmp_path: Path) -> None:
    options = ["--method", "source", "--network", "vit", "--images", "8", "--out", str(tmp_path)]
    with locked(tmp_path):
        refused = CliRunner().invoke(app, [*command, *options])
    assert (refused.exit_code, "is in use" in refused.stderr) == (2, True)


def test_a_job_has_one_writer(tmp_path: Path) -> None:
    """Processes that share a folder, as with `paper run --processes`, each hold the lock of their job."""
    run = Run(PLAN, tmp_path)
    with run.folder.writing(Job("tent", 0)):
        assert run.do(Job("source", 0)).done, "another job is free"
        with pytest.raises(InUseError, match=r"in use, for tent-seed0, by process \d+"):
            run.do(Job("tent", 0))
    assert run.do(Job("tent", 0)).done
    with run.folder.writing(Job("tent", 0)):
        assert run.do(Job("tent", 0)).done, "a finished result is only read"


def test_another_plan_is_seen_also_if_it_was_written_later(tmp_path: Path) -> None:
    early = Run(Plan(**{**PLAN.as_dict(), "severity": 3}), tmp_path)
    Run(PLAN, tmp_path).do(Job("source", 0))
    with pytest.raises(PlanError, match="another plan"):
        early.do(Job("tent", 0))


def test_recipes_have_one_command(tmp_path: Path) -> None:
    words = ["paper", "run", "toy", "--images", "8", "--out", str(tmp_path)]
    with claimed([RECIPES["toy"]], tmp_path / "digits"):
        refused = CliRunner().invoke(app, words)
        with claimed([RECIPES["selected"]], tmp_path / "digits"):
            pass
    assert (refused.exit_code, "is in use" in refused.stderr) == (2, True)


HOLD = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print(flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with locked(tmp_path, "job"):
        pass
    lock, owner = tmp_path / ".locks" / "job.lock", tmp_path / ".locks" / "job.json"
    assert not owner.exists()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], **pipes) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(InUseError, match="by another process"), locked(tmp_path, "job"):
                pass
            owner.write_text('{"process": 1, "host": "elsewhere", "command": "acclimate run", "since": "yesterday"}')
            with pytest.raises(InUseError, match="process 1 on elsewhere"), locked(tmp_path, "job"):
                pass
        finally:
            process.kill()
    with locked(tmp_path, "job"):
        assert str(os.getpid()) in owner.read_text()
