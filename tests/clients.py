"""Clients of a server, honest and hostile, many at a time: `python -m benchmarks.serving` runs them for longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from serving import as_file, binary, coded, white

MODEL = "/v2/models/net.py-coded/infer"
SIDES = (8, 12, 16)
"""The size of images by stream: a stream has one."""


class Connection:
    """An HTTP connection that is kept: one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, head: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Return code, headers and body of the answer to a request such as `POST /predict`."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        lines = [f"{head} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        code = int((await reader.readline()).split()[1])
        found = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(": ")
            found[name.lower()] = value
        content = await reader.readexactly(int(found["content-length"]))
        if found.get("connection") == "close":
            self.close()
        return code, found, content

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def tensors(connection: Connection, rng: random.Random, query: str, side: int) -> tuple[int, bool]:
    """Send tensors; return the code, and whether all answers belong to their images."""
    images = np.stack([coded(rng.getrandbits(60), side) for _ in range(rng.choice((1, 1, 2, 9)))])
    body, headers = binary(images, "UINT8", id=(number := str(rng.random())))
    given = {name.replace("-", "_"): value for name, value in headers.items()}
    code, found, content = await connection.send(f"POST {MODEL}?{query}", body, **given)
    if code != 200:
        return code, True
    length = int(found["inference-header-content-length"])
    head = json.loads(content[:length])
    names = [each["name"] for each in head["outputs"]]
    sizes = [each["parameters"]["binary_data_size"] for each in head["outputs"]]
    start = length + sum(sizes[: names.index("logits")])
    logits = np.frombuffer(content[start : start + sizes[names.index("logits")]], "<f4").reshape(len(images), -1)
    right = [{*np.flatnonzero(row > 0).tolist()} == white(image) for row, image in zip(logits, images, strict=True)]
    return code, head["id"] == number and all(right)


async def pictures(connection: Connection, rng: random.Random, query: str, side: int) -> tuple[int, bool]:
    """Send one picture or a form with several."""
    images = [coded(rng.getrandbits(60), side) for _ in range(rng.choice((1, 1, 3)))]
    files = [as_file(image) for image in images]
    body, kind = files[0], "image/png"
    if len(files) > 1:
        kind = "multipart/form-data; boundary=zz"
        head = b'--zz\r\nContent-Disposition: form-data; name="file"; filename="%d"\r\n\r\n%s\r\n'
        body = b"".join(head % each for each in enumerate(files)) + b"--zz--\r\n"
    code, _, content = await connection.send(f"POST /predict?{query}", body, Content_Type=kind)
    if code != 200:
        return code, True
    found = json.loads(content)["predictions"]
    tops = [{each["class"] for each in prediction["top"]} for prediction in found]
    return code, tops == [white(image) for image in images]


async def honest(port: int, rng: random.Random, count: float, seen: Counter[str], over: asyncio.Event) -> None:
    """Send requests until `count` are answered, and check each."""
    connection, streams, answered = Connection(port), 6, 0
    while answered < count and not over.is_set():
        stream = rng.randrange(streams)
        query = f"stream={stream}&adapt={rng.choice(('true', 'false'))}"
        kind = rng.choice((tensors, tensors, pictures))
        try:
            code, right = await kind(connection, rng, query, SIDES[stream % len(SIDES)])
        except (OSError, EOFError, IndexError):
            seen["connection lost"] += 1
            connection.close()
            continue
        seen[f"honest, {code}"] += 1
        seen["wrong"] += not right
        answered += code == 200
        if code == 503:
            await asyncio.sleep(0.02 * rng.random())
    connection.close()


# Hostile --------------------------------------------------------------------------------------------------------------


