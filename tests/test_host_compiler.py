"""What compiling needs on this machine, and compiled code that comes from another one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import make, stream
from torch import nn
from typer.testing import CliRunner

from acclimate import Adapter, Engine, Tent
from acclimate.cli.main import app
from acclimate.engine import host_compiler, pack, portable, purpose

CPU = torch.device("cpu")


def test_without_a_compiler_the_warning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config  # which reads the variable once

    monkeypatch.setenv("CXX", "no-such-compiler")
    ours, theirs = (Tent(make("ln"), engine=engine) for engine in (Engine(compiled=True), "eager"))
    x, y = stream(2)
    with pytest.warns(UserWarning, match=r"no-such-compiler.*install") as caught:
        assert torch.equal(ours(x), theirs(x))
    assert len(caught) == 1
    assert torch.equal(ours(y), theirs(y))
    assert ours.last.engine == "eager"


@pytest.mark.parametrize(
    ("said", "known", "skips"),
    [
        (("g++ 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", "12"), None, True),
        (("g++ 8.4\nCopyright (C) 2018 Free Software Foundation, Inc.", "8"), None, False),
        (("clang version 17.0.6", "17.0.6"), None, False),
        (("g++ 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", "12"), "0", False),
    ],
)
def test_the_probe_is_skipped_only_for_a_compiler_that_is_known(
    said: tuple[str, str], known: str | None, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)
    if known is not None:
        monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", known)
    monkeypatch.setattr(host_compiler.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host_compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host_compiler, "_compiler", lambda: "/usr/bin/g++")
    answers = iter(said)
    monkeypatch.setattr(host_compiler.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": next(answers)})())
    with inductor.patch({"cpp.vec_isa_ok": None}):
        assert host_compiler.settle_compiler.__wrapped__() is skips
        assert inductor.cpp.vec_isa_ok is (True if skips else None)


def test_bfloat16_on_a_processor_without_it_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate.core.adapter.has_fast_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="fp32"):
        adapter = Tent(make("ln"), precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.double()
        Tent(make("ln"))


@pytest.mark.parametrize("what", ["torch", "python", "device", "network"])
def test_compiled_code_for_something_else_is_ignored_with_the_reason(what: str, tmp_path: Path) -> None:
    adapter, file = Tent(make("ln")), tmp_path / "code"
    file.write_bytes(pack({"artifacts": b""}, {**purpose(adapter.model, CPU), what: "of old"}))
    with pytest.warns(UserWarning, match=f"{what} of old, and this is"):
        assert not adapter.load_compiled(file)


@pytest.mark.parametrize("content", [b"", b"text", None, "cut"])
def test_a_damaged_file_of_compiled_code_is_ignored_with_the_reason(content: Any, tmp_path: Path) -> None:
    adapter, file = Tent(make("ln")), tmp_path / "code"
    whole = pack({"artifacts": b"x" * 1000}, purpose(adapter.model, CPU))
    if content is not None:
        file.write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    with pytest.warns(UserWarning, match="No such file" if content is None else "damaged"):
        assert not adapter.load_compiled(file)


def test_the_purpose_is_the_architecture_and_not_the_weights() -> None:
    assert purpose(make("bn", seed=0), CPU) == purpose(make("bn", seed=1), CPU)
    assert purpose(nn.Sequential(nn.Linear(2, 3)), CPU) != purpose(nn.Sequential(nn.Linear(2, 4)), CPU)


def test_only_libraries_are_put_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: object())
    files = {"artifacts": b"", "ab/cabc.main.so": b"code", "../evil": b"", "ab/evil.py": b"", "/etc/evil": b""}
    portable.use_compiled_code(files)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["cabc.main.so"]


@pytest.mark.slow
def test_compiled_code_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty cache, and without building anything again."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder

    def warm(cache: str, load: bool) -> Tent:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / cache))
        torch.compiler.reset()
        CppPythonBindingsCodeCache.cache_clear()
        adapter = Tent(make("ln"), engine=Engine(compiled=True))
        if load:
            assert adapter.load_compiled(tmp_path / "code")
        adapter.warm_up((8, 3, 16, 16))
        return adapter

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        first = warm("one", load=False)
        first.save_compiled(tmp_path / "code")
        assert any((tmp_path / "one").rglob("*.main.so"))

        def build(_: Any) -> None:
            raise AssertionError("it was built again")

        monkeypatch.setattr(CppBuilder, "build", build)
        second = warm("two", load=True)
    assert second.runner.compiler.compiled_passes == 1
    assert torch.equal(first(stream(1)[0]), second(stream(1)[0]))


def test_the_command_compiles_for_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(Adapter, "warm_up", lambda self, shape: done.append((type(self).__name__, shape)))
    monkeypatch.setattr(Adapter, "save_compiled", lambda _, path: path.write_bytes(b""))
    words = ["warm-up", "--method", "eata", "--method", "tent", "--batch-size", "4", "--out", str(tmp_path / "code")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert "--image" in found.stderr
    found = CliRunner().invoke(app, [*words, "--image", "1x32x32"])
    assert found.exit_code == 0, found.output
    assert done == [("EATA", (4, 1, 32, 32)), ("Tent", (4, 1, 32, 32))]
    assert (tmp_path / "code").exists()
