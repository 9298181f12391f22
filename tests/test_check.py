"""The contract for methods of other packages: each promise can be broken, and plug-ins are found when asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import acclimate
from acclimate import METHODS, Adapter
from acclimate.cli import app
from acclimate.cli.check import find_method
from acclimate.contract import PROMISES, BrokenPromiseError, Subject
from acclimate.functional import entropy


class Honest(Adapter):
    """Minimises the entropy."""

    def adapt(self, x: Tensor) -> Tensor:
        batch = self.predict(x)
        self.update(entropy=entropy(batch.rows()).mean())
        return batch.logits


class WithGraph(Adapter):
    def adapt(self, x: Tensor) -> Tensor:
        self.predict(x)
        return self.logits(x)[:, :3]


class MovesTheHead(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        next(reversed([*self.model.parameters()])).data.add_(0.1)
        return super().adapt(x)


class LeavesAHook(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        self.model.register_forward_hook(lambda *_: None)
        return super().adapt(x)


class Idle(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return self.predict(x).logits


class RunsTheModel(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return super().adapt(x) + self.model(x).detach()


class Forgetful(Honest):
    """Its state is no buffer."""

    seen = 0

    def adapt(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().adapt(x) + self.seen


class Random(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return super().adapt(x) + torch.rand(1)


class TakesNaN(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return super().adapt(x.nan_to_num(0.0, 0.0))


class MiscountsAnUpdate(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        logits = super().adapt(x)
        self.passes.forwards.add_(1)
        return logits


class OneSize(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return super().adapt(x[:3])


class Nameless(Honest):
    def __init__(self, model: torch.nn.Module, *, rate: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)


class LearnsFromLooking(Honest):
    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.register_buffer("looks", torch.zeros(()))

    def answer(self, x: Tensor) -> Tensor:
        self.looks += 1
        return super().answer(x)


class Shared(Honest):
    """Its state is the class's."""

    log: list[int] = []  # noqa: RUF012

    def adapt(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return super().adapt(x) + len(self.log)


class Single(Honest):
    def adapt(self, x: Tensor) -> Tensor:
        return super().adapt(x).float()


class AllClasses(Honest):
    def __init__(self, model: torch.nn.Module, *, classes: Any = None, **options: Any) -> None:
        super().__init__(model, **options)


class AnswersOtherwise(Honest):
    """Its answers are not those of `predict_only`, and it does not say so."""

    def adapt(self, x: Tensor) -> Tensor:
        return 2 * super().adapt(x)


class NeedsGradMode(Honest):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(torch.is_grad_enabled())


BROKEN = [
    ("finite logits without a graph", WithGraph),
    ("only adapted parameters change", MovesTheHead),
    ("only adapted parameters change", LeavesAHook),
    ("only adapted parameters change", Idle),
    ("train() makes no difference", RunsTheModel),
    ("reset is bitwise", Forgetful),
    ("reset is bitwise", Random),
    ("snapshots and files replay bitwise", Forgetful),
    ("NaN is refused and changes nothing", TakesNaN),
    ("works inside no_grad and inference_mode", NeedsGradMode),
    ("passes are counted", MiscountsAnUpdate),
    ("batches of any size", OneSize),
    ("a choice of classes", AllClasses),
    ("moves and casts", Single),
    ("deep copies are independent", Shared),
    ("predict_only changes nothing", LearnsFromLooking),
    ("preview is what a call returns", AnswersOtherwise),
    ("repr prints the call", Nameless),
]


@pytest.mark.parametrize(("promise", "method"), BROKEN)
def test_a_broken_promise_is_found(promise: str, method: type[Adapter]) -> None:
    with pytest.raises(BrokenPromiseError):
        PROMISES[promise](Subject(method, "bn"))


def test_every_promise_can_be_broken() -> None:
    assert {promise for promise, _ in BROKEN} == PROMISES.keys()


PLUGIN = '''
from acclimate import Adapter
from acclimate.functional import entropy

class Theirs(Adapter):
    """Minimise entropy, as a plug-in."""

    def __init__(self, model, *, most=1.0, **options):
        super().__init__(model, **options)
        self.most = most

    def adapt(self, x):
        batch = self.predict(x)
        kept = batch.kept(entropy(batch.logits) < self.most)
        self.update(when=kept.any, entropy=kept.mean(entropy(kept.logits)))
        return batch.logits

class Careless(Theirs):
    def adapt(self, x):
        self.most += 0.5
        return super().adapt(x) + self.most
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a third party, installed in a folder of its own."""
    (tmp_path / "their_package.py").write_text(PLUGIN)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[acclimate.methods]\ntheirs = their_package:Theirs\nbroken = nowhere:Nothing\ntent = their_package:Theirs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("their_package", None)


def command(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done.output


def test_a_plug_in_is_listed_and_run(plugin: Path) -> None:
    listed = json.loads(command("list", "--format", "json"))["methods"]
    assert listed["theirs"] == "Minimise entropy, as a plug-in."
    assert "nowhere" in listed["broken"]
    assert listed["tent"] != listed["theirs"], "a plug-in does not replace one of ours"
    options = ["--images", "64", "--shift", "contrast", "--set", "theirs.most=0.5", "--set", "theirs.lr=0.01"]
    assert "Theirs" in command("run", "--method", "tent", "--method", "theirs", *options)
    assert "most=0.5" in json.loads((plugin / "acclimate-run" / "theirs-seed0.json").read_text())["call"]
    assert "Theirs" in command("table", "acclimate-run")
    command("run", "--method", "broken", code=2)
    command("run", "--method", "nobody", code=2)


@pytest.mark.usefixtures("plugin")
def test_the_contract_is_run_on_a_plug_in() -> None:
    kept = command("check", "their_package:Theirs", "--set", "most=2.0")
    assert all(promise in kept for promise in PROMISES)
    assert "✗" in command("check", "their_package:Careless", code=1)
    for name in (
        "nowhere:Nothing",
        "their_package",
        "json:loads",
        "their_package:Nothing",
        "their_package:Theirs.most",
    ):
        command("check", name, code=2)


def test_a_nested_class_is_found(plugin: Path) -> None:
    (plugin / "their_package.py").write_text(f"{PLUGIN}\nclass Outer:\n    Inner = Theirs\n")
    assert find_method("their_package:Outer.Inner").__name__ == "Theirs"


@pytest.mark.parametrize("content", ["def f(:", "1 / 0", "nobody"])
def test_a_module_that_cannot_be_imported_is_one_line(content: str, plugin: Path) -> None:
    (plugin / "their_broken.py").write_text(f"\n{content}")
    (line,) = command("check", "their_broken:Theirs", code=2).splitlines()
    assert "their_broken.py, line 2" in line


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("argument", ["most=abc", "lr=abc", "mist=1"])
def test_a_bad_argument_is_one_line(argument: str) -> None:
    words = ["--set", argument, "--set", "max_step=1.0"]
    (line,) = command("check", "their_package:Theirs", *words, code=2).splitlines()
    assert argument in line


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_is_found_by_its_name() -> None:
    assert METHODS["theirs"].__name__ == "Theirs"
    assert METHODS["tent"] is acclimate.Tent
    assert "theirs" not in [*METHODS], "what is ours does not depend on what is installed"
    with pytest.raises(ImportError, match="broken"):
        _ = METHODS["broken"]
    with pytest.raises(KeyError):
        _ = METHODS["nobody's"]
