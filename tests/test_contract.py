"""What every method promises, over every family of networks."""

from __future__ import annotations

import copy
import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, LEARNERS, TABLE
from networks import CLASSES, make, stream
from torch import Tensor, nn

import acclimate
from acclimate import Adapter, StateError

LR = 1e-2  # large enough to be seen after a few steps


def adapter_of(name: str, family: str, **keywords: object) -> Adapter:
    case = CASES[name]
    if case.learns:
        keywords.setdefault("lr", LR)
    return case.make(make(family), **keywords)


def everything_in(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(7.7), b[k].nan_to_num(7.7)) for k in a)


def flags(model: nn.Module) -> list[object]:
    """Everything about a network that a call must leave as it was, besides its weights."""
    seen: list[object] = []
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if k.endswith("_hooks")]
        seen.append((name, id(module), module.training, getattr(module, "track_running_stats", None), hooks))
    seen += [(name, id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return seen


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_predicts_finite_logits_without_a_graph(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    for x in stream():
        logits = adapter(x)
        assert logits.shape[:2] == (len(x), CLASSES)
        assert logits.isfinite().all()
        assert not logits.requires_grad


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_only_declared_parameters_move(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    before, found = everything_in(adapter.model), flags(adapter.model)
    for x in stream():
        adapter(x)
    after = everything_in(adapter.model)
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved <= set(adapter.names)
    assert bool(moved) == (CASES[name].learns and CASES[name].lasts)
    assert flags(adapter.model) == found


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_model_in_training_mode_stays_so_and_dropout_stays_off(name: str, family: str) -> None:
    resting, awake = adapter_of(name, family), adapter_of(name, family)
    awake.model.train()
    found = flags(awake.model)
    for x in stream(2):
        assert torch.equal(resting(x), awake(x))
    assert flags(awake.model) == found


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_reset_is_bitwise(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    source = everything_in(adapter.model)
    first = [adapter(x) for x in stream()]
    adapter.reset()
    assert same(everything_in(adapter.model), source)
    assert int(adapter.passes.forwards) == 0
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream(), strict=True))


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_snapshot_replays_bitwise(name: str, family: str, tmp_path: Path) -> None:
    adapter = adapter_of(name, family)
    warm_up, later = stream()[:2], stream(3, seed=200)
    for x in warm_up:
        adapter(x)
    snapshot = adapter.snapshot()
    adapter.save(tmp_path / "state.safetensors")
    first = [adapter(x) for x in later]

    adapter.restore(snapshot)
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, later, strict=True))

    other = adapter_of(name, family)
    other.load(tmp_path / "state.safetensors")
    assert all(torch.equal(a, other(x)) for a, x in zip(first, later, strict=True))
    assert other.passes.state_dict() == adapter.passes.state_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_files_replay_bitwise_in_a_new_process(tmp_path: Path) -> None:
    cases = {name: case.families[0] for name, case in CASES.items()}
    for name, family in cases.items():
        adapter = adapter_of(name, family)
        for x in stream()[:2]:
            adapter(x)
        adapter.save(tmp_path / f"{name}.safetensors")
        torch.save([adapter(x) for x in stream(3, seed=200)], tmp_path / f"{name}.pt")
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import torch; torch.set_num_threads(1)
from networks import stream
from test_contract import adapter_of
for name, family in {cases!r}.items():
    adapter = adapter_of(name, family)
    adapter.load(Path({str(tmp_path)!r}) / f"{{name}}.safetensors")
    expected = torch.load(Path({str(tmp_path)!r}) / f"{{name}}.pt")
    print(name, all(torch.equal(a, adapter(x)) for a, x in zip(expected, stream(3, seed=200), strict=True)))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} True" for name in CASES]