async def raw(port: int, content: bytes, rest: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None) -> str:
    """Send bytes, read what comes within seconds, and return the first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        if rest is not None:
            await rest(writer)
        return (await asyncio.wait_for(reader.readline(), 10)).decode("latin-1").strip()
    finally:
        writer.close()


def head(text: str, length: int = 0) -> bytes:
    return f"{text} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n".encode()


async def slow_head(port: int, rng: random.Random) -> str:
    async def rest(writer: asyncio.StreamWriter) -> None:
        for _ in range(10):
            await asyncio.sleep(0.05)
            writer.write(b"X-A: b\r\n")

    return await raw(port, b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n", None if rng.random() < 0.3 else rest)


async def slow_body(port: int, rng: random.Random) -> str:
    async def rest(writer: asyncio.StreamWriter) -> None:
        for _ in range(10):
            await asyncio.sleep(0.05)
            writer.write(b"\0" * 10)

    return await raw(port, head(f"POST {MODEL}?stream=hostile", 10_000), rest)


async def gone(port: int, rng: random.Random) -> str:
    """Go away after half of a request, or before the answer."""
    body, _ = binary(np.zeros((4, 1, 8, 8), np.uint8), "UINT8")
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(f"POST {MODEL}?adapt=false", len(body)) + body[: rng.choice((50, len(body)))])
    await asyncio.sleep(0.01 * rng.random())
    writer.transport.abort()
    return "gone"


async def oversize(port: int, rng: random.Random) -> str:
    return await raw(port, head("POST /predict?stream=hostile", 10**9) + bytes(10_000))


async def malformed(port: int, rng: random.Random) -> str:
    bodies = (b"[" * 10_000, b"{}", b"\xff" * 100, b'{"inputs": [{"name": "images", "shape": [1, 1, 8, 8]}]}')
    body = rng.choice(bodies)
    return await raw(port, head(f"POST {rng.choice((MODEL, '/predict'))}?stream=hostile", len(body)) + body)


async def garbage(port: int, rng: random.Random) -> str:
    lines = (rng.randbytes(200), b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n")
    return await raw(port, rng.choice(lines) + b"\r\n\r\n")


async def unauthenticated(port: int, rng: random.Random) -> str:
    action = rng.choice(("reset", "freeze", "rollback", "snapshot", "load"))
    body = b'{"stream": "%d"}' % rng.randrange(6)
    return await raw(port, head(f"POST /control/{action}", len(body)) + body)


async def poisoned(port: int, rng: random.Random) -> str:
    """Send NaN: to learn from it would damage the network."""
    body, headers = binary(np.full((1, 1, 8, 8), np.nan, np.float32))
    first = head(f"POST {MODEL}?stream=0", len(body))[:-2]
    return await raw(
        port, first + f"Inference-Header-Content-Length: {next(iter(headers.values()))}\r\n\r\n".encode() + body
    )


HOSTILE = (slow_head, slow_body, gone, oversize, malformed, garbage, unauthenticated, poisoned)


async def hostile(port: int, rng: random.Random, seen: Counter[str], over: asyncio.Event) -> None:
    """Do one hostile thing after another until all honest clients are done; note codes by kind."""
    while not over.is_set():
        attack = rng.choice(HOSTILE)
        try:
            line = await attack(port, rng)
        except (OSError, EOFError, asyncio.TimeoutError):
            line = ""
        words = line.split()
        seen[f"{attack.__name__}, {words[1] if len(words) > 1 else words[0] if words else 'cut off'}"] += 1
        await asyncio.sleep(0.005)


async def crowd(
    port: int, *, clients: int, each: float, enemies: int, seconds: float = 3600, seed: int = 0
) -> dict[str, int]:
    """Let honest and hostile clients at a server, until each honest one has its answers; return what they have seen."""
    seen: Counter[str] = Counter(wrong=0)
    over = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(seconds, over.set)
    against = [
        asyncio.create_task(hostile(port, random.Random(f"{seed} hostile {n}"), seen, over)) for n in range(enemies)
    ]
    await asyncio.gather(*(honest(port, random.Random(f"{seed} honest {n}"), each, seen, over) for n in range(clients)))
    over.set()
    timer.cancel()
    for task in against:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*against)
    return dict(sorted(seen.items()))


def codes(seen: dict[str, int], kind: str) -> set[str]:
    return {name.rpartition(", ")[2] for name in seen if name.startswith(f"{kind},")}


def unexpected(seen: dict[str, int]) -> dict[str, Any]:
    """Return answers that should not be: 500 anywhere, success without a token, or for what is wrong."""
    never = {"200": HOSTILE, "500": ("honest", *(attack.__name__ for attack in HOSTILE))}
    found = {
        kind: code
        for code, kinds in never.items()
        for kind in (each if isinstance(each, str) else each.__name__ for each in kinds)
        if code in codes(seen, kind)
    }
    wrong = codes(seen, "unauthenticated") - {"401", "503", "cut off"}
    return {**found, **({"unauthenticated": wrong} if wrong else {})}
