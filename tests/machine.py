"""What tests of several processes share on one machine: ports, and a turn to start a Ray cluster."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom


def free_port() -> int:
    """Return a port that nobody listens on. It is below those that outgoing connections get, so that it stays free."""
    chance = SystemRandom()
    for _ in range(1000):
        port = chance.randrange(15_000, 32_000)
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no free port from 15000 to 32000")


@contextmanager
def only_ray_cluster() -> Iterator[None]:
    """Wait until no other test process has a Ray cluster: two at a time are too many for a small machine."""
    from filelock import FileLock

    user = getattr(os, "getuid", int)()
    with FileLock(Path(tempfile.gettempdir()) / f"acclimate-tests-ray-{user}.lock", timeout=3600):
        yield
