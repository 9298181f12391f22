"""A callback for Lightning: adapt a module's network while it is tested or predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

__all__ = ["Adapt"]


class Adapt(Callback):
    """Adapt a network of a Lightning module in `trainer.test` and `trainer.predict`; afterwards it is itself again.

    What was learned stays in the network's parameters, and a second call goes on from there. The adapter is in
    `adapter`: `adapter.reset()` undoes it, `adapter.save(path)` keeps it. Another network gets an adapter of its own.

    >>> import acclimate, lightning, torch
    >>> class Classifier(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    ...     def predict_step(self, batch):
    ...         return self.net(batch)
    >>> adapt = Adapt("net", acclimate.Tent)
    >>> adapt.path, adapt.adapter is None
    ('net', True)

    Args:
        path: where the network is in the module, such as `"net"` or `"model.backbone"`; it must return logits.
        method: what makes an adapter from the network, such as `partial(acclimate.EATA, source=clean_batches)`.
    """

    def __init__(self, path: str, method: Callable[[nn.Module], nn.Module]) -> None:
        self.path, self.method = path, method
        self.adapter: Any = None
        self._network: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Put the adapter in the network's place."""
        if stage in ("test", "predict"):
            network = pl_module.get_submodule(self.path)
            if self.adapter is None or self.adapter.model is not network:
                self.adapter = self.method(network)
            self._network = network
            pl_module.set_submodule(self.path, self.adapter)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Put the network back."""
        if self._network is not None:
            pl_module.set_submodule(self.path, self._network)
            self._network = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Put the network back."""
        self.teardown(trainer, pl_module, "")
