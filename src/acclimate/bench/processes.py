"""A pool of processes on this machine. A worker that is killed is replaced, and only its own job starts again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import torch

from .workers import Event, J, OnEvent, Outcome, R, Report, Workers, carried_out, lost, packed, unpacked

__all__ = ["Processes", "start_process"]

_SPAWN = multiprocessing.get_context("spawn")


class Processes(Workers):
    """Jobs run in `count` processes of this machine, which share its cores."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(
        self, work: Callable[[J, Report], R], jobs: Sequence[J], on_event: OnEvent
    ) -> Generator[Outcome[R], None, None]:
        """Yield the outcomes as the jobs end."""
        waiting = deque((index, 1) for index in range(len(jobs)))
        threads = max(1, (os.cpu_count() or 1) // self.count)
        idle = [_Worker(threads) for _ in range(min(self.count, len(jobs)))]
        busy: dict[Connection, tuple[_Worker, int, int]] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    worker, (index, attempt) = idle.pop(), waiting.popleft()
                    busy[worker.connection] = worker, index, attempt
                    worker.give(packed(work, jobs[index]))
                    on_event(Event("started", index))
                for connection in wait([*busy]):
                    worker, index, attempt = busy[connection]  # type: ignore[index]
                    message = worker.message()
                    if isinstance(message, tuple):
                        on_event(Event("progress", index, message[1], message[0]))
                        continue
                    del busy[connection]  # type: ignore[arg-type]
                    idle.append(worker if message is not None else _Worker(threads))
                    if message is not None:
                        yield unpacked(index, message)
                    elif (outcome := lost(index, attempt, worker.stop(5), on_event)) is not None:
                        yield outcome
                    else:
                        waiting.append((index, attempt + 1))
        finally:
            for worker in [*idle, *(worker for worker, *_ in busy.values())]:
                worker.stop()


class _Worker:
    """A process that carries out one job after another."""

    def __init__(self, threads: int) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, threads))
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def give(self, content: bytes) -> None:
        """Start a job."""
        with suppress(OSError):  # it was killed while it was idle; `message` tells so
            self.connection.send(content)

    def message(self) -> bytes | tuple[int, str] | None:
        """Return the outcome or the progress of the job; None if the process is gone."""
        try:
            received: bytes | tuple[int, str] = self.connection.recv()
        except (EOFError, OSError):
            return None
        return received

    def stop(self, patience: float = 0.2) -> str:
        """End the process, and return how it ended. What it has written is whole; a job that is stopped resumes."""
        self.connection.close()
        self.process.join(patience)
        self.process.terminate()
        self.process.join()
        code = self.process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(connection: Connection, threads: int) -> None:
    start_process(threads)
    with suppress(EOFError, OSError):  # the driver has gone, or wants no more
        while True:
            content = connection.recv()
            connection.send(carried_out(content, lambda done, note: connection.send((done, note))))


def start_process(threads: int) -> None:
    """Limit a process to its share of threads, and its compiler to one; let the parent react to Ctrl-C.

    If the parent is killed, the process ends as well: what it has written is whole, and nobody waits for the rest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
