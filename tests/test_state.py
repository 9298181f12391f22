"""Files of adapter state: refused when they do not belong, whole or not at all."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import CASES
from networks import images, make, stream
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tape import Waits
from torch import Tensor, nn
from torch.optim import Adam

from acclimate import EATA, EATAC, ETA, SAR, Adapter, StateError, Tent
from acclimate.engine import Live


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    adapter = ETA(make("bn"), lr=1e-2)
    for x in stream():
        adapter(x)
    adapter.save(tmp_path / "eta.safetensors")
    return tmp_path / "eta.safetensors"


def refuses(adapter: Adapter, path: Path, message: str) -> None:
    adapter(stream()[0])
    before = adapter.snapshot()
    with pytest.raises(StateError, match=message):
        adapter.load(path)
    after = adapter.snapshot()
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_another_model(saved: Path) -> None:
    refuses(ETA(make("bn", seed=1), lr=1e-2), saved, "saved for another model: the source weights differ")


def test_another_method(saved: Path) -> None:
    refuses(Tent(make("bn")), saved, "is a state of ETA, not of Tent")


def test_another_choice_of_parameters(saved: Path) -> None:
    refuses(ETA(make("bn"), parameters=["stem.1.weight"]), saved, "another choice of parameters")


def test_another_version(saved: Path) -> None:
    save_file(load_file(saved), saved, {**metadata(saved), "version": "999"})
    refuses(ETA(make("bn")), saved, "state version 999")


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "other")
    refuses(ETA(make("bn")), tmp_path / "other", "not one that an adapter saved")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_file(saved: Path, cut: int) -> None:
    saved.write_bytes(saved.read_bytes()[:cut])
    refuses(ETA(make("bn")), saved, "damaged or no safetensors file")


@pytest.mark.parametrize("place", [0.02, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_flipped_bit_anywhere(saved: Path, place: float) -> None:
    content = bytearray(saved.read_bytes())
    content[int(place * len(content))] ^= 0x10
    saved.write_bytes(bytes(content))
    refuses(ETA(make("bn")), saved, "damaged|not one that an adapter saved|state version")


def test_changed_settings_are_seen(saved: Path) -> None:
    changed = metadata(saved)
    changed["settings"] = changed["settings"].replace("0.01", "0.02")
    assert changed != metadata(saved)
    save_file(load_file(saved), saved, changed)
    refuses(ETA(make("bn")), saved, "checksum")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no adapter state at"):
        Tent(make("bn")).load(tmp_path / "nothing")


def test_loading_with_other_hyper_parameters_warns(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"saved by ETA\(.*continues as ETA\("):
        ETA(make("bn"), lr=1e-2, margin=0.3).load(saved)


def test_only_what_changes_is_in_the_file(saved: Path) -> None:
    content = load_file(saved)
    adapter = ETA(make("bn"))
    assert {name.split("/")[0] for name in content} == {"parameter", "optimizer", "state", "generator"}
    assert {n.removeprefix("parameter/") for n in content if n.startswith("parameter/")} == set(adapter.names)
    assert "state/select.second.mean" in content
    momentum = sum(t.numel() for n, t in content.items() if n.startswith("optimizer/"))
    assert momentum == sum(p.numel() for p in adapter.adapted)


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ETA(make("bn")).save(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_snapshot_is_a_copy() -> None:
    adapter = EATA(make("bn"), source=images(16), lr=1e-2)
    snapshot = adapter.snapshot()
    held = {k: t.clone() for k, t in snapshot.tensors.items()}
    for x in stream():
        adapter(x)
    adapter.restore(snapshot)
    for x in stream():
        adapter(x)
    assert all(torch.equal(held[k], t) for k, t in snapshot.tensors.items())


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("optimizer", [None, partial(Adam, lr=1e-2)])
@pytest.mark.parametrize(("names", "momentum"), [(("average",), True), ((), False)])
def test_starting_over_on_the_device_is_starting_over(
    holds: bool, optimizer: object, names: tuple[str, ...], momentum: bool
) -> None:
    """Bit for bit, and in the memory that recorded steps read. Adam's state begins empty, so the host must read."""
    here, there = (SAR(make("bn"), optimizer=optimizer) for _ in range(2))
    for x in stream():
        here(x), there(x)
    here.execution = Waits()
    here.state.start_over(*names, optimizer=momentum, when=torch.tensor(holds))
    if holds:
        there.state.start_over(*names, optimizer=momentum)
    mine, theirs = here.snapshot(), there.snapshot()
    assert mine.settings == theirs.settings
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, value in mine.tensors.items():
        assert torch.equal(value, theirs.tensors[name]), name


def test_a_start_over_reads_its_condition_where_a_setting_changes() -> None:
    asked = []

    class Asks(Live):
        def condition(self, when: bool | Tensor, *, can_wait: bool) -> bool | Tensor:
            asked.append(can_wait)
            return False

    adapter = SAR(make("bn"), lr=1e-2)
    adapter(stream()[0])
    adapter.execution = Asks()
    adapter.state.start_over("average", when=torch.tensor(True))
    adapter.optimizer.param_groups[0]["lr"] = 1e-3
    adapter.state.start_over("average", when=torch.tensor(True))
    adapter.state.start_over(optimizer=False, when=torch.tensor(True))
    assert asked == [True, False, True]


