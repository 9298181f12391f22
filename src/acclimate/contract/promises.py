"""The promises. Each takes a `Subject` and raises `BrokenPromiseError`, which says what was broken."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..core.adapter import Adapter
from ..core.signature import arguments_of
from .networks import CLASSES, stream
from .subject import Subject

__all__ = ["PROMISES", "BrokenPromiseError", "Promise", "flags", "same", "values"]

Promise: TypeAlias = Callable[[Subject], None]
"""A function that raises `BrokenPromiseError` if a method breaks the promise it is named after.

>>> import acclimate
>>> from acclimate.contract import PROMISES, Subject
>>> PROMISES["reset is bitwise"](Subject(acclimate.Tent, "ln"))
"""


class BrokenPromiseError(AssertionError):
    """A method does not do what every method promises."""


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of everything in a network's state_dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are equal bit by bit, NaN included."""
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(7.7), b[k].nan_to_num(7.7)) for k in a)


def flags(model: nn.Module) -> list[object]:
    """Return everything about a network that a call must leave as it was, besides its weights."""
    seen: list[object] = []
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if k.endswith("_hooks")]
        seen.append((name, id(module), module.training, getattr(module, "track_running_stats", None), hooks))
    seen += [(name, id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return seen


def require(kept: bool, message: str) -> None:
    """Raise unless a promise is kept."""
    if not kept:
        raise BrokenPromiseError(message)


def equal(first: Iterable[Tensor], second: Iterable[Tensor], message: str) -> None:
    """Raise unless predictions agree bit by bit."""
    require(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), message)


@contextmanager
def _leaves_as_found(model: nn.Module, what: str) -> Any:
    before = flags(model)
    yield
    require(flags(model) == before, f"{what} leaves flags, hooks, modules or gradients of the network changed")


def predicts_finite_logits(subject: Subject) -> None:
    """Logits have one row per image and one column per class, are finite, and have no graph."""
    adapter = subject.make()
    for x in stream():
        logits = adapter(x)
        require(logits.shape[:2] == (len(x), CLASSES), f"logits of shape {tuple(logits.shape)} for {len(x)} images")
        require(bool(logits.isfinite().all()), "logits are NaN or infinite")
        require(not logits.requires_grad, "logits have a graph: return batch.logits, or detach them")


def moves_declared_parameters_only(subject: Subject) -> None:
    """Only the adapted parameters change, and they do; flags, hooks and BatchNorm buffers stay."""
    adapter = subject.make()
    before = values(adapter.model)
    with _leaves_as_found(adapter.model, "a call"):
        for x in stream():
            adapter(x)
    after = values(adapter.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    undeclared = sorted(moved - set(adapter.names))
    require(not undeclared, f"changed without being adapted parameters: {', '.join(undeclared)}")
    if subject.lasts:
        require(bool(moved), "nothing was learned from four batches; are its settings too strict for ten classes?")
    else:
        require(not moved, "it learns nothing, or for one batch only, and parameters have changed")


def ignores_training_mode(subject: Subject) -> None:
    """A network in training mode stays so, predicts the same, and dropout stays off."""
    resting, awake = subject.make(), subject.make()
    awake.model.train()
    with _leaves_as_found(awake.model, "a call in training mode"):
        for x in stream(2):
            equal([resting(x)], [awake(x)], "predictions depend on model.train(): run passes with predict and logits")


def resets_bitwise(subject: Subject) -> None:
    """After `reset()` the network is the source network, and the stream gives the same predictions again."""
    adapter = subject.make()
    source = values(adapter.model)
    first = [adapter(x) for x in stream()]
    adapter.reset()
    require(same(values(adapter.model), source), "reset() does not restore the network")
    require(int(adapter.passes.forwards) == 0, "reset() does not restore the counted passes")
    again = [adapter(x) for x in stream()]
    equal(first, again, "after reset() predictions differ: keep state in buffers, and use self.generator")


def replays_bitwise(subject: Subject) -> None:
    """A snapshot, or a file in another adapter, gives the same predictions again; no other file is left."""
    adapter = subject.make()
    later = stream(3, seed=200)
    for x in stream(2):
        adapter(x)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        snapshot = adapter.snapshot()
        adapter.save(path)
        first = [adapter(x) for x in later]
        adapter.restore(snapshot)
        equal(first, [adapter(x) for x in later], "a restored snapshot predicts differently: keep state in buffers")
        other = subject.make()
        other.load(path)
        equal(first, [other(x) for x in later], "a loaded file predicts differently: keep state in buffers")
        counted = [*adapter.passes.buffers()], [*other.passes.buffers()]
        equal(*counted, "a loaded file counts other passes")
        require([each.name for each in Path(folder).iterdir()] == [path.name], "saving leaves other files behind")


def refuses_non_finite_images(subject: Subject) -> None:
    """A batch with NaN or infinity raises ValueError and changes nothing."""
    for bad in (float("nan"), float("inf")):
        adapter = subject.make()
        x = stream()[0]
        adapter(x)
        before, state = values(adapter.model), adapter.snapshot()
        poisoned = x.clone()
        poisoned[3, 0, 2, 2] = bad
        with _leaves_as_found(adapter.model, "a refused batch"):
            _raises(ValueError, adapter, poisoned, f"a batch with {bad} is not refused: call predict(x) first")
        require(same(values(adapter.model), before), f"a batch with {bad} changes the network")
        require(same(adapter.snapshot().tensors, state.tensors), f"a batch with {bad} changes the method's state")


def _raises(expected: type[Exception], adapter: Adapter, x: Tensor, message: str) -> None:
    try:
        adapter(x)
    except expected:
        return
    raise BrokenPromiseError(message)


def works_without_gradients(subject: Subject) -> None:
    """Inside `no_grad` and `inference_mode` it learns as outside."""
    modes: tuple[Callable[[], AbstractContextManager[object]], ...] = (torch.no_grad, torch.inference_mode)
    for mode in modes:
        plain, within = subject.make(), subject.make()
        expected = [plain(x) for x in stream()]
        with mode():
            equal(expected, [within(x.clone()) for x in stream()], f"{mode.__name__} changes predictions")
            within.restore(within.snapshot())
            within(stream()[0].clone())
            within.reset()
            equal([expected[0]], [within(stream()[0].clone())], f"reset() inside {mode.__name__} fails")
        equal([expected[1]], [within(stream()[1])], f"after {mode.__name__} predictions differ")


def counts_passes(subject: Subject) -> None:
    """Each step's record adds up to `passes`, and says whether the parameters were updated."""
    adapter = subject.make()
    forwards = backwards = in_graph = 0
    for x in stream():
        adapter(x)
        last = adapter.last
        forwards, in_graph = forwards + int(last.forwards), in_graph + int(last.in_graph)
        backwards += int(last.backwards)
        agree = bool(last.updated) == (int(last.in_graph) > 0) == (last.loss is not None)
        require(agree, "`last.updated`, `last.in_graph` and `last.loss` contradict each other: learn with update(…)")
        if not subject.learns:
            own = (int(last.forwards), int(last.backwards), int(last.in_graph))
            require(own == (len(x), 0, 0), "it learns nothing, and counts more than one forward per image")
    counted = [int(count) for count in adapter.passes.buffers()]
    require(counted == [forwards, backwards, in_graph, 0], "the passes of the steps do not add up")
    require(in_graph >= backwards, "more samples have a gradient than are in the graph")


def takes_batches_of_any_size(subject: Subject) -> None:
    """Batches may differ in size, and have one image."""
    adapter = subject.make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a batch of one image")
        for size in (8, 3, 8, 1, 1):
            logits = adapter(stream()[0][:size])
            require(len(logits) == size and bool(logits.isfinite().all()), f"a batch of {size} fails")


def takes_a_choice_of_classes(subject: Subject) -> None:
    """With `classes=`, logits have the columns of these classes."""
    logits = subject.make(classes=[7, 2, 5])(stream()[0])
    require(logits.shape[1] == 3, f"classes=[7, 2, 5] returns {logits.shape[1]} columns: pass **options on")


def moves_and_casts(subject: Subject) -> None:
    """`double()` and its like take the whole state along."""
    adapter = subject.make()
    for x in stream(2):
        adapter(x)
    adapter.double()
    require(adapter(stream()[2].double()).dtype == torch.float64, "after double() logits are not double")
    adapter.reset()
    require(bool(adapter(stream()[0].double()).isfinite().all()), "after double() and reset() logits are not finite")


def copies_are_independent(subject: Subject) -> None:
    """A deep copy continues alone, from the same state."""
    adapter = subject.make()
    adapter(stream()[0])
    other = deepcopy(adapter)
    expected = [adapter(x) for x in stream()[1:]]
    equal(expected, [other(x) for x in stream()[1:]], "a deep copy predicts differently, or shares state")


def predicts_without_learning(subject: Subject) -> None:
    """`predict_only` changes nothing, and the stream does not notice it."""
    adapter, other = subject.make(), subject.make()
    for x in stream():
        before = adapter.snapshot()
        with _leaves_as_found(adapter.model, "predict_only"):
            predicted = adapter.predict_only(x)
        require(same(adapter.snapshot().tensors, before.tensors), "predict_only changes the method's state")
        require(not predicted.requires_grad, "predict_only returns a graph")
        equal([adapter(x)], [other(x)], "predict_only changes later predictions")
    equal([*adapter.passes.buffers()], [*other.passes.buffers()], "predict_only is counted")
    with torch.inference_mode():
        require(bool(adapter.predict_only(stream()[0].clone()).isfinite().all()), "predict_only returns NaN")


def previews_its_answers(subject: Subject) -> None:
    """`preview` returns what the next call returns, and changes nothing; `answers_first` says how that is found out."""
    adapter, other = subject.make(), subject.make()
    for x in stream():
        before = adapter.snapshot()
        with _leaves_as_found(adapter.model, "preview"):
            previewed = adapter.preview(x)
        require(same(adapter.snapshot().tensors, before.tensors), "preview changes the method's state")
        logits = adapter(x)
        equal([logits], [other(x)], "preview changes later predictions")
        advice = "set answers_first = False if a call does not return what predict_only returns before it"
        require(
            torch.allclose(previewed, logits, rtol=1e-4, atol=1e-4), f"preview is not what the call returns: {advice}"
        )
    equal([*adapter.passes.buffers()], [*other.passes.buffers()], "preview is counted")


def prints_its_call(subject: Subject) -> None:
    """`repr` is the call that makes the adapter, so each argument is an attribute of the same name."""
    try:
        text = repr(subject.make())
    except AttributeError as error:
        raise BrokenPromiseError(f"repr() fails, because an argument is not stored under its name: {error}") from error
    require(text.startswith(f"{subject.method.__name__}(") and text.endswith("seed=0)"), f"repr() is {text}")
    if subject.learns and "max_step" in arguments_of(subject.method):
        require(repr(subject.make(max_step=0.125)) != text, "repr() does not show max_step=, an option of all methods")


PROMISES: Mapping[str, Promise] = {
    "finite logits without a graph": predicts_finite_logits,
    "only adapted parameters change": moves_declared_parameters_only,
    "train() makes no difference": ignores_training_mode,
    "reset is bitwise": resets_bitwise,
    "snapshots and files replay bitwise": replays_bitwise,
    "NaN is refused and changes nothing": refuses_non_finite_images,
    "works inside no_grad and inference_mode": works_without_gradients,
    "passes are counted": counts_passes,
    "batches of any size": takes_batches_of_any_size,
    "a choice of classes": takes_a_choice_of_classes,
    "moves and casts": moves_and_casts,
    "deep copies are independent": copies_are_independent,
    "predict_only changes nothing": predicts_without_learning,
    "preview is what a call returns": previews_its_answers,
    "repr prints the call": prints_its_call,
}
"""Every promise by its name."""
