"""Sweeps on a local Ray cluster of several nodes: a worker or a node that is killed in the middle loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import free_port, only_ray_cluster
from sweeps import OPTIONS, PLAN, beat, disturbed, numbers_in, odd, resources
from typer.testing import CliRunner

from acclimate.bench import workers as bench_workers
from acclimate.bench.on_ray import OnRay, _Sweep
from acclimate.bench.plan import PlanError
from acclimate.bench.run import Run
from acclimate.bench.sweep import sweep
from acclimate.bench.workers import Event, Here, LostError, carry_out
from acclimate.cli.main import app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'acclimate[ray]'")
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs no jobs, and two nodes with one CPU and a GPU that does not exist."""
    with only_ray_cluster(), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick, "wait": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            add_nodes(cluster, 2)
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_nodes(cluster: Any, count: int) -> None:
    """Add nodes; a slow machine needs longer than the 30 s for which `add_node` waits."""
    for _ in range(count):
        cluster.add_node(wait=False, num_cpus=1, num_gpus=1)
    cluster.wait_for_nodes(timeout=180)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    sweep([Run(PLAN, out)], Here())
    return out


def test_a_sweep_has_the_same_results(
    cluster: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events: list[Event] = []
    results = sweep([Run(PLAN, Path("out"))], OnRay(), events.append)
    assert [result.done for result in results] == [True] * 3
    assert numbers_in(tmp_path / "out") == numbers_in(whole), "in a folder with a relative name"
    kinds = {event.kind for event in events}
    assert kinds >= {"started", "progress", "done"}
    assert "failed" not in kinds
    events.clear()
    sweep([Run(PLAN, Path("out"))], OnRay(), events.append)
    assert "progress" not in {event.kind for event in events}, "what is done is only read"


def test_reports_that_are_late_are_not_lost() -> None:
    """Without a cluster: an actor answers once, after the driver has waited in vain."""
    taken, waits = [[(0, 0, ""), (0, 3, "half")], [(0, 6, "end")]], iter([True, False, False])

    class Ray:
        exceptions = ray.exceptions
        util = SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: 0))

        def get_runtime_context(self) -> Any:
            return SimpleNamespace(get_node_id=lambda: "00")

        def remote(self, _: object) -> Any:
            actor = SimpleNamespace(take=SimpleNamespace(remote=lambda: taken.pop(0)))
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))

        def get(self, reference: Any, timeout: float) -> Any:
            if next(waits):
                raise ray.exceptions.GetTimeoutError
            return reference

    events: list[Event] = []
    sweep_ = _Sweep(Ray(), OnRay(), events.append)
    for _ in range(3):
        sweep_._report({0})
    assert [(event.kind, event.done) for event in events] == [("started", 0), ("progress", 3), ("progress", 6)]


def test_failing_and_dying_jobs_do_not_stop_the_others(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_workers, "ATTEMPTS", 2)
    events: list[Event] = []
    outcomes = {outcome.index: outcome for outcome in OnRay().map(odd, [0, 1, 2, 3, 4], events.append)}
    assert {index: outcome.value for index, outcome in outcomes.items()} == {0: 0, 1: None, 2: None, 3: None, 4: 40}
    assert isinstance(outcomes[1].error, ValueError)
    assert "a and b" in str(outcomes[2].error)
    assert isinstance(outcomes[3].error, LostError)
    assert [event.index for event in events if event.kind == "lost"] == [3]


def test_killing_a_worker_and_a_node_loses_nothing(cluster: Any, whole: Path, tmp_path: Path) -> None:
    run, events = Run(PLAN, tmp_path / "out"), list[Event]()
    acts = {"source": "", "tent": "die", "eata": "hang"}
    tasks = {job.name: (run, job, acts[job.method], tmp_path / job.name) for job in PLAN.jobs()}

    def kill_its_node() -> None:
        while not (marker := tmp_path / "eata-seed0").exists() or not marker.read_text():
            time.sleep(0.05)
        (node,) = (node for node in cluster.list_all_nodes() if node.node_id == marker.read_text())
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill_its_node, daemon=True)
    killer.start()
    carry_out(OnRay(), disturbed, tasks, events.append)
    killer.join()
    add_nodes(cluster, 1)  # for the other tests
    names = [job.name for job in PLAN.jobs()]
    lost = {names[event.index] for event in events if event.kind == "lost"}
    assert lost >= {"tent-seed0", "eata-seed0"}, "and the third, if its node held its result or was slow to answer"
    sweep([run], Here())
    assert numbers_in(tmp_path / "out") == numbers_in(whole)


