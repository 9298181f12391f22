"""The compared methods, step by step against literal transcriptions, and each in the situations that break methods."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transcriptions as plain
from cases import CASES
from networks import images, make, stream
from torch import Generator, Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from acclimate import DAT, ETA, MEMO, ROID, SAR, TEA, Adapter, CoTTA, RDumb
from acclimate.functional import entropy, free_energy, marginal_entropy, soft_likelihood_ratio, symmetric_cross_entropy
from acclimate.parts.image_buffer import ImageBuffer

CLASSIFIERS = ["bn", "ln", "gn"]
LR = 5e-3
BATCHES = [x.double() for x in stream(6, size=12)]


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def darker_and_turned(x: Tensor, generator: Generator | None = None) -> Tensor:
    """A view that needs no chance."""
    return 0.8 * x.flip(-1)


def changed(adapter: Adapter, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], value) for name, value in adapter.model.state_dict().items())


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# SAR ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("reset", ["empty", "released"])
def test_sar(family: str, reset: str) -> None:
    """With a floor that is reached: both ways of starting over are gone through."""
    model = make(family).double()
    settings = {"margin": 0.5, "rho": 0.05, "floor": 0.75}
    frozen = (model.norm,) if family == "ln" else ()
    adapter = SAR(make(family).double(), lr=LR, reset=reset, **settings)
    theirs, counts, recoveries = plain.sar(model, BATCHES, LR, released=reset == "released", frozen=frozen, **settings)
    for x, expected, (reliable, still) in zip(BATCHES, theirs, counts, strict=True):
        agree([adapter(x)], [expected])
        last = adapter.last
        assert last.forwards == len(x) + reliable
        assert int(last.backwards) == reliable + still
    assert any(still < reliable for reliable, still in counts)
    assert recoveries > 0


class ReliableAtFirst(nn.Module):
    """Everything is reliable in the first pass, and nothing in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(logits),), float(self.calls % 2))


def test_sar_where_nothing_stays_reliable_steps_by_momentum_alone() -> None:
    """As the released program does; the average of the loss is not touched."""
    adapter = SAR(make("ln"), lr=LR)
    adapter(stream()[0])
    average, before = adapter.average.clone(), [p.detach().clone() for p in adapter.adapted]
    velocity = [adapter.optimizer.state[p]["momentum_buffer"].clone() for p in adapter.adapted]
    adapter.reliable = ReliableAtFirst()
    adapter(stream()[1])
    assert (adapter.last.forwards, int(adapter.last.backwards)) == (16, 8)
    assert torch.equal(adapter.average, average)
    for p, then, v in zip(adapter.adapted, before, velocity, strict=True):
        torch.testing.assert_close(p.detach(), then - LR * 0.9 * v)


def test_sar_leaves_the_last_stage_alone() -> None:
    import timm
    import torchvision
    from transformers import ViTConfig, ViTForImageClassification

    resnet = timm.create_model("resnet18", num_classes=10)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
    other = torchvision.models.vit_b_16(image_size=32)
    hf = ViTForImageClassification(
        ViTConfig(hidden_size=12, num_hidden_layers=12, num_attention_heads=2, intermediate_size=12, image_size=32)
    )
    for model, layers in ((resnet, 20 - 5), (vit, 2 * 9), (other, 2 * 9), (hf, 2 * 9)):
        adapter = SAR(model)
        assert len(adapter.names) == 2 * layers, adapter.names
    assert not any("layer4" in name for name in SAR(resnet).names)
    assert SAR(make("bn")).names == ETA(make("bn")).names, "no last stage is known"
    assert set(ETA(make("ln")).names) - set(SAR(make("ln")).names) == {"norm.weight", "norm.bias"}
    assert SAR(vit, parameters="norm").names == ETA(vit).names