@pytest.mark.parametrize(("name", "family"), TABLE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_images_are_refused_and_change_nothing(name: str, family: str, bad: float) -> None:
    adapter = adapter_of(name, family)
    x = stream()[0]
    adapter(x)
    before, found, state = everything_in(adapter.model), flags(adapter.model), adapter.snapshot()
    poisoned = x.clone()
    poisoned[3, 0, 2, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 8 images"):
        adapter(poisoned)
    assert same(everything_in(adapter.model), before)
    assert flags(adapter.model) == found
    assert same(dict(adapter.snapshot().tensors), dict(state.tensors))


@pytest.mark.parametrize(("name", "family"), TABLE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(name: str, family: str, mode: type) -> None:
    plain, within = adapter_of(name, family), adapter_of(name, family)
    expected = [plain(x) for x in stream()]
    with mode():
        assert all(torch.equal(a, within(x.clone())) for a, x in zip(expected, stream(), strict=True))
        within.restore(within.snapshot())
        within(stream()[0].clone())
        within.reset()
        assert torch.equal(expected[0], within(stream()[0].clone()))
    assert torch.equal(expected[1], within(stream()[1]))


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_passes_are_counted(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    forwards = backwards = in_graph = 0
    for x in stream():
        adapter(x)
        last = adapter.last
        forwards, backwards, in_graph = (
            forwards + last.forwards,
            backwards + int(last.backwards),
            in_graph + last.in_graph,
        )
        assert last.updated == (last.in_graph > 0) == (last.loss is not None)
        if not CASES[name].learns:
            assert (last.forwards, last.backwards, last.in_graph) == (len(x), 0, 0)
    assert [int(c) for c in adapter.passes.buffers()] == [forwards, backwards, in_graph, 0]
    assert in_graph >= backwards


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_batch_of_one(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    x = stream()[0][:1]
    if CASES[name].learns and CASES[name].lasts and family == "bn":
        with pytest.warns(UserWarning, match="a batch of one image"):
            logits = adapter(x)
    else:
        logits = adapter(x)
    assert logits.isfinite().all()
    assert adapter(x).isfinite().all()  # without a second warning


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_short_last_batch(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    for size in (8, 3, 8):
        assert len(adapter(stream()[0][:size])) == size


@pytest.mark.parametrize(("name", "family"), [row for row in LEARNERS if CASES[row[0]].selects])
def test_an_empty_selection_learns_nothing(name: str, family: str) -> None:
    adapter = adapter_of(name, family, margin=1e-9)
    before = everything_in(adapter.model)
    for x in stream():
        adapter(x)
        assert not adapter.last.updated
        assert adapter.last.loss is None
        assert (adapter.last.backwards, adapter.last.in_graph, adapter.last.forwards) == (0, 0, len(x))
    assert same(everything_in(adapter.model), before)


@pytest.mark.parametrize(("name", "family"), [row for row in LEARNERS if row[0] != "memo"])  # which takes none
@pytest.mark.parametrize("strategy", ["replay", "replay-subset"])
def test_a_second_pass_keeps_the_promises_too(name: str, family: str, strategy: str) -> None:
    adapter = adapter_of(name, family, strategy=strategy)
    found = flags(adapter.model)
    first = [adapter(x) for x in stream()]
    assert flags(adapter.model) == found
    if CASES[name].by_rows:
        assert int(adapter.passes.backwards) == int(adapter.passes.in_graph)
        assert int(adapter.passes.forwards) == 32 + int(adapter.passes.backwards)
    adapter.reset()
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream(), strict=True))


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_class_mask(name: str, family: str) -> None:
    classes = [7, 2, 5]
    adapter = adapter_of(name, family, classes=classes)
    logits = adapter(stream()[0])
    assert logits.shape[1] == 3
    if CASES[name].plain(family):
        assert torch.equal(logits, adapter_of(name, family)(stream()[0])[:, classes])


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_moves_and_casts_take_everything_along(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    for x in stream()[:2]:
        adapter(x)
    adapter.double()
    assert adapter(stream()[2].double()).dtype == torch.float64
    adapter.reset()
    assert adapter(stream()[0].double()).isfinite().all()


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_a_deep_copy_is_independent(name: str, family: str) -> None:
    adapter = adapter_of(name, family)
    adapter(stream()[0])
    other = copy.deepcopy(adapter)
    expected = [adapter(x) for x in stream()[1:]]
    assert all(torch.equal(a, other(x)) for a, x in zip(expected, stream()[1:], strict=True))


@pytest.mark.parametrize(("name", "family"), LEARNERS)
def test_other_optimizers(name: str, family: str, tmp_path: Path) -> None:
    def make_one() -> Adapter:
        return adapter_of(name, family, lr=None, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))

    adapter = make_one()
    for x in stream():
        adapter(x)
    adapter.save(tmp_path / "state")
    other = make_one()
    other.load(tmp_path / "state")
    assert torch.equal(adapter(stream()[0]), other(stream()[0]))
    with pytest.raises(StateError, match="other optimizer: AdamW"):
        adapter_of(name, family).load(tmp_path / "state")


@pytest.mark.parametrize("name", CASES)
def test_repr_prints_the_call(name: str) -> None:
    adapter = adapter_of(name, "bn")
    assert repr(adapter).startswith(f"{type(adapter).__name__}(ConvNet, ")
    assert repr(adapter).endswith("seed=0)")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.first or name == "roid"])
def test_permuting_a_batch_permutes_its_logits(name: str) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    x = stream()[0]
    family = CASES[name].families[0]
    torch.testing.assert_close(adapter_of(name, family)(x)[order], adapter_of(name, family)(x[order]))


@pytest.mark.parametrize(("name", "family"), TABLE)
@pytest.mark.gpu
def test_agrees_on_the_gpu(name: str, family: str) -> None:
    """In double precision: the GPU's default convolutions round to TF32."""
    if CASES[name].noisy:
        adapter = adapter_of(name, family).double().cuda()
        first = [adapter(x.double().cuda()) for x in stream()]
        adapter.reset()
        for a, x in zip(first, stream(), strict=True):  # not bit for bit: convolutions' gradients add up in any order
            torch.testing.assert_close(a, adapter(x.double().cuda()))
        return
    here, there = adapter_of(name, family).double(), adapter_of(name, family).double().cuda()
    for x in stream():
        torch.testing.assert_close(here(x.double()), there(x.double().cuda()).cpu())
    for adapter in (here, there):
        adapter.reset()
    torch.testing.assert_close(here(stream()[0].double()), there(stream()[0].double().cuda()).cpu())


def test_public_names_have_docstrings() -> None:
    for name in acclimate.__all__:
        thing = getattr(acclimate, name)
        assert isinstance(thing, (str, dict)) or thing.__doc__, name


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_predicting_only_changes_nothing(name: str, family: str) -> None:
    """And is what the method would return, where it returns the forward before its update."""
    adapter, other = adapter_of(name, family), adapter_of(name, family)
    with pytest.raises(RuntimeError, match="no batch yet"):
        _ = adapter.last
    for x in stream():
        before, found = adapter.snapshot(), flags(adapter.model)
        predicted = adapter.predict_only(x)
        assert same(dict(adapter.snapshot().tensors), dict(before.tensors))
        assert flags(adapter.model) == found
        assert not predicted.requires_grad
        logits = adapter(x)
        assert torch.equal(logits, other(x)), "the stream must not notice"
        if (CASES[name].plain(family) and name not in ("cotta", "rdumb")) or name == "roid":
            torch.testing.assert_close(predicted, logits, rtol=1e-4, atol=1e-4)  # kernels differ without a graph
    assert adapter.passes.state_dict() == other.passes.state_dict()
    with torch.inference_mode():
        assert adapter.predict_only(stream()[0].clone()).isfinite().all()


@pytest.mark.parametrize("name", [name for name in acclimate.METHODS if name != "source"])
def test_docstrings_of_methods_link_their_paper(name: str) -> None:
    assert "https://arxiv.org/abs/" in (acclimate.METHODS[name].__doc__ or "")


@pytest.mark.parametrize(
    "name", [name for name in acclimate.__all__ if name not in ("METHODS", "POLICIES", "__version__")]
)
def test_examples_in_docstrings_run(name: str) -> None:
    thing = getattr(acclimate, name)
    given = {**vars(inspect.getmodule(thing) or acclimate), "torch": torch, "nn": nn, "Generator": torch.Generator}
    tests = doctest.DocTestFinder(recurse=name == "functional").find(thing, name, globs=given)
    if name != "Adapter":
        assert any(test.examples for test in tests), f"{name} has no example"
    for test in tests:
        assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


@pytest.mark.parametrize("name", CASES)
def test_settings_that_are_used_once_cannot_be_changed(name: str) -> None:
    """All others take effect with the next batch: see the engine's tests."""
    adapter = adapter_of(name, CASES[name].families[0])
    for setting in adapter.set_once:
        with pytest.raises(AttributeError, match=setting):
            setattr(adapter, setting, 0.123)
        assert getattr(adapter, setting) != 0.123
    for setting in ("strategy", "statistics"):
        setattr(adapter, setting, getattr(adapter, setting))
