"""Checks of a network's input and output, with errors that say what to do."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "DivergenceError",
    "check_images",
    "class_index",
    "no_such",
    "read_logits",
    "refuse_divergence",
    "refuse_half_precision",
    "refuse_nan_weights",
    "refuse_non_finite",
    "refuse_not_a_number",
    "refuse_probabilities",
    "soundness",
    "warn",
]

_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)
_SLACK = 0.01  # resizing may overshoot [0, 1] a little


class DivergenceError(ValueError):
    """The network returns NaN or infinity for finite images.

    >>> issubclass(DivergenceError, ValueError)
    True
    """


def check_images(x: object, device: torch.device, *, may_be_empty: bool = False) -> Tensor:
    """Return `x` if it is a batch of images on the device, else raise."""
    if not isinstance(x, Tensor):
        hint = ": of a pair (x, y) pass x alone, of a list of images pass torch.stack(images)"
        remedy = hint if isinstance(x, (tuple, list)) else ""
        raise TypeError(f"expected a batch of images as a torch.Tensor, got {type(x).__name__}{remedy}")
    if not x.is_floating_point():
        raise TypeError(f"expected floating-point images, got {x.dtype}: convert them, such as x.float() / 255")
    if x.dim() < 2:
        raise ValueError(f"expected a batch of images, got shape {tuple(x.shape)}: add the batch dimension")
    if x.numel() == 0 and not (may_be_empty and x[:0].shape == x.shape):
        raise ValueError(f"the batch is empty: shape {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"the images are on {x.device}, the model on {device}: move them with x.to({str(device)!r})")
    return x


def read_logits(output: object, x: Tensor) -> Tensor:
    """Return the logits in a network's output: the output, its `.logits` (transformers) or `["out"]` (torchvision)."""
    logits = output["out"] if isinstance(output, dict) and "out" in output else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__}, not logits: wrap it in a module that returns one tensor of "
            "shape (B, C) or (B, C, H, W)"
        )
    if not logits.is_floating_point() or logits.dim() not in (2, 4) or logits.shape[1] < 2:
        raise ValueError(
            f"the model's output is not logits: got {logits.dtype} of shape {tuple(logits.shape)}, expected floating "
            "point of shape (B, C) or (B, C, H, W) with at least two classes"
        )
    if logits.shape[0] != x.shape[0]:
        raise ValueError(
            f"{x.shape[0]} images gave {logits.shape[0]} rows of logits, for input of shape {tuple(x.shape)}: is the "
            "batch dimension missing or merged with another?"
        )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def soundness(x: Tensor, logits: Tensor | None = None) -> Tensor:
    """Return one flag for the input and one for the output, true if finite, without synchronising the device."""
    return torch.stack([t.isfinite().all() for t in (x, logits) if t is not None])


def refuse_non_finite(x: Tensor, logits: Tensor | None = None, *, unit_range: bool = False) -> None:
    """Raise for NaN or infinity in the input or output, and for images outside [0, 1] if `unit_range`.

    Synchronises the device once.
    """
    sound = soundness(x, logits)
    if unit_range:
        sound = torch.cat([sound, torch.stack([(x > -_SLACK).all(), (x < 1 + _SLACK).all()])])
    flags = sound.tolist()
    if not flags[0]:
        bad = int((~x.isfinite().flatten(1).all(1)).sum())
        raise ValueError(f"NaN or infinity in {bad} of {len(x)} images: the batch was rejected and nothing was learned")
    if logits is not None and not flags[1]:
        raise DivergenceError(
            "the model returned NaN or infinite logits for finite images: the batch was rejected and nothing was "
            "learned. reset() restores the source network"
        )
    if not all(flags):
        low, high = float(x.min()), float(x.max())
        remedy = (
            "divide them by 255"
            if low >= 0 and high > 10
            else "they look normalised. Pass images without normalisation, and normalise inside the network with "
            "acclimate.Normalised(net, mean=…, std=…)"
        )
        raise ValueError(f"augmentations need images in [0, 1], got values in [{low:.3g}, {high:.3g}]: {remedy}")


def refuse_divergence(logits: Tensor) -> None:
    """Raise if the network returns NaN or infinity after an update."""
    if not bool(logits.isfinite().all()):
        raise DivergenceError(
            "the network returns NaN or infinite logits after its update: it has diverged. reset() restores the source "
            "network; a smaller lr may prevent it"
        )


def refuse_half_precision(method: str, types: Iterable[torch.dtype]) -> None:
    """Raise if parameters that adapt have half precision, in which most updates are too small to change them."""
    for dtype in types:
        if dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"{method}: parameters that adapt are {dtype}, in which most updates round to nothing. Keep the "
                f'network in single precision, net.float(), and let the engine compute in half: precision="bf16"'
            )


def refuse_nan_weights(method: str, parameters: Mapping[str, Tensor]) -> None:
    """Raise if a network has NaN in parameters that would adapt."""
    for name, value in parameters.items():
        if bool(value.isnan().any()):
            raise ValueError(f"{method}: the network has NaN in {name} before any adaptation: load its weights again")


def refuse_not_a_number(method: str, name: str, value: object) -> None:
    """Raise if a setting is NaN."""
    if isinstance(value, Real) and not isinstance(value, int) and math.isnan(value):
        raise ValueError(f"{method}: {name}={value} is not a number")


def warn(message: str) -> None:
    """Warn at the line of the user's code, outside of this package and of torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def refuse_probabilities(logits: Tensor) -> None:
    """Raise if the model seems to end in a softmax."""
    if bool((logits >= 0).all()) and bool(((logits.sum(1) - 1).abs() < 1e-2).all()):
        raise ValueError(
            "the model's output looks like probabilities (every row sums to one): return logits, without the softmax"
        )


def no_such(what: str, name: object, known: Iterable[str], most: int = 40) -> str:
    """Return the message about an unknown name: the nearest known one, and all of them unless they are many."""
    every = [*known]
    near = get_close_matches(str(name), every, n=1)
    listed = f"choose from {', '.join(every)}" if len(every) <= most else ""
    if near:
        listed = f"did you mean {near[0]}?" + (listed and f" Otherwise {listed}")
    return f"no {what} {name!r}" + (listed and f": {listed}")


def class_index(classes: Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Return class indices as a tensor; raise if they are not distinct."""
    if classes is None:
        return None
    if len(set(classes)) != len(classes) or len(classes) < 2 or min(classes) < 0:
        raise ValueError(f"classes= takes at least two distinct class indices, none negative, got {list(classes)}")
    return torch.tensor(list(classes), device=device)
