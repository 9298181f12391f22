"""Bad luck: threads, gradients that are not finite, half precision, shared networks, interrupts, frozen adapters."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES
from faults import _free, in_child, weights
from networks import images, make, stream
from torch import Tensor, nn
from torch.optim import SGD, Adam

import acclimate
from acclimate import (
    DAT,
    EATA,
    ETA,
    ETAC,
    MEMO,
    METHODS,
    ROID,
    SAR,
    TEA,
    BNAdapt,
    CoTTA,
    RDumb,
    Source,
    StateError,
    Tent,
    norm_parameters,
    subnetwork,
)
from acclimate.core.adapter import Adapter
from acclimate.parts.wrappers import calls

LEARNING = [name for name, case in CASES.items() if case.learns]


def build(name: str, family: str | None = None, **arguments: object) -> Adapter:
    return CASES[name].make(make(family or ("seg" if name == "dat" else "bn")), **arguments)


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
    before = weights(adapter.model)
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


@pytest.mark.parametrize("call", ["predict_source", "fingerprint"])
def test_the_source_is_not_read_during_a_step(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, read = Tent(make("bn")), threading.Event()
    name = {"predict_source": "source_parameters"}.get(call, call)
    original = getattr(adapter.state, name)
    monkeypatch.setattr(adapter.state, name, lambda: (read.set(), original())[1])
    thread = threading.Thread(target=lambda: getattr(adapter, call)(*[images(4)][: call == "predict_source"]))
    with adapter.sharing:  # as a step has it
        thread.start()
        assert not read.wait(0.2)
    thread.join(10)
    assert read.is_set()


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
        (Tent, {"lr": np.float32("nan")}),
        (Tent, {"lr": float("inf")}),
        (EATA, {"beta": float("nan"), "source": stream(1)}),
        (EATA, {"beta": np.float32("nan"), "source": stream(1)}),
        (ETA, {"margin": float("nan")}),
        (ETA, {"epsilon": float("nan")}),
        (SAR, {"rho": float("nan")}),
        (SAR, {"floor": float("nan")}),
    ],
)
def test_settings_that_are_no_number_are_refused(method: type[Adapter], settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a number|Invalid learning rate|infinite"):
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
    before = weights(adapter.model)
    with pytest.raises(TypeError, match="net.float"):
        adapter.to(dtype)
    assert same(adapter.model, before)
    assert {p.dtype for p in adapter.model.parameters()} == {torch.float32}


def test_a_network_that_another_adapter_has_changed() -> None:
    net = make("bn")
    before = weights(net)
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
    before = weights(net)
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


@pytest.mark.parametrize("wrapper", ["compiled", "compiled inside", "compiled in place"])
def test_what_the_user_has_compiled_stays_compiled(wrapper: str) -> None:
    net = WRAPPERS[wrapper](make("bn"))
    before = [calls(module) for module in net.modules()]
    adapter = BNAdapt(net)
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(adapter, stream(8, 4))]
    assert [calls(module) for module in net.modules()] == before
    assert any(before)
    bad = images(4)
    bad[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        adapter(bad)
    assert [calls(module) for module in net.modules()] == before


# What a hostile reviewer found ----------------------------------------------------------------------------------------


def test_a_wrapper_with_parameters_of_its_own_shares_the_lock() -> None:
    net = make("bn")
    inside, outside = Tent(net, lr=1e-2), Tent(nn.Sequential(nn.BatchNorm2d(3), net), lr=1e-2)
    apart = Tent(make("bn"))
    assert {*inside.runner.sharing._locks} & {*outside.runner.sharing._locks}
    assert not {*inside.runner.sharing._locks} & {*apart.runner.sharing._locks}
    inside(images(8))
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        Tent(nn.Sequential(nn.BatchNorm2d(3), net))


def test_each_change_of_a_network_is_remembered() -> None:
    net = make("bn")
    first, second = Tent(net, lr=1e-2), Tent(net, parameters="all", lr=1e-2)
    second.predict_only(images(8))
    first(images(8))
    with pytest.warns(UserWarning, match="has changed since"):
        second(images(8))
    first.reset()
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        ETA(net)


def test_a_new_process_starts_with_free_locks() -> None:
    adapter = Tent(make("bn"))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with adapter.sharing:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        assert not in_child(adapter.snapshot, seconds=20)
    finally:
        done.set()
        thread.join()


class Normed(torch.optim.Optimizer):
    """Divides by the gradient's norm, also where that is zero; its learning rate is None."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= 1e-3 * p.grad / p.grad.norm()


