"""Workers carry out every job, whoever is killed: here and in processes. `test_on_ray` has the same for a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweeps import OPTIONS, PLAN, Unpicklable, disturbed, numbers_in, odd
from typer.testing import CliRunner

from acclimate.bench import workers as bench_workers
from acclimate.bench.locks import locked
from acclimate.bench.plan import Job, PlanError
from acclimate.bench.processes import Processes
from acclimate.bench.run import Run
from acclimate.bench.sweep import sweep
from acclimate.bench.workers import Event, Here, LostError, Outcome, SweepError, Workers, carry_out
from acclimate.cli.main import app
from acclimate.cli.terminal import RESUMES, repeatable
from acclimate.cli.workers import Bar, choose_workers, job_bars
from acclimate.parts.world import World


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    sweep([Run(PLAN, out)], Here())
    return out


@pytest.mark.parametrize("workers", [Here(), Processes(2)], ids=["here", "processes"])
def test_a_job_that_fails_does_not_stop_the_others(workers: Workers) -> None:
    events: list[Event] = []
    outcomes = {outcome.index: outcome for outcome in workers.map(odd, [0, 1, 2, 4, 5], events.append)}
    assert {index: outcome.value for index, outcome in outcomes.items()} == {0: 0, 1: None, 2: None, 3: 40, 4: None}
    assert isinstance(outcomes[1].error, ValueError)
    assert "a and b" in str(outcomes[2].error), "also an error that cannot be pickled"
    assert "--processes" in str(outcomes[4].error), "what to do where the GPU is full"
    assert {(event.index, event.kind, event.note) for event in events} >= {
        (0, "started", ""),
        (3, "progress", "number 4"),
    }


def test_an_error_that_other_ranks_may_not_have_ends_the_sweep() -> None:
    """A rank that goes on with the next job would answer questions of the last one."""

    class Several(World):
        def agreed(self, error: BaseException) -> bool:
            return isinstance(error, Unpicklable)

    done = Here(Several()).map(odd, [0, 2, 1, 4], lambda _: None)
    assert [next(done).value, str(next(done).error)] == [0, "a and b"]
    with pytest.raises(ValueError, match="one"):
        next(done)
    assert [*done] == []


def test_a_lost_worker_is_replaced_and_its_job_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    monkeypatch.setattr(bench_workers, "ATTEMPTS", 2)
    with pytest.raises(SweepError, match="1 of 3 runs failed.*b: .*lost 2 times.*SIGKILL") as raised:
        carry_out(Processes(2), odd, {"a": 0, "b": 3, "c": 4}, events.append)
    assert isinstance(raised.value.__cause__, LostError)
    assert [event.kind for event in events if event.index == 1].count("lost") == 1
    assert sorted(event.value for event in events if event.kind == "done") == [0, 40]


def test_killing_a_worker_in_the_middle_loses_nothing(whole: Path, tmp_path: Path) -> None:
    run, events = Run(PLAN, tmp_path / "out"), list[Event]()
    tasks = {job.name: (run, job, "die" * (job.method == "eata"), tmp_path / job.name) for job in PLAN.jobs()}
    carry_out(Processes(2), disturbed, tasks, events.append)
    assert [event.index for event in events if event.kind == "lost"] == [2]
    assert (tmp_path / "eata-seed0").read_text() == "died"
    sweep([run], Here())
    assert numbers_in(tmp_path / "out") == numbers_in(whole)


def test_results_do_not_depend_on_who_is_done_first(whole: Path, tmp_path: Path) -> None:
    for job in reversed([*PLAN.jobs()]):
        assert Run(PLAN, tmp_path).do(job).source_accuracy is None or job.method == "source"
    results = sweep([Run(PLAN, tmp_path)], Here())
    assert numbers_in(tmp_path) == numbers_in(whole)
    assert [result.method for result in results] == ["Source", "Tent", "EATA"], "in the order of the plan"


def test_a_run_is_pickled_without_what_it_has_loaded(tmp_path: Path) -> None:
    import pickle

    run = Run(PLAN, tmp_path)
    assert run.network.model is not None
    content = pickle.dumps(run)
    assert len(content) < 10_000
    one, other = pickle.loads(content), pickle.loads(content)
    assert (one.plan, one.folder.path) == (PLAN, tmp_path)
    assert one.network is other.network, "a worker loads a network once"
    assert one.network is not run.network


def test_a_job_waits_for_the_lock_of_a_lost_worker(tmp_path: Path) -> None:
    run = Run(PLAN, tmp_path)
    run.patience = 30
    holder = (
        "import sys, time; from pathlib import Path; from acclimate.bench.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'tent-seed0'): print(flush=True); time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert run.do(Job("tent", 0)).done


def test_a_result_that_is_not_seen_here_stops_the_sweep(tmp_path: Path) -> None:
    """As on a cluster whose machines do not share a folder."""

    class Elsewhere(Workers):
        def map(self, work, jobs, on_event):
            for index, _ in enumerate(jobs):
                yield Outcome(index)

    with pytest.raises(PlanError, match="all machines share"):
        sweep([Run(PLAN, tmp_path)], Elsewhere())


def test_ctrl_c_stops_the_processes_and_the_same_command_resumes(tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    longer = [*OPTIONS, "--images", "384"]  # some seconds are left when the first result is there
    command = [sys.executable, "-m", "acclimate", "run", *longer, "--on", "processes", "--processes", "2"]
    command += ["--out", str(out)]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        wait_for(out / "source-seed0.json")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.stderr is not None
        message = process.stderr.read().decode()
    assert process.returncode == 130, message
    assert RESUMES in " ".join(message.split())
    assert "Traceback" not in message
    assert ended(process.pid), "no worker is left"
    for folder in (out, whole):
        done = CliRunner().invoke(app, ["run", *longer, "--out", str(folder)])
        assert done.exit_code == 0, done.stderr
    assert numbers_in(out) == numbers_in(whole)


def ended(group: int, seconds: float = 20) -> bool:
    """Wait until a group of processes has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.02)


