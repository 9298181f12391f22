"""Several ranks that share each batch equal one process with the whole batch, for every method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import A_TRAP
from machine import free_port
from parallel_faults import FAULTS
from parallel_faults import PLAN as FAULTY
from parallel_guard import WATCHED, WIDE, divided, guarded, titles, watch
from parallel_worker import DIVIDED, batches, build, outcome, part, settings
from torch import Tensor
from typer.testing import CliRunner

from acclimate import EATA, METHODS, Adapter, Ranks
from acclimate.bench.run import Run
from acclimate.bench.sweep import sweep
from acclimate.bench.workers import Here
from acclimate.cli.main import app
from acclimate.parts.world import ALONE, Share

pytestmark = A_TRAP
SIZES = sorted(DIVIDED)
HERE = Path(__file__).parent
Found = dict[str, Any]


def together(ranks: int, *words: str) -> list[tuple[int, str]]:
    """Run a program as torchrun does, in several processes; return the exit code and the output of each."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    shared = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all ranks of all sizes; each size is started once, all at a time: they often wait for a timeout."""
    folder = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor() as pool:
        started = pool.map(lambda size: together(size, str(HERE / "parallel_worker.py"), str(folder)), SIZES)
        for size, done in zip(SIZES, started, strict=True):
            assert [code for code, _ in done] == [*[0] * (size - 1), 3], done
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Callable[[int], list[Found]]:
    read = {size: [torch.load(folder / f"found-{size}-{rank}.pt") for rank in range(size)] for size in SIZES}
    return read.__getitem__


@pytest.fixture(scope="module")
def alone() -> Callable[[str, str, dict[str, Any]], Found]:
    """What one process finds with whole batches."""
    known: dict[str, Found] = {}

    def look(title: str, name: str, family: str, more: dict[str, Any]) -> Found:
        if title not in known:
            known[title] = outcome(build(name, family, more), batches())
        return known[title]

    return look


TABLE = [(*each, size) for size in SIZES for each in settings(size)]


