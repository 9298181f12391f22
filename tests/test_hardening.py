"""Bad luck: threads, gradients that are not finite, half precision, shared networks, interrupts, frozen adapters."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import CASES
from networks import images, make, stream
from torch import Tensor, nn
from torch.optim import Adam

from acclimate import EATA, ETA, METHODS, SAR, Source, StateError, Tent
from acclimate.core.adapter import Adapter

LEARNING = [name for name, case in CASES.items() if case.learns]


def build(name: str, family: str | None = None, **arguments: object) -> Adapter:
    return CASES[name].make(make(family or ("seg" if name == "dat" else "bn")), **arguments)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def compiled_inside(net: nn.Module) -> nn.Module:
    """A network of which one part is compiled, which changes the names below it."""
    net.blocks = torch.compile(net.blocks, backend="eager")
    return net


def compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


# Threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eata", "tent", "cotta"])
def test_threads_take_turns(name: str) -> None:
    """Whatever the order, the network is a source network again after reset()."""
    adapter = build(name)
    before = copied(adapter.model)
    batches = stream(24)
    with ThreadPoolExecutor(4) as pool:
        logits = [*pool.map(adapter, batches)]
    assert all(z.isfinite().all() for z in logits)
    assert int(adapter.passes.forwards) >= sum(map(len, batches))
    adapter.reset()
    assert same(adapter.model, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in adapter.model.modules())


def test_two_adapters_over_one_network_take_turns() -> None:
    """A forward pass of one must not see the flags of the other."""
    net = make("bn")
    adapters = [Source(net), Tent(net, lr=0.0)]
    expected = [adapter(images(8)) for adapter in adapters]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda i: adapters[i % 2](images(8)), range(40))]
    assert all(torch.equal(z, expected[i % 2]) for i, z in enumerate(found))


def test_reset_save_and_load_wait_for_a_step(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.slow = make("bn"), False

        def forward(self, x: Tensor) -> Tensor:
            if self.slow:
                inside.set()
                go.wait(10)
            return self.net(x)

    net = Slow()
    adapter = Tent(net)
    adapter.save(tmp_path / "state")
    net.slow = True
    done: list[str] = []
    step = threading.Thread(target=lambda: (adapter(images(4)), done.append("step")))
    step.start()
    assert inside.wait(10)
    calls = {
        "reset": adapter.reset,
        "save": partial(adapter.save, tmp_path / "other"),
        "load": partial(adapter.load, tmp_path / "state"),
        "snapshot": adapter.snapshot,
    }
    others = [threading.Thread(target=lambda n=n, c=c: (c(), done.append(n))) for n, c in calls.items()]
    for thread in others:
        thread.start()
    time.sleep(0.2)
    assert not done
    go.set()
    for thread in (step, *others):
        thread.join(10)
    assert {*done} == {"step", *calls}


# Gradients that are not finite ----------------------------------------------------------------------------------------


class Deviation(nn.Module):
    """Pools by the standard deviation over space: its gradient is NaN for a black image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.BatchNorm2d(3), make("bn")

    def forward(self, x: Tensor) -> Tensor:
        h = x.relu() * self.first.weight[:, None, None]
        deviation = (h - h.mean((2, 3), keepdim=True)).pow(2).mean((2, 3)).sqrt()
        return self.net(self.first(x)) + 0.1 * deviation.sum(1, keepdim=True) * torch.linspace(0, 1, 10)


WIDE = {"margin": 1.5, "epsilon": None}
"""Every sample is kept."""


def black(count: int = 8) -> Tensor:
    """A batch with one black image."""
    x = images(count)
    x[0] = 0
    return x


@pytest.mark.parametrize("optimizer", [None, partial(Adam, lr=1e-3)])
@pytest.mark.parametrize("name", [name for name in LEARNING if METHODS[name].task != "segmentation"])
def test_a_gradient_that_is_not_finite_drops_the_step(name: str, optimizer: object, tmp_path: Path) -> None:
    arguments = {**CASES[name].arguments(), **(WIDE if CASES[name].selects else {})}
    arguments |= {"blocks": "net.blocks.*"} if "blocks" in arguments else {}
    if name == "sar":
        arguments |= {"parameters": "norm"}
        del arguments["epsilon"]
    if name == "memo":
        arguments |= {"augment": lambda x, _: x}
    arguments |= {"lr": 1e-3} if optimizer is None else {"optimizer": optimizer}
    adapter = METHODS[name](Deviation(), **arguments)
    adapter(images(8))
    assert int(adapter.passes.dropped) == 0
    before = [p.detach().clone() for p in adapter.adapted]
    with pytest.warns(UserWarning, match="dropped"):
        logits = adapter(black())
    assert logits.isfinite().all()
    assert int(adapter.passes.dropped) > 0
    if name not in ("roid", "cotta"):  # these also pull towards the source
        assert all(torch.equal(p, b) for p, b in zip(adapter.adapted, before, strict=True))
    adapter(black())  # warned about once
    assert adapter(images(8)).isfinite().all()
    adapter.save(tmp_path / "state")
    adapter.load(tmp_path / "state")


