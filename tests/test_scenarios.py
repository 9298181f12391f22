"""Scenarios are data: what comes, in which order, and when adapters start over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from networks import images, make
from torch import Tensor

from acclimate import Source, Tent
from acclimate.bench.evaluate import evaluate, run
from acclimate.bench.hostile import HOSTILE
from acclimate.bench.scenarios import (
    SCENARIOS,
    correlated,
    episodic,
    gradual,
    lifelong,
    mixed,
    rounds,
    sample_domain,
    single_domain,
    with_clean,
)
from acclimate.bench.stream import SampledDomain, Scenario
from acclimate.data.folders import Tensors
from acclimate.data.on_the_fly import Corrupted
from acclimate.data.types import Part


def suite(count: int = 40) -> Corrupted:
    x = (images(count, size=32) * 255).byte()
    return Corrupted("blobs", Tensors(x, torch.arange(count) % 5))


SHIFTS = ["contrast", "gaussian_noise"]


def everything(scenario: Scenario) -> list[tuple[Tensor, Tensor]]:
    return [batch for domain in scenario.domains for batch in domain.on("cpu")]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in HOSTILE])
def test_every_scenario_can_be_repeated(name: str) -> None:
    scenario = SCENARIOS[name](suite(), shifts=SHIFTS, severity=3, batch_size=16, seed=4)
    first, second = everything(scenario), everything(scenario)
    assert len(first) == len(scenario)
    assert all(torch.equal(a, b) and torch.equal(y, t) for (a, y), (b, t) in zip(first, second, strict=True))
    assert all(x.dtype == torch.float32 and float(x.min()) >= 0 and float(x.max()) <= 1 for x, _ in first)
    assert not any(torch.equal(a, b) for (a, _), (b, _) in zip(everything(_again(name, 5)), first, strict=True))


def _again(name: str, seed: int) -> Scenario:
    return SCENARIOS[name](suite(), shifts=SHIFTS, severity=3, batch_size=16, seed=seed)


def test_lifelong_single_domain_and_episodic_differ_in_resets_alone() -> None:
    made = [make_one(suite(), shifts=SHIFTS, batch_size=16) for make_one in (lifelong, single_domain, episodic)]
    assert [s.resets for s in made] == ["never", "domain", "batch"]
    assert all([d.name for d in s.domains] == SHIFTS for s in made)
    assert [len(d) for d in made[0].domains] == [3, 3]
    for scenario in made:
        batches = list(run(Tent(make("bn"), lr=1e-2), scenario))
        fresh = [Tent(make("bn"), lr=1e-2)(x) for x, _ in everything(scenario)]
        same = [torch.equal(b.logits, z) for b, z in zip(batches, fresh, strict=True)]
        expected = {
            "never": [True] + [False] * 5,
            "domain": [True, False, False, True, False, False],
            "batch": [True] * 6,
        }
        assert same == expected[scenario.resets]


def test_rounds_repeat_the_same_images() -> None:
    scenario = rounds(suite(), times=3, shifts=SHIFTS, batch_size=20)
    assert [d.name for d in scenario.domains] == [f"{s}, round {r}" for r in (1, 2, 3) for s in SHIFTS]
    labels = [y for domain in scenario.domains for _, y in domain.on("cpu")]
    assert torch.equal(labels[0], labels[4])


def test_gradual_severity_rises_and_falls() -> None:
    scenario = gradual(suite(), severity=3, shifts=["contrast"], batch_size=40)
    assert [d.name for d in scenario.domains] == [f"contrast {s}" for s in (1, 2, 3, 2, 1)]
    spread = [float(x.std()) for x, _ in everything(scenario)]
    assert spread[0] > spread[1] > spread[2] < spread[3] < spread[4]


def test_mixed_batches_have_every_shift() -> None:
    scenario = mixed(suite(), shifts=[*SHIFTS, "brightness"], batch_size=30)
    (domain,) = scenario.domains
    assert isinstance(domain, SampledDomain)
    assert len(domain.picks) == 120
    for start in range(0, 120, 30):
        assert {part for part, _ in domain.picks[start : start + 30]} == {0, 1, 2}
    x, _ = next(iter(domain.on("cpu")))
    rows = [row for row, (part, _) in enumerate(domain.picks[:30]) if part == 0]
    flat = x.flatten(1).std(1)
    others = [row for row in range(30) if row not in rows]
    assert float(flat[rows].max()) < float(flat[others].min()), "contrast was taken from its rows alone"


def test_correlated_labels_come_in_runs() -> None:
    def changes(scenario: Scenario) -> int:
        y = torch.cat([labels for _, labels in everything(scenario)])
        return int((y[1:] != y[:-1]).sum())

    plain = changes(lifelong(suite(200), shifts=["contrast"], batch_size=20))
    runs = changes(correlated(suite(200), concentration=0.1, shifts=["contrast"], batch_size=20))
    assert runs < plain / 3
    same = {
        tuple(sorted(index for _, index in s.domains[0].picks))
        for s in (
            lifelong(suite(200), shifts=["contrast"]),
            correlated(suite(200), shifts=["contrast"]),
        )
    }
    assert len(same) == 1, "the same images, in another order"
    with pytest.raises(ValueError, match="concentration=0"):
        correlated(suite(), concentration=0)


def test_a_batch_of_one() -> None:
    scenario = lifelong(suite(), shifts=["contrast"], batch_size=1, images=3)
    assert [len(x) for x, _ in everything(scenario)] == [1, 1, 1]


def test_the_papers_probe_adapts_to_clean_images_between_the_domains() -> None:
    scenario = lifelong(suite(), shifts=SHIFTS, batch_size=20)
    clean = sample_domain("clean", suite().clean(), batch_size=20)
    probed = with_clean(scenario, clean)
    assert [b.domain for b in run(Source(make("bn")), probed)] == [
        *["contrast"] * 2,
        *["clean"] * 2,
        *["gaussian_noise"] * 2,
        *["clean"] * 2,
    ]
    result = evaluate(Tent(make("bn"), lr=1e-2), probed)
    plain = evaluate(Tent(make("bn"), lr=1e-2), scenario)
    assert [d.name for d in result.domains] == ["contrast", "gaussian_noise"], "averages leave the probes out"
    assert all(d.clean_accuracy is not None for d in result.domains)
    assert result.domains[0].nll == plain.domains[0].nll
    assert result.domains[1].nll != plain.domains[1].nll, "the adaptation to clean images carries on"


def test_clean_images_between_episodes_start_anew_too() -> None:
    probed = with_clean(episodic(suite(), shifts=["contrast"], batch_size=20), sample_domain("clean", suite().clean()))
    batches = [b for b in run(Tent(make("bn"), lr=0.3), probed) if b.domain == "clean"]
    fresh = Tent(make("bn"), lr=0.3)
    for batch, (x, _) in zip(batches, sample_domain("clean", suite().clean()).on("cpu"), strict=True):
        fresh.reset()
        assert torch.equal(batch.logits, fresh(x))


def test_a_probe_of_an_episodic_run_is_episodic() -> None:
    clean = sample_domain("clean", suite().clean(), batch_size=8)
    result = evaluate(Tent(make("bn"), lr=0.3), episodic(suite(), shifts=SHIFTS, batch_size=8), clean=clean)
    assert {d.clean_accuracy for d in result.domains} == {result.clean_before}


def test_labels_of_other_data_are_refused() -> None:
    many = Corrupted("many", Tensors((images(20, size=32) * 255).byte(), torch.arange(20)))
    with pytest.raises(ValueError, match="labels go up to .*, and the network has 10 classes"):
        evaluate(Source(make("bn")), lifelong(many, shifts=["contrast"]))


def test_workers_read_the_same_stream() -> None:
    here = lifelong(suite(), shifts=SHIFTS, batch_size=16)
    there = lifelong(suite(), shifts=SHIFTS, batch_size=16, workers=2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(everything(here), everything(there), strict=True))


def parts_equal_the_whole(domain: SampledDomain) -> None:
    """The parts of two and three ranks, one after another, are the batches of one process, bit for bit."""
    for ranks in (2, 3):
        parts = [[*replace(domain, part=(rank, ranks)).on("cpu")] for rank in range(ranks)]
        for (x, y), *own in zip(domain.on("cpu"), *parts, strict=True):
            joined = torch.cat([part for part, _ in own])
            assert torch.equal(joined.isnan(), x.isnan())
            assert torch.equal(joined.nan_to_num(7), x.nan_to_num(7)), f"{domain.name}, {ranks} ranks"
            assert torch.equal(torch.cat([part for _, part in own]), y)
            assert max(len(part) for part, _ in own) - min(len(part) for part, _ in own) <= 1


@pytest.mark.parametrize("shift", [*suite(1).shifts, *suite(1).extra])
def test_ranks_get_the_images_of_one_process_for_every_shift(shift: str) -> None:
    (domain,) = lifelong(suite(13), shifts=[shift], batch_size=6).domains  # of the last batch some get none
    parts_equal_the_whole(domain)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_get_the_images_of_one_process_in_every_scenario(name: str) -> None:
    more = {"poisoned": {"network": make("bn")}, "rounds": {"times": 2}}.get(name, {})
    shifts = ["contrast", "shot_noise"]
    for domain in SCENARIOS[name](suite(25), shifts=shifts, severity=2, batch_size=6, **more).domains:
        parts_equal_the_whole(domain)


def test_ranks_read_only_their_part_of_images_without_a_change() -> None:
    read: list[int] = []

    class Noted(Tensors):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            read.append(index)
            return super().__getitem__(index)

    domain = sample_domain("clean", Part(Noted(images(13), torch.arange(13)), ordered=True), batch_size=6)
    parts_equal_the_whole(domain)
    read.clear()
    assert [len(x) for x, _ in replace(domain, part=(1, 3)).on("cpu")] == [2, 2, 0]
    assert read == [2, 3, 8, 9, 12], "an empty part reads one image for its shape"


def test_a_domain_counts_and_measures() -> None:
    result = evaluate(Source(make("bn")), lifelong(suite(), shifts=SHIFTS, batch_size=16))
    for domain in result.domains:
        assert domain.images == domain.forwards == 40
        assert domain.kept == 0
        assert domain.process_memory > 0
        assert domain.gpu_memory is None
        assert 0 <= domain.aurc <= 1
    learned = evaluate(Tent(make("bn")), lifelong(suite(), shifts=SHIFTS, batch_size=16))
    assert [d.kept for d in learned.domains] == [1.0, 1.0]
    assert learned.kept == 1.0
    assert learned.images_per_second == pytest.approx(80 / learned.seconds)
    assert learned.as_dict()["summary"]["nll"] == pytest.approx(sum(d.nll for d in learned.domains) / 2)
