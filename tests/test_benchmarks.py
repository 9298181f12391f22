"""Measuring commands that wait for a GPU: their arithmetic against numbers worked by hand, and short runs on a CPU."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from acclimate import EATA, Engine
from acclimate.data import open_suite
from benchmarks import answers, counts, methods, overheads, segmentation, steps_stream, strategies
from benchmarks.command import ENGINES, command, name_of, path, read
from benchmarks.steps_stream import Entry, Row, Setting, Way

here = partial(ThreadPoolExecutor, 1)
"""Instead of a process of its own, which imports for seconds."""


# A real stream


class Known:
    """Answers with the labels that it was given, and notes when it was asked and when a mask of it was read."""

    def __init__(self, answers: Tensor, kept: list[int | None]) -> None:
        self.answers, self.kept, self.events, self.seen = answers, kept, list[str](), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.events.append("step")
        number = self.kept[self.events.count("step") - 1]
        mask = SimpleNamespace(sum=partial(self.read, number))
        self.last = SimpleNamespace(kept=None if number is None else mask)
        logits = torch.nn.functional.one_hot(self.answers[self.seen : self.seen + len(x)], 10).float()
        self.seen += len(x)
        return logits

    def read(self, number: int) -> int:
        self.events.append("read")
        return number


def row(method: str = "EATA", strategy: str = "masked", engine: str = "eager", **fields: Any) -> Row:
    return Row("net", 5, 4, method, strategy, engine, 0.0, **fields)


def test_kept_and_right_are_counted_and_nothing_is_read_while_the_stream_runs() -> None:
    labels = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    answers = torch.tensor([0, 1, 2, 9, 4, 5, 9, 9])
    adapter: Any = Known(answers, [1, 4])
    entry = Entry(row(), adapter, torch.empty(2, 4, 1))
    found = entry.run(torch.zeros(2, 4, 1), labels)
    assert adapter.events == ["step", "step", "read", "read"]
    assert (found.numbers, found.kept, found.accuracy) == ([1, 4], 5 / 8, 100 * 5 / 8)
    adapter.seen, adapter.kept = 0, [1, 4, 0, 0]
    found = entry.run(torch.zeros(2, 4, 1), labels)
    assert (found.numbers, found.kept, found.accuracy) == ([1, 4, 0, 0], 5 / 16, 100 * 5 / 8)
    assert len(found.milliseconds) == 2
    assert found.reserved_mb is None


@pytest.mark.parametrize(("method", "expected"), [("Tent", 1000.0), ("MEMO", 4000.0)])
def test_milliseconds_are_per_batch(method: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of eight, or four single images of the first of them, take two seconds."""
    monkeypatch.setattr(steps_stream.time, "perf_counter", iter([1.0, 3.0]).__next__)
    adapter: Any = Known(torch.zeros(16, dtype=torch.long), [None] * 4)
    entry = Entry(Row("net", 5, 8, method, "", "eager", 0.0), adapter, torch.empty(2, 8, 1))
    found = entry.run(torch.zeros(2, 8, 1), torch.zeros(2, 8, dtype=torch.long))
    assert found.milliseconds == [expected]
    assert adapter.seen == (16 if method == "Tent" else 4)
    assert found.kept is None


def test_times_are_relative_to_the_right_rows() -> None:
    """Chunk by chunk: inference on the same engine, and the method's default strategy in plain PyTorch."""
    times = {
        ("inference", "", "eager"): [10.0, 20.0, 10.0],
        ("EATA", "masked", "eager"): [30.0, 60.0, 50.0],
        ("EATA", "replay-subset", "eager"): [60.0, 60.0, 100.0],
        ("inference", "", "bf16"): [8.0, 8.0, 8.0],
        ("EATA", "masked", "bf16"): [20.0, 20.0, 40.0],
        ("inference", "", "auto"): [4.0, 4.0, 2.0],
        ("EATA", "masked", "auto"): [8.0, 8.0, 6.0],
        ("EATA", "replay-subset", "auto"): [5.0, 6.0, 8.0],
    }
    rows = [
        vars(row(*place, milliseconds=milliseconds, kept=None if place[0] == "inference" else 0.5))
        for place, milliseconds in times.items()
    ]
    head, lines = steps_stream.costs({"rows": rows})
    found = {tuple(line[:3]): dict(zip(head, line, strict=True)) for line in lines}
    names = ("ms", "× inference", "× eager", "× eager bf16")
    shown = {place: tuple(line[name] for name in names) for place, line in found.items()}
    assert shown["EATA", "replay-subset", "auto"] == ("6.00", "1.50", "0.16", "0.25")
    assert shown["EATA", "masked", "auto"] == ("8.00", "2.00", "0.13", "0.40")
    assert shown["EATA", "replay-subset", "eager"] == ("60.00", "6.00", "2.00", "3.00")
    assert shown["inference", "", "auto"] == ("4.00", "1.00", "0.20", "0.50")
    assert shown["EATA", "masked", "eager bf16"] == ("20.00", "2.50", "0.67", "1.00")
    head, lines = steps_stream.table({"rows": rows})
    assert [line[head.index("× plain")] for line in lines if line[2:5] == ["EATA", "replay-subset", "auto"]] == ["0.16"]