# The command line -----------------------------------------------------------------------------------------------------


def test_options_name_the_workers() -> None:
    assert isinstance(choose_workers(None, None, None, None, "cpu"), Here)
    assert isinstance(choose_workers(None, 1, None, None, "cpu"), Here)
    for on in (None, "processes"):
        workers = choose_workers(on, 3, None, None, "cpu")
        assert isinstance(workers, Processes)
        assert workers.count == 3
    for wrong, named in (
        (("nowhere", None, None, None), "nowhere"),
        (("ray", 2, None, None), "--processes"),
        (("here", 2, None, None), "--processes"),
        (("processes", 2, None, 0.5), "--gpus-per-run"),
        ((None, None, 2, None), "--cpus-per-run"),
    ):
        with pytest.raises(PlanError, match=named):
            choose_workers(*wrong, "cpu")
    with pytest.raises(PlanError, match="cuda:1"):
        choose_workers("ray", None, None, None, "cuda:1")
    for device, gpus, expected in (("cpu", None, 0), ("cuda", None, 1), ("cuda", 0.25, 0.25)):
        ray = choose_workers("ray://head:10001", None, None, gpus, device)
        assert (ray.address, ray.cpus, ray.gpus, ray.here) == ("ray://head:10001", 1, expected, False)
    assert choose_workers("ray", None, 2, None, "cpu").address is None


def test_a_cluster_needs_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = CliRunner().invoke(app, ["run", *OPTIONS, "--on", "ray", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "[ray]" in refused.stderr


def test_a_dry_run_does_not_time_a_machine_that_is_not_used(tmp_path: Path) -> None:
    shown = {
        on: CliRunner().invoke(app, ["run", *OPTIONS, "--on", on, "--dry-run", "--out", str(tmp_path)]).stdout
        for on in ("here", "ray")
    }
    assert all("scenario" in text for text in shown.values())
    assert {on: "about" in text for on, text in shown.items()} == {"here": True, "ray": False}


def test_a_recorded_command_has_no_address() -> None:
    words = [
        "paper",
        "run",
        "toy",
        "--on",
        "ray://head:10001",
        "--gpus-per-run",
        "0.5",
        "--out=s3://mine/a",
        "--seed",
        "1",
    ]
    assert repeatable(words) == ["paper", "run", "toy", "--seed", "1"]


def test_many_jobs_show_those_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    with job_bars([Bar(f"job {index}", 4) for index in range(40)]) as on_event:
        for index in range(40):
            on_event(Event("started", index))
            on_event(Event("progress", index, "half", 2))
            on_event(Event("lost", index, "gone") if index == 5 else Event("done", index))
    shown = capsys.readouterr().err
    assert "job 5: gone" in shown
    assert "job 7" not in shown.rpartition("\n\n")[2]
    assert "39/40" in shown


def test_two_commands_on_one_folder(tmp_path: Path) -> None:
    """The second one is refused, whatever its workers; nothing is started."""
    with locked(tmp_path):
        refused = CliRunner().invoke(app, ["run", *OPTIONS, "--on", "ray", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert f"process {os.getpid()} on" in refused.stderr
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
