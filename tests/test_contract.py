"""What every method promises, over every family of networks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import A_TRAP, CASES, LEARNERS, TABLE
from networks import make, stream

import acclimate
from acclimate import Adapter, StateError
from acclimate.contract import PROMISES, Subject
from acclimate.contract.promises import flags, same, values
from acclimate.contract.subject import LR


def adapter_of(name: str, family: str, **keywords: object) -> Adapter:
    case = CASES[name]
    if case.learns:
        keywords.setdefault("lr", LR)
    return case.make(make(family), **keywords)


@pytest.mark.parametrize(("name", "family"), TABLE)
@pytest.mark.parametrize("promise", PROMISES)
def test_keeps_the_promise(promise: str, name: str, family: str) -> None:
    PROMISES[promise](Subject(CASES[name].method, family, CASES[name].arguments()))


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_the_contract_knows_what_a_method_does(name: str, family: str) -> None:
    subject = Subject(CASES[name].method, family)
    assert (subject.learns, subject.lasts) == (CASES[name].learns, CASES[name].learns and CASES[name].lasts)


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


@pytest.mark.parametrize(("name", "family"), [row for row in LEARNERS if CASES[row[0]].selects])
def test_an_empty_selection_learns_nothing(name: str, family: str) -> None:
    adapter = adapter_of(name, family, margin=1e-9)
    before = values(adapter.model)
    for x in stream():
        adapter(x)
        assert not adapter.last.updated
        assert adapter.last.loss is None
        assert (adapter.last.backwards, adapter.last.in_graph, adapter.last.forwards) == (0, 0, len(x))
    assert same(values(adapter.model), before)


@A_TRAP
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


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_predicting_only_is_what_the_method_would_return(name: str, family: str) -> None:
    """Where it returns the forward before its update."""
    adapter = adapter_of(name, family)
    with pytest.raises(RuntimeError, match="no batch yet"):
        _ = adapter.last
    if (CASES[name].plain(family) and name not in ("cotta", "rdumb")) or name == "roid":
        for x in stream():
            predicted = adapter.predict_only(x)
            torch.testing.assert_close(predicted, adapter(x), rtol=1e-4, atol=1e-4)  # kernels differ without a graph


@pytest.mark.parametrize("name", [name for name in acclimate.METHODS if name != "source"])
def test_docstrings_of_methods_link_their_paper(name: str) -> None:
    assert "https://arxiv.org/abs/" in (acclimate.METHODS[name].__doc__ or "")


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