def test_without_the_row_to_compare_with_there_is_no_ratio() -> None:
    _, lines = steps_stream.costs({"rows": [vars(row(milliseconds=[1.0]))]})
    assert lines == [["EATA", "", "eager", "1.00", "", "1.00", "", "", "0.0", "0", "", ""]]


def test_committed_results_can_be_read() -> None:
    content = read("steps_stream_vit", "cpu")
    head, lines = steps_stream.costs(content)
    assert len(lines) == len(content["rows"])
    assert head[:2] == ["severity", "batch"]


def test_a_stream_has_as_many_batches_of_each_corruption() -> None:
    suite = open_suite("digits")
    batches = [*steps_stream.stream(suite, 3, 4, 7, "cpu")]
    assert len(batches) == 12
    assert {(x.shape, y.shape) for x, y in batches} == {((4, 1, 32, 32), (4,))}
    again = [*steps_stream.stream(suite, 3, 4, 7, "cpu")]
    assert all(torch.equal(x, same) for (x, _), (same, _) in zip(batches, again, strict=True))


def test_rows_run_on_the_same_stream_and_a_failure_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps_stream, "_entries", {})
    setting = Setting("digits-resnet", None, 5, 16, None, "cpu", tmp_path)
    steps_stream.prepare(setting, open_suite("digits"), chunks=2, batches=2)
    chosen = [*steps_stream.ways(["eata"], ["eager"], batch_norm=True), Way("memo", "eager", "sparse")]
    first, rows = steps_stream.measure(setting, chosen, 2, here, together=True)
    assert len(first) == len(rows) == 3
    assert [(r.method, r.strategy) for r in rows][1:] == [("EATA", "masked"), ("EATA", "replay-subset")]
    assert rows[0].kept is None
    assert all(len(r.milliseconds) == 2 for r in rows)
    assert "strategy" in capsys.readouterr().out  # MEMO takes none
    adapter = steps_stream.build(setting, Way("eata", "eager"))
    numbers, right = [], 0
    for chunk in range(2):
        for x, y in zip(*setting.chunk(chunk), strict=True):
            right += int((adapter(x).argmax(1) == y).sum())
            numbers.append(int(adapter.last.kept.sum()))
    assert rows[1].numbers == numbers
    assert rows[1].accuracy == 100 * right / 64
    assert len({*numbers}) > 1, "the number changes"


@pytest.mark.slow
def test_a_row_has_a_process_of_its_own(tmp_path: Path) -> None:
    setting = Setting("digits-resnet", None, 5, 8, None, "cpu", tmp_path)
    steps_stream.prepare(setting, open_suite("digits"), chunks=1, batches=3)
    ((found,),) = steps_stream.measure(setting, [Way("tent", "eager")], 1, together=False)
    assert (found.network, found.method, len(found.milliseconds)) == ("digits-resnet", "Tent", 1)
    assert found.accuracy > 20
    assert steps_stream._entries == {}


# The other commands


def test_a_part_has_a_file_of_its_own(tmp_path: Path) -> None:
    parser = command("")
    names = []
    for part in ([], ["--part", "resnet"]):
        arguments = parser.parse_args(["--device", "cpu", "--out", str(tmp_path), *part])
        names.append(path("steps_stream_" + name_of("hf:a/b=file"), arguments).name)
    assert names == ["steps_stream_hf-a-b_cpu.json", "steps_stream_hf-a-b_resnet_cpu.json"]


def test_engines_by_name() -> None:
    engine = methods.make("tent", "small ResNet", torch.rand(2, 1, 32, 32), "bf16").engine
    assert engine == Engine("bf16")
    assert list(ENGINES) == ["eager", "bf16", "recorded", "auto"]


