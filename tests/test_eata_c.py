"""EATA-C: each equation by hand, whole steps against a literal transcription, its ablations and its uncertainties."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import transcriptions as plain
from cases import A_TRAP
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import images, make, stream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acclimate
from acclimate import EATA, EATAC, ETA, ETAC, ROID, TEA, CoTTA, Everything, Scaled, Tent, functional
from acclimate.bench.networks import Loaded
from acclimate.bench.own_networks import SmallViT
from acclimate.core.options import FEW_CLASSES

BRANCHES = {"bn": "blocks.*.norm2", "gn": "blocks.*.norm2", "ln": ["blocks.*.attention", "blocks.*.mlp"]}
BATCHES = [x.double() for x in stream(6, size=12)]
SOURCE = [x.double() for x in stream(3, size=10, seed=500)]


def logits(seed: int, batch: int = 5, classes: int = 4) -> Tensor:
    return 2 * torch.randn(batch, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_fused_target_by_hand() -> None:
    """Eq. (11), q = 0.5: ((.8, .2) + ½(.4, .6))/1.5 = (2/3, 1/3)."""
    y, s = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.4, 0.6]])
    torch.testing.assert_close(functional.fused(y, s, 0.5), torch.tensor([[2 / 3, 1 / 3]]))
    torch.testing.assert_close(functional.fused(y, s, 1.0), y)


def test_consistency_by_hand() -> None:
    """Eq. (10) with the fused target above: forward ⅔·ln(⅔/.4) + ⅓·ln(⅓/.6); reverse .4·ln(.4/⅔) + .6·ln(.6/⅓)."""
    y, s = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.4, 0.6]]).log()
    forward = 2 / 3 * math.log(2 / 3 / 0.4) + 1 / 3 * math.log(1 / 3 / 0.6)
    reverse = 0.4 * math.log(0.4 / (2 / 3)) + 0.6 * math.log(0.6 / (1 / 3))
    assert functional.consistency(y, s, 0.5).item() == pytest.approx(forward, rel=1e-5)
    assert functional.consistency(y, s, 0.5, "reverse").item() == pytest.approx(reverse, rel=1e-5)


@given(st.integers(0, 1000), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_gradient_of_the_default_loss(seed: int, q: float) -> None:
    """(s − y)/(2 − q) on the sub-network's logits, none on the full network's."""
    z, z_sub = logits(seed).requires_grad_(), logits(seed + 5000).requires_grad_()
    functional.consistency(z, z_sub, q).sum().backward()
    torch.testing.assert_close(z_sub.grad, (z_sub.softmax(1) - z.softmax(1)).detach() / (2 - q))
    assert z.grad is None


@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from(["forward", "reverse"]))
@settings(max_examples=30, deadline=None)
def test_consistency_is_zero_only_in_agreement(seed: int, q: float, direction: str) -> None:
    z = logits(seed)
    torch.testing.assert_close(functional.consistency(z, z + 3.0, q, direction), torch.zeros(5).double())
    assert (functional.consistency(z, logits(seed + 5000), q, direction) > 0).all()


def test_the_reverse_divergence_has_a_gradient_through_the_target() -> None:
    z, z_sub = logits(0), logits(1)
    certain = torch.tensor([[0.0, 120.0]]), torch.tensor([[0.0, 110.0]], requires_grad=True)
    functional.consistency(*certain, 0.2, "reverse").sum().backward()
    assert certain[1].grad.isfinite().all()
    assert torch.autograd.gradcheck(
        lambda s: functional.consistency(z, s, 0.2, "reverse"), z_sub.requires_grad_(), atol=1e-8
    )


def test_certainty_and_the_sign_of_the_entropy_term() -> None:
    """Eq. (12), (13): entropy falls where both predict the same class, and rises where they do not."""
    z = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    z_sub = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    c = functional.certainty(z, z_sub)
    assert c.tolist() == [1, -1]
    (c * functional.entropy(z_sub)).sum().backward()
    stepped = (z_sub - 0.1 * z_sub.grad).detach()
    before, after = functional.entropy(z_sub.detach()), functional.entropy(stepped)
    assert after[0] < before[0]
    assert after[1] > before[1]


def test_selection_is_an_indicator() -> None:
    adapter = ETAC(make("ln"), branches=BRANCHES["ln"], margin=0.4, epsilon=2.0)
    s = adapter.select(torch.randn(200, 10, generator=torch.Generator().manual_seed(0)) * 3)
    assert set(s.tolist()) == {0.0, 1.0}


def deeper(family: str, blocks: int) -> nn.Module:
    """Return a tiny network with this many blocks."""
    model = make(family).double()
    while len(model.blocks) < blocks:
        model.blocks.append(copy.deepcopy(model.blocks[len(model.blocks) % 2]))
    return model


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("family", ["bn", "ln", "gn"])
def test_whole_steps(family: str, divergence: str, blocks: int) -> None:
    """With four blocks the linear schedule drops at 0, ⅓, ⅔ and 1 times the ratio."""
    values = {"margin": 0.5, "epsilon": 0.6, "alpha": 0.3, "beta": 20.0, "drop": 0.4}
    net, reverse = partial(deeper, family, blocks), divergence == "reverse"
    fisher = plain.fisher_by_batch(net(), SOURCE)
    theirs = plain.eata_c(net(), BATCHES, 1e-2, **values, q=0.25, fisher=fisher, seed=7, reverse=reverse)
    adapter = EATAC(
        net(),
        source=SOURCE,
        lr=1e-2,
        branches=BRANCHES[family],
        smoothing=0.25,
        seed=7,
        divergence=divergence,
        **values,
    )
    disagreed, forwards = 0, 0
    for x, expected in zip(BATCHES, theirs, strict=True):
        torch.testing.assert_close(adapter(x), expected, rtol=1e-8, atol=1e-8)
        last = adapter.last
        if last.uncertainty is not None:
            disagreed += int(last.uncertainty.data.sum())
            assert len(last.uncertainty.model) == last.backwards == last.in_graph
            assert float(last.terms["consistency"]) == pytest.approx(float(last.uncertainty.model.mean()))
        forwards += len(x) + int(last.backwards)
    assert int(adapter.passes.forwards) == forwards
    assert int(adapter.passes.backwards) > 0
    assert disagreed > 0 or (family, blocks) != ("ln", 2), "the golden run must see both signs of C(x)"


def test_drop_zero_is_plain_entropy_minimisation_of_what_is_kept() -> None:
    """Without dropped branches both networks agree: L_c and its gradient vanish and C = +1."""
    keywords = {"lr": 1e-2, "strategy": "replay-subset", "select": Everything()}
    ours = ETAC(make("ln").double(), drop=0.0, alpha=1.0, **keywords)
    theirs = Tent(make("ln").double(), lr=1e-2)
    for x in BATCHES:
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-8, atol=1e-8)
        assert float(ours.last.terms["consistency"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("consistent", "entropic", "fisher", "selective"),
    [(c, e, f, s) for s in (0, 1) for f in (0, 1) for c, e in ((1, 0), (0, 1), (1, 1))],
)
def test_the_twelve_ablations_are_arguments(consistent: int, entropic: int, fisher: int, selective: int) -> None:
    arguments = {"weight": float(consistent), "alpha": 0.1 * entropic, "beta": 20.0 * fisher}
    select = {} if selective else {"select": Everything()}
    adapter = EATAC(
        make("bn"), source=stream(2, seed=500), branches=BRANCHES["bn"], drop=0.5, lr=1e-2, **arguments, **select
    )
    moved = 0.0
    for x in stream(4, size=12):
        adapter(x)
        if adapter.last.updated:
            terms = adapter.last.terms
            assert (float(terms["consistency"]) != 0) == bool(consistent)
            assert (float(terms["entropy"]) != 0) == bool(entropic)
            moved = max(moved, float(terms["fisher"]))
    assert (moved > 0) == bool(fisher)
    assert (int(adapter.passes.backwards) == 48) == (not selective)


def test_all_parameters() -> None:
    """EATA-C†."""
    adapter = ETAC(make("ln"), branches=BRANCHES["ln"], parameters="all", lr=1e-2, margin=0.9)
    before = {name: p.clone() for name, p in adapter.model.named_parameters()}
    for x in stream():
        adapter(x)
    assert all(not torch.equal(p, before[name]) for name, p in adapter.model.named_parameters())


@A_TRAP
@pytest.mark.parametrize("per", ["sample", "batch"])
@pytest.mark.parametrize("schedule", ["linear", "uniform"])
@pytest.mark.parametrize("strategy", ["replay", "replay-subset"])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_choices_run_and_replay_bitwise(per: str, schedule: str, strategy: str, divergence: str, tmp_path) -> None:
    def make_one() -> ETAC:
        return ETAC(
            make("bn"),
            branches=BRANCHES["bn"],
            drop=0.5,
            per=per,
            schedule=schedule,
            strategy=strategy,
            divergence=divergence,
            lr=1e-2,
        )

    adapter = make_one()
    for x in stream(3):
        adapter(x)
    adapter.save(tmp_path / "state")
    later = [adapter(x) for x in stream(4, seed=300)]
    other = make_one()
    other.load(tmp_path / "state")
    assert all(torch.equal(a, other(x)) for a, x in zip(later, stream(4, seed=300), strict=True))
    assert int(adapter.passes.backwards) > 0


def test_uncertainty_without_learning() -> None:
    adapter = ETAC(make("ln"), branches=BRANCHES["ln"], drop=0.6, lr=1e-2)
    adapter(stream()[0])
    before, last = adapter.snapshot(), adapter.last
    x = images(16)
    first = adapter.uncertainty(x)
    assert first.model.shape == first.data.shape == (16,)
    assert (first.model >= 0).all()
    assert first.data.dtype == torch.bool
    assert torch.equal(first.model, adapter.uncertainty(x).model)
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)
    assert adapter.last is last
    with torch.inference_mode():
        assert torch.equal(first.model, adapter.uncertainty(x.clone()).model)


def test_uncertainty_is_larger_where_a_digit_is_hidden() -> None:
    from acclimate.bench.own_networks import digits_resnet
    from acclimate.data.corruptions import corrupt
    from acclimate.data.digits import load_digits

    digits = load_digits()[1].x[:128]
    coarse = corrupt(digits, "pixelate", 5, torch.Generator())
    adapter = ETAC(digits_resnet())
    clear, hidden = adapter.uncertainty(digits), adapter.uncertainty(coarse)
    assert hidden.model.mean() > 2 * clear.model.mean()
    assert hidden.data.sum() > clear.data.sum()


@A_TRAP
@pytest.mark.parametrize("strategy", ["replay", "replay-subset"])
def test_uncertainty_is_what_a_step_would_record(strategy: str) -> None:
    adapter = ETAC(make("bn"), branches=BRANCHES["bn"], drop=0.6, select=Everything(), strategy=strategy)
    x = stream()[0]
    foreseen = adapter.uncertainty(x)
    adapter(x)
    assert adapter.last.uncertainty is not None
    torch.testing.assert_close(foreseen.model, adapter.last.uncertainty.model)
    assert torch.equal(foreseen.data, adapter.last.uncertainty.data)


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_activation_checkpoints_run_the_same_sub_network(per: str) -> None:
    def run(saving: bool) -> list[Tensor]:
        model = SmallViT(channels=3, width=16, depth=3, heads=2)
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2)
        if saving:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        adapter = ETAC(model, drop=0.6, per=per, lr=1e-2, select=Everything())
        return [adapter(images(6, seed=i, size=32)) for i in range(4)]

    for plain_run, saving_run in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(plain_run, saving_run)


PAPER = {
    ("EATAC", "resnet50"): {"lr": 5e-3, "alpha": 0.1, "beta": 50.0, "drop": 0.2},
    ("EATAC", "vit-base"): {"lr": 0.1, "alpha": 0.1, "beta": 50.0, "drop": 0.2},
    ("EATAC", "segformer-b5"): {"lr": 5e-4, "alpha": 0.0, "beta": 500.0, "drop": 0.6},
    ("EATA", "resnet50"): {"lr": 2.5e-4, "beta": 2000.0, "margin": 0.4},
    ("EATA", "vit-base"): {"lr": 1e-3, "beta": 2000.0, "margin": 0.4},
    ("EATA", "segformer-b5"): {"lr": 7.5e-5, "beta": 500.0},
    ("Tent", "resnet50"): {"lr": 2.5e-4},
    ("Tent", "vit-base"): {"lr": 1e-3},
}


@pytest.mark.parametrize(("method", "network"), PAPER)
def test_presets_are_the_papers_numbers(method: str, network: str) -> None:
    settings = getattr(acclimate, method).presets[network]
    assert {key: settings[key] for key in PAPER[method, network]} == PAPER[method, network]


TEN_CLASSES = {
    ("EATA", "cifar-resnet"): {"lr": 5e-3, "beta": 100.0, "epsilon": 0.4},
    ("EATA", "cifar-vit"): {"lr": 2.5e-3, "beta": 800.0, "epsilon": 0.4},
    ("EATAC", "cifar-resnet"): {"lr": 0.05, "beta": 50.0, "margin": 0.5},
    ("EATAC", "cifar-vit"): {"lr": 3e-3, "beta": 50.0, "margin": 0.4},
    ("Tent", "cifar-resnet"): {"lr": 5e-3},
    ("SAR", "cifar-resnet"): {"lr": 5e-3, "floor": 0.2 / 3},
    ("MEMO", "cifar-resnet"): {"lr": 2.5e-4, "views": 32},
    ("CoTTA", "cifar-vit"): {"threshold": 0.92, "restoration": 0.01, "loss": "teacher"},
}


@pytest.mark.parametrize(("method", "network"), TEN_CLASSES)
def test_presets_for_few_classes(method: str, network: str) -> None:
    settings = getattr(acclimate, method).presets[network]
    assert {key: settings[key] for key in TEN_CLASSES[method, network]} == TEN_CLASSES[method, network]


@pytest.mark.parametrize(("paper", "few"), FEW_CLASSES.items())
def test_with_few_classes_a_step_of_eata_pulls_as_much_towards_the_source(paper: str, few: str) -> None:
    usual, ours = EATA.presets[paper], EATA.presets[few]
    assert ours["lr"] * ours["beta"] == pytest.approx(usual["lr"] * usual["beta"])
    rates = {"cifar-resnet": (1e-3, 1e-3, 1e-3), "cifar-vit": (1e-5, 1e-3, 1e-4)}[few]
    for method, rate in zip((CoTTA, ROID, TEA), rates, strict=True):
        optimizer = method.preset(few, make("bn")).optimizer
        assert isinstance(optimizer, torch.optim.Adam)
        assert optimizer.param_groups[0]["lr"] == rate


def test_adapters_of_a_preset_share_no_selector() -> None:
    one, other = (EATA.preset("segformer-b5", make("seg"), beta=0) for _ in range(2))
    assert one.select is not other.select


def test_the_outputs_of_a_network_are_its_last_layers() -> None:
    layers = [nn.BatchNorm2d(4), nn.Linear(4, 1000), nn.Linear(1000, 10)]
    assert Loaded("net", nn.Sequential(*layers), None).outputs == 10
    assert Loaded("net", nn.Sequential(*layers[:2]), None).outputs == 1000
    assert Loaded("net", nn.Sequential(*layers[:1]), None).outputs is None


def test_presets() -> None:
    net = make("ln")
    named = {"branches": BRANCHES["ln"], "source": stream(1)}
    vit = EATAC.preset("vit-base", net, **named)
    assert vit.optimizer is not None
    assert vit.optimizer.param_groups[0]["lr"] == 0.1
    assert repr(vit.select) == "Reliable(0.4, weighted=False) * NonRedundant(Scaled(0.05))"
    resnet = EATAC.preset("resnet50", make("bn"), source=stream(1), branches=BRANCHES["bn"], drop=0.1)
    assert (resnet.drop, resnet.beta, resnet.alpha) == (0.1, 50.0, 0.1)
    assert repr(resnet.select) == "Reliable(0.5, weighted=False) * NonRedundant(Scaled(0.07))"
    segformer = EATAC.preset("segformer-b5", make("seg"), source=stream(1), branches=BRANCHES["bn"])
    assert (segformer.drop, segformer.beta, segformer.alpha) == (0.6, 500.0, 0.0)
    assert repr(segformer.select) == "Everything()"
    assert segformer(stream()[0]).isfinite().all()
    chosen = ETAC.preset("segformer-b5", make("seg"), branches=BRANCHES["bn"], margin=0.3)
    assert repr(chosen.select) == "Reliable(0.3, weighted=False)"
    assert repr(EATA.preset("segformer-b5", make("seg"), source=stream(1)).select) == "Reliable(0.1)"
    assert ETA.preset("vit-base", net).optimizer.param_groups[0]["lr"] == 1e-3
    adam = Tent.preset("vit-base", net, optimizer=torch.optim.Adam)
    assert isinstance(adam.optimizer, torch.optim.Adam)
    with pytest.raises(ValueError, match="no preset 'alexnet': choose from resnet50"):
        Tent.preset("alexnet", net)
    assert Scaled(0.07).at(1000) == pytest.approx(0.07)
    assert Scaled(0.05).at(10) == pytest.approx(0.5)


def test_bad_use() -> None:
    with pytest.raises(ValueError, match="no residual branch is known in ConvNet"):
        ETAC(make("bn"))
    with pytest.raises(TypeError, match="ETAC has no Fisher regulariser, so it takes no source="):
        ETAC(make("bn"), source=stream())
    with pytest.raises(ValueError, match="a sub-network needs a pass of its own"):
        ETAC(make("bn"), branches=BRANCHES["bn"], strategy="masked")
    with pytest.raises(ValueError, match="smoothing=2"):
        ETAC(make("bn"), branches=BRANCHES["bn"], smoothing=2.0)
    for keywords in ({"drop": 1.0}, {"per": "x"}, {"schedule": "cosine"}):
        with pytest.raises(ValueError, match=f"{next(iter(keywords))}="):
            ETAC(make("bn"), branches=BRANCHES["bn"], **keywords)
    with pytest.raises(ValueError, match="divergence="):
        ETAC(make("bn"), branches=BRANCHES["bn"], divergence="js")
    with pytest.raises(ValueError, match="EATAC: beta=50 pulls towards the source"):
        EATAC(make("bn"), branches=BRANCHES["bn"])


@pytest.mark.parametrize("name", ["seed", "margin", "epsilon", "fisher", "branches", "blocks"])
def test_arguments_of_the_build_cannot_be_set_later(name: str) -> None:
    adapter = ETAC(make("bn"), branches=BRANCHES["bn"])
    with pytest.raises(AttributeError, match="build another one"):
        setattr(adapter, name, None)