def test_states_that_are_not_finite_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    adapter = EATA(make("bn"), source=stream(1))
    adapter(images(8))
    good = adapter.snapshot()
    adapter.save(tmp_path / "state")
    with torch.no_grad():
        adapter.adapted[0][0] = torch.nan
    with pytest.raises(StateError, match="NaN or infinity"):
        adapter.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    adapter.load(tmp_path / "state")
    assert all(torch.equal(t, adapter.snapshot().tensors[name]) for name, t in good.tensors.items())
    adapter.optimizer.state[adapter.adapted[0]]["momentum_buffer"][0] = torch.inf
    with pytest.raises(StateError, match="optimizer"):
        adapter.save(tmp_path / "bad")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Tent, {"lr": float("nan")}),
        (Tent, {"optimizer": partial(Adam, lr=float("nan"))}),
        (EATA, {"beta": float("nan"), "source": stream(1)}),
        (ETA, {"margin": float("nan")}),
        (ETA, {"epsilon": float("nan")}),
        (SAR, {"rho": float("nan")}),
        (SAR, {"floor": float("nan")}),
    ],
)
def test_settings_that_are_no_number_are_refused(method: type[Adapter], settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a number|Invalid learning rate"):
        method(make("bn"), **settings)
    adapter = Tent(make("bn"))
    with pytest.raises(ValueError, match="not a number"):
        adapter.anything = float("nan")


# Precision and shared networks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_are_refused(name: str, dtype: torch.dtype) -> None:
    family = "seg" if name == "dat" else "bn"
    with pytest.raises(TypeError, match="net.float"):
        METHODS[name](make(family).to(dtype), **CASES[name].arguments())
    adapter = build(name)
    before = copied(adapter.model)
    with pytest.raises(TypeError, match="net.float"):
        adapter.to(dtype)
    assert same(adapter.model, before)
    assert {p.dtype for p in adapter.model.parameters()} == {torch.float32}


def test_a_network_that_another_adapter_has_changed() -> None:
    net = make("bn")
    before = copied(net)
    first = Tent(net, lr=1e-2)
    first(images(8))
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        ETA(net)
    del first
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        ETA(net)
    net.load_state_dict(before)
    second = ETA(net, lr=1e-2)
    second(images(8))
    second.reset()
    assert same(net, before)
    Tent(net)


def test_the_source_is_the_network_when_the_adapter_was_built() -> None:
    net = make("bn")
    before = copied(net)
    adapter = Tent(net)
    with torch.no_grad():
        for p in adapter.adapted:
            p.add_(1.0)
    with pytest.warns(UserWarning, match="has changed since"):
        adapter.reset()
    assert same(net, before)


# Refused batches ------------------------------------------------------------------------------------------------------


def test_a_refused_batch_leaves_the_generator() -> None:
    for name in LEARNING:
        adapter = build(name)
        x = images(4)
        x[0, 0, 0, 0] = torch.nan
        random = adapter.generator.get_state()
        with pytest.raises(ValueError, match="NaN"):
            adapter(x)
        assert torch.equal(adapter.generator.get_state(), random), name


# Predicting without learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_adapter_only_predicts(name: str) -> None:
    adapter = build(name)
    x = images(4)
    adapter(x)
    before, expected = adapter.snapshot(), adapter.predict_only(x)
    adapter.frozen = True
    assert torch.equal(adapter(x), expected)
    assert all(torch.equal(t, adapter.snapshot().tensors[n]) for n, t in before.tensors.items())
    adapter.frozen = False
    assert adapter.eval()(x).isfinite().all(), "eval() does not freeze it"


def test_a_state_dict_is_not_a_state() -> None:
    adapter = Tent(make("bn"))
    with pytest.raises(TypeError, match=r"save\(path\) and load\(path\)"):
        adapter.load_state_dict(adapter.state_dict())


# Names ----------------------------------------------------------------------------------------------------------------

WRAPPERS = {
    "compiled": partial(torch.compile, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda net: torch.compile(nn.DataParallel(net), backend="eager"),
    "compiled inside": compiled_inside,
    "compiled in place": compiled_in_place,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CASES)
def test_states_of_wrapped_and_plain_networks_are_the_same(name: str, wrapper: str, tmp_path: Path) -> None:
    family = "seg" if name == "dat" else "bn"
    plain, wrapped = (CASES[name].make(net) for net in (make(family), WRAPPERS[wrapper](make(family))))
    assert plain.names == wrapped.names
    first, second = stream(2, 4)
    for here, there in ((plain, wrapped), (wrapped, plain)):
        here.reset()
        here(first)
        here.save(tmp_path / "state")
        there.load(tmp_path / "state")
        assert torch.equal(here(second), there(second))
        there.restore(here.snapshot())


def test_a_wrapper_does_not_change_which_parameters_adapt() -> None:
    net = make("ln")
    expected = SAR(net).names
    assert "norm.weight" not in expected, "the last norm of a ViT does not adapt"
    assert SAR(nn.DataParallel(net)).names == expected
    assert Tent(nn.DataParallel(net), parameters=["module.norm.weight"]).names == ("norm.weight",)
    assert Tent(nn.DataParallel(net), parameters=["norm.weight"]).names == ("norm.weight",)
    assert Tent(nn.DataParallel(net), parameters=lambda name, _: name == "norm.bias").names == ("norm.bias",)
