"""Results go to stdout; messages and progress to stderr. Ctrl-C ends with one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acclimate.bench.run import Run
from acclimate.cli.main import app
from acclimate.cli.terminal import RESUMES

SMALL = ["--images", "8", "--shift", "contrast", "--shift", "fog", "--probe", "none"]
RUN = ["run", "--method", "source", "--method", "tent", *SMALL]


def test_messages_are_apart_from_results(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    dry = CliRunner().invoke(app, [*RUN, "--out", out, "--dry-run"])
    assert "network" in dry.stdout
    assert "--preset" in dry.stderr
    assert "--preset" not in dry.stdout
    done = CliRunner().invoke(app, [*RUN, "--seed", "0", "--seed", "1", "--out", out])
    assert "acc %" in done.stdout
    assert "acclimate table" not in done.stdout
    assert all(hint in done.stderr for hint in ("--preset", "acclimate table"))
    CliRunner().invoke(app, [*RUN, "--severity", "3", "--out", out + "3"])
    mixed = CliRunner().invoke(app, ["table", out, out + "3", "--paper"])
    assert mixed.stdout.startswith("| Method |")
    assert all(line.startswith("|") for line in mixed.stdout.splitlines())
    assert "not comparable" in mixed.stderr
    wrong = CliRunner().invoke(app, ["table", str(tmp_path / "no")])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "no table" in wrong.stderr

    records = json.loads(CliRunner().invoke(app, ["table", out, "--format", "json"]).stdout)
    assert [(each["Method"], each["Metric"]) for each in records] == [
        *(("Source", "Acc."), ("Source", "ECE")),
        *(("Tent", "Acc."), ("Tent", "ECE")),
    ]
    assert all(isinstance(each[name], float) for each in records for name in ("contrast", "Avg.", "Avg. deviation"))
    assert records[0]["#Forwards"] == 8


def test_recipes_print_only_tables(tmp_path: Path) -> None:
    words = ["paper", "run", "selected", "--images", "8", "--network", "vit", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "written:" in done.stderr
    assert "scale" in done.stderr
    assert "scale" not in done.stdout
    assert "| confidence |" in done.stdout


def test_names_as_json() -> None:
    listed = json.loads(CliRunner().invoke(app, ["list", "--format", "json"]).stdout)
    assert {"methods", "networks", "data sets", "scenarios"} == listed.keys()
    assert listed["methods"] == json.loads(CliRunner().invoke(app, ["methods", "--format", "json"]).stdout)
    assert "eata-c" in listed["methods"]
    assert CliRunner().invoke(app, ["list", "--format", "jsn"]).exit_code == 2


@pytest.mark.parametrize("command", ["run", "paper"])
def test_ctrl_c_says_how_to_go_on(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = RUN if command == "run" else ["paper", "run", "components", "--images", "8", "--method", "tent"]
    words = [*words, "--out", str(tmp_path)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "start", stop)
        stopped = CliRunner().invoke(app, words)
    assert stopped.exit_code == 130
    assert "Traceback" not in stopped.output
    assert RESUMES in stopped.stderr.splitlines()[-1]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("seconds", [0.2, 0.6, 1.2])
def test_an_interrupt_during_the_imports_is_one_line(seconds: float) -> None:
    command = [sys.executable, "-c", "from acclimate_start import main; print('started', flush=True); main()", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert "Traceback" not in said, said
    assert process.returncode in (0, 130, -signal.SIGINT), "or it had ended, or was about to"
    assert said.count("\n") <= 1