@pytest.mark.parametrize(
    ("title", "name", "family", "more", "size"), TABLE, ids=[f"{each[0]}, {each[-1]} ranks" for each in TABLE]
)
@pytest.mark.filterwarnings("ignore:a batch of one image")
def test_ranks_equal_one_process(
    title: str, name: str, family: str, more: dict[str, Any], size: int, found: Any, alone: Any
) -> None:
    expected, ranks = alone(title, name, family, more), [each[title] for each in found(size)]
    for step, logits in enumerate(expected["logits"]):
        parts = [rank["logits"][step] for rank in ranks]
        assert tuple(map(len, parts)) == DIVIDED[size][step]
        close(torch.cat(parts), logits)
    for rank in ranks:
        assert rank["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            close(rank["state"][key], value)
            assert torch.equal(rank["state"][key], ranks[0]["state"][key]), f"{key} differs between ranks"
        assert [step.keys() for step in rank["losses"]] == [step.keys() for step in expected["losses"]]
        for mine, its in zip(rank["losses"], expected["losses"], strict=True):
            for term, value in its.items():
                assert mine[term] == pytest.approx(value, rel=1e-9, abs=1e-12)
    lasts = any("parameter/" in key for key in expected["state"])
    assert not lasts or changes(expected, name, family, more)


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


def changes(found: Found, name: str, family: str, more: dict[str, Any]) -> bool:
    """Whether the stream has taught the method anything: otherwise equality means nothing."""
    before = build(name, family, more).snapshot().tensors
    return any(not torch.equal(value, before[key]) for key, value in found["state"].items() if "parameter/" in key)


def test_every_method_and_both_kinds_of_norm_are_compared() -> None:
    for size in SIZES:
        assert {name for _, name, _, _ in settings(size)} == METHODS.keys()
        assert {family for _, _, family, _ in settings(size)} == {"bn", "ln", "seg"}


@pytest.fixture(scope="module")
def watched_alone() -> Callable[[str], Found]:
    """What one process finds with a guard and whole batches."""
    known: dict[str, Found] = {}

    def look(title: str) -> Found:
        if title not in known:
            known[title] = watch(guarded(build, WATCHED[title]), WATCHED[title])
        return known[title]

    return look


@pytest.mark.parametrize(("title", "size"), [(title, size) for size in SIZES for title in titles(size)])
def test_a_guard_over_ranks_equals_one_of_one_process(title: str, size: int, found: Any, watched_alone: Any) -> None:
    expected, ranks = watched_alone(title), [each["guards"][title] for each in found(size)]
    for step, logits in enumerate(expected["logits"]):
        eighths = DIVIDED[size][step % len(DIVIDED[size])]
        parts = [rank["logits"][step] for rank in ranks]
        assert [*map(len, parts)] == [divided(len(logits), eighths, rank).size for rank in range(size)]
        close(torch.cat(parts), logits)
        for rank in ranks:
            same_numbers(rank["health"][step], expected["health"][step], SINGLE)
    for rank in ranks:
        assert rank["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            close(rank["state"][key], value)
            assert torch.equal(rank["state"][key], ranks[0]["state"][key]), f"{key} differs between ranks"
            assert torch.equal(rank["state"][key], rank["loaded"][key]), f"{key} differs after loading"


SINGLE = 1e-6
"""The weights of a trial's images are in single precision."""


def same_numbers(value: Any, expected: Any, digits: float = 1e-9) -> None:
    """Compare nested data; numbers that are not whole up to an error."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for key, each in expected.items():
            same_numbers(value[key], each, digits)
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for mine, its in zip(value, expected, strict=True):
            same_numbers(mine, its, digits)
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=digits, abs=digits)
    else:
        assert value == expected


@pytest.mark.parametrize("size", SIZES)
def test_one_process_continues_from_the_guard_of_several(size: int, folder: Path, watched_alone: Any) -> None:
    title = titles(size)[-1]
    guard = guarded(build, WATCHED[title])
    guard.load(folder / f"guard-{size}.safetensors")
    same_numbers(guard.health.as_dict(), watched_alone(title)["health"][-1], SINGLE)
    for key, value in watched_alone(title)["state"].items():
        close(guard.snapshot().tensors[key], value)


def test_guards_meet_what_they_are_for(watched_alone: Any) -> None:
    """Otherwise equality means little."""
    last = {title: watched_alone(title)["health"][-1] for title in WATCHED}
    alarms = {title: {alarm["signal"] for alarm in health["alarms"]} for title, health in last.items()}
    assert not alarms["honest, bn"] | alarms["honest, ln"] | alarms["familiar, bn"]
    assert last["familiar, bn"]["familiar"] == 3 * WIDE
    assert "collapse" in alarms["collapse, bn"] & alarms["divergence"] & alarms["divergence of few images"]
    assert "harm" in alarms["harm, ln"] & alarms["few images, ln"]
    assert alarms["forgetting, ln"] == {"evidence"}
    assert alarms["stuck camera"] == {"repeated"}
    assert last["broken images"]["rejected"] == 51
    assert all(last[title]["rollbacks"] for title in ("collapse, bn", "harm, ln", "few images, ln", "divergence"))


@pytest.mark.parametrize("size", SIZES)
def test_guards_that_differ_are_refused(size: int, found: Any) -> None:
    assert all(rank["other guard"].startswith("RankError") for rank in found(size))


@pytest.mark.parametrize("size", SIZES)
def test_some_rank_keeps_nothing_while_another_learns(size: int, found: Any) -> None:
    """The parts are such that it happens with images and without."""
    kept = zip(*(rank["eata-c, bn"]["kept"] for rank in found(size)), strict=True)
    steps = [[*zip(step, images, strict=True)] for step, images in zip(kept, DIVIDED[size], strict=True)]
    learned = [step for step in steps if any(number for number, _ in step)]
    assert any(number == 0 and images for step in learned for number, images in step)
    assert any(not images for step in learned for _, images in step)


@pytest.mark.parametrize("size", SIZES)
def test_a_wrong_part_is_rejected_on_all_ranks(size: int, found: Any) -> None:
    for rank in found(size):
        nan, whole, empty = rank["rejections"]["errors"]
        assert nan.startswith(f"ValueError: rank {size - 1} of {size}: NaN")
        assert whole.startswith(f"TypeError: rank {size - 1}")
        assert empty.startswith("ValueError")
        assert rank["rejections"]["unchanged"]
        assert rank["rejections"]["different"].startswith("RankError")
        assert rank["rejections"]["diverged"].startswith("RankError")
    *others, last = [rank["rejections"]["engine"] for rank in found(size)]
    assert others == [""] * (size - 1)
    assert last.startswith("ValueError")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The accuracy per domain of each job of the sweep with faults, in one process without them."""
    results = sweep([Run(FAULTY, tmp_path_factory.mktemp("undisturbed"))], Here())
    return [[domain.accuracy for domain in result.domains] for result in results]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_one_rank_ends_the_job_on_all(fault: str, size: int, found: Any, undisturbed: Any) -> None:
    """They go on with the next job together, and the same sweep resumes."""
    guilty, message = {"unreadable": (size - 1, "fog/7.png"), "full": (0, "No space left")}[fault]
    for rank in found(size):
        error, after = rank["faults"][fault]
        assert error.startswith("SweepError: 1 of 2 runs failed")
        assert f"rank {guilty} of {size}" in error
        assert message in error
        assert after["done"], "the other job was done nevertheless"
        assert after["scores"] == [pytest.approx(scores) for scores in undisturbed]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_one_message(size: int, found: Any) -> None:
    for rank in found(size):
        message = rank["message"]
        small = message["bytes"] - message["gradients"]
        assert 0 < small < 1500, "besides the gradients, only a few numbers travel"
        assert message["messages"] < 12


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_or_falls_silent_stops_the_others(size: int, folder: Path, found: Any) -> None:
    assert all(said.startswith("RankError") for rank in found(size) for said in rank["silence"])
    for rank in range(size - 1):
        assert torch.load(folder / f"lost-{size}-{rank}.pt").startswith(f"RankError: rank {rank} of {size}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("error")
def test_one_process_continues_from_the_state_of_several(size: int, folder: Path, alone: Any) -> None:
    adapter = build("eata-c", "bn", {})
    adapter.load(folder / f"state-{size}.safetensors")
    for key, value in alone("eata-c, bn", "eata-c", "bn", {})["state"].items():
        close(adapter.snapshot().tensors[key], value)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:a batch of one image")
def test_statistics_of_each_part_on_request(size: int, found: Any) -> None:
    x, sizes = batches()[0], DIVIDED[size][0]
    for rank, each in enumerate(found(size)):
        close(each["local statistics"]["logits"][0], build("tent", "bn", {})(part(x, sizes, rank)))
    states = [each["local statistics"]["state"] for each in found(size)]
    assert all(torch.equal(value, states[0][key]) for state in states for key, value in state.items())
    assert "sync_statistics=False" in found(size)[0]["local statistics"]["repr"]


@pytest.mark.parametrize("size", SIZES)
def test_repr_says_so(size: int, found: Any) -> None:
    assert "ranks='all'" in found(size)[0]["tent, ln"]["repr"]
    assert "ranks" not in repr(build("tent", "ln", {}))


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        build("tent", "ln", {}, ranks="all")
    with pytest.raises(ValueError, match="ranks"):
        build("tent", "ln", {}, ranks="some")
    with pytest.raises(RuntimeError, match="torchrun"):
        Ranks()
    adapter: Adapter = EATA(torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)), beta=0.0)
    assert adapter.world is ALONE
    with pytest.raises(AttributeError, match="ranks"):
        adapter.ranks = "all"


def test_shares() -> None:
    rows, share = torch.arange(10, 13), Share(2, 3, 8)
    assert share.whole(rows).tolist() == [0, 0, 10, 11, 12, 0, 0, 0]
    assert torch.equal(share.of(share.whole(rows)), rows)
    assert Share(0, 3, 3).whole(rows) is rows, "one process copies nothing"


RUN = [
    *(
        "run",
        "--guard",
        "--method",
        "eata",
        "--method",
        "source",
        "--data",
        "digits",
        "--model",
        "digits-resnet",
        "--preset",
        "cifar-resnet",
    ),
    *("--shift", "gaussian_noise", "--shift", "contrast", "--images", "34", "--batch-size", "11"),
    *("--source-images", "40", "--probe-images", "9"),
]
"""Batches of 11, 11, 11 and 1: the last part of one of two ranks is empty. EATA has a guard, the source has none."""


@pytest.mark.filterwarnings("ignore:a batch of one image")
def test_a_run_of_two_ranks_resumes_and_equals_one_process(tmp_path: Path) -> None:
    """Noise is drawn for the whole batch, so the images are the same; one rank dies after the first domain."""
    done = CliRunner().invoke(app, [*RUN, "--out", str(tmp_path / "alone")])
    assert done.exit_code == 0, done.output

    def run(out: str, *before: str) -> list[tuple[int, str]]:
        return together(2, *before, *RUN, "--out", str(tmp_path / out))

    (code, said), (dead, _) = run("ranks", str(HERE / "parallel_run.py"))
    assert dead == 3
    assert code == 2
    assert "another rank has stopped" in said
    assert (tmp_path / "ranks" / "eata-seed0.after1.safetensors").is_file()

    (code, said), (other, silent) = run("ranks", "-m", "acclimate")
    assert (code, other) == (0, 0), said + silent
    assert "acc %" in said
    assert silent == ""
    for method in ("eata", "source"):
        compare_results(
            *(json.loads((tmp_path / out / f"{method}-seed0.json").read_text()) for out in ("ranks", "alone"))
        )


def compare_results(mine: Found, its: Found) -> None:
    assert mine["origin"]["ranks"] == "2"
    assert len(mine["domains"]) == 2
    assert (mine["health"] is None) == (mine["method"] == "Source")
    if mine["health"] is not None:
        assert mine["health"]["history"]
        same_numbers(mine["health"], its["health"], digits=1e-4)
    for domain, expected in zip(mine["domains"], its["domains"], strict=True):
        for key in ("accuracy", "clean_accuracy", "images", "forwards", "backwards", "kept"):
            assert domain[key] == pytest.approx(expected[key], abs=1e-9), key
        assert domain["ece"] == pytest.approx(expected["ece"], abs=1e-4)
        assert domain["nll"] == pytest.approx(expected["nll"], rel=1e-4)


def test_other_commands_refuse_several_processes() -> None:
    shown = CliRunner().invoke(app, ["demo"], env={"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    assert shown.exit_code == 2
    assert "acclimate run" in shown.output
