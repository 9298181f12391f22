"""Bad use answers in the user's words, and changes nothing."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from cases import A_TRAP
from networks import ConvNet, batch_norm, images, make, stream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acclimate import EATA, EATAC, ETA, ETAC, BNAdapt, Everything, NonRedundant, Reliable, Source, Tent


class Returning(nn.Module):
    """A network that returns what a function makes of its logits."""

    def __init__(self, change) -> None:
        super().__init__()
        self.net = make("bn")
        self.change = change

    def forward(self, x: Tensor):
        return self.change(self.net(x))


def test_no_normalisation_layer() -> None:
    with pytest.raises(ValueError, match="Tent found no parameter to adapt: the model has no normalisation layer"):
        Tent(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))


def test_bn_adapt_without_batch_norm() -> None:
    with pytest.raises(ValueError, match="BNAdapt needs BatchNorm layers"):
        BNAdapt(make("ln"))


def test_all_parameters_and_chosen_ones() -> None:
    x = stream()[0]
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
    before = model[1].weight.clone()
    Tent(model, parameters="all")(x)
    assert not torch.equal(model[1].weight, before)
    assert Tent(make("bn"), parameters=["head.bias"]).names == ("head.bias",)
    assert Tent(make("bn"), parameters=lambda name, p: name.startswith("stem.1")).names == (
        "stem.1.weight",
        "stem.1.bias",
    )
    with pytest.raises(ValueError, match="does not have: nonsense"):
        Tent(make("bn"), parameters=["nonsense"])
    with pytest.raises(ValueError, match='expected "norm", "early-norm", "all"'):
        Tent(make("bn"), parameters="norms")
    with pytest.raises(ValueError, match="none matches"):
        Tent(make("bn"), parameters=lambda name, p: False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda z: (z, z), TypeError, "returned tuple, not logits"),
        (lambda z: {"features": z}, TypeError, "returned dict, not logits"),
        (lambda z: z[:, 0], ValueError, "not logits: got torch.float32 of shape"),
        (lambda z: z.argmax(1, keepdim=True), ValueError, "not logits: got torch.int64"),
        (lambda z: z[:, :1], ValueError, "at least two classes"),
        (lambda z: z[:2], ValueError, "8 images gave 2 rows"),
        (lambda z: z.softmax(1), ValueError, "looks like probabilities"),
        (lambda z: z * float("nan"), ValueError, "returned NaN or infinite logits for finite images"),
        (lambda z: z.detach(), RuntimeError, "the logits carry no gradient"),
    ],
)
def test_output_that_is_not_logits(change, error: type[Exception], message: str) -> None:
    adapter = Tent(Returning(change))
    before = adapter.snapshot()
    with pytest.raises(error, match=message):
        adapter(stream()[0])
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)


def test_logits_in_an_attribute_are_found() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    assert torch.equal(Tent(Returning(Output))(stream()[0]), Tent(make("bn"))(stream()[0]))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(0, 3, 16, 16), ValueError, "the batch is empty"),
        (torch.zeros(4, 3, 16, 16, dtype=torch.uint8), TypeError, "expected floating-point images, got torch.uint8"),
        ([1, 2], TypeError, "expected a batch of images as a torch.Tensor, got list"),
        ((torch.zeros(4, 3, 16, 16), torch.zeros(4)), TypeError, "got tuple.* pass x alone"),
        (torch.zeros(5), ValueError, "add the batch dimension"),
        (torch.zeros(4, 5, 16, 16), ValueError, r"the model failed on a batch of shape \(4, 5, 16, 16\)"),
        (torch.zeros(3, 16, 16), ValueError, r"\(3, 16, 16\)"),
    ],
)
def test_input_that_is_no_batch_of_images(x: object, error: type[Exception], message: str) -> None:
    adapter = EATA(make("bn"), source=images(16))
    with pytest.raises(error, match=message):
        adapter(x)
    assert not any(module._forward_pre_hooks for module in adapter.model.modules())
    assert not any(module.training for module in adapter.model.modules())


def test_beta_without_source_images() -> None:
    with pytest.raises(ValueError, match="EATA: beta=2000 pulls towards the source, which needs unlabelled"):
        EATA(make("bn"))
    EATA(make("bn"), beta=0.0)
    with pytest.raises(ValueError, match="source= holds no image"):
        EATA(make("bn"), source=[])
    with pytest.raises(ValueError, match="NaN or infinity in 8 of 8 images"):
        EATA(make("bn"), source=images() * float("nan"))
    with pytest.raises(TypeError, match="expected batches of images"):
        EATA(make("bn"), source=["cat.png"])
    with pytest.raises(ValueError, match="expected one of batch, sample"):
        EATA(make("bn"), source=images(), fisher="diagonal")
    with pytest.raises(ValueError, match="is negative"):
        EATA(make("bn"), source=images(), beta=-1.0)


@pytest.mark.parametrize("source", [images(20), [images(10), images(10, 1)], [(images(20), torch.zeros(20))]])
def test_source_images_come_in_any_wrapping(source: object) -> None:
    assert EATA(make("bn"), source=source)(stream()[0]).isfinite().all()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": 0.1, "optimizer": partial(torch.optim.SGD, lr=0.1)}, "give lr= or optimizer=, not both"),
        ({"statistics": "both"}, "statistics='both'"),
        ({"strategy": "sparser"}, "expected one of masked, sparse, replay"),
        ({"classes": [3]}, "at least two distinct class indices"),
        ({"classes": [3, 3]}, "at least two distinct class indices"),
    ],
)
def test_arguments_that_contradict(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tent(make("bn"), **keywords)


def test_a_class_that_the_model_does_not_have() -> None:
    with pytest.raises(ValueError, match="classes= names class 12; the model has 10 classes"):
        Tent(make("bn"), classes=[0, 12])(stream()[0])


def test_the_model_must_be_a_module_outside_inference_mode() -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got function"):
        Source(lambda x: x)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside torch.inference_mode"):
        Source(make("bn"))


def test_selectors_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="margin=0 keeps nothing"):
        Reliable(0)
    for keywords in ({"epsilon": 0.0}, {"epsilon": "big"}, {"momentum": 1}):
        with pytest.raises(ValueError, match="expected"):
            NonRedundant(**keywords)


def test_last_before_the_first_batch() -> None:
    with pytest.raises(RuntimeError, match="no batch yet"):
        _ = Tent(make("bn")).last


@A_TRAP
def test_one_value_per_channel_falls_back_to_source_statistics() -> None:
    """A batch of one through BatchNorm1d has no variance: torch refuses it, we do not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    for strategy in ("masked", "replay", "replay-subset"):
        adapter = Tent(model, strategy=strategy)
        with pytest.warns(UserWarning, match="a batch of one image"):
            logits = adapter(images(1))
        adapter.reset()
        torch.testing.assert_close(logits, model.eval()(images(1)).detach())
        model.train()


