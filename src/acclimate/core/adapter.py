"""Adapter: a network that keeps learning from the unlabelled batches it predicts.

A method writes `adapt`. It runs the network with `predict`, asks for the logits it learns from with `kept`, and makes a
step with `update`:

    def adapt(self, x):
        batch = self.predict(x)
        kept = batch.kept(entropy(batch.logits) < 1)
        self.update(when=kept.any, entropy=kept.mean(entropy(kept.logits)))
        return batch.logits
"""

from __future__ import annotations

import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import Self

from ..checks import (
    check_images,
    class_index,
    no_such,
    refuse_half_precision,
    refuse_nan_weights,
    refuse_non_finite,
    refuse_not_a_number,
    refuse_probabilities,
    warn,
)
from ..engine import (
    Engine,
    Execution,
    Live,
    Output,
    Pass,
    Precision,
    Recorder,
    Runner,
    choose,
    has_fast_bfloat16,
    without_recording,
)
from ..parts.batchnorm import Mode, check_statistics
from ..parts.optimizers import can_wait, refuse_closure, start_momentum
from ..parts.parameters import Parameters, adapted_parameters
from ..parts.ranks import Ranks, SharedBy, world_of
from ..parts.sharing import Sharing, changed_by, claim, exclusive, release
from ..parts.world import Share, World
from . import ahead
from .learning import finite, gradients_on, optimizer_step, restored_afterwards
from .notices import Notices
from .options import NETWORKS, Defaults, MakeOptimizer, Presets, override
from .prediction import STRATEGIES, Asked, Prediction
from .settings_file import is_settings_file, read_settings
from .signature import call_text, refuse_wrong_type
from .snapshot import Snapshot
from .state import State
from .step import Passes, Step
from .strategy import choose_strategy

__all__ = ["Adapter", "Statistics"]

Statistics: TypeAlias = Mode | Sequence[Tensor]
"""How BatchNorm normalises: a mode, or the statistics of an earlier batch."""
Result = TypeVar("Result")


def _same(logits: Tensor) -> Tensor:
    return logits