def test_strategies_run_in_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process cannot use CUDA."""
    contexts = []

    def pool(processes: int, context: Any) -> ThreadPoolExecutor:
        contexts.append((processes, context.get_start_method()))
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(strategies, "ProcessPoolExecutor", pool)
    what = [
        "--model",
        "digits-resnet",
        "--data",
        "digits",
        "--images",
        "8",
        "--methods",
        "bn-adapt",
        "--processes",
        "3",
    ]
    run = partial(monkeypatch.setattr, sys, "argv")
    for more, name in (([], ""), (["--precision", "bf16"], "_eager_bf16")):
        run(["strategies", *what, *more, "--device", "cpu", "--out", str(tmp_path), "--work", str(tmp_path / "work")])
        strategies.main()
        content = json.loads((tmp_path / f"strategies_digits-resnet{name}_cpu.json").read_text())
        (found,) = content["rows"]
        assert found["engine"] == content["engine"] == ("eager bf16" if more else "eager fp32")
        assert 30 < found["accuracy"] < 80
        assert found["clean"][0] > 90
    assert contexts == [(3, "spawn")] * 2


def test_processes_share_the_cores_that_read_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies.os, "cpu_count", lambda: 16)
    shared = {"model": "digits-resnet", "data": "digits", "engine": "auto"}
    found = [plan for _, plan in strategies.plans(["eata"], 4, device="cuda", **shared)]
    assert [(plan.workers, plan.precision) for plan in found] == [(3, "bf16")] * 4
    assert [dict(plan.overrides) for plan in found][:2] == [{}, {"eata": {"strategy": "replay-subset"}}]


def test_strategies_of_several_engines_make_one_table() -> None:
    def result(engine: str, *accuracies: float) -> dict[str, Any]:
        own = {"strategy": "masked", "engine": engine, "ece": 3.0, "clean": [74.0, 73.0]}
        rows: list[dict[str, Any]] = [{"method": "eata", "accuracy": each, **own} for each in accuracies]
        return {"rows": [*rows, {**rows[0], "method": "source", "strategy": ""}]}

    _, lines = strategies.table(result("eager fp32", 38.0, 39.0), result("auto bf16", 38.2))
    assert [line[:4] for line in lines] == [
        ["source", "–", "eager fp32", "38.0"],
        ["source", "–", "auto bf16", "38.2"],
        ["eata", "masked", "eager fp32", "38.5"],
        ["eata", "masked", "auto bf16", "38.2"],
    ]


def test_every_number_of_kept_samples_occurs_once() -> None:
    assert sorted(counts.numbers(256, 256)) == [*range(1, 257)]
    assert len({*counts.numbers(256, 200)}) == 200
    found = counts.measure("eager", "cpu", 8, 4)
    assert (found["distinct"], len(found["reserved_mb"]), found["ran"]) == (4, 4, "eager")


def test_memory_is_shown_after_so_many_numbers() -> None:
    own = {"peak_mb": 700.0, "milliseconds": 5.0, "seconds": 9.0, "distinct": 200}
    rows = [{"engine": "auto", "reserved_mb": [100.0 + i for i in range(200)], **own}]
    head, lines = counts.table({"rows": rows})
    assert head[1:6] == ["MB after 1", "MB after 10", "MB after 50", "MB after 100", "MB after 200"]
    assert lines == [["auto", "100", "109", "149", "199", "299", "700", "5.0", "9"]]


def test_first_batches_find_the_cache_or_file_that_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, dict[str, Any]]] = []

    def in_a_process(cache: Path, *arguments: object, **options: Any) -> float:
        assert arguments == ("ResNet-50", "EATA-C", "cuda")
        calls.append((cache, options))
        return float(len(calls))

    monkeypatch.setattr(overheads, "in_a_process", in_a_process)
    found = overheads.first_batches("ResNet-50", "EATA-C", "cuda")
    assert found == {"empty cache": 1.0, "filled cache": 2.0, "file": 3.0, "background": 4.0}
    (first, wrote), (filled, plain), (other, used), (last, behind) = calls
    assert first == filled
    assert len({first, other, last}) == 3
    assert used["use"] == wrote["save"]
    assert (plain, behind) == ({}, {"background": True})


@pytest.mark.parametrize("method", ["EATA", "EATA-C"])
def test_the_first_batch_is_learned_from(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random network is sure of nothing: without a fixed share, the second pass would not be compiled."""
    learner, made = overheads.LEARNERS[method], []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append(learner(*arguments, **options))
        return made[-1]

    monkeypatch.setitem(overheads.LEARNERS, method, build)
    monkeypatch.setattr(overheads, "choose", lambda *_: Engine())
    assert overheads.first_batch("small ResNet", method, "cpu") > 0
    assert made[0].last.updated
    assert int(made[0].last.kept.sum()) == 39  # 60 % of 64


