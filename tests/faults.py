"""A bench of bad luck: a fault strikes at the n-th operation or line of a call, and nothing may be lost.

`python -m benchmarks.bad_luck` runs these trials for an hour, `test_bad_luck.py` some of them.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from cases import CASES
from networks import images, make, stream
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import stateless
from torch.utils import _contextlib
from torch.utils._python_dispatch import TorchDispatchMode

import acclimate
from acclimate import EATAC, Adapter, StateError
from acclimate.engine import Live

Act = Callable[[], None]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, such as those about dropped steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Faults ---------------------------------------------------------------------------------------------------------------


class BadLuckError(RuntimeError):
    """What a fault raises, as a failing kernel would."""


def fail() -> None:
    raise BadLuckError


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class AtOperation(TorchDispatchMode):
    """Strike before the n-th tensor operation inside the block."""

    def __init__(self, at: int, act: Act) -> None:
        super().__init__()
        self.count, self.at, self.act = 0, at, act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            self.act()
        return func(*args, **(kwargs or {}))


class AtLine:
    """Strike before the n-th line of the package, or of the context managers that it uses.

    Python handles no interrupt between the end of a `with` and the release of a lock of its own, but a tracer sees a
    line there, so those lines, which are all in `sharing.py`, are left out. Real interrupts test them.
    """

    FILES = (str(Path(acclimate.__file__).parent), contextlib.__file__, stateless.__file__, _contextlib.__file__)

    def __init__(self, at: int, act: Act) -> None:
        self.count, self.at, self.act = 0, at, act

    def __enter__(self) -> AtLine:
        self._found = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._found)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith(self.FILES) and not file.endswith("sharing.py") else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.act()
        return self._line


PLACES: dict[str, Callable[[int, Act], Any]] = {"operation": AtOperation, "line": AtLine}
ERRORS: dict[str, Act] = {"error": fail, "interrupt": interrupt}


def struck(work: Callable[[], object], place: str, at: int, act: Act) -> int:
    """Call a function and let a fault strike; return the number of operations or lines, if it survives."""
    with PLACES[place](at, act) as fault:
        work()
    return int(fault.count)


def in_child(work: Callable[[], object], seconds: float = 60) -> bool:
    """Call a function in a process of its own; return whether that was killed, or had to be because it hung."""
    with quiet():  # Python warns of forks where threads run
        pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while not (status := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return os.WIFSIGNALED(status[1])


class Faulty(nn.Module):
    """A network whose n-th forward or backward pass gives NaN."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.left = {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        return NotANumber.apply(self.net(x), self)

    def strikes(self, which: str) -> bool:
        self.left[which] -= 1
        return self.left[which] == 0


class NotANumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, network: Faulty) -> Tensor:
        ctx.network = network
        return logits * (torch.nan if network.strikes("forward") else 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (torch.nan if ctx.network.strikes("backward") else 1.0), None


# What must hold -------------------------------------------------------------------------------------------------------


def appearance(net: nn.Module) -> list[object]:
    """Return all of a network that a call must leave as it is, whatever happens: flags, hooks, buffers, gradients."""
    modules = [*net.modules()]
    norms = [m for m in modules if isinstance(m, _BatchNorm)]
    return [
        [m.training for m in modules],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        [(m.track_running_stats, id(m.running_mean), id(m.running_var)) for m in norms],
        [(id(p), p.requires_grad, p.grad) for p in net.parameters()],
        [buffer.tolist() for buffer in net.buffers()],
    ]


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Subject:
    """One adapter that faults are tried on, and what it does without them."""

    KEEPS = ("predict_only", "uncertainty", "snapshot", "save", "build", "copy")
    """Operations that leave the adapter as it is, even where they are interrupted."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        family = "seg" if name == "dat" else "bn"
        small = {"views": 2} if name in ("memo", "cotta") else {}
        arguments = {"blocks": "net.blocks.*"} if "blocks" in CASES[name].arguments() else {}
        self.network = Faulty(make(family))
        self.build = partial(CASES[name].make, self.network, **small, **arguments)
        self.adapter: Adapter = self.build()
        self.x = images(4)
        self.source = weights(self.network)
        self.before = appearance(self.network)
        for x in stream(2, 4):
            self.adapter(x)
        self.state = self.adapter.snapshot()
        self.logits = self.adapter(self.x)
        self.after = self.adapter.snapshot()
        self.adapter.restore(self.state)
        self.path = folder / f"{name}.safetensors"

        self.operations: dict[str, Callable[[], object]] = {
            "forward": partial(self.adapter, self.x),
            "predict_only": partial(self.adapter.predict_only, self.x),
            "snapshot": self.adapter.snapshot,
            "restore": partial(self.adapter.restore, self.after),
            "reset": self.adapter.reset,
            "save": partial(self.adapter.save, self.path),
            "load": partial(self.adapter.load, self.path),
            "new_domain": self.adapter.new_domain,
            "build": self.build,
            "copy": partial(copy.deepcopy, self.adapter),
        }
        if isinstance(self.adapter, EATAC):
            self.operations["uncertainty"] = partial(self.adapter.uncertainty, self.x)

    def count(self, which: str, place: str) -> int:
        """Return how many operations or lines a call has."""
        self._start()
        return struck(self.operations[which], place, 0, fail)

    def strike(self, which: str, place: str, at: int, error: str) -> str:
        """Try one fault. Return what was lost, or nothing."""
        self._start()
        try:
            struck(self.operations[which], place, at, ERRORS[error])
        except (Exception, KeyboardInterrupt) as fault:
            if not isinstance(fault.__cause__ or fault, (BadLuckError, KeyboardInterrupt)):
                raise
        return self._lost(keeps=which in self.KEEPS)

    def strike_soon(self, which: str, seconds: float) -> str:
        """Interrupt a call by a real signal, which may strike between any two instructions. Return what was lost."""
        self._start()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, seconds)
                try:
                    self.operations[which]()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
        return self._lost(keeps=which in self.KEEPS)

    def strike_nan(self, which: str, at: int) -> str:
        """Let the n-th forward or backward pass of a step give NaN. Return what was lost, or nothing."""
        self._start()
        self.network.left[which] = at
        logits = None
        try:
            logits = self.adapter(self.x)
        except ValueError as error:  # DivergenceError is one
            if "NaN" not in str(error):
                raise
        self.network.left[which] = 0
        if logits is not None and not bool(logits.isfinite().all()):
            return "the logits"
        try:
            self.adapter.save(self.path)
        except StateError as error:
            return str(error)
        return self._lost()

    def strike_dead(self, place: str, at: int) -> str:
        """Kill a process that saves at one of its operations. Return what was lost, or nothing."""
        self._start()
        self.adapter.save(self.path)
        self.adapter.restore(self.after)
        in_child(partial(struck, self.operations["save"], place, at, kill))
        try:
            self.adapter.load(self.path)
        except (OSError, StateError) as error:
            return str(error)
        found = self.adapter.snapshot().tensors
        if not (equal(found, self.state.tensors) or equal(found, self.after.tensors)):
            return "the file is neither the old nor the new state"
        self.adapter.save(self.path)
        if left := [path.name for path in self.folder.iterdir() if path.name.startswith(f".{self.path.name}")]:
            return f"{left[0]} was left behind"
        return self._lost()

    def hammer(self, calls: int, seed: int) -> str:
        """Run random operations in four threads at a time. Return what was lost, or nothing."""
        self._start()
        chosen = random.Random(seed).choices([*self.operations.values()], k=calls)
        failed: list[BaseException] = []

        def work(own: list[Callable[[], object]]) -> None:
            try:
                for operation in own:
                    operation()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(chosen[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        if any(thread.is_alive() for thread in threads):
            return "a thread waits for ever"
        return repr(failed[0]) if failed else self._lost()

    def _start(self) -> None:
        self.adapter.restore(self.state)
        if not self.path.is_file():
            self.adapter.save(self.path)

    def _lost(self, *, keeps: bool = False) -> str:
        """Return what differs from a network and an adapter without a fault."""
        adapter = self.adapter
        if appearance(self.network) != self.before:
            return "flags, hooks or buffers of the network"
        if not all(_free(lock.own) for lock in adapter.runner.sharing._locks):
            return "the lock"
        if adapter.runner._eager or not isinstance(adapter.execution, Live):
            return "the engine"
        if keeps and not equal(adapter.snapshot().tensors, self.state.tensors):
            return "the state"
        if self.path.is_file():
            adapter.load(self.path)
        adapter.restore(self.state)
        if not torch.equal(adapter(self.x), self.logits):
            return "the next prediction"
        if not equal(adapter.snapshot().tensors, self.after.tensors):
            return "what the next batch teaches"
        adapter.reset()
        return "" if equal(weights(self.network), self.source) else "the source network"


def _free(lock: Any) -> bool:
    """Return whether another thread could take a lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]