def test_sar_starts_over_when_the_loss_is_too_low() -> None:
    adapter = SAR(make("ln"), lr=LR, floor=100.0)
    before = copied(adapter.model)
    for x in stream():
        adapter(x)
        assert adapter.last.updated
        assert not changed(adapter, before)
        assert adapter.average < 0
    assert int(adapter.passes.forwards) > 4 * 8, "counters go on"
    released = SAR(make("ln"), lr=LR, floor=100.0, reset="released")
    released(stream()[0])
    assert released.average >= 0


def test_sar_counts_the_whole_batch_in_the_graph() -> None:
    """The released program runs everything twice; where samples are independent we run the reliable ones alone."""
    for family, whole in (("bn", True), ("ln", False)):
        adapter = SAR(make(family), margin=0.5)
        x = stream(1, size=12)[0]
        adapter(x)
        reliable = int(adapter.last.kept.sum())
        assert 0 < reliable < 12
        assert adapter.last.forwards == 12 + reliable
        assert adapter.last.in_graph == 12 + (12 if whole else reliable)


# ROID -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("prior", ["log", "released"])
def test_roid(family: str, prior: str) -> None:
    adapter = ROID(make(family).double(), lr=2e-5, momentum=0.9, prior=prior, augment=darker_and_turned)
    theirs, kept = plain.roid(make(family).double(), BATCHES, 2e-5, darker_and_turned, pull=0.9, prior=prior)
    for x, expected, count in zip(BATCHES, theirs, kept, strict=True):
        agree([adapter(x)], [expected])
        last = adapter.last
        assert last.forwards == last.in_graph == len(x) + count, "the paper's count"
        assert int(last.backwards) == 2 * count, "those that received a gradient"
        assert 0 < count < len(x)


def test_roid_returns_what_prior_says() -> None:
    x = stream()[0]
    logits = {prior: ROID(make("bn"), prior=prior)(x) for prior in ("log", "released", None)}
    frequency = logits[None].softmax(1).mean(0)
    smooth = (1 / 8) / frequency.max()  # a batch of 8 in ten classes
    smoothed = (frequency + smooth) / (1 + 10 * smooth)
    torch.testing.assert_close(logits["log"], logits[None] + smoothed.log())
    torch.testing.assert_close(logits["released"], logits[None] * smoothed)
    assert logits["released"].softmax(1).amax(1).mean() < 0.5 * logits["log"].softmax(1).amax(1).mean()


def test_roid_with_momentum_zero_returns_to_the_source() -> None:
    adapter = ROID(make("bn"), lr=LR, momentum=0.0)
    before = copied(adapter.model)
    adapter(stream()[0])
    assert not changed(adapter, before)


# RDumb ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*CLASSIFIERS, "seg"])
def test_rdumb_is_a_new_eta_every_so_many_batches(family: str) -> None:
    adapter = RDumb(make(family).double(), lr=LR, every=2)
    ours = [adapter(x) for x in BATCHES]
    theirs = []
    for start in (0, 2, 4):
        fresh = ETA(make(family).double(), lr=LR)
        theirs += [fresh(x) for x in BATCHES[start : start + 2]]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert int(adapter.passes.forwards) == 6 * 12, "counters go on"


def test_rdumb_counts_batches_across_a_file(tmp_path) -> None:
    def later(adapter: Adapter) -> list[Tensor]:
        return [adapter(x) for x in BATCHES[3:]]

    adapter = RDumb(make("bn").double(), lr=LR, every=4)
    for x in BATCHES[:3]:
        adapter(x)
    adapter.save(tmp_path / "state")
    expected = later(adapter)
    other = RDumb(make("bn").double(), lr=LR, every=4)
    other.load(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(expected, later(other), strict=True))


def test_rdumb_starts_over_when_it_is_time_though_it_has_diverged() -> None:
    adapter = RDumb(make("bn"), lr=LR, every=3)
    first = adapter(stream()[0])
    with torch.no_grad():
        adapter.adapted[0].fill_(float("nan"))
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN or infinite logits for finite images"):
            adapter(stream()[0])
    assert torch.equal(adapter(stream()[0]), first)