@pytest.mark.parametrize(("epsilon", "margin", "words"), [(1e-6, 0.9, "under 1 %"), (2.0, 2.0, "over 99 %")])
def test_an_alarm_when_almost_nothing_or_everything_is_kept(epsilon: float, margin: float, words: str) -> None:
    adapter = ETA(make("ln"), epsilon=epsilon, margin=margin, lr=0.0)
    x = stream()[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):  # five windows: one warning, not a flood
            adapter(x)
    assert [str(w.message).split(" of the samples")[0] for w in caught] == [f"the selection kept {words}"]


def test_a_healthy_rate_raises_no_alarm() -> None:
    adapter = ETA(make("ln"), margin=0.5, epsilon=0.7, lr=0.0)
    for _ in range(120):
        adapter(stream(1, size=16)[0])
    assert 0 < int(adapter.passes.backwards) < int(adapter.passes.forwards)


def test_reset_takes_back_what_another_adapter_of_the_network_sees() -> None:
    model = ConvNet(batch_norm).eval()
    first, second = Tent(model, lr=1e-2), Source(model)
    x = stream()[0]
    clean = second(x)
    first(x)
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        assert not torch.equal(second(x), clean)
    first.reset()
    assert torch.equal(second(x), clean)


def test_the_alarm_uses_the_rate_of_the_window_not_of_each_batch() -> None:
    """One sample in forty batches of 64 is 0.04 %, though that one batch kept more than 1 %."""
    select = Reliable()
    one, none = torch.zeros(2, 64, dtype=torch.bool)
    one[0] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(50):
            select.watch(one if i % 40 == 0 else none)
    assert ["under 1 %" in str(w.message) for w in caught] == [True]


