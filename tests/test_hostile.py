"""Hostile streams: each has what makes it hostile, can be made again, and does not stop a run."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path

import pytest
import torch
from networks import images, make
from torch import Tensor, nn
from typer.testing import CliRunner

from acclimate import Source, Tent
from acclimate.bench import preflight
from acclimate.bench.evaluate import accuracy_of, evaluate, run
from acclimate.bench.hostile import (
    HOSTILE,
    bursts,
    mixing,
    noise,
    one_by_one,
    one_class,
    poisoned,
    recurring,
    sorted_labels,
    stuck,
)
from acclimate.bench.own_networks import digits_resnet
from acclimate.bench.plan import Plan
from acclimate.bench.result import DomainResult, Result
from acclimate.bench.run import Run
from acclimate.bench.scenarios import SCENARIOS, lifelong
from acclimate.bench.stream import Domain, SampledDomain, Scenario
from acclimate.cli.main import app
from acclimate.data import open_suite
from acclimate.data.folders import Tensors
from acclimate.data.on_the_fly import Corrupted
from acclimate.parts.batchnorm import Normalisation

SHIFTS = ["contrast", "gaussian_noise"]
Batches = list[tuple[Tensor, Tensor]]


def suite(count: int = 96, labels: Tensor | None = None) -> Corrupted:
    x = (images(count, size=32) * 255).byte()
    return Corrupted("blobs", Tensors(x, torch.arange(count) % 5 if labels is None else labels))


def batches(scenario: Scenario) -> list[Batches]:
    """The batches of each domain."""
    return [[*domain.on("cpu")] for domain in scenario.domains]


def build(name: str, seed: int = 4) -> Scenario:
    network = {"network": make("bn")} if name == "poisoned" else {}
    return HOSTILE[name](suite(48), shifts=SHIFTS, severity=3, batch_size=12, seed=seed, **network)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_scenario_can_be_repeated(name: str) -> None:
    assert SCENARIOS[name] is HOSTILE[name]
    scenario = build(name)
    assert scenario.name == name
    assert scenario.tolerant
    first, again, other = (
        [b for domain in batches(s) for b in domain] for s in (scenario, build(name), build(name, 5))
    )
    assert len(first) == len(scenario)
    assert all(same(x, z) and torch.equal(y, t) for (x, y), (z, t) in zip(first, again, strict=True))
    assert all(x.dtype == torch.float32 and 0 <= x.nan_to_num(0).min() <= x.nan_to_num(0).max() <= 1 for x, _ in first)
    assert not any(same(x, z) for (x, _), (z, _) in zip(first, other, strict=True))


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "one-by-one"])
def test_a_domain_is_made_again_without_those_before_it(name: str) -> None:
    """As a killed run does that resumes."""
    scenario = build(name)
    whole = batches(scenario)
    assert all(same(x, z) for (x, _), (z, _) in zip(whole[-1], scenario.domains[-1].on("cpu"), strict=True))


def test_labels_are_sorted_on_clean_images_first() -> None:
    scenario = sorted_labels(suite(), shifts=SHIFTS, images=50, batch_size=16)
    assert [d.name for d in scenario.domains] == ["clean", *SHIFTS]
    for domain in batches(scenario):
        labels = torch.cat([y for _, y in domain])
        assert len(labels) == 50
        assert torch.equal(labels, labels.sort()[0])
        assert len(labels.unique()) == 5
    clean = torch.cat([x for x, _ in batches(scenario)[0]])
    assert {x.sum().item() for x in clean} <= {(x.float() / 255).sum().item() for x in suite().images.x}


def test_one_class_is_the_most_frequent_of_all_images() -> None:
    labels = torch.tensor([3] * 30 + [1] * 30 + [0] * 20 + [4] * 16)
    for seed in range(4):
        scenario = one_class(suite(labels=labels), shifts=SHIFTS, images=20, batch_size=8, seed=seed)
        assert [d.name for d in scenario.domains] == ["clean", *SHIFTS]
        assert [torch.cat([y for _, y in domain]).tolist() for domain in batches(scenario)] == [[1] * 20] * 3
    more = one_class(suite(labels=labels), shifts=SHIFTS, batch_size=8)
    assert [sum(len(y) for _, y in domain) for domain in batches(more)] == [30] * 3


def test_labels_per_pixel_have_no_order() -> None:
    class Scenes:
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(3, 4, 4), torch.zeros(4, 4)

        def __len__(self) -> int:
            return 2

    with pytest.raises(ValueError, match="one per pixel"):
        sorted_labels(Corrupted("scenes", Scenes()), shifts=SHIFTS)


def test_a_stuck_camera_repeats_one_image_in_the_middle_half() -> None:
    honest = batches(lifelong(suite(), shifts=SHIFTS, batch_size=12))
    for domain, before in zip(batches(stuck(suite(), shifts=SHIFTS, batch_size=12)), honest, strict=True):
        middle = torch.cat([x for x, _ in domain[2:6]])
        assert len(middle) == 48
        assert torch.equal(middle, middle[:1].expand_as(middle)), "with the same noise"
        assert {y for _, labels in domain[2:6] for y in labels.tolist()} == {int(before[2][1][0])}
        for number in (0, 1, 6, 7):
            assert torch.equal(domain[number][0], before[number][0])
            assert torch.equal(domain[number][1], before[number][1])


def test_noise_is_uniform_and_in_the_middle_half() -> None:
    honest = batches(lifelong(suite(), shifts=SHIFTS, batch_size=12))
    for domain, before in zip(batches(noise(suite(), shifts=SHIFTS, batch_size=12)), honest, strict=True):
        assert all(torch.equal(y, t) for (_, y), (_, t) in zip(domain, before, strict=True))
        assert [torch.equal(x, z) for (x, _), (z, _) in zip(domain, before, strict=True)] == [
            *[True] * 2,
            *[False] * 4,
            *[True] * 2,
        ]
        for x, _ in domain[2:6]:
            counts = x.histc(10, 0, 1) / x.numel()
            assert float((counts - 0.1).abs().max()) < 0.01
        assert not torch.equal(domain[2][0], domain[3][0])


def test_bursts_blacken_and_spoil_two_of_three_batches() -> None:
    honest = batches(lifelong(suite(144), shifts=SHIFTS, batch_size=12))
    for domain, before in zip(batches(bursts(suite(144), shifts=SHIFTS, batch_size=12)), honest, strict=True):
        spoilt = [int(x.isnan().flatten(1).all(1).sum()) for x, _ in domain]
        black = [int((x == 0).flatten(1).all(1).sum()) for x, _ in domain]
        assert spoilt == black == [0, 0, 0, 4, 4, 0, 4, 4, 0, 0, 0, 0]
        assert all(torch.equal(y, t) for (_, y), (_, t) in zip(domain, before, strict=True))
        assert not torch.equal(domain[3][0].isnan(), domain[4][0].isnan()), "other images in each batch"
    (low_contrast,) = batches(bursts(suite(144), shifts=["contrast"], batch_size=12))
    for (x, _), (z, _) in zip(low_contrast, honest[0], strict=True):
        kept = ~(x.isnan() | (x == 0)).flatten(1).all(1)
        assert torch.equal(x[kept], z[kept])


def test_twenty_visits_are_as_long_as_lifelong() -> None:
    scenario = recurring(suite(200), shifts=SHIFTS, batch_size=4)
    assert [d.name for d in scenario.domains] == [f"{s}, visit {v}" for v in range(1, 11) for s in SHIFTS]
    assert [d.round for d in scenario.domains] == [v for v in range(1, 11) for _ in SHIFTS]
    assert all(isinstance(d, SampledDomain) and len(d.picks) == 20 for d in scenario.domains)
    met = [index for d in scenario.domains[::2] for _, index in d.picks]
    assert sorted(met) == [*range(200)], "other images in each visit"
    short = recurring(suite(), shifts=SHIFTS, images=8, batch_size=6)
    assert [len(d.picks) for d in short.domains] == [6] * 20, "a whole batch, of images met before"


def test_the_share_of_the_next_domain_grows() -> None:
    scenario = mixing(suite(), shifts=[*SHIFTS, "brightness"], batch_size=16)
    honest = batches(lifelong(suite(), shifts=[*SHIFTS, "brightness"], batch_size=16))
    assert [d.name for d in scenario.domains] == [*SHIFTS, "brightness"]
    for domain in scenario.domains[:-1]:
        assert isinstance(domain, SampledDomain)
        shares = [sum(part for part, _ in domain.picks[i : i + 16]) for i in range(0, 96, 16)]
        assert shares == [0, 3, 6, 10, 13, 16]
    made = batches(scenario)
    assert torch.equal(made[0][0][0], honest[0][0][0])
    spread = [x.flatten(1).std(1) for x, _ in made[0]]
    low = float(honest[0][0][0].flatten(1).std(1).max())
    assert [int((s > 2 * low).sum()) for s in spread] == [0, 3, 6, 10, 13, 16], "the others have no low contrast"
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(made[-1], honest[-1], strict=True))


def test_one_by_one_is_lifelong_in_batches_of_one() -> None:
    scenario = one_by_one(suite(), shifts=SHIFTS, images=3, batch_size=16)
    assert [[len(x) for x, _ in domain] for domain in batches(scenario)] == [[1, 1, 1]] * 2


def flips(network: nn.Module, x: Tensor, honest: Tensor) -> int:
    """Return how many images are predicted otherwise than in the honest batch, of those that are the same."""
    with torch.no_grad(), Normalisation(network).batch():
        other = network(x).argmax(1) != network(honest).argmax(1)
    return int(other[(x == honest).flatten(1).all(1)].sum())


def test_poison_flips_the_predictions_of_the_others() -> None:
    """More of them than as many images of noise do."""
    network, digits = digits_resnet().train(), open_suite("digits")
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(network.state_dict())
    options = {"shifts": ["fog", "gaussian_noise"], "images": 80, "batch_size": 40}
    scenario = poisoned(digits, network=network, **options)
    assert [d.name for d in scenario.domains] == ["clean", "fog", "gaussian_noise"]
    honest = batches(lifelong(digits, **options))
    flipped = by_noise = 0
    for (x, y), (z, t) in zip(chain(*batches(scenario)[1:]), chain(*honest), strict=True):
        crafted = (x != z).flatten(1).any(1)
        assert int(crafted.sum()) == 4
        assert torch.equal(y, t)
        assert 0 <= float(x.min()) <= float(x.max()) <= 1
        noisy = z.clone()
        noisy[crafted] = torch.rand(z[crafted].shape, generator=torch.Generator().manual_seed(0))
        flipped, by_noise = flipped + flips(network, x, z), by_noise + flips(network, noisy, z)
    assert flipped > 1.5 * by_noise, (flipped, by_noise)
    assert all(module.training for module in network.modules())
    assert all(p.requires_grad and p.grad is not None and bool((p.grad == 1).all()) for p in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_poison_without_batch_norm_is_confident_of_class_0() -> None:
    network = make("ln")
    honest = batches(lifelong(suite(), shifts=["contrast"], batch_size=32))[0]
    with torch.inference_mode():
        made = batches(poisoned(suite(), network=network, share=0.25, shifts=["contrast"], batch_size=32))[1]
    for (x, _), (z, _) in zip(made, honest, strict=True):
        crafted = (x != z).flatten(1).any(1)
        assert int(crafted.sum()) == 8
        with torch.no_grad():
            p, q = (network(images[crafted]).softmax(1)[:, 0] for images in (x.clone(), z))
        assert float(p.mean()) > float(q.mean()) + 0.4


def test_poison_does_not_depend_on_what_an_adapter_has_learned() -> None:
    network = make("bn")
    scenario = poisoned(suite(), network=network, shifts=["contrast"], batch_size=16)
    first = batches(scenario)[1]
    tent = Tent(network, lr=0.1)
    learned = [*run(tent, scenario)]
    assert len(learned) == 12
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(first, batches(scenario)[1], strict=True))


@pytest.mark.parametrize("family", ["bn", "ln"])
def test_one_image_is_not_poisoned(family: str) -> None:
    options = {"shifts": ["contrast"], "images": 2, "batch_size": 1}
    made, honest = poisoned(suite(), network=make(family), **options), lifelong(suite(), **options)
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(batches(made)[1], batches(honest)[0], strict=True))
    with pytest.raises(ValueError, match="share=0"):
        poisoned(suite(), network=make(family), share=0)


def test_a_tolerant_run_answers_rejected_batches_uniformly() -> None:
    scenario = bursts(suite(), shifts=SHIFTS, batch_size=12)
    found = [*run(Tent(make("bn")), scenario)]
    assert [b.rejected for b in found] == [False, False, True, True, False, True, False, False] * 2
    for batch in found:
        assert batch.logits.shape == (12, 10)
        assert batch.step.size == 12
        assert batch.rejected == bool((batch.logits == 0).all())
        assert batch.step.forwards == (0 if batch.rejected else 12)
    result = evaluate(Tent(make("bn")), scenario)
    assert [d.rejected for d in result.domains] == [3, 3]
    assert [d.images for d in result.domains] == [96, 96]
    assert [d.forwards for d in result.domains] == [60, 60]
    assert [d.kept for d in result.domains] == pytest.approx([60 / 96] * 2)
    assert result.bins["count"][1] >= 72, "a confidence of a tenth"
    plain = lifelong(suite(), shifts=SHIFTS, batch_size=12)
    assert [d.rejected for d in evaluate(Tent(make("bn")), plain).domains] == [None, None]


def test_only_a_tolerant_run_goes_on_after_a_rejected_batch() -> None:
    domain = Domain("spoilt", [(torch.full((4, 3, 16, 16), torch.nan), torch.arange(4))])
    with pytest.raises(ValueError, match="NaN"):
        evaluate(Tent(make("bn")), Scenario("strict", [domain]))
    result = evaluate(Tent(make("bn")), Scenario("tolerant", [domain], tolerant=True), clean=domain)
    assert result.accuracy == 0.25
    assert result.clean_before == result.clean_after == 0.25, "the probe is tolerant, too"
    with pytest.raises(ValueError, match="NaN"):
        accuracy_of(Tent(make("bn")), domain)


def test_a_network_that_has_diverged_is_answered_for() -> None:
    """Also with the first batch, as of a run that resumes."""
    tent = Tent(make("bn"))
    tent.snapshot()
    with torch.no_grad():
        tent.adapted[0].fill_(torch.nan)
    scenario = Scenario("tolerant", [Domain("one", [(images(4), torch.arange(4))])], tolerant=True)
    (batch,) = run(tent, scenario)
    assert batch.rejected
    assert torch.equal(batch.logits, torch.zeros(4, 10))


def test_errors_of_segmenters_have_their_shape() -> None:
    x, y = torch.full((2, 3, 16, 16), torch.nan), torch.zeros(2, 8, 8, dtype=torch.long)
    (batch,) = run(Source(make("seg")), Scenario("tolerant", [Domain("one", [(x, y)])], tolerant=True))
    assert batch.logits.shape == (2, 10, 8, 8)


def test_rejected_batches_are_read_back_and_may_be_absent() -> None:
    scenario = bursts(suite(), shifts=SHIFTS, batch_size=12)
    result = evaluate(Source(make("bn")), scenario)
    assert Result.from_dict(result.as_dict()) == result
    assert [d.rejected for d in Result.from_dict(result.compact()).domains] == [3, 3]
    content = result.as_dict()
    for domain in content["domains"]:
        del domain["rejected"]
    assert [d.rejected for d in Result.from_dict(content).domains] == [None, None]
    assert DomainResult("old", 0.5, 0.1, 10, 10, 0, 1.0).rejected is None


@pytest.mark.parametrize("scenario", ["poisoned", "bursts"])
def test_a_plan_of_a_hostile_scenario(scenario: str, tmp_path: Path) -> None:
    plan = Plan(methods=("tent",), scenario=scenario, shifts=("contrast",), images=64, batch_size=16, probe="none")
    job = Run(plan, tmp_path)
    preflight.check(job)
    result = job.do(next(plan.jobs()))
    assert result.scenario == scenario
    assert [d.rejected for d in result.domains] == ([0, 0] if scenario == "poisoned" else [2])


def test_the_list_has_the_hostile_scenarios() -> None:
    shown = CliRunner().invoke(app, ["list"]).output
    for name, make_one in HOSTILE.items():
        assert any(line.split()[:1] == [name] for line in shown.splitlines()), name
        assert make_one.__doc__