def test_rdumb_refuses_a_bad_batch_before_it_starts_over() -> None:
    adapter = RDumb(make("bn"), lr=LR, every=1)
    adapter(stream()[0])
    before = copied(adapter.model)
    with pytest.raises(ValueError, match="NaN or infinity"):
        adapter(stream()[1] * float("nan"))
    assert not changed(adapter, before)
    assert int(adapter.batches) == 1


# CoTTA ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("loss", ["symmetric", "teacher"])
def test_cotta(family: str, loss: str) -> None:
    settings = {"momentum": 0.7, "restoration": 0.1, "views": 3, "seed": 5}
    with torch.no_grad():
        sure = [plain.on_batch_statistics(make(family).double())(x).softmax(1).amax(1).mean() for x in BATCHES]
    threshold = float(torch.stack(sure).median()) + 1e-6  # so that some batches are looked at in views
    theirs, looked = plain.cotta(
        make(family).double(),
        BATCHES,
        LR,
        darker_and_turned,
        threshold=threshold,
        symmetric=loss == "symmetric",
        **settings,
    )
    adapter = CoTTA(make(family).double(), lr=LR, threshold=threshold, loss=loss, augment=darker_and_turned, **settings)
    for x, expected, in_views in zip(BATCHES, theirs, looked, strict=True):
        agree([adapter(x)], [expected])
        assert adapter.last.forwards == len(x) * (3 + 3 * in_views)
        assert int(adapter.last.backwards) == adapter.last.in_graph == len(x)
    assert True in looked
    assert False in looked


def test_cotta_keeps_one_copy_of_what_adapts() -> None:
    """The anchor is the source snapshot, the teacher one more copy, and neither has a graph."""
    adapter = CoTTA(make("bn"), parameters=["head.weight", "head.bias"])
    assert not [name for name in adapter.snapshot().tensors if "teacher" in name], "equal to the student so far"
    adapter(stream()[0])
    held = {name for name in adapter.snapshot().tensors if name.startswith("state/teacher")}
    assert held == {"state/teacher.head/weight", "state/teacher.head/bias"}
    assert len(list(adapter.parameters())) == len(list(adapter.model.parameters()))
    assert not any(buffer.requires_grad for buffer in adapter.buffers())


def test_cotta_restores_the_share_it_says() -> None:
    adapter = CoTTA(make("ln"), lr=0.5, restoration=0.25)
    before = copied(adapter.model)
    adapter(stream()[0])
    after = adapter.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    same = sum(int((before[name] == after[name]).sum()) for name in moved)
    assert 0.2 < same / sum(before[name].numel() for name in moved) < 0.3
    for rate, goes_back in ((1.0, True), (0.0, False)):
        adapter = CoTTA(make("bn"), lr=0.1, restoration=rate)
        before = copied(adapter.model)
        adapter(stream()[0])
        assert changed(adapter, before) != goes_back


# MEMO -----------------------------------------------------------------------------------------------------------------


