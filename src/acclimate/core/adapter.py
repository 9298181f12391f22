"""Adapter: a network that keeps learning from the unlabelled batches it predicts.

A method writes `adapt` and nothing else. It runs the network with `predict`, asks for the logits it wants to learn
from with `kept`, and takes a step with `update`:

    def adapt(self, x):
        batch = self.predict(x)
        kept = batch.kept(entropy(batch.logits) < 1)
        self.update(when=kept.any, entropy=kept.mean(entropy(kept.logits)))
        return batch.logits
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from typing_extensions import Self

from ..checks import check_images, read_logits, refuse_non_finite, refuse_probabilities, soundness
from ..engine import Engine, Graphs, Part, Pieces, Precision, Runner, choose
from ..parts.batchnorm import Normalisation
from ..parts.optimizers import start_momentum
from ..parts.parameters import Parameters, choose_parameters
from ..parts.selection import Reliable, Selector
from ..parts.subnetwork import Draw, StochasticDepth
from .learner import Learner
from .prediction import STRATEGIES, Prediction, Strategy
from .record import Passes, Step
from .signature import call_of

__all__ = ["Adapter", "Options", "Running"]

MakeOptimizer: TypeAlias = Callable[[list[Parameter]], Optimizer]


class Running(TypedDict, total=False):
    """What every method takes besides its own arguments."""

    engine: Engine | Literal["eager", "recorded", "auto"]
    precision: Precision | None
    classes: Sequence[int] | None
    seed: int


class Options(Running, total=False):
    """What every learning method takes besides its own arguments."""

    lr: float | None
    optimizer: MakeOptimizer | None
    parameters: Parameters
    statistics: Literal["batch", "source"]
    detach_statistics: bool
    strategy: Strategy | None


class Adapter(Learner, ABC):
    """Wraps a network that returns logits: `logits = adapter(x)` predicts x, then learns from it.

    The network is left as it was found. After a call only the adapted parameters' values differ, and `reset()` takes
    those back; no module is replaced, no hook stays, BatchNorm keeps its source statistics.

    Args:
        model: any module that takes a batch and returns logits (B, C) or (B, C, H, W), or has them in `.logits`.
        lr: learning rate of the paper's SGD with momentum 0.9.
        optimizer: instead of `lr`, a callable given the parameters, such as `partial(Adam, lr=1e-4)`.
        parameters: which adapt: `"norm"`, `"early-norm"`, `"all"`, names, or a test of (name, parameter); None is the
            method's own choice.
        statistics: what BatchNorm normalises by: the `"batch"`, or the `"source"` domain's.
        detach_statistics: no gradient flows through the batch's statistics, so that samples do not depend on each
            other in the backward pass.
        strategy: how kept samples get their gradient (see `acclimate.core.prediction`).
        engine: how passes run: `"eager"`, as PyTorch has them; `"recorded"`, the same as CUDA graphs, for small
            networks on a GPU; `"auto"`, as fast as the machine allows, after some time of compilation; or an
            `acclimate.Engine`.
        precision: `"fp32"`, `"tf32"` or `"bf16"`, whatever the engine would choose.
        classes: adapt and predict over these classes alone (ImageNet-R); logits then have that many columns.
        seed: of the adapter's own generator, which is part of its state.
    """

    default_lr: ClassVar[float] = 2.5e-4
    default_optimizer: ClassVar[Callable[..., Optimizer]] = partial(SGD, momentum=0.9)
    default_parameters: ClassVar[Parameters | None] = "norm"
    """None: the method learns nothing."""
    default_strategy: ClassVar[Strategy] = "masked"
    selective: ClassVar[bool] = False
    """Whether the method learns from some of the samples: a compiled engine then chooses `"sparse"`."""
    by_size: ClassVar[bool] = False
    """Whether BatchNorm's statistics depend on the batch size."""
    cost: ClassVar[tuple[int, int]] = (1, 1)
    """Forward and backward passes a sample, at most."""
    task: ClassVar[Literal["any", "classification", "segmentation"]] = "any"
    """What the method is for: classifiers, with logits (B, C), segmenters, with (B, C, H, W), or both."""
    without: ClassVar[tuple[str, ...]] = ()
    """Arguments of the class above that a method does not take."""

    unit_range: bool = False
    """Whether images must lie in [0, 1], as augmentations need them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        optimizer: MakeOptimizer | None = None,
        parameters: Parameters | None = None,
        statistics: Literal["batch", "source"] = "batch",
        detach_statistics: bool = False,
        strategy: Strategy | None = None,
        engine: Engine | Literal["eager", "recorded", "auto"] = "eager",
        precision: Precision | None = None,
        classes: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")
        if torch.is_inference_mode_enabled() or any(p.is_inference() for p in model.parameters()):
            raise RuntimeError(f"{name}: build the model and the adapter outside torch.inference_mode()")
        if lr is not None and optimizer is not None:
            raise ValueError(f"{name}: give lr= or optimizer=, not both")
        if statistics not in ("batch", "source"):
            raise ValueError(f'{name}: statistics={statistics!r}; expected "batch" or "source"')
        if strategy is not None and strategy not in STRATEGIES:
            raise ValueError(f"{name}: strategy={strategy!r}; expected one of {', '.join(STRATEGIES)}")
        if optimizer is not None and not callable(optimizer):
            raise TypeError(
                f"{name}: optimizer= is called with the parameters: give partial(SGD, lr=…), not an optimizer"
            )
        if any(isinstance(module, Adapter) for module in model.modules()):
            raise ValueError(f"{name}: the model is, or holds, an adapter already; wrap the network itself")
        parameters = self.default_parameters if parameters is None else parameters
        adapted = {} if parameters is None else choose_parameters(model, parameters)
        if parameters is not None and not adapted:
            norms = parameters in ("norm", "early-norm")
            why = "the model has no normalisation layer with weights" if norms else "none matches"
            raise ValueError(f'{name} found no parameter to adapt: {why}. parameters="all" adapts every one')

        self.model = model
        self.statistics = statistics
        self.detach_statistics = detach_statistics
        self.seed = seed
        self.norm = Normalisation(model)
        self._asked = engine, precision, strategy
        self.engine = choose(engine, precision, model, self.device)
        self.strategy = self._strategy(strategy)
        self.select: Selector | None = None
        """S(x), of methods that select by it."""
        self.depth: StochasticDepth | None = None
        """Where sub-networks leave branches out, of methods that have some."""
        self.draw: Draw | None = None
        """The sub-network that passes are of."""
        self.runner, self.graphs, self.piece = Runner(self), Graphs(self), Pieces(self)
        self.part: Part | None = None
        """The part of a step that is being recorded."""
        self.passes = Passes().to(self.device)
        self.generator = torch.Generator().manual_seed(seed)
        """On the CPU, so that a stream's randomness is the same on every device."""
        self.classes: Tensor | None
        self.register_buffer("classes", _class_index(classes, self.device), persistent=False)
        self.class_list = None if classes is None else [int(c) for c in classes]

        self.parameters_adapted = parameters
        self.adapted = tuple(adapted.values())
        self.names = tuple(adapted)
        chosen = set(map(id, self.adapted))
        self.frozen = {name: p for name, p in model.named_parameters() if id(p) not in chosen}
        make = optimizer or partial(type(self).default_optimizer, lr=self.default_lr if lr is None else lr)
        self.optimizer = make(list(self.adapted)) if adapted else None
        start_momentum(self.optimizer)

        self._trusted = False  # a first batch has shown that the model returns logits
        self._warned_of_one = False
        self.step = Step(0)
        """The record of the batch in hand, which `predict`, `rows` and `update` fill."""
        self._last: Step | None = None

    # What a user calls ------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch and learn from it. Returns logits without a graph."""
        self.graphs.settle()
        x = check_images(x, self.device)
        self.remember_source()
        with self.learning():
            self.step = step = Step(len(x))
            with self.runner.precise():
                logits = self.adapt(x.clone() if x.is_inference() else x.detach())
        step.backwards, step.in_graph = (n * step.taken for n in (step.backwards, step.in_graph))
        step.logits = logits.detach()
        self.passes.add(step)
        self._last, self.step = step, Step(0)
        return step.logits

    @classmethod
    def preset(cls, network: str, model: nn.Module, **arguments: Any) -> Self:
        """With the paper's hyper-parameters for `"resnet50"`, `"vit-base"` or `"segformer-b5"`; yours override them.

        `"cifar-resnet"` and `"cifar-vit"` are for networks with some ten classes (see `acclimate.methods.presets`).
        """
        from ..methods.presets import hyper_parameters

        settings = hyper_parameters(cls.__name__, network)
        if arguments.get("optimizer") is not None:
            settings.pop("lr", None)
        if arguments.get("lr") is not None and (made := settings.pop("optimizer", None)) is not None:
            arguments = {**arguments, "lr": None, "optimizer": partial(made, lr=arguments["lr"])}
        if arguments.keys() & {"margin", "epsilon"}:
            alone = isinstance(settings.pop("select", None), Reliable) and "epsilon" not in arguments
            if alone and arguments.get("select") is None:
                settings["select"] = Reliable(arguments["margin"])
        return cls(model, **{**settings, **arguments})

    @property
    def last(self) -> Step:
        """The record of the last batch: what was kept, entropies, the loss by term, passes."""
        if self._last is None:
            raise RuntimeError("no batch yet: `last` is the record of the last call")
        return self._last

    def new_domain(self, *, round: int = 1) -> None:  # noqa: A002
        """A new domain begins, perhaps not for the first time. A stream's owner may say so; most methods do not ask."""

    # What a method writes, and what it writes it with -------------------------------------------------------------

    @abstractmethod
    def adapt(self, x: Tensor) -> Tensor:
        """Return the logits of x, having learned from it. Gradients are on; only adapted parameters have them."""

    def predict(self, x: Tensor) -> Prediction:
        """Run the batch, so that `rows` can give a graph. Refuses NaN and infinity before anything has changed."""
        if self.part is not None and (predicted := self.part.predicted()) is not None:
            return predicted
        batch = STRATEGIES[self.strategy](self, x)
        self._check(x, batch.logits)
        if self.part is not None:
            self.part.prediction = batch
        return batch

    @torch.no_grad()
    def infer(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the batch without a graph. Refuses NaN and infinity before anything has changed."""
        logits = self.logits(x, parameters)
        self._check(x, logits)
        return logits

    def settle(self, *, discard: bool = False) -> None:
        """Raise for an earlier batch that was refused, where that is told late; or let bygones be bygones."""
        self.graphs.settle(wait=True, discard=discard)

    def logits(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None, *, fresh: bool = False) -> Tensor:
        """One pass of the full network, normalised as the method has it, perhaps with other parameters.

        `fresh` says that the batch size is a new one at each call.
        """

        def body(x: Tensor, _: Sequence[Tensor]) -> tuple[Tensor]:
            with self.normalising(x.shape[0]):  # len(x) would fix the batch size of a compiled pass
                return (self.network(x),)

        return self.counted(self.runner("logits", body, x, parameters, fresh=fresh)[0])

    def traced(self, x: Tensor) -> Tensor:
        """One pass with a graph, whose samples all receive a gradient."""
        self.step.backwards = self.step.backwards + len(x)
        self.step.in_graph += len(x)
        return self.logits(x)

    @property
    def coupled(self) -> bool:
        """Whether a sample's logits depend on the others of its batch, through BatchNorm's statistics."""
        return bool(self.norm.layers) and self.statistics == "batch"

    def normalising(self, size: int) -> AbstractContextManager[None]:
        """How BatchNorm normalises a batch of `size`."""
        if self.statistics == "source":
            return self.norm.source()
        return self.norm.detached() if self.detach_statistics else self.norm.batch(size)

    def network(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The network's logits, under whatever statistics are in force, perhaps with other parameters."""
        try:
            output = self.model(x) if parameters is None else functional_call(self.model, dict(parameters), (x,))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the model failed on a batch of shape {tuple(x.shape)} ({x.dtype}): {error}") from error
        return read_logits(output, x)

    def counted(self, logits: Tensor) -> Tensor:
        """Count a pass; its logits over the classes that were asked for."""
        self.step.forwards += len(logits)
        if self.classes is None:
            return logits
        if (last := max(self.class_list or [0])) >= logits.shape[1]:
            raise ValueError(f"classes= names class {last}; the model has {logits.shape[1]} classes")
        return logits.index_select(1, self.classes)

    # Inside -------------------------------------------------------------------------------------------------------

    def _strategy(self, asked: Strategy | None) -> Strategy:
        """The strategy that was asked for, or the one that suits method, network and engine."""
        apart = not self.coupled or self.detach_statistics
        if asked is None:
            sparse = self.selective and self.engine.compiled and apart
            return "sparse" if sparse else self.default_strategy
        if asked == "sparse":
            self.engine = replace(self.engine, compiled=True)
            if not apart:
                warnings.warn(
                    'strategy="sparse" has no rows to leave out: batch statistics of BatchNorm tie the samples '
                    "together, and the backward runs on all of them. detach_statistics=True unties them",
                    stacklevel=4,
                )
        return asked

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A move, perhaps to another kind of device: what suits it may be another engine."""
        super()._apply(fn, recurse)
        engine, precision, strategy = self._asked
        self.engine = choose(engine, precision, self.model, self.device, moved=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when it was built
            self.strategy = self._strategy(strategy)
        self.runner, self.graphs, self.piece = Runner(self), Graphs(self), Pieces(self)
        return self

    def _check(self, x: Tensor, logits: Tensor) -> None:
        found = "segmentation" if logits.dim() > 2 else "classification"
        if self.task not in ("any", found):
            raise ValueError(
                f"{type(self).__name__} is for {self.task}, and this model is for {found}: its logits are "
                f"{tuple(logits.shape)}. Tent, CoTTA, EATA and EATA-C take both"
            )
        if self.part is not None:
            sound = soundness(x, logits)
            self.part.sound = sound if self.part.sound is None else self.part.sound & sound
            return
        refuse_non_finite(x, logits, unit_range=self.unit_range and logits.dim() == 2)
        if not self._trusted:
            refuse_probabilities(logits)
            self._trusted = True
        if (
            len(x) == 1
            and not self._warned_of_one
            and self.statistics == "batch"
            and self.norm.layers
            and logits.dim() == 2
        ):
            self._warned_of_one = True
            warnings.warn(
                "a batch of one image: BatchNorm's statistics of a single image are poor. Gather a batch, or give "
                'statistics="source"',
                stacklevel=5,
            )

    def __repr__(self) -> str:
        """The call that makes this adapter."""
        return call_of(self, engine=True)

    def call(self) -> str:
        """The same, without what only says how its passes run."""
        return call_of(self, engine=False)


def _class_index(classes: Sequence[int] | None, device: torch.device) -> Tensor | None:
    if classes is None:
        return None
    if len(set(classes)) != len(classes) or len(classes) < 2 or min(classes) < 0:
        raise ValueError("classes= takes at least two distinct class indices, none negative")
    return torch.tensor(list(classes), device=device)