def test_a_job_has_its_share_of_a_machine(cluster: Any) -> None:
    (outcome,) = OnRay(cpus=0.5, gpus=0.25).map(resources, [""], lambda _: None)
    assert outcome.value == ({"CPU": 0.5, "GPU": 0.25}, "0"), "the GPU is one that only its jobs see"


def test_a_job_that_fits_no_machine_waits_and_says_so(cluster: Any) -> None:
    said, nodes = [], []

    def on_event(event: Event) -> None:
        if event.kind == "waiting":
            said.append(event.note)
            nodes.append(cluster.add_node(wait=False, num_cpus=1, num_gpus=3))

    assert [outcome.error for outcome in OnRay(gpus=3).map(odd, [0], on_event)] == [None]
    assert len(said) == 1
    assert "3 GPUs" in said[0]
    cluster.remove_node(nodes[0])


def test_other_versions_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate.bench.on_ray.__version__", "0.0")
    (outcome,) = OnRay().map(odd, [0], lambda _: None)
    assert isinstance(outcome.error, PlanError)
    assert "0.0" in str(outcome.error)


def test_an_interrupted_sweep_ends_its_jobs(cluster: Any, tmp_path: Path) -> None:
    """Those that run and those that wait for a machine, also on a connection that stays."""
    markers = [tmp_path / name for name in "abcd"]

    def interrupt(event: Event) -> None:
        if event.kind == "progress":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(OnRay().map(beat, markers, interrupt))
    until, quiet = time.monotonic() + 180, 0
    while quiet < 8 and time.monotonic() < until:
        before = [marker.exists() and marker.read_text() for marker in markers]
        time.sleep(0.25)
        same = before == [marker.exists() and marker.read_text() for marker in markers]
        quiet = quiet + 1 if same else 0
    assert quiet == 8, "a job goes on for nobody"


def test_ctrl_c_cancels_and_the_same_command_resumes(cluster: Any, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    longer = ["run", *OPTIONS, "--images", "192"]  # some seconds are left when the first result is there
    process = subprocess.Popen(
        [sys.executable, "-m", "acclimate", *longer, "--on", "ray", "--out", str(out)],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        until = time.monotonic() + 300
        while not [*out.glob("*-seed0.json")]:
            assert time.monotonic() < until, "no result"
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, message
    assert "Traceback" not in message
    for folder, on in ((out, ["--on", "ray"]), (whole, [])):
        done = CliRunner().invoke(app, [*longer, *on, "--out", str(folder)])
        assert done.exit_code == 0, done.stderr
    assert numbers_in(out) == numbers_in(whole)


def test_an_address_of_ray_client(cluster: Any, whole: Path, tmp_path: Path) -> None:
    """Its server is a process of its own, without the proxy that `ray start` puts before it."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--mode", "specific-server", "--address", cluster.address]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    only = OPTIONS[: OPTIONS.index("tent") - 1]  # the source network alone, in one worker
    command = ["run", *only, "--on", f"ray://127.0.0.1:{port}", "--out", str(tmp_path / "out")]
    program = [sys.executable, "-m", "acclimate", *command]
    server = subprocess.Popen([sys.executable, "-m", "ray.util.client.server", *options], **quiet)
    try:
        done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=600)
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr
    assert numbers_in(tmp_path / "out") == {"source-seed0.json": numbers_in(whole)["source-seed0.json"]}


def test_recipes_run_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    words = ["paper", "run", "calibration", "--method", "tent", "--images", "16"]
    for place, on in (("here", []), ("ray", ["--on", "ray"])):
        done = CliRunner().invoke(app, [*words, *on, "--out", str(tmp_path / place)])
        assert done.exit_code == 0, done.output
    one, two = ((tmp_path / place / "digits" / "calibration.md").read_text() for place in ("here", "ray"))
    assert one == two
