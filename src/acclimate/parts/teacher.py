"""A teacher: a moving average of the student's parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["Teacher"]


class Teacher(nn.Module):
    """θ_t ← m·θ_t + (1 − m)·θ, an exponential moving average of the student's adapted parameters.

    The teacher runs as the student's network with other parameters. It keeps one copy of the adapted parameters, made
    at the first step, and no second network.
    """

    def __init__(self, names: tuple[str, ...], momentum: float) -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"a teacher's momentum must be in [0, 1], not {momentum}")
        self.momentum = momentum
        self._keys = {name: name.replace(".", "/") for name in names}  # a buffer's name has no dot
        for key in self._keys.values():
            self.register_buffer(key, None)

    def of(self, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return θ_t by name; before the first step, the `source` that student and teacher start from."""
        held = {name: self._buffers[key] for name, key in self._keys.items()}
        return {name: source[name] if average is None else average for name, average in held.items()}

    @torch.no_grad()
    def follow(self, student: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
        """Move the average one step towards the student."""
        averages = self.of(source)
        for name, key in self._keys.items():
            if self._buffers[key] is None:
                averages[name] = self._buffers[key] = source[name].clone()
        pairs = [(averages[name], student[name].detach()) for name in self._keys]
        torch._foreach_mul_([mine for mine, _ in pairs], self.momentum)
        torch._foreach_add_([mine for mine, _ in pairs], [theirs for _, theirs in pairs], alpha=1 - self.momentum)
