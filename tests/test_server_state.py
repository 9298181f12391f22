"""A server that is killed comes back with its last complete state, and goes on bit for bit as the library does."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from kills import BATCH, WORDS, Twin, X, ask, check, kill_and_restart
from serving import CONTROL, Forked

quiet = pytest.mark.filterwarnings("ignore:batch .*:UserWarning")  # the guard's first alarm


@quiet
def test_kills_lose_nothing(tmp_path: Path) -> None:
    found = kill_and_restart(tmp_path, 3)
    assert found["lost"] == []
    assert found["requests"] > 0


@quiet
def test_an_orderly_end_saves_all_and_damaged_files_are_set_aside(tmp_path: Path) -> None:
    twin, lost = Twin(tmp_path), list[str]()
    with Forked(tmp_path, *WORDS) as server:
        for stream in ("north", "south"):
            ask(server.client, X[:BATCH], stream)
            ask(server.client, X[:1], stream)
        assert server.control("freeze").status_code == 200
        server.client.close()
        for _ in range(2):  # an impatient user
            os.kill(server.process.pid, signal.SIGINT)
            time.sleep(0.05)
        server.process.join(120)
    assert (twin.load("north"), twin.load("south")) == (BATCH + 1, BATCH + 1)
    names = {path.read_text(): path.with_suffix(".safetensors") for path in twin.folder.glob("*.txt")}
    content = names["north"].read_bytes()
    names["north"].write_bytes(content[: len(content) // 2])
    with Forked(tmp_path, *WORDS) as server:
        errors = [line["message"] for line in server.lines() if line["level"] == "error"]
        assert len(errors) == 1
        assert names["north"].name in errors[0]
        assert next(twin.folder.glob("*.damaged*")).read_bytes() == content[: len(content) // 2]
        assert server.client.get("/control/status", headers=CONTROL).json()["frozen"] is True
        before = ask(server.client, X[:3], "south")
        assert np.array_equal(before, ask(server.client, X[:3], "south"))
        server.control("unfreeze")
        check(server, twin, random.Random(0), lost)
    assert lost == []