def test_keeping_everything_on_purpose_raises_no_alarm() -> None:
    adapter = ETA(make("ln"), select=Everything(), lr=0.0)
    for _ in range(60):
        adapter(stream()[0])
    assert int(adapter.passes.backwards) == 60 * 8


def test_an_adapter_cannot_be_wrapped() -> None:
    with pytest.raises(ValueError, match="an adapter"):
        Source(nn.Sequential(Tent(make("bn"))))


def test_an_optimizer_that_is_made_already() -> None:
    model = make("bn")
    with pytest.raises(TypeError, match="optimizer="):
        Tent(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_users_own_gradients_are_left_alone() -> None:
    model = make("bn")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    Tent(model, lr=1e-2)(stream()[0])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_an_interrupted_step_changes_nothing() -> None:
    adapter = ETA(make("bn"), lr=1e-2, margin=2.0, epsilon=2.0)
    adapter(stream()[0])
    before = adapter.snapshot()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    adapter.optimizer.register_step_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        adapter(stream()[1])
    after = adapter.snapshot()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)
    assert all(p.grad is None for p in adapter.model.parameters())


@A_TRAP
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_activation_checkpoints_see_the_same_statistics(reentrant: bool, training: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make("bn")

        def forward(self, x: Tensor) -> Tensor:
            y = self.net.stem(x)
            for block in self.net.blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            return self.net.head(self.net.drop(y)).mean((2, 3))

    again = [] if reentrant else [{"strategy": "replay"}, {"strategy": "replay-subset"}]  # torch warns without a graph
    for options in ({}, {"detach_statistics": True}, *again):
        arguments = {"lr": 1e-2, "margin": 2.0, "epsilon": 0.99, **options}
        plain, saving = ETA(make("bn"), **arguments), ETA(Checkpointed().train(training), **arguments)
        buffers = [b.clone() for b in saving.model.buffers()]
        for x in stream():
            torch.testing.assert_close(plain(x), saving(x))
            assert int(plain.last.backwards) > 0
        assert all(torch.equal(a, b) for a, b in zip(buffers, saving.model.buffers(), strict=True))


@pytest.mark.parametrize("method", [Source, BNAdapt])
def test_half_precision_networks(method: type) -> None:
    logits = method(make("bn").bfloat16())(stream()[0].bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, method(make("bn"))(stream()[0]), rtol=0.1, atol=0.5)


def test_autocast_around_the_loop_uses_what_was_learned() -> None:
    def run(outer: bool) -> list[Tensor]:
        adapter = Tent(make("ln"), parameters="all", lr=1e-2)
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            outputs = []
            for x in stream():
                with torch.autocast("cpu", torch.bfloat16):
                    outputs.append(adapter(x))
            return outputs

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_the_defaults_are_the_papers() -> None:
    def settings(adapter) -> dict:
        group = adapter.optimizer.param_groups[0]
        return {key: group[key] for key in ("lr", "momentum", "weight_decay", "nesterov")}

    sgd = {"lr": 2.5e-4, "momentum": 0.9, "weight_decay": 0, "nesterov": False}
    eata, eatac = EATA(make("bn"), source=images()), EATAC(make("bn"), source=images(), blocks="blocks.*")
    assert settings(Tent(make("bn"))) == settings(ETA(make("bn"))) == settings(eata) == sgd
    assert settings(eatac) == sgd | {"lr": 5e-3}
    assert (eata.beta, eata.fisher, repr(eata.select)) == (2000.0, "batch", "Reliable(0.4) * NonRedundant('auto')")
    assert (eatac.alpha, eatac.beta, eatac.drop, eatac.smoothing, eatac.weight) == (0.1, 50.0, 0.2, 0.2, 1.0)
    assert repr(eatac.select) == "Reliable(0.5, weighted=False) * NonRedundant(Scaled(0.07))"
    assert (eatac.schedule, eatac.per, eatac.divergence) == ("linear", "sample", "forward")
    assert eatac.strategy == "replay-subset"
    assert ETAC(make("bn"), blocks="blocks.*").beta == 0
    assert BNAdapt(make("bn")).prior == 64
    assert eata.select.second.momentum == 0.9
