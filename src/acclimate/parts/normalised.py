"""A network with its input normalisation inside, so that it takes images in [0, 1] as augmentations need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checks import warn

__all__ = ["IMAGENET", "Normalised", "check_normalisation"]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation per channel that most ImageNet networks expect."""


class Normalised(nn.Module):
    """`model` applied to (x − mean)/std.

        net = Normalised(timm.create_model("resnet50", pretrained=True))  # timm's networks know their mean and std
        net = Normalised(torchvision.models.resnet50(weights="DEFAULT"), *IMAGENET)

    >>> net = Normalised(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), mean=(0.5,), std=(0.25,))
    >>> net(torch.rand(2, 1, 4, 4)).shape
    torch.Size([2, 3])

    Args:
        model: a network that expects normalised images.
        mean: subtracted from each channel; None takes it from timm's `pretrained_cfg`.
        std: divides each channel; None as above.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        own = getattr(model, "pretrained_cfg", None) or {}
        mean, std = own.get("mean") if mean is None else mean, own.get("std") if std is None else std
        if mean is None or std is None:
            raise ValueError(
                f"{type(model).__name__} does not say how its images are normalised: give mean= and std=, such as "
                "*acclimate.parts.normalised.IMAGENET"
            )
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(f"mean={tuple(mean)} and std={tuple(std)}: expected as many of each, and each std above 0")
        if {"mean", "std"} <= own.keys():
            check_normalisation(type(model).__name__, (mean, std), (own["mean"], own["std"]))
        self.model = model
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        for name, values in (("mean", mean), ("std", std)):
            constant = torch.tensor(values, dtype=like.dtype, device=like.device)
            self.register_buffer(name, constant.view(-1, 1, 1), persistent=False)
        self.training = model.training

    def forward(self, x: Tensor) -> object:
        """Return what the model returns."""
        return self.model((x - self.mean) / self.std)


def check_normalisation(
    name: str, given: tuple[Sequence[float], Sequence[float]], own: tuple[Sequence[float], Sequence[float]]
) -> None:
    """Warn once if a network is given another mean or standard deviation than its own configuration has."""
    mine, its = ([tuple(round(value, 4) for value in values) for values in each] for each in (given, own))
    text = f"{name} is used with mean {mine[0]} and std {mine[1]}, and its own are {its[0]} and {its[1]}"
    if mine == its or len(mine[0]) != len(its[0]) or text in _WARNED:  # other channels need other values
        return
    _WARNED.add(text)
    warn(f"{text}: unless you intend this, use its own, or it will be less accurate")


_WARNED: set[str] = set()
