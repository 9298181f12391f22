"""Compile in a thread, so that nobody waits: passes run eagerly until the compiled ones are there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .compiler import Compiler

__all__ = ["Background"]


class Background:
    """Runs a function that returns compiled passes in a thread of its own.

    The function must work on a copy of the network: tracing replaces the parameters of its modules.
    """

    def __init__(self, compile_copy: Callable[[], Compiler]) -> None:
        self._compiler: Compiler | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(compile_copy,), name="acclimate-compile", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> Compiler | None:
        """Wait for the thread; return the compiled passes, or None after an `error`."""
        self._thread.join()
        return self._compiler

    def _run(self, compile_copy: Callable[[], Compiler]) -> None:
        try:
            import torch._dynamo.config  # takes a second to import

            # Tracing sets a flag of the whole process. Other threads may run compiled code meanwhile.
            torch._dynamo.config.error_on_nested_fx_trace = False
            self._compiler = compile_copy()
        except BaseException as error:
            self.error = error
