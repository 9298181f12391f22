"""How a server bears up: `python -m benchmarks.serving [throughput] [crowd] [kills] [soak] [--minutes 10]`

- throughput: images per second, latencies and the server's processor time per image, for single digits as bytes by the
  Open Inference Protocol, with adaptation on, off (`?adapt=false`) and frozen, beside the plain network behind the same
  server.
- crowd: thousands of requests whose answers are checked, beside slow, broken, oversize, malformed and unauthenticated
  clients.
- kills: SIGKILL at random moments, on a disk whose writes take long; what comes back is compared with the library.
- soak: such a crowd for minutes, with the server's memory at intervals.

Each part replaces its own entry of `serving_cpu.json`. Clients and server share the machine, perhaps with
others: `load_average` tells, and the processor time per image depends on that the least. `tests/` has the clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch

from acclimate.bench.provenance import origin
from acclimate.bench.tables import Table, as_markdown
from acclimate.data.digits import load_digits

from .command import command, path, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clients import Connection, crowd, unexpected
from kills import kill_and_restart
from serving import CONTROL, Server, binary

NETWORKS = ("digits-resnet", "digits-vit")
CLIENTS = (1, 8, 32)
MODES = {"plain network": "", "on": "", "off": "?adapt=false", "frozen": ""}
CODED = ("--model", "net.py:coded", "--method", "tent", "--timeout", "5", "--body", "1", "--batch-size", "16")


def processor(server: Server) -> float:
    """Return the processor time that a server has used, in seconds."""
    words = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def memory(server: Server) -> float:
    """Return the memory of a server in MB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


# Throughput -----------------------------------------------------------------------------------------------------------


async def load(port: int, address: str, clients: int, seconds: float) -> list[float]:
    """Return the milliseconds of each request of some clients that ask again as soon as they are answered."""
    digits = (255 * load_digits()[1].x[:512]).round().byte().numpy()
    bodies = [binary(digits[i : i + 1], "UINT8") for i in range(512)]
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection, turn = Connection(port), 61 * number
        while time.perf_counter() < end:
            body, headers = bodies[turn % 512]
            start, turn = time.perf_counter(), turn + 1
            code, _, _ = await connection.send(
                f"POST {address}", body, Inference_Header_Content_Length=next(iter(headers.values()))
            )
            if code != 200:
                raise RuntimeError(f"{address} answered {code}")
            taken.append(1000 * (time.perf_counter() - start))
        connection.close()

    await asyncio.gather(*map(client, range(clients)))
    return taken


