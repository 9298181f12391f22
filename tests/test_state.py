"""Files of adapter state: refused when they do not belong, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from networks import images, make, stream
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from acclimate import EATA, ETA, Adapter, StateError, Tent


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


def test_other_hyper_parameters_go_on_with_a_warning(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"saved by ETA\(.*goes on as ETA\("):
        ETA(make("bn"), lr=1e-2, margin=0.3).load(saved)


def test_only_what_changes_is_in_the_file(saved: Path) -> None:
    names = set(load_file(saved))
    adapter = ETA(make("bn"))
    assert {n.removeprefix("parameter/") for n in names if n.startswith("parameter/")} == set(adapter.names)
    assert "state/select.second.mean" in names
    assert saved.stat().st_size < 20_000 < sum(p.numel() * 4 for p in adapter.model.parameters()) * 10


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


def test_a_snapshot_of_another_adapter_is_refused() -> None:
    with pytest.raises(StateError, match="another model or another choice"):
        Tent(make("bn")).restore(Tent(make("gn"), parameters="all").snapshot())
    with pytest.raises(StateError, match="another method: it holds select"):
        Tent(make("bn")).restore(_learned(ETA(make("bn"))).snapshot())


def _learned(adapter: Adapter) -> Adapter:
    adapter(stream()[0])
    return adapter


def test_the_state_dict_of_the_network_keeps_its_keys() -> None:
    model = make("bn")
    keys = list(model.state_dict())
    adapter = _learned(EATA(model, source=images(16)))
    assert list(model.state_dict()) == keys
    assert [k.removeprefix("model.") for k in adapter.state_dict() if k.startswith("model.")] == keys