class Unused(nn.Module):
    """Has a norm layer whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = make("bn"), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.0 * self.unused(x).mean()


@pytest.mark.parametrize("optimizer", [partial(Adam, lr=1e-3, eps=0), Normed, partial(SGD, lr=1e-3, momentum=1e30)])
def test_a_step_that_would_leave_nan_is_undone(optimizer: object) -> None:
    adapter = Tent(Unused(), optimizer=optimizer)
    with pytest.warns(UserWarning, match="dropped"):
        logits = [adapter(x) for x in stream(4, 8)]
    assert all(z.isfinite().all() for z in logits)
    assert int(adapter.passes.dropped) > 0
    assert all(t.isfinite().all() for t in adapter.snapshot().tensors.values() if t.is_floating_point())


def test_settings_that_become_nan_later() -> None:
    adapter = Tent(make("bn"))
    before = adapter.snapshot()
    adapter.optimizer.param_groups[0]["momentum"] = float("nan")
    with pytest.warns(UserWarning, match="dropped"):
        adapter(images(8))
    values = zip(adapter.names, adapter.adapted, strict=True)
    assert all(torch.equal(p, before.tensors[f"parameter/{name}"]) for name, p in values)
    with pytest.raises(StateError, match="momentum"):
        adapter.save("never written")


def test_dat_counts_gradients_that_are_not_finite() -> None:
    adapter = build("dat")
    for p in adapter.adapted:
        p.register_hook(lambda g: g * torch.nan)
    with pytest.warns(UserWarning, match="dropped"):
        adapter(images(2))
    assert not adapter.last.updated
    assert not adapter.chosen.any()


@pytest.mark.parametrize("bad", [images(4)[:, :1], images(4)[0]])
def test_rdumb_keeps_what_it_has_learned_if_a_batch_is_refused(bad: Tensor) -> None:
    adapter = RDumb(make("bn"), every=2, select="everything", lr=1e-2)
    for x in stream(2, 8):
        adapter(x)
    before = adapter.snapshot()
    with pytest.raises(ValueError, match=r"shape|batch"):
        adapter(bad)
    assert all(torch.equal(t, before.tensors[n]) for n, t in adapter.snapshot().tensors.items())


def test_empty_parameters_and_sparse_gradients() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.empty = make("bn"), nn.Parameter(torch.empty(0))
            self.table = nn.Embedding(4, 10, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.table(torch.zeros(len(x), dtype=torch.long)) + self.empty.sum()

    adapter = Tent(Odd(), parameters="all", optimizer=partial(SGD, lr=1e-3))
    assert adapter(images(4)).isfinite().all()
    assert adapter.last.updated


def test_hooks_of_others_stay() -> None:
    net = make("bn")

    def hook(*_: object) -> None: ...

    hook.__module__ = "acclimate_server.hooks"
    net.stem.register_forward_hook(hook)
    adapter, bad = Tent(net), images(4)
    bad[0] = torch.nan
    with subnetwork(net, drop=0.5, generator=torch.Generator(), blocks="blocks.*"):
        count = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
        with pytest.raises(ValueError, match="NaN"):
            adapter(bad)
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) == count
    assert [*net.stem._forward_hooks.values()] == [hook]


def test_part_of_a_network_in_half_precision() -> None:
    adapter = Tent(make("bn"))
    adapter.model.blocks[1].half()
    with pytest.raises(TypeError, match="net.float"):
        adapter(images(4))


def test_warnings_name_the_users_line(tmp_path: Path) -> None:
    net = make("bn")
    first = EATA(net, source=stream(1), lr=1e-2, select="everything")
    first(images(8))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        EATA(net, source=stream(1))
        Tent(make("bn"))(images(1))
        first.save(tmp_path / "state")
        first.reset()
        EATA(net, source=stream(1), lr=1e-3).load(tmp_path / "state")
        Tent(Deviation())(black())
    assert len(found) == 4
    assert {warning.filename for warning in found} == {__file__}


def test_copies_are_independent() -> None:
    adapter = EATA(make("bn"), source=stream(1))
    adapter(images(8))
    copied = copy.deepcopy(adapter)
    assert not {*copied.runner.sharing._locks} & {*adapter.runner.sharing._locks}
    assert torch.equal(copied(images(8)), adapter(images(8)))
    copied.reset()
    adapter.reset()
    assert same(copied.model, weights(adapter.model))


# What a second hostile reviewer found ---------------------------------------------------------------------------------


def in_context(adapter: Adapter) -> None:
    with adapter.sharing:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer here")
@pytest.mark.parametrize("which", ["predict_only", "forward", "snapshot", "reset", "build", "copy", "context"])
def test_no_real_interrupt_leaves_a_lock_held(which: str) -> None:
    """A signal may arrive between any two instructions, also while a lock is taken or freed."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    adapter, x = Tent(net), torch.rand(8, 4)
    calls: dict[str, Callable[[], object]] = {
        "predict_only": partial(adapter.predict_only, x),
        "forward": partial(adapter, x),
        "snapshot": adapter.snapshot,
        "reset": adapter.reset,
        "build": lambda: Tent(net),
        "context": lambda: in_context(adapter),
        "copy": partial(copy.deepcopy, adapter),
    }
    before, delays = signal.signal(signal.SIGALRM, signal.default_int_handler), random.Random(0)
    try:
        for number in range(150):
            with contextlib.suppress(KeyboardInterrupt):
                end = time.monotonic() + 0.1  # Python ignores an interrupt inside a weak reference's callback
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, 2e-3))
                while time.monotonic() < end:
                    calls[which]()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert all(_free(lock.own) for lock in adapter.runner.sharing._locks), f"interrupt {number}"
            assert torch.is_grad_enabled(), f"interrupt {number}"
    finally:
        torch.set_grad_enabled(True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_another_adapter_has_changed_is_noticed() -> None:
    net, x = make("bn"), images(8)
    source, memo, head = (
        Source(net),
        MEMO(net, views=2, augment=lambda x, _: x),
        Tent(net, parameters=["head.weight"], lr=1e-2),
    )
    tent = Tent(net, lr=1e-2)
    source(x)
    tent(x)
    for adapter in (source, memo, head):
        with pytest.warns(UserWarning, match="Tent has changed this network"):
            adapter(x)
        adapter(x)  # said once
    for adapter in (head, tent):
        adapter.reset()
    source(x)


def test_a_state_belongs_to_the_network_before_any_adapter_changed_it(tmp_path: Path) -> None:
    net = make("bn")
    saved, other = Tent(net, lr=1e-2), Tent(net, parameters=["head.weight"], lr=1e-2)
    other(images(8))
    saved.save(tmp_path / "state")
    Tent(make("bn"), lr=1e-2).load(tmp_path / "state")
    with pytest.warns(UserWarning, match="Tent has changed this network"):
        later = Tent(net, lr=1e-2)  # what has changed before is its source
    later.save(tmp_path / "state")
    with pytest.raises(StateError, match="weights"):
        Tent(make("bn"), lr=1e-2).load(tmp_path / "state")


def test_weights_that_are_loaded_after_an_adapter_is_gone_count(tmp_path: Path) -> None:
    net, new = make("bn"), make("bn")
    with torch.no_grad():
        new.head.weight.mul_(2)
    gone = Tent(net, parameters=["head.weight"], lr=1e-2)
    gone(images(8))
    del gone
    net.load_state_dict(new.state_dict())
    with pytest.warns(UserWarning, match="has changed this network"):
        adapter = Tent(net, lr=1e-2)
    adapter.save(tmp_path / "state")
    Tent(new, lr=1e-2).load(tmp_path / "state")


def test_annotations_for_type_checkers_are_not_needed(tmp_path: Path) -> None:
    source = (
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from acclimate import Tent\n"
        "if TYPE_CHECKING:\n    from pathlib import Path\n"
        "class Mine(Tent):\n"
        "    def __init__(self, model, *, path: Path | None = None, **options):\n"
        "        super().__init__(model, **options)\n        self.path = path\n"
    )
    names: dict[str, Any] = {"__name__": "mine"}
    exec(source, names)
    assert names["Mine"](make("bn"), path=tmp_path).path == tmp_path


@pytest.mark.parametrize("name", ["lr", "alpha", "drop"])
def test_nan_in_a_tensor_is_refused_as_well(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=nan is not a number"):
        ETAC(make("bn"), **{name: torch.tensor(torch.nan)})


@pytest.mark.parametrize(
    ("method", "arguments", "expected"),
    [
        (ETAC, {"alpha": "abc"}, "alpha='abc'; expected a number"),
        (ETAC, {"drop": None}, "drop=None"),
        (CoTTA, {"views": 2.5}, "views=2.5; expected a whole number"),
        (CoTTA, {"threshold": None}, "threshold=None"),
        (MEMO, {"views": True}, "views=True"),
        (MEMO, {"views": math.inf}, "views=inf"),
        (MEMO, {"augment": "flip"}, "augment='flip'; expected a function or None"),
        (SAR, {"floor": "abc"}, "floor='abc'"),
        (TEA, {"steps": 2.5}, "steps=2.5"),
        (DAT, {"search": "abc"}, "search='abc'"),
        (Tent, {"lr": "abc"}, "lr='abc'"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(method: Any, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        method(make("bn"), **arguments)


@pytest.mark.parametrize(
    ("method", "name", "wrong"),
    [
        (ETAC, "divergence", "bogus"),
        (ETAC, "per", "bogus"),
        (ETAC, "smoothing", 2.0),
        (ETAC, "statistics", "sourc"),
        (ETAC, "strategy", "bogus"),
        (ETAC, "max_step", -1.0),
        (ETAC, "engine", "bogus"),
        (ETAC, "beta", 50.0),
        (CoTTA, "loss", "bogus"),
        (ROID, "prior", "bogus"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_set(method: Any, name: str, wrong: Any) -> None:
    adapter = method(make("bn"), **({"blocks": "blocks.*"} if method is ETAC else {}))
    before = getattr(adapter, name)
    with pytest.raises(ValueError, match=str(wrong)):
        setattr(adapter, name, wrong)
    assert getattr(adapter, name) == before
    adapter(images(8))


def test_settings_that_follow_others_and_engines_take_effect() -> None:
    adapter = ETAC(make("bn"), drop=0.2, blocks="blocks.*")
    adapter.drop = 0.5
    assert adapter.smoothing == 0.5
    adapter.smoothing = 0.1
    adapter.smoothing = None
    assert adapter.smoothing == 0.5
    adapter.engine = "eager"
    adapter(images(8))
    adapter.engine = acclimate.Engine("bf16")
    assert adapter.to("cpu").engine.precision == "bf16", "a new engine outlasts a move"


@pytest.mark.parametrize("given", ["bogus", "replayed", "recorded", 1.5, -0.1, True, ["source"], 3 + 1j])
def test_statistics_that_do_not_exist_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="statistics="):
        Tent(make("bn")).predict_only(images(4), statistics=given)


def test_the_share_of_the_batch_may_be_a_whole_number() -> None:
    adapter = Tent(make("bn"))
    for share, mode in ((1, 1.0), (0, "source")):
        expected = adapter.predict_only(images(4), statistics=mode)
        torch.testing.assert_close(adapter.predict_only(images(4), statistics=share), expected)


def test_a_network_with_nan_weights_is_refused() -> None:
    net = make("ln")
    with torch.no_grad():
        next(iter(norm_parameters(net).values()))[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        Tent(net)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="LBFGS"):
        Tent(make("ln"), optimizer=torch.optim.LBFGS)


def test_infinities_of_the_source_network_are_saved_and_new_ones_are_not(tmp_path: Path) -> None:
    net = make("ln")
    net.register_parameter("mask", nn.Parameter(torch.tensor([0.0, -torch.inf])))
    adapter = Tent(net, parameters="all", lr=1e-3)
    adapter(images(4))
    adapter.save(tmp_path / "state")
    adapter.load(tmp_path / "state")
    with torch.no_grad():
        net.mask[0] = torch.inf
    with pytest.raises(StateError, match="infinity"):
        adapter.save(tmp_path / "state")


@pytest.mark.parametrize("optimizer", [None, partial(Adam, lr=1e-2)])
@pytest.mark.parametrize("name", [name for name in LEARNING if name not in ("memo", "cotta", "dat", "roid", "rdumb")])
def test_the_length_of_a_step_is_limited(name: str, optimizer: object) -> None:
    """MEMO's steps are undone; CoTTA, DAT, ROID and RDumb also change parameters in other ways."""
    lr = {"lr": 1.0} if optimizer is None else {"lr": None, "optimizer": optimizer}
    adapter = CASES[name].method(make("ln"), **{**CASES[name].arguments(), **lr, "max_step": 1e-3})
    moved = []
    for x in stream(4):
        before = [p.detach().clone() for p in adapter.adapted]
        adapter(x)
        changes = [(p.detach() - q).flatten() for p, q in zip(adapter.adapted, before, strict=True)]
        moved.append(float(torch.cat(changes).norm()))
    assert max(moved) <= 1e-3 * 1.001
    assert max(moved) > 0.5e-3


def test_a_step_within_the_limit_is_the_same_bit_for_bit() -> None:
    plain, limited = Tent(make("bn"), lr=1e-2), Tent(make("bn"), lr=1e-2, max_step=1e6)
    for x in stream(3):
        assert torch.equal(plain(x), limited(x))
    with pytest.raises(ValueError, match="positive"):
        Tent(make("bn"), max_step=0.0)


def test_a_step_whose_loss_is_not_finite_is_dropped() -> None:
    class Infinite(Adapter):
        def adapt(self, x: Tensor) -> Tensor:
            batch = self.predict(x)
            self.update(entropy=acclimate.functional.entropy(batch.rows()).mean(), constant=torch.tensor(math.inf))
            return batch.logits

    adapter = Infinite(make("ln"), lr=0.1)
    before = [p.detach().clone() for p in adapter.adapted]
    with pytest.warns(UserWarning, match="dropped"):
        assert adapter(images(8)).isfinite().all()
    assert not adapter.last.updated
    assert int(adapter.passes.dropped) == 1
    assert all(map(torch.equal, before, adapter.adapted))