def throughput(folder: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Return one row per network, mode and number of clients. Modes take turns, as the machine may be shared."""
    rows = []
    for network in NETWORKS:
        with (
            Server(folder / network, "--model", network) as adapting,
            Server(folder / f"{network}-plain", "--model", network, "--method", "source", "--no-guard") as plain,
        ):
            found: dict[tuple[str, int], dict[str, Any]] = {}
            for turn in range(rounds + 1):  # the first warms up
                for mode, query in MODES.items():
                    server = plain if mode == "plain network" else adapting
                    if mode in ("frozen", "on"):
                        adapting.control("freeze" if mode == "frozen" else "unfreeze")
                    for clients in CLIENTS:
                        before, start = processor(server), time.perf_counter()
                        each = asyncio.run(
                            load(server.port, f"/v2/models/{network}/infer{query}", clients, seconds if turn else 0.5)
                        )
                        if turn:
                            own = found.setdefault((mode, clients), {"taken": [], "seconds": 0.0, "processor": 0.0})
                            own["taken"] += each
                            own["seconds"] += time.perf_counter() - start
                            own["processor"] += processor(server) - before
            adapting.control("unfreeze")
        for (mode, clients), own in found.items():
            taken = np.array(own["taken"])
            rows.append(
                {
                    "network": network,
                    "mode": mode,
                    "clients": clients,
                    "images": len(taken),
                    "images_per_second": len(taken) / own["seconds"],
                    "processor_ms_per_image": 1000 * own["processor"] / len(taken),
                    **{f"p{q}_ms": float(np.percentile(taken, q)) for q in (50, 95, 99)},
                }
            )
            print(rows[-1], flush=True)
    return {"seconds": seconds * rounds, "rows": rows}


# Attacks --------------------------------------------------------------------------------------------------------------


def attacked(folder: Path, requests: int, clients: int = 64, enemies: int = 48) -> dict[str, Any]:
    """Return what a crowd has seen: wrong answers, answers that should not be, and changes without a token."""
    with Server(folder / "crowd", *CODED, "--no-guard", "--queue", "64", "--save-every", "2") as server:
        start = time.perf_counter()
        seen = asyncio.run(crowd(server.port, clients=clients, each=requests // clients, enemies=enemies))
        seconds = time.perf_counter() - start
        status = server.client.get("/control/status", headers=CONTROL).json()
        listed = server.client.get("/control/snapshots", headers=CONTROL).json()["snapshots"]
        audit = (folder / "crowd" / "state" / "audit.jsonl").read_text().splitlines()
        changed = [line for line in map(json.loads, audit) if line["code"] is None]
        errors = [line["message"] for line in server.lines() if line["level"] == "error"]
    return {
        "clients": clients,
        "enemies": enemies,
        "seconds": seconds,
        "seen": seen,
        "wrong": seen["wrong"],
        "unexpected": unexpected(seen),
        "unauthenticated_changes": len(changed) + len(listed) + status["frozen"],
        "errors_in_the_log": errors,
    }


def killed(folder: Path, kills: int, beside: int = 4) -> dict[str, Any]:
    """Return what was lost by kills of some servers beside each other."""

    def one(seed: int) -> dict[str, Any]:
        return kill_and_restart(folder / str(seed), kills // beside, seed)

    with ThreadPoolExecutor(beside) as pool:
        found = [*pool.map(one, range(beside))]
    total = {name: sum(each[name] for each in found) for name in ("kills", "during_a_write", "requests")}
    seconds = median(each["restart_seconds"] for each in found)
    return {**total, "servers": beside, "lost": [one for each in found for one in each["lost"]], "restart_s": seconds}


def soak(folder: Path, minutes: float, every: float = 20.0) -> dict[str, Any]:
    """Return the memory of a server in a crowd, at intervals; states of half of its streams are in files."""
    with Server(folder / "soak", *CODED, "--cameras", "3", "--save-every", "5") as server:
        memories: list[tuple[float, float]] = []
        over, start = threading.Event(), time.monotonic()

        def watch() -> None:
            while not over.wait(every):
                memories.append((time.monotonic() - start, memory(server)))
                httpx.get(f"{server.address}/metrics")
                print(f"{memories[-1][0]:.0f} s: {memories[-1][1]:.1f} MB", flush=True)

        def view() -> None:
            with suppress(httpx.HTTPError), httpx.stream("GET", f"{server.address}/events", timeout=60) as response:
                for _ in response.iter_lines():
                    pass

        threads = [threading.Thread(target=each, daemon=True) for each in (watch, view)]
        for thread in threads:
            thread.start()
        seen = asyncio.run(crowd(server.port, clients=8, each=float("inf"), enemies=8, seconds=60 * minutes))
        over.set()
        threads[0].join()
    third = len(memories) // 3
    middle, last = (median(mb for _, mb in part) for part in (memories[third : 2 * third], memories[2 * third :]))
    return {
        "minutes": minutes,
        "memory_mb": [[round(when), mb] for when, mb in memories],
        "middle_third_mb": middle,
        "last_third_mb": last,
        "seen": seen,
        "wrong": seen["wrong"],
        "unexpected": unexpected(seen),
    }


# The file -------------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per network and mode: processor time, and speed and latencies with some clients."""
    rows = [
        [
            row["network"],
            row["mode"],
            str(row["clients"]),
            f"{row['images_per_second']:.0f}",
            *(f"{row[f'p{q}_ms']:.0f}" for q in (50, 95, 99)),
            f"{row['processor_ms_per_image']:.1f}",
        ]
        for row in result["throughput"]["rows"]
        if row["clients"] in (1, 32)
    ]
    return ["network", "adaptation", "clients", "images/s", "p50, ms", "p95, ms", "p99, ms", "CPU per image, ms"], rows


def attacks_table(result: Mapping[str, Any]) -> Table:
    """Return one row per attack: how long, and what went wrong."""
    crowded, killed, soaked = (result[part] for part in ("crowd", "kills", "soak"))
    answered = [f"{part['seen']['honest, 200']:,}" for part in (crowded, soaked)]
    grown = soaked["last_third_mb"] - soaked["middle_third_mb"]
    rows = [
        ["answers checked, beside hostile clients", answered[0], f"{crowded['wrong']} wrong"],
        ["changes without the token", f"{crowded['enemies']} hostile clients", f"{crowded['unauthenticated_changes']}"],
        ["kills", f"{killed['kills']}, {killed['during_a_write']} of them in a write", f"{len(killed['lost'])} lost"],
        ["memory in a crowd", f"{soaked['minutes']:g} minutes, {answered[1]} answers", f"{grown:+.1f} MB"],
    ]
    return ["what", "how much", "result"], rows


def main() -> None:
    """Measure some parts, and write them beside the others."""
    parser = command(__doc__)
    parser.add_argument("parts", nargs="*", help="throughput, crowd, kills, soak; all by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="per mode, number of clients and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5000, help="of the crowd")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    arguments = parser.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "throughput": lambda folder: throughput(folder, arguments.seconds, arguments.rounds),
        "crowd": lambda folder: attacked(folder, arguments.requests),
        "kills": lambda folder: killed(folder, arguments.kills),
        "soak": lambda folder: soak(folder, arguments.minutes),
    }
    if unknown := {*arguments.parts} - parts.keys():
        parser.error(f"no part {min(unknown)}: choose from {', '.join(parts)}")
    commit = origin(torch.device("cpu"))["commit"]
    for name in arguments.parts or parts:
        with TemporaryDirectory() as folder:
            found = parts[name](Path(folder))
        found = {"commit": commit, "load_average": os.getloadavg()[2], **found}  # of a quarter of an hour
        print(name, found)
        file = path("serving", arguments)
        earlier = json.loads(file.read_text()) if file.is_file() else {}
        known = {each: earlier[each] for each in parts if each in earlier}
        write("serving", arguments, {"cores": os.cpu_count(), "seed": 0, **known, name: found}, depth=3)
    whole = json.loads(path("serving", arguments).read_text())
    for shown, needed in ((table, {"throughput"}), (attacks_table, {"crowd", "kills", "soak"})):
        if needed <= whole.keys():
            print(as_markdown(*shown(whole)))


if __name__ == "__main__":
    main()