def four_views(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Of one image given four times, or once: four of different brightness, every other flipped."""
    gains = torch.tensor([0.7, 0.9, 1.1, 1.3], dtype=x.dtype).view(4, 1, 1, 1)
    views = gains * x.expand(4, -1, -1, -1)
    return torch.stack([view.flip(-1) if i % 2 else view for i, view in enumerate(views)])


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_memo(family: str) -> None:
    adapter = MEMO(make(family).double(), lr=0.05, views=4, prior=3, augment=four_views)
    before = copied(adapter.model)
    for x in BATCHES[:2]:
        agree([adapter(x)], [plain.memo(make(family).double(), x, 0.05, four_views, prior=3)])
        assert not torch.equal(adapter.last.logits, MEMO(make(family).double(), lr=0.0, augment=four_views, views=4)(x))
        assert not changed(adapter, before)


def test_memo_with_adamw_starts_each_image_anew() -> None:
    make_optimizer = partial(AdamW, lr=1e-2, weight_decay=0.01)
    one = MEMO(make("bn"), views=4, augment=four_views, optimizer=make_optimizer)
    together = one(stream()[0])
    assert not one.optimizer.state
    apart = torch.cat([one(x) for x in stream()[0].split(1)])
    torch.testing.assert_close(together, apart)


def test_memo_holds_no_copy_of_the_network() -> None:
    adapter = MEMO(make("ln"), views=2)
    adapter(stream()[0][:2])
    assert not [name for name in adapter.snapshot().tensors if name.startswith(("parameter/", "optimizer/"))]
    for option in ({"statistics": "batch"}, {"detach_statistics": True}):
        with pytest.raises(TypeError, match=f"MEMO takes no {min(option)}="):
            MEMO(make("ln"), **option)


def test_memo_interrupted_leaves_the_network_as_it_was() -> None:
    calls = 0

    def interrupting(x: Tensor, generator: Generator) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return x

    adapter = MEMO(make("bn"), lr=0.1, views=4, augment=interrupting)
    before = copied(adapter.model)
    with pytest.raises(KeyboardInterrupt):
        adapter(stream()[0])
    assert not changed(adapter, before)


# TEA ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_tea(family: str) -> None:
    settings = {"steps": 4, "step_size": 0.1, "noise": 0.01, "buffer": 30, "renewal": 0.2, "seed": 3}
    adapter = TEA(make(family).double(), lr=LR, storage=torch.float64, **settings)
    theirs, store = plain.tea(make(family).double(), BATCHES, LR, **settings)
    agree([adapter(x) for x in BATCHES], theirs)
    agree([adapter.replay[place] for place in range(len(adapter.replay))], [store[i] for i in range(len(store))])
    assert 20 < len(store) <= 30
    assert int(adapter.passes.forwards) == 6 * 12 * (4 + 3)
    assert int(adapter.passes.backwards) == int(adapter.passes.in_graph) == 6 * 12 * (4 + 2)


def test_replay_takes_up_memory_as_it_is_used() -> None:
    replay, generator = ImageBuffer(1000, torch.float16), Generator().manual_seed(0)
    like = torch.zeros(50, 3, 8, 8)
    assert replay.nbytes == 0
    sizes = []
    for _ in range(40):
        drawn, places = replay.sample(like, 0.0, generator)
        assert drawn.shape == like.shape
        assert drawn.abs().max() <= 1
        replay.write(drawn, places)
        sizes.append(len(replay))
        assert replay.nbytes == min(1000, 256 * -(-sizes[-1] // 256)) * 3 * 8 * 8 * 2, "a shelf of 256 at a time"
    assert sizes[0] <= 50
    expected = 1000 * (1 - (1 - 1 / 1000) ** 2000)  # distinct images among 2,000 draws of 1,000
    assert abs(sizes[-1] - expected) < 40
    assert sizes[-1] <= 1000


def test_replay_gives_back_what_was_written() -> None:
    replay, generator = ImageBuffer(4, torch.float32), Generator().manual_seed(0)
    like = torch.zeros(64, 1, 2, 2)
    _, places = replay.sample(like, 0.0, generator)
    replay.write(torch.arange(64.0).view(64, 1, 1, 1).expand(64, 1, 2, 2), places)
    assert set(places) == {0, 1, 2, 3}
    later = {place: float(row) for row, place in enumerate(places)}
    drawn, again = replay.sample(like, 0.0, generator)
    assert [float(image.mean()) for image in drawn] == [later[place] for place in again]
    anew, _ = replay.sample(like, 1.0, generator)
    assert anew.abs().max() <= 1
    replay.write(torch.full((1, 1, 2, 2), 1e39, dtype=torch.float64), [0])
    assert replay[0].isfinite().all()
    assert replay.double()[0].dtype == torch.float32, "its own precision stays"


def test_tea_refuses_images_of_another_size_and_changes_nothing() -> None:
    adapter = TEA(make("bn"), steps=1)
    adapter(stream()[0])
    before = adapter.snapshot()
    with pytest.raises(ValueError, match=r"holds images of \(3, 16, 16\), and these are of \(3, 24, 24\)"):
        adapter(images(8, size=24))
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)


def test_tea_runs_with_activation_checkpoints() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make("bn")

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    plainly, saving = TEA(make("bn"), steps=3, lr=1e-2), TEA(Checkpointed(), steps=3, lr=1e-2)
    assert all(torch.equal(plainly(x), saving(x)) for x in stream())


def test_tea_resets_its_buffer() -> None:
    adapter = TEA(make("bn"), steps=1)
    adapter(stream()[0])
    assert adapter.replay.nbytes > 0
    adapter.reset()
    assert adapter.replay.nbytes == 0


def test_tea_raises_if_the_network_has_diverged() -> None:
    adapter = TEA(make("ln"), lr=1e30, steps=1)
    with pytest.raises(ValueError, match="NaN or infinite logits after its update: it has diverged"):
        adapter(stream()[0])
    adapter.reset()
    assert adapter.infer(stream()[0]).isfinite().all()


# All of them ----------------------------------------------------------------------------------------------------------

COSTS = {
    "memo": (lambda: MEMO(make("ln")), 65, 64),
    "cotta": (lambda: CoTTA(make("ln")), 3, 1),
    "cotta, unsure": (lambda: CoTTA(make("ln"), threshold=2.0), 35, 1),
    "tea": (lambda: TEA(make("ln")), 23, 22),
}


@pytest.mark.parametrize("name", COSTS)
def test_passes_are_the_papers(name: str) -> None:
    make_adapter, forwards, backwards = COSTS[name]
    adapter = make_adapter()
    adapter(images(2))
    assert int(adapter.passes.forwards) == 2 * forwards
    assert int(adapter.passes.backwards) == int(adapter.passes.in_graph) == 2 * backwards


@pytest.mark.parametrize("name", CASES)
def test_no_method_costs_more_than_it_says(name: str) -> None:
    case = CASES[name]
    given = case.arguments()
    defaults = {key: given[key] for key in ("source", "blocks") if key in given}
    adapter = case.method(make(case.families[0]), **defaults)
    x = images(4)
    adapter(x)
    forwards, backwards = adapter.cost
    assert int(adapter.passes.forwards) <= 4 * forwards
    assert int(adapter.passes.backwards) <= 4 * backwards


ALL = {
    "memo": lambda **k: MEMO(make("bn"), views=4, **k),
    "cotta": lambda **k: CoTTA(make("bn"), threshold=2.0, views=2, **k),
    "sar": lambda **k: SAR(make("bn"), **k),
    "roid": lambda **k: ROID(make("bn"), **k),
    "rdumb": lambda **k: RDumb(make("bn"), every=2, **k),
    "tea": lambda **k: TEA(make("bn"), steps=2, **k),
}


@pytest.mark.parametrize("name", ALL)
def test_a_reset_in_the_middle_starts_the_stream_again(name: str) -> None:
    adapter = ALL[name](lr=1e-2)
    first = [adapter(x) for x in stream(3)]
    adapter.reset()
    half = [adapter(x) for x in stream(3)[:2]]
    adapter.reset()
    assert all(torch.equal(a, b) for a, b in zip(first, half, strict=False))
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream(3), strict=True))


@pytest.mark.parametrize("name", ["memo", "cotta", "roid"])
@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda x: (x - 0.5) / 0.25, "they look normalised"), (lambda x: 255 * x, "divide them by 255")],
)
def test_images_in_a_wrong_range_are_rejected_and_change_nothing(name: str, change, told: str) -> None:
    adapter = ALL[name](lr=1e-2)
    adapter(stream()[0])
    before = adapter.snapshot()
    with pytest.raises(ValueError, match=rf"augmentations need images in \[0, 1\].*{told}"):
        adapter(change(stream()[1]))
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)


@pytest.mark.parametrize("name", ["memo", "cotta", "roid"])
def test_views_that_are_not_finite_are_refused_and_change_nothing(name: str) -> None:
    adapter = ALL[name](lr=1e-2, augment=lambda x, generator: x * float("nan"))
    before = copied(adapter.model)
    with pytest.raises(ValueError, match="NaN or infinity|NaN or infinite"):
        adapter(stream()[0])
    assert not changed(adapter, before)
    assert adapter.infer(stream()[0]).isfinite().all()


@pytest.mark.parametrize("name", ["memo", "cotta", "roid"])
def test_an_augmentation_of_the_users_own_takes_any_range(name: str) -> None:
    adapter = ALL[name](lr=1e-2, augment=darker_and_turned)
    assert adapter(4 * stream()[0] - 2).isfinite().all()


@pytest.mark.parametrize(("method", "family"), [(MEMO, "seg"), (ROID, "seg"), (TEA, "seg"), (DAT, "bn")])
def test_a_network_for_another_task_is_refused(method: type[Adapter], family: str) -> None:
    adapter = method(make(family))
    before = copied(adapter.model)
    with pytest.raises(ValueError, match=f"{method.__name__} is for {adapter.task}, and this model is for"):
        adapter(images(2))
    assert not changed(adapter, before)


def test_the_defaults_are_their_authors() -> None:
    def settings(adapter: Adapter) -> dict:
        group = adapter.optimizer.param_groups[0]
        return {key: group.get(key) for key in ("lr", "momentum", "weight_decay", "nesterov")}

    def sgd(lr: float, momentum: float = 0.9, nesterov: bool = False) -> dict:
        return {"lr": lr, "momentum": momentum, "weight_decay": 0, "nesterov": nesterov}

    net = make("bn")
    memo, cotta, sar, roid, rdumb, tea = (method(net) for method in (MEMO, CoTTA, SAR, ROID, RDumb, TEA))
    assert settings(memo) == sgd(2.5e-4, momentum=0)
    assert settings(cotta) == sgd(0.01, nesterov=True)
    assert settings(roid) == sgd(2.5e-4, nesterov=True)
    assert settings(sar) == settings(rdumb) == settings(tea) == sgd(2.5e-4)
    assert (memo.views, memo.prior) == (64, 16)
    assert (cotta.momentum, cotta.restoration, cotta.threshold, cotta.views) == (0.999, 0.001, 0.1, 32)
    assert (sar.margin, sar.rho, sar.floor, sar.reset_) == (0.4, 0.05, 0.2, "empty")
    assert (roid.temperature, roid.momentum, roid.prior) == (1 / 3, 0.99, "log")
    assert (rdumb.every, rdumb.margin) == (1000, 0.4)
    assert (tea.steps, tea.step_size, tea.noise, tea.buffer, tea.renewal) == (20, 0.1, 0.01, 10_000, 0.05)
    everything = {name for name, _ in net.named_parameters()}
    assert set(memo.names) == set(cotta.names) == everything
    assert set(roid.names) == set(rdumb.names) == set(tea.names) == set(ETA(net).names)


def test_presets_of_the_compared_methods() -> None:
    def lr(adapter: Adapter) -> float:
        return adapter.optimizer.param_groups[0]["lr"]

    rates = {
        SAR: (2.5e-4, 1e-3),
        ROID: (2.5e-4, 2.5e-4),
        RDumb: (2.5e-4, 1e-3),
        TEA: (2.5e-4, 5e-3),
        CoTTA: (0.01, 5e-3),
        MEMO: (2.5e-4, 1e-5),
    }
    for method, (resnet, vit) in rates.items():
        assert lr(method.preset("resnet50", make("bn"))) == resnet
        assert lr(method.preset("vit-base", make("ln"))) == vit
    memo = MEMO.preset("vit-base", make("ln"))
    assert isinstance(memo.optimizer, AdamW)
    assert memo.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert isinstance(MEMO.preset("vit-base", make("ln"), lr=1e-3).optimizer, AdamW)
    with pytest.raises(ValueError, match="no preset of ROID for segformer-b5"):
        ROID.preset("segformer-b5", make("seg"))


@pytest.mark.parametrize(
    ("make_adapter", "message"),
    [
        (lambda m: SAR(m, reset="never"), "SAR: reset='never'"),
        (lambda m: SAR(m, rho=-1), "rho=-1 is negative"),
        (lambda m: ROID(m, prior="added"), "ROID: prior='added'"),
        (lambda m: ROID(m, momentum=2), "momentum=2 must lie in"),
        (lambda m: RDumb(m, every=0), "every=0"),
        (lambda m: CoTTA(m, loss="kl"), "loss='kl'"),
        (lambda m: CoTTA(m, views=0), "views=0 must be at least 1"),
        (lambda m: CoTTA(m, momentum=1.5), "a teacher's momentum"),
        (lambda m: MEMO(m, views=0), "views=0 must be at least 1"),
        (lambda m: TEA(m, renewal=2), "renewal=2"),
        (lambda m: TEA(m, storage=torch.int8), "storage=torch.int8"),
        (lambda m: TEA(m, buffer=0), "at least one image"),
    ],
)
def test_wrong_arguments_raise_at_once(make_adapter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_adapter(make("bn"))


# Their equations ------------------------------------------------------------------------------------------------------


def test_marginal_entropy_by_hand() -> None:
    """Two opposite certainties average to a coin: ln 2; two equal predictions have their own entropy."""
    opposite = torch.tensor([[40.0, 0.0], [0.0, 40.0]])
    torch.testing.assert_close(marginal_entropy(opposite), torch.tensor(2.0).log())
    z = torch.tensor([[1.0, 2.0, 4.0]])
    torch.testing.assert_close(marginal_entropy(z.expand(5, 3)), entropy(z)[0])
    far = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    marginal_entropy(far).backward()
    assert far.grad.isfinite().all()


def test_the_other_equations_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    both = -0.5 * (p * q.log()).sum() - 0.5 * (q * p.log()).sum()
    torch.testing.assert_close(symmetric_cross_entropy(p.log(), q.log()), both[None])
    ratio = -(p * (p / (1 - p) + 1e-5).log()).sum()
    torch.testing.assert_close(soft_likelihood_ratio(p.log()), ratio[None])
    sure = torch.tensor([[0.999, 0.001]], dtype=torch.float64)
    expected = -(0.99 * torch.tensor(99 + 1e-5).log() + 0.001 * torch.tensor(0.001 / 0.999 + 1e-5).log())
    torch.testing.assert_close(soft_likelihood_ratio(sure.log()), expected.double()[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(free_energy(p.log()), torch.zeros(1, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (ROID, {"temperature": 0.0}),
        (ROID, {"momentum": 1.01}),
        (CoTTA, {"views": 0}),
        (CoTTA, {"restoration": -0.01}),
        (CoTTA, {"restoration": 1.01}),
        (TEA, {"steps": -1}),
        (TEA, {"renewal": 1.01}),
        (MEMO, {"views": 0}),
        (SAR, {"rho": -0.01}),
        (DAT, {"share": 0.0}),
        (DAT, {"share": 1.01}),
    ],
)
def test_settings_out_of_bounds_are_refused(method: type[Adapter], settings: dict[str, float]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        method(make("seg" if method is DAT else "bn"), **settings)


def test_dat_chooses_no_tensor_without_a_gradient() -> None:
    adapter = DAT(make("seg"), share=1.0)
    gradients = [torch.zeros_like(p) for p in adapter.adapted]
    gradients[2] += 1
    adapter._choose(gradients)
    assert adapter.chosen.nonzero().flatten().tolist() == [2]
