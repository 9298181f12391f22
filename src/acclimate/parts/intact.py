"""A network that is as it was found after an error or an interrupt, wherever that strikes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Generator, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _contextlib

from .copying import copy_all
from .wrappers import calls, is_compiled

__all__ = ["Intact"]

_PACKAGE = __name__.split(".")[0]
_FILES = (str(Path(__file__).parents[1]), contextlib.__file__, _contextlib.__file__)
"""The code that opens and closes contexts."""


class Intact:
    """Restores a network's flags, hooks, buffers and gradients where a block raises.

    The contexts inside the block restore what they change. But an interrupt may strike between a change and the `try`
    that undoes it, or while it is being undone.

    >>> net = nn.Dropout()
    >>> with contextlib.suppress(KeyboardInterrupt), Intact(net)(torch.Generator()):
    ...     net.training = False
    ...     raise KeyboardInterrupt
    >>> net.training
    True
    """

    def __init__(self, network: nn.Module) -> None:
        self.modules = tuple(network.modules())
        self.layers = tuple(m for m in self.modules if isinstance(m, _BatchNorm))
        self.parameters = tuple(network.parameters())
        self.owned = [(m._parameters, dict(m._parameters)) for m in self.modules if m._parameters]
        self.owned += [(vars(m), calls(m)) for m in self.modules if is_compiled(m)]

    @contextmanager
    def __call__(self, generator: Generator, values: Sequence[Parameter] = ()) -> Iterator[None]:
        """Restore them, the generator, and the values of some parameters if the block raises."""
        training = [module.training for module in self.modules]
        hooks = [{*m._forward_hooks, *m._forward_pre_hooks} if _hooked(m) else () for m in self.modules]
        tracking = [(layer.track_running_stats, dict(layer._buffers)) for layer in self.layers]
        gradients = [(p.requires_grad, p.grad) for p in self.parameters]
        random, before = generator.get_state(), [p.detach().clone() for p in values]
        try:
            yield
        except BaseException as error:
            _finish(error)
            for place, own in self.owned:
                place.update(own)  # others may have run in their place
            for module, flag, known in zip(self.modules, training, hooks, strict=True):
                module.training = flag
                for now in (module._forward_hooks, module._forward_pre_hooks):
                    for key in [key for key, hook in now.items() if key not in known and _ours(hook)]:
                        del now[key]  # those of other libraries stay
                        module._forward_pre_hooks_with_kwargs.pop(key, None)
            for layer, (flag, buffers) in zip(self.layers, tracking, strict=True):
                layer.track_running_stats = flag
                layer._buffers.update(buffers)
            for p, (flag, gradient) in zip(self.parameters, gradients, strict=True):
                p.requires_grad_(flag)
                p.grad = gradient
            copy_all([p.detach() for p in values], before)
            generator.set_state(random)
            raise


def _finish(error: BaseException) -> None:
    """End the contexts that an interrupt has left open.

    Otherwise they would end when they are collected, perhaps in the middle of a later call, and undo its work. Frames
    of other code keep their variables, for debuggers.
    """
    traced = error.__traceback__
    while traced is not None:
        if traced.tb_frame.f_code.co_filename.startswith(_FILES):
            with suppress(RuntimeError):  # frames that still run
                traced.tb_frame.clear()
        traced = traced.tb_next


def _ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).split(".")[0] == _PACKAGE


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
