"""A user's program under `mypy --strict` in `make lint`: public names have types, and wrong uses are seen."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import acclimate
from acclimate.functional import entropy


class MostCertain(acclimate.Selector):
    """A selector of the user's."""

    def forward(self, logits: Tensor) -> Tensor:
        """Return the weights."""
        return (entropy(logits) < 1).float()


def adapted(net: nn.Module, clean: Tensor, stream: Iterable[Tensor]) -> acclimate.Guard:
    """Adapt to a stream, and return the guard."""
    method = acclimate.EATA(net, source=clean, lr=1e-3, select=MostCertain() * acclimate.NonRedundant("auto"))
    model = acclimate.Guard(method, probe=clean)
    for x in stream:
        logits: Tensor = model(x)
        print(logits.argmax(1), method.last.kept)
    assert_type(method.snapshot(), acclimate.Snapshot)
    assert_type(method.last.updated, bool)
    assert_type(acclimate.EATAC.preset("resnet50", net, source=clean).uncertainty(clean), acclimate.Uncertainty)
    assert_type(acclimate.METHODS["eata"], type[acclimate.Adapter])
    return model


acclimate.Tent(nn.Linear(2, 2), optimizer=partial(torch.optim.Adam, lr=1e-4))
acclimate.Tent(nn.Linear(2, 2), parameters=None)  # the method chooses
acclimate.Tent(nn.Linear(2, 2), lr="fast")  # type: ignore[arg-type]
acclimate.EATA(nn.Linear(2, 2), betta=1.0)  # type: ignore[call-arg]
acclimate.Engine(precision="fp12")  # type: ignore[arg-type]