class Adapter(nn.Module, ABC):
    """A wrapper around a network that returns logits: `logits = adapter(x)` predicts x, then learns from it.

    The network stays as it was found. After a call only the values of the adapted parameters differ, and `reset()`
    restores them; no module is replaced, no hook remains, BatchNorm keeps its source statistics.

    >>> import acclimate, torch
    >>> class Mine(acclimate.Adapter):
    ...     def adapt(self, x):
    ...         batch = self.predict(x)
    ...         self.update(entropy=acclimate.functional.entropy(batch.rows()).mean())
    ...         return batch.logits
    >>> model = Mine(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)), lr=0.1)
    >>> model(torch.rand(8, 4)).shape, model.last.updated
    (torch.Size([8, 3]), True)
    >>> model.reset()

    Args:
        model: any module that takes a batch and returns logits (B, C) or (B, C, H, W), or has them in `.logits`.
        lr: learning rate of SGD with momentum 0.9, the paper's optimizer.
        optimizer: instead of `lr`, a function of the parameters, such as `partial(Adam, lr=1e-4)`.
        parameters: which ones adapt: `"norm"`, `"early-norm"`, `"all"`, names, or a function of (name, parameter); None
            is the method's own choice.
        statistics: what BatchNorm normalises with: the statistics of the `"batch"`, or those of the `"source"` domain.
        detach_statistics: stop gradients through the batch's statistics, so that samples do not depend on each other in
            the backward pass. On networks with BatchNorm this is a trap, and warns: it is less accurate and forgets
            (see docs/engine.md).
        strategy: how the gradient of the kept samples is computed (see `acclimate.core.prediction`). `"fastest"` is the
            fastest sound one for method, network and engine; numbers may differ from the default's, and
            `adapter.strategy` says which it is.
        engine: how passes run: `"eager"`; `"recorded"`, as CUDA graphs, for small networks on a GPU; `"auto"`, as fast
            as the machine allows, after compilation at the first batch; or an `acclimate.Engine`.
        precision: `"fp32"`, `"tf32"` or `"bf16"`, instead of the engine's choice.
        classes: adapt and predict over these classes only (ImageNet-R); logits then have that many columns.
        seed: the seed of the adapter's generator, which is part of its state.
        max_step: the Euclidean length that one update of all adapted parameters has at most; longer ones are shortened.
        ranks: `"all"` shares each batch among the processes of torch.distributed: every one calls the adapter with its
            part, and all have the same parameters afterwards (see docs/parallel.md).
    """

    defaults: ClassVar[Defaults] = Defaults()
    presets: ClassVar[Presets] = {}
    """Hyper-parameters for the networks in `NETWORKS`, by name."""
    cost: ClassVar[tuple[int, int]] = (1, 1)
    """Forward and backward passes per sample, at most."""
    counted: ClassVar[Literal["gradient", "graph"]] = "gradient"
    """What the paper's tables count as #Backwards: samples that received a gradient, or samples in the graph."""
    task: ClassVar[Literal["any", "classification", "segmentation"]] = "any"
    """Classifiers have logits (B, C), segmenters (B, C, H, W)."""
    selective: ClassVar[bool] = False
    """Whether the method learns from some of the samples: a compiled engine then uses the strategy `"sparse"`."""
    subset: ClassVar[bool] = False
    """Whether it is known to learn as well where BatchNorm normalises the kept samples with their own statistics:
    `strategy="fastest"` then is `"replay-subset"`."""
    episodic: ClassVar[bool] = False
    """Whether parameters and optimizer are the same after a call as before."""
    answers_first: ClassVar[bool] = True
    """Whether a call returns what `predict_only` would have returned before it."""
    without: ClassVar[tuple[str, ...]] = ()
    """Arguments of the parent class that a method does not take."""

    set_once: ClassVar[tuple[str, ...]] = ("seed",)
    """Arguments that are used when the adapter is built. Setting them later raises, all others take effect."""

    unit_range: bool = False
    """Whether images must lie in [0, 1], as augmentations need them."""
    frozen: bool = False
    """Set this to True to predict without learning, until it is False again."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        optimizer: MakeOptimizer | None = None,
        parameters: Parameters | None = None,
        statistics: Literal["batch", "source"] = "batch",
        detach_statistics: bool = False,
        strategy: Asked | None = None,
        engine: Engine | Literal["eager", "recorded", "auto"] = "eager",
        precision: Precision | None = None,
        classes: Sequence[int] | None = None,
        seed: int = 0,
        max_step: float | None = None,
        ranks: SharedBy = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")
        if torch.is_inference_mode_enabled() or any(p.is_inference() for p in model.parameters()):
            raise RuntimeError(f"{name}: build the model and the adapter outside torch.inference_mode()")
        refuse_wrong_type(type(self), "lr", lr)
        if lr is not None and optimizer is not None:
            raise ValueError(f"{name}: give lr= or optimizer=, not both")
        refuse_wrong_type(type(self), "strategy", strategy)
        if optimizer is not None and not callable(optimizer):
            raise TypeError(f"{name}: optimizer= must be a function of the parameters, such as partial(SGD, lr=1e-3)")
        if any(isinstance(module, Adapter) for module in model.modules()):
            raise ValueError(f"{name}: the model is or contains an adapter; wrap the network itself")

        self.model = model
        self.statistics, self.detach_statistics, self.seed, self.max_step = (
            statistics,
            detach_statistics,
            seed,
            max_step,
        )
        self.ranks = ranks
        self._which = self.defaults.parameters if parameters is None else parameters
        Sharing(model).run(partial(self._build, lr, optimizer, engine, precision, strategy, classes))
        self.step = Step(0)
        """The record of the current batch, which `predict`, `kept` and `update` fill."""
        self._last: Step | None = None
        self._claimed = False  # whether the network is noted as changed by this adapter
        self.notices = Notices(self.runner.sharing.changes)
        self._compared = False  # whether all ranks are known to have the same state
        self._statistics: Statistics | None = None  # of a prediction that learns nothing
        self._trusted = False  # true once a batch has shown that the model returns logits

    def _build(
        self,
        lr: float | None,
        optimizer: MakeOptimizer | None,
        engine: Engine | Literal["eager", "recorded", "auto"],
        precision: Precision | None,
        strategy: Asked | None,
        classes: Sequence[int] | None,
    ) -> None:
        """Build what depends on the network as it is now."""
        name, model = type(self).__name__, self.model
        named = adapted_parameters(name, model, self._which)
        refuse_half_precision(name, (p.dtype for p in named.values()))
        refuse_nan_weights(name, named)
        if other := changed_by(model.parameters()):
            warn(
                f"{other} has changed this network: {name} starts from the changed parameters, and its reset() "
                "returns to those. Call reset() of the other adapter first, or give each a copy of the network"
            )
        self.names, self.adapted = tuple(named), tuple(named.values())
        self._asked = engine, precision, strategy
        self.runner = self._new_runner(named)
        if self.device.type == "cpu" and self.runner.asked.precision == "bf16" and not has_fast_bfloat16():
            warn(
                "this processor has no bfloat16 instructions (AVX-512 BF16 or AMX), so that bfloat16 is slower than "
                'single precision: use precision="fp32"'
            )
        self.recorder = Recorder(self)
        self.execution: Execution = Live()
        self.strategy = choose_strategy(self, strategy)
        self.passes = Passes().to(self.device)
        self.generator = Generator().manual_seed(self.seed)
        """The generator is on the CPU, so that random numbers are the same on every device."""
        self.classes: Tensor | None
        self.register_buffer("classes", class_index(classes, self.device), persistent=False)
        self._class_list = None if classes is None else [int(c) for c in classes]
        make = optimizer or partial(self.defaults.optimizer, lr=self.defaults.lr if lr is None else lr)
        self.optimizer: Optimizer | None = make(list(self.adapted)) if named else None
        refuse_closure(name, self.optimizer)
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            for key, value in group.items():
                refuse_not_a_number(name, key, value)
            if math.isinf(group.get("lr") or 0.0):
                raise ValueError(f"{name}: lr={group['lr']} is infinite")
        start_momentum(self.optimizer)
        self.state = State(self, {} if self.episodic else named)

    # For users --------------------------------------------------------------------------------------------------------

    @exclusive
    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch and learn from it; return logits without a graph. While `frozen`, only predict."""
        if self.frozen:
            return self.predict_only(x)
        self.recorder.settle()
        x, share = self.admit(x)
        self._claim()
        self.notices.others(type(self).__name__, self.runner.sharing.changes, self._unrestored())
        self.runner.change_over(lambda: ahead.compile_copy(self, x))
        with self._aside(share, self.adapted if self.episodic else ()), self.learning(), self.runner.tf32():
            logits = self.adapt(x.clone() if x.is_inference() else x.detach())
            step = self.step
        with self.recorder.after_learning():
            step.finish(logits)
            step.engine = self.recorder.ran
            self.passes.add(step, self.world)
            self.watch(step)
            self.notices.dropped(self.passes)
        self._last = step
        return logits.detach()

    @exclusive
    @torch.inference_mode(False)
    def warm_up(self, batch: Tensor | Sequence[int]) -> None:
        """Compile, and record, the steps of batches like this one, or of this shape, ahead of time; nothing changes.

        Give images where random numbers in [0, 1] will not do. Code that a method needs only for some batches may still
        be compiled later.
        """
        ahead.warm_up(self, batch)

    @exclusive
    def save_compiled(self, path: str | Path) -> None:
        """Write what this process has compiled to a file, for networks and machines of the same kind."""
        ahead.save_compiled(self, path)

    @exclusive
    def load_compiled(self, path: str | Path) -> bool:
        """Use code that `save_compiled` or `acclimate warm-up` has written; return whether it fits.

        A file that is missing, damaged, or for another version, device or network is ignored, with a warning that says
        why. The file is code: load only one that you trust.
        """
        return ahead.load_compiled(self, path)

    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x as the method would predict them now. Nothing is learned, counted or changed.

        `statistics` replaces how BatchNorm normalises: `"source"`, `"batch"`, a number, which is the share of the
        batch's statistics blended with the source's, or what `measure_statistics` has returned.
        """
        return self._look(x, statistics, self.answer)

    @exclusive
    @torch.inference_mode(False)
    def preview(self, x: Tensor) -> Tensor:
        """Return the logits that a call would return. Nothing is learned, counted or changed."""
        if self.answers_first or self.frozen:
            return self.predict_only(x)
        before, last = self.snapshot(), self._last
        try:
            logits: Tensor = self(x)
            return logits
        finally:
            self.restore(before)
            self._last = last

    @exclusive
    def predict_source(self, x: Tensor, *, statistics: Statistics | None = "source") -> Tensor:
        """Return the logits that the network had before any adaptation.

        With `statistics=None` it normalises and corrects its logits as the method does.
        """
        source = self.state.source_parameters()
        correct = self.correct if statistics is None else _same
        return self._look(x, statistics, lambda images: correct(self.infer(images, source)))

    def measure_statistics(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits of x, and the means and variances of its BatchNorm layers, for `predict_only`."""

        def measure(images: Tensor) -> Output:
            return self._run(Pass("recorded"), images)

        logits, statistics, _ = self._look(x, None, measure)
        return logits, [*statistics]

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def _look(self, x: Tensor, statistics: Statistics | None, predict: Callable[[Tensor], Result]) -> Result:
        """Call a function of a batch that learns nothing, with the given statistics instead of the method's."""
        if statistics is not None:
            statistics = check_statistics(statistics)
        x, share = self.admit(x)
        with self._aside(share), self.runner.tf32():
            try:
                x = x.clone() if x.is_inference() else x
                if not isinstance(statistics, (str, float, NoneType)) and not self.runner.normalisation.calls:
                    self._run(Pass("recorded"), x)  # shows how often each layer is called
                self._statistics = statistics
                return predict(x)
            finally:
                self._statistics = None

    @classmethod
    def preset(cls, network: str, model: nn.Module, **arguments: Any) -> Self:
        """Build with the paper's hyper-parameters for `"resnet50"`, `"vit-base"` or `"segformer-b5"`.

        `"cifar-resnet"` and `"cifar-vit"` are for small networks with about ten classes. A file that `acclimate tune`
        has written, `"settings.json"`, has those for your network. `arguments` override them. A method without any
        presets is built with its own defaults.
        """
        if is_settings_file(network):
            network, chosen = read_settings(network, cls.__name__)
            arguments = {**chosen, **arguments}
        if network not in NETWORKS:
            raise ValueError(no_such("preset", network, NETWORKS))
        if cls.presets and network not in cls.presets:
            raise ValueError(f"no preset of {cls.__name__} for {network}: use {cls.__name__}(model), its own defaults")
        return cls(model, **override(cls.presets.get(network, {}), arguments))

    @property
    def last(self) -> Step:
        """The record of the last batch: what was kept, entropies, the terms of the loss, passes."""
        if self._last is None:
            raise RuntimeError("no batch yet: `last` is the record of the last call, so run a batch first")
        self.runner.sharing.join()
        return self._last

    @exclusive
    @torch.inference_mode(False)
    def snapshot(self) -> Snapshot:
        """Return a copy of everything that changes between batches."""
        self.settle()
        self.state.source()
        return self.state.copy()

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. The same batches then give the same results as before, bit for bit."""
        self._claim()
        self.settle(discard=True)
        self.state.restore(snapshot)
        self._compared = False

    @exclusive
    def reset(self) -> None:
        """Restore the source: parameters, optimizer, the method's state, counters and generator."""
        compared = self._compared
        self.restore(self.state.source())
        self._compared = compared  # all ranks have the same source
        release(self.adapted)
        self._claimed = False
        self.runner.sharing.note_change()

    @exclusive
    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write what has changed, not the network, to one safetensors file, completely or not at all.

        The path may be an address in storage, such as `s3://bucket/state.safetensors`. A `snapshot` is written instead
        of the current state. Of several ranks the first writes, if all have learned the same, and the others wait.
        """
        if self.world.size > 1:
            self.world.same("state", self.state.digest())
        with self.world.together():
            if self.world.rank == 0:
                self.state.save(path, snapshot or self.snapshot(), call_text(self, Adapter, engine=False))

    @exclusive
    def read(self, path: str | Path) -> Snapshot:
        """Return a saved state. A file of another model, method or version, or a damaged one, raises."""
        return self.state.read(path)[0]

    @exclusive
    def load(self, path: str | Path) -> None:
        """Continue from a saved state. A file of another model, method or version, or a damaged one, raises."""
        snapshot, call = self.state.read(path)
        own = call_text(self, Adapter, engine=False)
        self.restore(snapshot)
        if call != own:
            warn(f"{path} was saved by {call} and continues as {own}, with the optimizer's settings from the file")

    @exclusive
    def settle(self, *, discard: bool = False) -> None:
        """Raise the deferred error of an earlier batch; `discard=True` drops it."""
        self.recorder.settle(wait=True, discard=discard)

    def new_domain(self, *, round: int = 1) -> None:  # noqa: A002
        """Announce a new domain, or the next round of one. Most methods ignore this."""

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        tensor = next(chain(self.adapted, self.model.parameters(), self.model.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def world(self) -> World:
        """The ranks that share each batch. `world.mean` and the like are over the batch of all of them."""
        return self.runner.world

    @property
    def sharing(self) -> AbstractContextManager[None]:
        """A context in which no other thread runs the network."""
        return self.runner.sharing.held()

    @property
    def engine(self) -> Engine:
        """How passes run. A new engine takes effect with the next batch."""
        return self.runner.engine

    @engine.setter
    def engine(self, engine: Engine | Literal["eager", "recorded", "auto"]) -> None:
        _, precision, strategy = asked = self._asked
        self._asked = engine, None if isinstance(engine, Engine) else precision, strategy
        try:
            self.runner.engine = self._choose_engine(self.world)
        except ValueError:
            self._asked = asked
            raise

    @exclusive
    def fingerprint(self) -> str:
        """Return a hash of the network as it was before any adaptation."""
        return self.state.fingerprint()

    # For methods ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def adapt(self, x: Tensor) -> Tensor:
        """Return the logits of x, and learn from x. Gradients are on, for the adapted parameters only."""

    def answer(self, x: Tensor) -> Tensor:
        """Return what the method predicts for x without learning; override it where other parameters than θ predict."""
        return self.correct(self.infer(x))

    def correct(self, logits: Tensor) -> Tensor:
        """Return logits as the method changes them after the network; most methods do not."""
        return logits

    def watch(self, step: Step) -> None:
        """Inspect a finished step outside any recording, for example to warn. Most methods do nothing."""

    def predict(self, x: Tensor) -> Prediction:
        """Run the batch, so that `kept` can return a graph. Rejects NaN and infinity before anything has changed."""

        def first() -> Prediction:
            batch = STRATEGIES[self.strategy](self, x)
            self._check(x, batch.logits)
            return batch

        return self.execution.prediction(first)

    @torch.no_grad()
    def infer(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the batch without a graph. Rejects NaN and infinity before anything has changed."""
        logits = self.logits(x, parameters)
        self._check(x, logits)
        return logits

    def logits(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run one pass of the full network, perhaps with other parameters."""
        self.step.count(forwards=len(x))
        return self._run(self._pass(self.step.overall(len(x)), parameters or {}), x).logits

    def _pass(self, size: int, parameters: Mapping[str, Tensor]) -> Pass:
        given = self._statistics
        if given is None or isinstance(given, (str, float)):
            return Pass(self.mode(size) if given is None else given, parameters=parameters)
        return Pass("replayed", parameters=parameters, replayed=given)

    def traced(self, x: Tensor) -> Tensor:
        """Run one pass with a graph in which all samples receive a gradient."""
        self.step.count(backwards=len(x), in_graph=len(x))
        return self.logits(x)

    def update(
        self,
        *,
        when: bool | Tensor = True,
        sound: bool | Tensor = True,
        gradients: Sequence[Tensor | None] | None = None,
        **terms: Tensor,
    ) -> None:
        """Make one optimizer step on the sum of the loss terms, if `when` holds.

        `gradients` replace those of the terms; a parameter with the gradient None does not change. A step whose loss
        or gradients are not finite, or that is not `sound`, is dropped and counted.
        """
        if self.optimizer is None:
            raise TypeError(f"{type(self).__name__} was built without parameters to adapt")
        if (when := self.execution.condition(when, can_wait=can_wait(self.optimizer))) is False:
            return
        if gradients is None:
            gradients = self.gradients(torch.stack([*terms.values()]).sum())
        if terms:
            sound = self.world.all(torch.stack([*terms.values()]).detach().isfinite()) & sound
        sound = self.execution.condition(self.sound(gradients) & sound, can_wait=True)
        condition = when & sound
        taken = (
            False
            if sound is False
            else optimizer_step(self.optimizer, self.adapted, gradients, condition, self.max_step)
        )
        self.step.dropped = self.step.dropped + (when & (taken ^ True))
        self.step.taken = taken
        self.step.losses = {name: term.detach() for name, term in terms.items()}

    def sound(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return whether gradients are finite and not too large for a step, without reading it."""
        return finite(gradients, [] if self.optimizer is None else self.optimizer.param_groups)

    def gradients(self, loss: Tensor, *, of: Sequence[Tensor] | None = None, retain: bool = False) -> list[Tensor]:
        """Return ∂loss/∂θ for the adapted parameters, zero for unused ones; or for the tensors in `of`."""
        if of is not None:
            with self._backward_context():
                return list(torch.autograd.grad(loss, of, retain_graph=retain))
        own = self.execution.gradients(loss, self.adapted, self._backward_context(), retain=retain)
        return self.world.average(own)

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Restore the parameters and clear the optimizer at the end: nothing learned inside remains.

        Each rank has episodes of its own.
        """
        with self.apart(), restored_afterwards(self.adapted, self.optimizer):
            yield

    def apart(self) -> AbstractContextManager[None]:
        """Let each rank run and learn on its own inside; they may do so in different numbers."""
        return self.runner.apart()

    def refuse_non_finite(self, x: Tensor, logits: Tensor | None = None, *, unit_range: bool = False) -> None:
        """Reject a batch with NaN or infinity in images or logits, or with images outside [0, 1] if `unit_range`."""
        with self.world.together():
            refuse_non_finite(x, logits, unit_range=unit_range)

    def captured(
        self, function: Callable[..., Any], *inputs: Tensor, generator: Generator | None = None, reads: Any = ()
    ) -> Any:
        """Call a function of tensors that leaves the adapter unchanged; the engine may record it as a CUDA graph.

        `reads` are tensors other than parameters that the function reads in place.
        """
        return self.recorder.function(function, *inputs, generator=generator, reads=reads)

    def learning(self, *, parameters: bool = True) -> AbstractContextManager[None]:
        """Turn gradients on for the adapted parameters only, also inside the caller's no_grad or inference_mode."""
        return gradients_on(self.adapted, self.runner.frozen.values(), parameters=parameters)

    @property
    def coupled(self) -> bool:
        """Whether the logits of a sample depend on the rest of its batch, through BatchNorm's statistics."""
        return bool(self.runner.normalisation.layers) and self.statistics == "batch"

    def mode(self, size: int) -> Mode:  # noqa: ARG002
        """Return how BatchNorm normalises a batch of this size."""
        if self.statistics == "source":
            return "source"
        return "detached" if self.detach_statistics else "batch"

    def admit(self, x: Tensor) -> tuple[Tensor, Share]:
        """Check the images, and return which part of the batch of all ranks they are. Ranks must have the same state.

        Where one rank's images are refused, all ranks raise.
        """
        checked, share = self.world.admit(lambda: check_images(x, self.device, may_be_empty=self.world.size > 1))
        if self.world.size > 1 and not self._compared:
            self.world.same("adapter", re.sub(" at 0x[0-9a-f]+", "", repr(self)))
            self.world.same("network", self.state.fingerprint())
            self.world.same("state", self.state.digest())
            self._compared = True
        return checked, share

    # Inside -----------------------------------------------------------------------------------------------------------

    def _run(self, pass_: Pass, x: Tensor, *, varying: bool = False) -> Output:
        """Run a pass without counting it; return its logits over the chosen classes."""
        if not len(x):
            return self._run_none(pass_, x)
        if pass_.subnetworks is not None:
            pass_ = replace(pass_, sample=self.execution.sample(pass_.subnetworks, x, self.generator, pass_.share))
        if torch.is_grad_enabled():
            self.step.graph = pass_, len(x)
        output = self.runner(pass_, x, varying=varying, sparse=self.strategy == "sparse")
        if self.classes is None:
            return output
        logits = output.logits
        if (last := max(self._class_list or [0])) >= logits.shape[1]:
            raise ValueError(f"classes= names class {last}; the model has {logits.shape[1]} classes")
        return output._replace(logits=logits.index_select(1, self.classes))

    def _run_none(self, pass_: Pass, x: Tensor) -> Output:
        """Run a pass of a rank without rows: one row of padding, so that it takes part in the messages of the others.

        Its values are not constant: some networks divide by an image's deviation.
        """
        share = pass_.share or Share(0, 0, 0)
        row = torch.linspace(0, 1, math.prod(x.shape[1:]), dtype=x.dtype, device=x.device)
        padded = torch.cat([x, row.view(1, *x.shape[1:])])  # x may have a gradient
        output = self._run(replace(pass_, share=share), padded)
        return output._replace(logits=output.logits[:0])

    @exclusive
    def eagerly(self, call: Callable[[], Result]) -> Result:
        """Call a function whose passes run eagerly in the network's own precision, with gradients on."""
        with self._aside(0), self.learning(), self.runner.eager():
            return call()

    def _new_runner(self, named: Mapping[str, Parameter], *, moved: bool = False) -> Runner:
        """Return what runs the passes on this device, for the engine that was asked for."""
        world = world_of(self.ranks)
        return Runner(self.model, named, self._choose_engine(world, moved=moved), world)

    def _choose_engine(self, world: World, *, moved: bool = False) -> Engine:
        engine, precision, _ = self._asked
        chosen = choose(engine, precision, self.model, self.device, moved=moved)
        return without_recording(type(self).__name__, engine, chosen) if isinstance(world, Ranks) else chosen

    def _claim(self) -> None:
        """Check the network before it changes, and note who changes it."""
        refuse_half_precision(type(self).__name__, {p.dtype for p in self.adapted})
        if not self._claimed:
            self.state.source()
            claim(type(self).__name__, self.state.parameters.values(), self.state.before.values())
            self._claimed = True
            self.runner.sharing.note_change()

    def _unrestored(self) -> Iterator[Parameter]:
        """Yield the parameters that `reset` does not restore."""
        own = set(map(id, self.state.parameters.values()))
        yield from (p for p in self.model.parameters() if id(p) not in own)

    @contextmanager
    def _aside(self, rows: int | Share, values: Sequence[Parameter] = ()) -> Iterator[None]:
        """Run passes inside with a record of their own, for this many rows or this share of a batch.

        If they raise, the network's flags and hooks, the generator, and these parameters are as they were.
        """
        step = self.step
        with self.runner.intact(self.generator, values):
            try:
                self.step = Step(rows) if isinstance(rows, int) else Step(rows.size, share=rows)
                yield
            finally:
                self.step = step

    def _backward_context(self) -> AbstractContextManager[object]:
        """Return the contexts of the pass that made the graph, since activation checkpoints run its forward again."""
        if self.step.graph is None:
            return nullcontext()
        pass_, size = self.step.graph
        self.runner.normalisation.counted = pass_.counted
        return pass_.entered(self.runner.normalisation, size, pass_.given)

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        vars(copied)["_claimed"] = False
        return copied

    @exclusive
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast (`to`, `cuda`, `double`, …) everything, and choose the engine for the new device."""
        if self.names:
            refuse_half_precision(type(self).__name__, [fn(torch.zeros(())).dtype])
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.state.move(fn)
        self.runner = self._new_runner(self.runner.adapted, moved=True)
        self.recorder = Recorder(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning was given when the adapter was built
            self.strategy = choose_strategy(self, self._asked[2])
        return self

    def _check(self, x: Tensor, logits: Tensor) -> None:
        found = "segmentation" if logits.dim() > 2 else "classification"
        if self.task not in ("any", found):
            raise ValueError(
                f"{type(self).__name__} is for {self.task}, and this model is for {found}: its logits have shape "
                f"{tuple(logits.shape)}. Tent, CoTTA, EATA and EATA-C support both"
            )
        with self.world.together():
            if not self.execution.check(x, logits, unit_range=self.unit_range and logits.dim() == 2):
                return
            if not self._trusted and len(x):
                refuse_probabilities(logits)
                self._trusted = True
        poor = self.coupled and self.statistics == "batch" and self._statistics is None
        alone = poor and self.step.overall(len(x)) == 1 and logits.dim() == 2
        if alone:
            self.notices.single_image()

    def __setattr__(self, name: str, value: Any) -> None:
        if (name in self.set_once or name == "ranks") and name in vars(self):
            raise AttributeError(f"{type(self).__name__}.{name} is used when the adapter is built: build another one")
        refuse_not_a_number(type(self).__name__, name, value)
        refuse_wrong_type(type(self), name, value)
        if name == "max_step" and value is not None and not value > 0:
            raise ValueError(f"{type(self).__name__}: max_step={value} is not positive; None sets no limit")
        super().__setattr__(name, value)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse: the tensors of a module are not all of an adapter's state."""
        raise TypeError(
            "a state_dict has no optimizer, no generator and not all of a method's state: use save(path) and "
            "load(path), or snapshot() and restore(snapshot). Load weights into a network before it is wrapped"
        )

    def __repr__(self) -> str:
        """Return the call that builds this adapter."""
        return call_text(self, Adapter, engine=True)
