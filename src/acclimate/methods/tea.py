"""TEA: the classifier as an energy-based model of its images (Yuan et al., 2024)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.optim import Adam
from typing_extensions import Unpack

from ..checks import refuse_divergence, soundness
from ..core.adapter import Adapter
from ..core.options import Options, Presets
from ..functional import free_energy
from ..parts.image_buffer import ImageBuffer
from ..parts.randomness import draw, on_device

__all__ = ["TEA"]


class TEA(Adapter):
    """min_θ mean g(fake) − mean g(real), with g(x) = log Σ exp f(x): contrastive divergence. Predicts after the step.

    Fake images are sampled from the model itself: images from a replay buffer take `steps` steps of Langevin dynamics,
    x ← x + step_size·∇g(x) + noise·N(0, 1), and are written back.

    Paper: https://arxiv.org/abs/2311.14402

    >>> import acclimate, torch
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 3))
    >>> model = acclimate.TEA(net, steps=2)
    >>> model(torch.rand(8, 3, 8, 8)).shape
    torch.Size([8, 3])

    Args:
        model: a classifier.
        steps: the number of steps of Langevin dynamics.
        step_size: the size of these steps.
        noise: the standard deviation of their noise.
        buffer: how many images are kept for replay. Memory is allocated as they are sampled, on the model's device and
            in `storage`: in half precision 10,000 images take 3.0 GB at 3×224×224 and 61 MB at 3×32×32.
            `replay.nbytes` is what is in use.
        renewal: the probability that a sampled image starts from noise.
        storage: the type that images are stored in.
        options: what every adapter takes, such as `lr` and `engine`: see `Adapter`.
    """

    cost = (23, 22)
    answers_first = False
    set_once = ("seed", "buffer", "storage")
    task = "classification"
    presets: ClassVar[Presets] = {
        "resnet50": {"lr": 2.5e-4},
        "vit-base": {"lr": 5e-3},
        "cifar-resnet": {"optimizer": partial(Adam, lr=1e-3)},
        "cifar-vit": {"optimizer": partial(Adam, lr=1e-4)},
    }

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
            raise ValueError(f"TEA: steps={steps} must not be negative, and renewal={renewal} must lie in [0, 1]")
        if not storage.is_floating_point:
            raise ValueError(f"TEA: storage={storage}; expected a floating-point type such as torch.float16")
        self.steps, self.step_size, self.noise = steps, step_size, noise
        self.buffer, self.renewal, self.storage = buffer, renewal, storage
        self.replay = ImageBuffer(buffer, storage)

    def adapt(self, x: Tensor) -> Tensor:
        """Learn to separate the batch from fake images, then predict."""
        self.refuse_non_finite(x)
        fake, places = self.replay.sample(x, self.renewal, self.generator, self.step.share)
        fake = self.captured(self._langevin, fake, generator=on_device(self.generator, x.device))
        g_real = free_energy(self.predict(x).rows())
        z_fake = self.traced(fake)
        sound = self.world.all(soundness(fake, z_fake))
        self.update(sound=sound, real=-self.world.mean(g_real), fake=self.world.mean(free_energy(z_fake)))
        if bool(sound):
            self.replay.write(fake, places, self.world)
        with torch.no_grad():
            logits = self.logits(x)
        with self.world.together():
            refuse_divergence(logits)
        return logits

    def _langevin(self, x: Tensor, generator: Generator) -> Tensor:
        with self.learning(parameters=False):
            for _ in range(self.steps):
                x = x.detach().requires_grad_()
                (slope,) = self.gradients(free_energy(self.traced(x)).sum(), of=[x])
                noise = draw(torch.randn, x, generator, self.step.share)
                x = x + self.step_size * slope + self.noise * noise
        return x.detach()
