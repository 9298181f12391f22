"""A callback for Lightning: adapt a module's network while it is tested or predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..extras import extra

with extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class Adapt(Callback):
    """Adapt the network at `path` of a Lightning module, such as `"model.backbone"`, in `trainer.test` and `.predict`.

    `method` makes an adapter from a network that returns logits: `partial(acclimate.EATA, source=clean_batches)`.
    Afterwards the adapter is removed; the adapted parameters stay. A second call continues from there, unless it loads
    a checkpoint. `adapter.reset()` undoes what was learned, `adapter.save(file)` keeps it.

    >>> import acclimate, lightning, torch
    >>> class Classifier(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    ...     def predict_step(self, batch):
    ...         return self.net(batch)
    >>> adapt = Adapt("net", acclimate.Tent)
    >>> trainer = lightning.Trainer(callbacks=[adapt], accelerator="cpu", logger=False, enable_progress_bar=False)
    >>> logits = trainer.predict(Classifier(), torch.rand(2, 8, 4))  # two batches
    >>> adapt.adapter.last.updated
    True
    """

    def __init__(self, path: str, method: Callable[[nn.Module], nn.Module]) -> None:
        self.path, self.method = path, method
        self.adapter: Any = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the adapter in the network's place, after Lightning has loaded a checkpoint."""
        network = pl_module.get_submodule(self.path)
        if self.adapter is None or self.adapter.model is not network or trainer.ckpt_path:
            with torch.inference_mode(False):
                self.adapter = self.method(network)
        pl_module.set_submodule(self.path, self.adapter)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Put the network back."""
        if self.adapter is not None and pl_module.get_submodule(self.path) is self.adapter:
            network: Any = self.adapter.model
            pl_module.set_submodule(self.path, network)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Put the network back."""
        self.on_test_end(trainer, pl_module)

    on_predict_start, on_predict_end = on_test_start, on_test_end
