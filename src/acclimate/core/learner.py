"""How an adapter learns: gradients of the adapted parameters alone, and steps by them.

self.update(when=kept.any, entropy=…, fisher=…)      # one step on the sum of the terms
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from ..parts.optimizers import can_wait, only_where
from .record import Step
from .state import copy_all
from .stateful import Stateful

if TYPE_CHECKING:
    from ..engine import Part, Runner

__all__ = ["Learner"]


class Learner(Stateful, ABC):
    """A network some of whose parameters learn; all else about them stays as the user left it."""

    frozen: dict[str, Parameter]
    step: Step
    runner: Runner
    part: Part | None

    @abstractmethod
    def normalising(self, size: int) -> AbstractContextManager[None]:
        """How BatchNorm normalises a batch of `size`."""

    def update(self, *, when: bool | Tensor = True, **terms: Tensor) -> None:
        """One optimizer step on the sum of the loss's terms, `when` there is anything to learn from."""
        if (when := self._foreseen(when)) is not False:
            self._step(self.gradients(torch.stack([*terms.values()]).sum()), when, terms)

    def gradients(self, loss: Tensor, *, again: bool = False) -> list[Tensor]:
        """∂loss/∂θ of the adapted parameters; nought where one is not used. With `again`, the graph stays."""
        if self.part is not None:
            return self.runner.gradients(loss, self.part)
        with self._own_gradients():
            self._backward(loss, again=again)
            return [p.grad for p in self.adapted if p.grad is not None]

    def descend(self, gradients: Sequence[Tensor | None], *, when: bool | Tensor = True, **terms: Tensor) -> None:
        """One optimizer step by given gradients, those of the loss's terms, `when` there is anything to learn from.

        A parameter without one stays as it is.
        """
        if (when := self._foreseen(when)) is not False:
            self._step(gradients, when, terms)

    def _step(self, gradients: Sequence[Tensor | None], when: bool | Tensor, terms: Mapping[str, Tensor]) -> None:
        if self.optimizer is None:
            raise TypeError(f"{type(self).__name__} was built without parameters to adapt")
        with self._own_gradients():
            for p, gradient in zip(self.adapted, gradients, strict=True):
                p.grad = gradient
            with only_where(when, self.optimizer):
                self.optimizer.step()
        self.step.taken = when
        self.step.losses = {name: term.detach() for name, term in terms.items()}

    def _foreseen(self, when: bool | Tensor) -> bool | Tensor:
        """A condition on the device is left there where the optimizer can mind it itself."""
        if self.part is not None:
            return self.part.holds(when)
        if isinstance(when, Tensor) and (when.device.type == "cpu" or not self.can_wait):
            return bool(when)
        return when

    @property
    def can_wait(self) -> bool:
        """Whether a condition of an update may stay on the device."""
        return self.optimizer is None or can_wait(self.optimizer)

    def _backward(self, loss: Tensor, *, again: bool = False) -> None:
        if not loss.requires_grad:
            raise RuntimeError(
                "the logits carry no gradient: does the model's forward use torch.no_grad() or detach()?"
            )
        with self.normalising(self.step.size):  # activation checkpoints run the forward again in here
            loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        for p in self.adapted:
            if p.grad is None:  # in a branch that was left out: momentum goes on as if its gradient were nought
                p.grad = torch.zeros_like(p)

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """`.grad` of the adapted parameters is ours inside, and the user's again after."""
        found = [p.grad for p in self.adapted]
        for p in self.adapted:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in zip(self.adapted, found, strict=True):
                p.grad = grad

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """No gradient for the parameters, for passes that differentiate by the images alone."""
        for p in self.adapted:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self.adapted:
                p.requires_grad_(True)

    @contextmanager
    def episode(self) -> Iterator[None]:
        """What is learned inside is forgotten at its end: parameters and optimizer are as before."""
        found = [p.detach().clone() for p in self.adapted]
        try:
            yield
        finally:
            if self.optimizer is not None:
                self.optimizer.state.clear()
            copy_all([p.detach() for p in self.adapted], found)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Gradients for the adapted parameters and for no other, whatever mode the caller is in."""
        found = [p for p in self.frozen.values() if p.requires_grad], [p for p in self.adapted if not p.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            for change in found:
                for p in change:
                    p.requires_grad_(not p.requires_grad)
            try:
                yield
            finally:
                for change in found:
                    for p in change:
                        p.requires_grad_(not p.requires_grad)