def test_a_snapshot_of_another_network_is_refused() -> None:
    with pytest.raises(StateError, match="another model or another choice"):
        Tent(make("bn"), parameters="all").restore(Tent(make("ln"), parameters="all").snapshot())


def _learned(adapter: Adapter) -> Adapter:
    adapter(stream()[0])
    return adapter


def test_the_state_dict_of_the_network_keeps_its_keys() -> None:
    model = make("bn")
    keys = list(model.state_dict())
    adapter = _learned(EATA(model, source=images(16)))
    assert list(model.state_dict()) == keys
    assert [k.removeprefix("model.") for k in adapter.state_dict() if k.startswith("model.")] == keys


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (ETA, lambda m: ETA(m, classes=[1, 2, 3]), "other classes"),
        (lambda m: EATA(m, source=images()), lambda m: EATA(m, beta=0.0), "regulariser.importance does not fit"),
        (lambda m: EATA(m, source=images()), Tent, "other method: Tent"),
        (Tent, lambda m: Tent(m, optimizer=Adam), "other optimizer: Adam"),
        (
            lambda m: Tent(m, optimizer=torch.optim.AdamW),
            lambda m: Tent(m, optimizer=Adam),
            "other optimizer",
        ),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(here, there, message: str) -> None:
    ours, theirs = _learned(here(make("bn"))), _learned(there(make("bn")))
    before = ours.snapshot()
    with pytest.raises(StateError, match=message):
        ours.restore(theirs.snapshot())
    after = ours.snapshot()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)


def test_a_norm_layer_under_two_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = make("bn")
        model.again = model.stem[1]
        return model

    adapter = ETA(tied(), lr=1e-2)
    for x in stream():
        adapter(x)
    adapter.save(tmp_path / "state")
    other = ETA(tied(), lr=1e-2)
    other.load(tmp_path / "state")
    assert torch.equal(adapter(stream()[0]), other(stream()[0]))


def test_settings_of_the_optimizer_come_from_the_file_and_say_so(saved: Path) -> None:
    adapter = ETA(make("bn"), lr=1e-5)
    with pytest.warns(UserWarning, match="with the optimizer's settings from the file"):
        adapter.load(saved)
    assert adapter.optimizer is not None
    assert adapter.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="its folder"):
        Tent(make("bn")).save(tmp_path / "nowhere" / "state")
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        Tent(make("bn")).save(tmp_path)


def test_the_record_of_a_step_is_not_written_to_later() -> None:
    adapter = _learned(Tent(make("bn")))
    last, forwards = adapter.last, adapter.last.forwards
    adapter.infer(stream()[1])
    assert adapter.last is last
    assert last.forwards == forwards


def test_a_cast_takes_the_source_and_the_momentum_along() -> None:
    """Cast in the middle of a stream, an adapter goes on, and goes back, as one that was made so."""
    adapter, made_so = Tent(make("bn"), lr=1e-2), Tent(make("bn").double(), lr=1e-2)
    for x in stream()[:2]:
        adapter(x)
        made_so(x.double())
    adapter.double()
    for x in stream()[2:]:
        torch.testing.assert_close(adapter(x.double()), made_so(x.double()), rtol=1e-3, atol=1e-3)
    adapter.reset()
    made_so.reset()
    torch.testing.assert_close(adapter(stream()[0].double()), made_so(stream()[0].double()))


def test_the_generator_is_part_of_the_state() -> None:
    adapter = Tent(make("bn"))
    snapshot = adapter.snapshot()
    first = torch.rand(3, generator=adapter.generator)
    adapter.restore(snapshot)
    assert torch.equal(first, torch.rand(3, generator=adapter.generator))


@pytest.mark.gpu
def test_a_state_crosses_devices(tmp_path: Path) -> None:
    def make_one() -> Adapter:
        return EATAC(make("bn").double(), beta=0.0, lr=1e-2, blocks="blocks.*")

    here = make_one()
    batches = [x.double() for x in stream()]
    first = [here(x) for x in batches]
    here.save(tmp_path / "state")
    there = make_one().cuda()
    there.load(tmp_path / "state")
    torch.testing.assert_close(here(batches[0]), there(batches[0].cuda()).cpu())
    here.cuda()
    here.reset()
    for a, x in zip(first, batches, strict=True):
        torch.testing.assert_close(a, here(x.cuda()).cpu())


@pytest.mark.parametrize("name", ["tent", "tea"])
def test_a_pickled_adapter_continues(name: str) -> None:
    case = CASES[name]
    adapter = case.method(make("bn"), **case.arguments())
    first, second = stream()[:2]
    adapter(first)
    again = pickle.loads(pickle.dumps(adapter))
    assert again.recorder.host is again
    assert torch.equal(again(second), adapter(second))


def test_an_optimizer_that_is_replaced_is_part_of_the_state(tmp_path: Path) -> None:
    adapter = Tent(make("bn"), lr=1e-2)
    adapter.optimizer = torch.optim.SGD(list(adapter.adapted), lr=1e-2, momentum=0.5)
    adapter.generator = torch.Generator().manual_seed(9)
    first = [adapter(x) for x in stream()]
    assert any(name.endswith("momentum_buffer") for name in adapter.snapshot().tensors)
    adapter.save(tmp_path / "state")
    later = adapter(stream()[0])
    adapter.load(tmp_path / "state")
    assert torch.equal(adapter(stream()[0]), later)
    adapter.reset()
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, stream(), strict=True))
