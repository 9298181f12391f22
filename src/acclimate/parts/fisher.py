"""The Fisher regulariser against forgetting: the importance of each parameter, and a pull to its source value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

from ..checks import check_images, refuse_non_finite
from .world import World

__all__ = ["Fisher", "Images", "batch_importance", "image_batches", "refuse_beta", "refuse_fisher", "sample_importance"]

Images: TypeAlias = Tensor | Iterable[Tensor | Sequence[Tensor]]
"""Images without labels: one tensor, or batches of them. Labels that a DataLoader yields with them are ignored."""


Result = TypeVar("Result")


class Learner(Protocol):
    """What the estimate needs from an adapter."""

    @property
    def device(self) -> torch.device:
        """The device of the network."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the adapted parameters."""

    @property
    def adapted(self) -> Sequence[Parameter]:
        """The adapted parameters."""

    @property
    def coupled(self) -> bool:
        """Whether the samples of a batch depend on each other."""

    @property
    def world(self) -> World:
        """The ranks that share the work."""

    def apart(self) -> AbstractContextManager[None]:
        """Let each rank run passes of its own inside."""

    def eagerly(self, call: Callable[[], Result]) -> Result:
        """Call a function whose passes run eagerly in the network's own precision, with gradients on."""

    def logits(self, x: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run one pass."""

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of the adapted parameters."""


class Fisher(nn.Module):
    """R(θ, θ°) = Σ ω·(θ − θ°)² (Eq. 7). Without an importance ω it is zero.

    >>> fisher = Fisher(torch.tensor([2.0, 3.0]), torch.tensor([5.0, 5.0]))
    >>> fisher([nn.Parameter(torch.tensor([6.0, 3.0]))])  # 2·1² + 3·2²
    tensor(14., grad_fn=<SumBackward0>)
    """

    importance: Tensor | None
    source: Tensor | None

    def __init__(self, importance: Tensor | None = None, source: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("importance", importance)
        self.register_buffer("source", source)

    @classmethod
    def estimate(cls, adapter: Learner, images: Images, how: Literal["batch", "sample"] = "batch") -> Fisher:
        """Estimate the importance from unlabelled in-distribution images, with the network in adaptation mode.

        `"batch"` squares the gradient of each batch's mean loss, as the released EATA does. `"sample"` is Eq. (9) as
        written, which is larger by about the batch size, so that β must be smaller. Several ranks, which are given the
        same images, take turns with the batches.
        """
        if how not in _IMPORTANCE:
            raise ValueError(f"fisher={how!r}: expected one of {', '.join(map(repr, _IMPORTANCE))}")
        world = adapter.world
        with world.together(), adapter.apart():
            batches = world.turns(_checked(images, adapter.device))
            squares, count = adapter.eagerly(lambda: _IMPORTANCE[how](adapter, batches))
        importance = world.ratio(squares, count)
        if not bool(importance.isfinite().all()):
            raise ValueError("the source images gave NaN or infinite gradients: no importance could be estimated")
        return cls(importance, _vector(adapter.adapted))

    @classmethod
    def weighted(cls, beta: float, adapter: Learner, images: Images | None, how: Literal["batch", "sample"]) -> Fisher:
        """Return what a method with weight β needs: an estimate, or an empty regulariser if β = 0."""
        if beta == 0:
            return cls()
        if images is None:
            raise ValueError(
                f"{type(adapter).__name__}: beta={beta:g} pulls towards the source, which needs unlabelled "
                "in-distribution images. Give source=batches (acclimate.collect_in_distribution finds some in a "
                "stream), or beta=0 for no regulariser"
            )
        return cls.estimate(adapter, images, how)

    def forward(self, parameters: Iterable[Parameter]) -> Tensor:
        """Eq. (7), over all parameters in one vector."""
        theta = parameters_to_vector(parameters)
        if self.importance is None or self.source is None:
            return theta.new_zeros(())
        return (self.importance * (theta - self.source).square()).sum()


def refuse_beta(method: nn.Module, beta: float) -> None:
    """Raise if β is negative, or pulls towards a source whose importance was not estimated."""
    if isinstance(beta, (int, float)) and beta < 0:
        raise ValueError(f"{type(method).__name__}: beta={beta} is negative")
    regulariser = getattr(method, "regulariser", None)  # none yet while a method is being built
    if regulariser is not None and regulariser.importance is None and beta != 0:
        raise ValueError(
            f"{type(method).__name__} was built with beta=0, so that it has no Fisher importance: build another one "
            f"with source= and beta={beta}"
        )


def refuse_fisher(method: str, arguments: Mapping[str, object]) -> None:
    """Raise if arguments of the regulariser are given to a method without one."""
    if given := [name for name in ("source", "beta", "fisher") if name in arguments]:
        raise TypeError(f"{method} has no Fisher regulariser, so it takes no {given[0]}=; EATA and EATAC do")


def pseudo_label_loss(logits: Tensor) -> Tensor:
    """Return the cross-entropy with the network's own prediction per sample: (B,); a mean over a segmenter's pixels."""
    losses = F.cross_entropy(logits, logits.detach().argmax(1), reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def batch_importance(adapter: Learner, batches: Iterable[Tensor]) -> tuple[Tensor, int]:
    """ω = the mean over batches of the squared gradient of the batch's mean loss: return the sum and the number.

    The released EATA computes this, and its β = 2,000 belongs to it.
    """
    squares, count = torch.zeros_like(_vector(adapter.adapted)), 0
    for x in batches:
        gradient = adapter.gradients(pseudo_label_loss(adapter.logits(x)).mean())
        squares += _vector(gradient).square()
        count += 1
    return squares, count


def sample_importance(adapter: Learner, batches: Iterable[Tensor]) -> tuple[Tensor, int]:
    """ω = 1/Q Σ_q (∂ loss(x_q) / ∂θ)², Eq. (9) as written: return the sum and Q.

    Where samples do not depend on their batch, all are differentiated at once. With BatchNorm on batch statistics each
    sample's loss is differentiated through its whole batch.
    """
    gradients = _coupled_gradients if adapter.coupled else _independent_gradients
    squares, count = torch.zeros_like(_vector(adapter.adapted)), 0
    for x in batches:
        for rows in gradients(adapter, x):
            squares += rows.square().sum(0)
        count += len(x)
    return squares, count


def _independent_gradients(adapter: Learner, x: Tensor) -> Iterator[Tensor]:
    def loss(theta: dict[str, Tensor], image: Tensor) -> Tensor:
        return pseudo_label_loss(adapter.logits(image.unsqueeze(0), theta)).squeeze(0)

    theta = {name: p.detach() for name, p in zip(adapter.names, adapter.adapted, strict=True)}
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no batching rule
        rows = vmap(grad(loss), in_dims=(None, 0))(theta, x)
    yield torch.cat([rows[name].flatten(1) for name in theta], 1)


def _coupled_gradients(adapter: Learner, x: Tensor, chunk: int = 16) -> Iterator[Tensor]:
    losses = pseudo_label_loss(adapter.logits(x))
    for one in torch.split(torch.eye(len(x), device=losses.device, dtype=losses.dtype), chunk):
        rows = torch.autograd.grad(
            losses,
            adapter.adapted,
            one,
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        yield torch.cat([row.flatten(1) for row in rows], 1)


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector, in at least single precision: squares of small half-precision gradients would vanish."""
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return flat if flat.dtype == torch.float64 else flat.float()


def _checked(images: Images, device: torch.device) -> Iterator[Tensor]:
    empty = True
    for batch in image_batches(images):
        x = check_images(batch.to(device), device)
        refuse_non_finite(x)
        empty = False
        yield x
    if empty:
        raise ValueError("source= holds no image: the Fisher regulariser needs a few hundred in-distribution images")


_IMPORTANCE = {"batch": batch_importance, "sample": sample_importance}


def image_batches(images: Images, size: int = 64) -> Iterator[Tensor]:
    """Yield batches of images from a tensor, a list of batches or a DataLoader."""
    if isinstance(images, Tensor):
        yield from torch.split(images, size)
        return
    for batch in images:
        x = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
        if not isinstance(x, Tensor) or x.dim() < 2:
            what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"expected batches of images, as tensors or (images, …) tuples; got {what}")
        yield x
