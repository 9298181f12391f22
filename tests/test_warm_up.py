"""Compiling ahead of time or in the background: nothing changes but when it happens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES
from networks import make, stream
from torch import Tensor

from acclimate import ETA, ETAC, Adapter, Engine, Tent
from acclimate.engine import show_with
from acclimate.engine.progress import _on_terminal

COMPILED = Engine(compiled=True)
SHAPE = (8, 3, 16, 16)


@pytest.fixture(autouse=True)
def _without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything but Inductor's C++, and torch's own deprecations."""
    from functorch.compile import make_boxed_func

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        from acclimate.engine import selective, tracing

        torch.compiler.reset()
        backend = partial(selective.inductor, inner=lambda graph, _, **__: make_boxed_func(graph.forward))
        monkeypatch.setattr(tracing, "BACKEND", backend)
        monkeypatch.setattr(selective, "compile_fx_inner", lambda graph, _, **__: make_boxed_func(graph.forward))
        yield


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def adapter_of(name: str, family: str, **options: Any) -> Adapter:
    return CASES[name].make(make(family), **options)


@pytest.mark.parametrize(
    ("name", "images"),
    [
        *((name, SHAPE) for name in ("tent", "sar", "rdumb", "tea", "cotta", "memo", "source", "eata-c")),
        ("eata", stream(1, seed=40)[0]),
    ],
)
def test_warming_up_changes_nothing(name: str, images: Any) -> None:
    ours, theirs = (adapter_of(name, "bn") for _ in range(2))
    for first, second in (stream(2), stream(2, seed=9)):  # before a stream, and in the middle of it
        before, noise, last = ours.snapshot().tensors, torch.get_rng_state(), ours._last
        ours.warm_up(images)
        assert equal(ours.snapshot().tensors, before)
        assert torch.equal(torch.get_rng_state(), noise)
        assert ours._last is last
        assert torch.equal(ours(first), theirs(first))
        assert torch.equal(ours(second), theirs(second))
    assert equal(ours.snapshot().tensors, theirs.snapshot().tensors)


def test_after_warming_up_nothing_is_left_to_compile() -> None:
    ours, theirs = (adapter_of("eta-c", "bn", engine=COMPILED) for _ in range(2))
    before = ours.snapshot().tensors
    ours.warm_up(SHAPE)
    assert equal(ours.snapshot().tensors, before)
    passes = ours.runner.compiler.compiled_passes
    assert passes == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        logits = [ours(x) for x in stream(4)]
    assert ours.last.engine == "compiled"
    assert all(torch.equal(z, theirs(x)) for z, x in zip(logits, stream(4), strict=True))
    assert ours.runner.compiler.compiled_passes == passes


def test_a_rehearsal_that_fails_changes_nothing() -> None:
    adapter = Tent(make("bn"), lr=0.1)
    before = adapter.snapshot().tensors
    with pytest.raises(ValueError, match="NaN or infinity"):
        adapter.warm_up(torch.full(SHAPE, torch.nan))
    assert equal(adapter.snapshot().tensors, before)


@pytest.mark.parametrize("method", [ETA, partial(ETAC, blocks="blocks.*", drop=0.5)])
def test_in_the_background_answers_are_eager_ones_until_everything_is_compiled(method: Any) -> None:
    ours = method(make("bn").double(), engine=replace(COMPILED, background=True))
    theirs = method(make("bn").double())
    xs = [x.double() for x in stream(60)]
    assert torch.equal(ours(xs[0]), theirs(xs[0]))
    assert ours.last.engine == "eager"
    for count, x in enumerate(xs[1:50]):
        logits, expected = ours(x), theirs(x)
        if ours.last.engine == "compiled":
            break
        assert torch.equal(logits, expected), f"the network was disturbed at batch {count}"
        if count == 40:
            ours.runner._background.result()
    assert ours.last.engine == "compiled"
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
    passes = ours.runner.compiler.compiled_passes
    with torch.compiler.set_stance("fail_on_recompile"):
        for x in xs[50:]:
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-7, atol=1e-9)
    assert ours.runner.compiler.compiled_passes == passes, "what was compiled in the background was not used"
    assert "background=True" in repr(ours)


def test_a_failure_in_the_background_warns_and_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Tent(make("bn"), engine=replace(COMPILED, background=True)), Tent(make("bn"))

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Adapter, "warm_up", fail)
    xs = stream(3)
    assert torch.equal(ours(xs[0]), theirs(xs[0]))
    ours.runner._background.result()
    with pytest.warns(UserWarning, match="no space left"):
        assert torch.equal(ours(xs[1]), theirs(xs[1]))
    assert torch.equal(ours(xs[2]), theirs(xs[2]))
    assert ours.last.engine == "eager"


def test_what_is_compiled_is_said() -> None:
    said: list[str] = []
    show_with(said.append)
    try:
        Tent(make("bn"), engine=COMPILED).warm_up(SHAPE)
    finally:
        show_with(_on_terminal)
    assert len(said) == 1
    assert type(make("bn")).__name__ in said[0]


def test_nothing_is_said_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Tent(make("bn"), engine=COMPILED).warm_up(SHAPE)
    assert capsys.readouterr().err == ""