def test_overheads_of_several_files_make_one_table() -> None:
    times = {"empty cache": 20.0, "filled cache": 3.0, "file": 4.0, "background": 0.5}
    new = [{"first_batch": {name: {"EATA": times}}} for name in ("ResNet-50", "ViT-Base")]
    head, lines = overheads.table(read("overheads", "h200"), *new)
    assert head == ["", "ResNet-50", "ViT-Base"]
    assert lines[0] == ["EATA: first batch, empty cache", "20.0 s", "20.0 s"]
    assert not any(line[0].startswith("first call") for line in lines)
    assert ["import torch", "4.4 s", "4.4 s"] in lines


def tiny_segmenter(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16}
    monkeypatch.setitem(segmentation.SIZES, "tiny", {**sizes, "num_attention_heads": [1, 1, 2, 2]})


@pytest.mark.parametrize("engine", ["eager", "bf16"])
def test_a_segmenter_runs_on_each_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_segmenter(monkeypatch)
    calls = []
    monkeypatch.setattr(EATA, "watch", lambda self, _: calls.append(self.engine.precision))
    found = segmentation.measure("eata", "tiny", (32, 64), "cpu", 3, engine)
    assert (found["method"], found["engine"], found["forwards"]) == ("EATA", engine, 1)
    assert calls == ["fp32" if engine == "eager" else "bf16"] * 5


def test_segmenters_are_compared_with_plain_pytorch() -> None:
    own = {"low": 1.0, "high": 2.0, "forwards": 1, "backwards": 1, "peak_mb": None}
    times = {"eager": 120.0, "bf16": 90.0, "auto": 30.0}
    rows = [{"method": "Tent", "engine": engine, "milliseconds": ms, **own} for engine, ms in times.items()]
    head, lines = segmentation.table({"rows": rows})
    assert head[:4] == ["method", "engine", "× eager", "ms per image"]
    assert [line[1:4] for line in lines] == [
        ["eager", "1.00", "120"],
        ["eager bf16", "0.75", "90"],
        ["auto", "0.25", "30"],
    ]
    assert segmentation.table({"rows": rows[:1]})[0] == list(segmentation.COLUMNS)


def test_images_before_a_recording_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images take 1, 5, 9 and 13 seconds here. CUDA graphs are recorded at the third batch."""
    tiny_segmenter(monkeypatch)
    clock = iter(float(i * i) for i in range(8))
    monkeypatch.setattr(segmentation.time, "perf_counter", clock.__next__)
    assert segmentation.measure("tent", "tiny", (32, 64), "cpu", 2)["milliseconds"] == 11_000
    assert segmentation.WARM["auto"] > 3


# Time to the answer


class Slow:
    """Answers after a second of a clock that only it moves, and learns for three more."""

    def __init__(self) -> None:
        self.now, self.learning, self.waited = 0.0, 0.0, list[float]()

    def __call__(self, x: Tensor) -> Tensor:
        self.now = max(self.now, self.learning) + 1
        self.learning = self.now + 3
        return x

    def settle(self) -> None:
        self.now = max(self.now, self.learning)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    found = Slow()
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: found.now, sleep=found.sleep))
    return found


def test_an_answer_does_not_count_learning(slow: Slow) -> None:
    times: Any = answers.alone({"slow": slow}, torch.zeros(1), repeats=3)  # type: ignore[dict-item]
    assert times == {"slow": {"answer": 1000.0, "step": 4000.0}}


@pytest.mark.parametrize(("every", "waits"), [(5000.0, 1000.0), (4000.0, 1000.0)])
def test_learning_delays_no_answer_that_comes_late_enough(slow: Slow, every: float, waits: float) -> None:
    found = answers.stream(slow, torch.zeros(1), every=every, count=20)  # type: ignore[arg-type]
    assert found["median"] == pytest.approx(waits, abs=10)


def test_an_answer_waits_for_the_learning_before(slow: Slow) -> None:
    found = answers.stream(slow, torch.zeros(1), every=2000.0, count=20)  # type: ignore[arg-type]
    assert found["largest"] == pytest.approx(19 * 2000 + 1000, rel=0.01)


def test_answers_are_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["answers", "--device", "cpu", "--repeats", "4", "--networks", "small ResNet", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--batches", "1", "2"])
    answers.main()
    rows = json.loads((tmp_path / "answers_cpu.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["inference", "EATA", "EATA-C"] * 2
    assert all(
        row["ratio"] == pytest.approx(row["answer"] / rows[place // 3 * 3]["answer"], rel=1e-6)
        for place, row in enumerate(rows)
    )
