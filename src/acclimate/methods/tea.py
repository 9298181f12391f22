"""TEA: the classifier as an energy-based model of the images it meets (Yuan et al., 2024)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from typing_extensions import Unpack

from ..checks import refuse_divergence, refuse_non_finite
from ..core.adapter import Adapter, Options
from ..functional import free_energy
from ..parts.image_buffer import Replay
from ..parts.randomness import on_device

__all__ = ["TEA"]


class TEA(Adapter):
    """min_θ mean g(fake) − mean g(real), with g(x) = log Σ exp f(x): contrastive divergence. Predicts after the step.

    The fakes are drawn from the model itself: images from a replay buffer take `steps` steps of Langevin dynamics,
    x ← x + step_size·∇g(x) + noise·N(0, 1), and go back into it.

    Args:
        model: a classifier.
        steps: of Langevin dynamics.
        step_size: theirs.
        noise: its standard deviation.
        buffer: how many images are kept for replay. They take up memory as they are drawn, on the model's device and in
            `storage`: in half precision 10,000 are 3.0 GB at 3×224×224 and 61 MB at 3×32×32. `replay.nbytes` tells.
        renewal: the probability that a drawn image starts anew from noise.
        storage: the type that images are kept in.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    cost = (23, 22)
    task = "classification"

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 20,
        step_size: float = 0.1,
        noise: float = 0.01,
        buffer: int = 10_000,
        renewal: float = 0.05,
        storage: torch.dtype = torch.float16,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if steps < 0 or not 0 <= renewal <= 1:
            raise ValueError(f"TEA: steps={steps} must not be negative, and renewal={renewal} lie in [0, 1]")
        if not storage.is_floating_point:
            raise ValueError(f"TEA: storage={storage}; expected a floating-point type such as torch.float16")
        self.steps, self.step_size, self.noise = steps, step_size, noise
        self.buffer, self.renewal, self.storage = buffer, renewal, storage
        self.replay = Replay(buffer, storage)

    def adapt(self, x: Tensor) -> Tensor:
        """Learn to tell the batch from what the model imagines, then predict."""
        refuse_non_finite(x)
        fake, places = self.replay.draw(x, self.renewal, self.generator)
        fake = self.piece(self._langevin, fake, generator=on_device(self.generator, x.device))
        real = self.predict(x).rows()
        imagined = self.traced(fake)
        refuse_non_finite(fake, imagined)
        self.update(real=-free_energy(real).mean(), fake=free_energy(imagined).mean())
        self.replay.write(fake, places)
        with torch.no_grad():
            logits = self.logits(x)
        refuse_divergence(logits)
        return logits

    def _langevin(self, x: Tensor, generator: Generator) -> Tensor:
        with self.fixed():
            for _ in range(self.steps):
                x = x.detach().requires_grad_()
                energy = free_energy(self.traced(x)).sum()
                with self.normalising(len(x)):  # activation checkpoints run the forward again in here
                    (slope,) = torch.autograd.grad(energy, x)
                drift = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
                x = x + self.step_size * slope + self.noise * drift
        return x.detach()
