"""Start the command line. Importing torch takes seconds, and Ctrl-C is one line then, too.

This is not part of the package `acclimate`, because importing any part of a package imports the whole of it first.
"""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    before = signal.signal(signal.SIGINT, _stop)  # libraries swallow an interrupt while they are imported
    from acclimate.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _stop(*_: object) -> None:
    """Exit at once: nothing has begun."""
    os.write(2, b"stopped before it began\n")
    os._exit(130)
