"""The arithmetic of docs/scale.md: against numbers worked by hand, and against the committed file."""

from __future__ import annotations

import pytest

from acclimate.files import rounded
from benchmarks import fleet
from benchmarks.command import read


def test_a_queue_without_waiting_has_the_delay_of_its_service() -> None:
    assert fleet.queue(0.01, streams=1, period=0.02) == pytest.approx(0.01)


def test_delays_grow_with_the_load_and_without_bound_beyond_it() -> None:
    delays = [fleet.queue(0.01, streams, period=1.0) for streams in (10, 50, 90, 120)]
    assert delays == sorted(delays)
    assert delays[0] < 0.05
    assert delays[-1] == pytest.approx(fleet.SECONDS * 0.2, rel=0.1), "a fifth of the work is late"


def test_a_schedule_worked_by_hand() -> None:
    assert fleet.makespan([3, 3, 2, 2, 2], 2) == 7
    assert fleet.makespan([9, 1, 1, 1], 4) == 9


def test_the_norm_layers_are_those_of_the_networks() -> None:
    counts = {name: sum(p.numel() for p in fleet.NormLayers(name).parameters()) for name in fleet.STRATEGY}
    assert counts == {"ResNet-50": 53_120, "ViT-Base": 38_400}


def test_the_terms_of_a_step_add_up_to_the_measured_one() -> None:
    errors = {(row["network"], row["method"]): row["expected"] / row["measured"] - 1 for row in fleet.ranks()}
    assert len(errors) == 17
    assert max(map(abs, errors.values())) < 0.2, errors


def test_messages_are_counted_per_layer_and_pass() -> None:
    assert fleet.sent("ViT-Base", "eata") == (8, 0)
    assert fleet.sent("ResNet-50", "eata") == (8 + 2 * 53 - 1, 2)
    assert fleet.sent("ResNet-50", "eata-c") == (9 + 3 * 53 - 1, 3)


def test_the_committed_file_is_what_the_committed_measurements_give() -> None:
    stored = read("fleet", "cpu")
    for name, content in (
        ("sweeps", fleet.sweeps()),
        ("check", fleet.check()),
        ("ranks", fleet.ranks()),
        ("mixed", fleet.mixed(stored["states"])),
    ):
        assert stored[name] == rounded(content, digits=8), name
    shares = {row["state"]: row["gpus"] for row in stored["cameras"] if row["network"] == "ResNet-50"}
    assert all(row["gpus"] >= row["busy"] for row in stored["cameras"])
    assert shares["one per camera"] > shares["one per GPU"] > shares["one per camera, learns from one batch in ten"]
