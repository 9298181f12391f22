"""A stand-in for the server of `acclimate serve`, for tests of its page: the same addresses, and events as asked.

`python tests/page_server.py` shows the page with an invented model on http://127.0.0.1:8799, token `secret`.
"""

from __future__ import annotations

import base64
import json
import math
import queue
import random
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = Path(__file__).parents[1] / "src" / "acclimate" / "service" / "page"
POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abfgcd")
BARS = {"a": (8, 5, 16, 3), "b": (21, 6, 3, 10), "c": (21, 16, 3, 10), "d": (8, 24, 16, 3)}
BARS |= {"e": (8, 16, 3, 10), "f": (8, 6, 3, 10), "g": (8, 15, 16, 3)}


def png(digit: int, noise: float = 0.0, size: int = 32) -> bytes:
    """Return a small grey image of a digit."""
    pixels = [[0] * size for _ in range(size)]
    for left, top, width, height in (BARS[name] for name in SEGMENTS[digit]):
        for y in range(top, top + height):
            pixels[y][left : left + width] = [235] * width
    rows = b"".join(
        b"\0" + bytes(min(255, max(0, int(value + random.gauss(0, 255 * noise)))) for value in row) for row in pixels
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def hello(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": "digits-resnet",
        "method": "EATAC(lr=0.005, margin=0.4)",
        "method_name": "eata-c",
        "version": "0.1.0",
        "network": "digits-resnet",
        "classes": [str(digit) for digit in range(10)],
        "guarded": True,
        "control": True,
        "batch_size": 64,
        "started": time.time() - 7000,
        "input": {"channels": 1, "height": 32, "width": 32},
    }
    return {**content, **changes}


def status(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "time": time.time(),
        "uptime": 7000.0,
        "images": 12480,
        "images_per_second": 24.3,
        "requests_per_second": 11.8,
        "errors": 0,
        "queue": 3,
        "queue_most": 256,
        "latency_ms": {"p50": 8.1, "p95": 14.2, "p99": 31.0},
        "kept_share": 0.42,
        "entropy": 0.61,
        "distance": 0.37,
        "confidences": [0, 2, 4, 6, 8, 10, 11, 13, 14, 18, 20, 21, 25, 28, 34, 40, 56, 80, 140, 470],
        "state_age": 12.0,
        "streams": 1,
        "stream": "default",
        "frozen": False,
        "doing": "learning",
        "since_batch": 12,
        "batches": 195,
        "rollbacks": 0,
        "probe": {"disagreement": 0.031, "evidence": 0.21, "wealth": 1.7, "tolerated": 0.11},
    }
    return {**content, **changes}


def prediction(number: int, **changes: Any) -> dict[str, Any]:
    digit = number % 10
    content: dict[str, Any] = {
        "id": number,
        "time": time.time(),
        "stream": "default",
        "label": str(digit),
        "class": digit,
        "confidence": 0.93,
        "entropy": 0.31,
        "disagreement": 0.02,
        "learned": True,
        "thumbnail": "data:image/png;base64," + base64.b64encode(png(digit, 0.06)).decode(),
        "milliseconds": 12.3,
    }
    return {**content, **changes}


def alarm(**changes: Any) -> dict[str, Any]:
    content = {"time": time.time(), "stream": "default", "batch": 140, "signal": "evidence", "value": 1.31}
    return {**content, "action": "roll back", **changes}


class PageServer:
    """The server: `hello` and `history` greet who connects, `send` tells all, `drop` cuts all connections."""

    def __init__(self, port: int = 0) -> None:
        self.token = "secret"
        self.hello = hello()
        self.history: dict[str, list[Any]] = {"status": [], "predictions": [], "alarms": [], "control": []}
        self.refuse = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.listeners: list[queue.Queue[str | None]] = []
        self.opened = 0
        self.policy = POLICY
        self.http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (Handler,), {"served": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def send(self, event: str, data: Any) -> None:
        for each in list(self.listeners):
            each.put(f"event: {event}\ndata: {json.dumps(data)}\n\n")

    def drop(self) -> None:
        for each in list(self.listeners):
            each.put(None)

    def close(self) -> None:
        self.drop()
        self.http.shutdown()
        self.http.server_close()

    def predict(self, body: bytes, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if b"\x89PNG" not in body:
            return 415, {"error": "notes.txt is no image that can be read: send a JPEG, PNG or WebP file."}
        shares = (0.912, 0.051, 0.02, 0.009, 0.004)
        top = [{"label": str(7 - rank), "class": 7 - rank, "confidence": share} for rank, share in enumerate(shares)]
        learned = False if query.get("adapt") == ["false"] else None
        one = {"label": "7", "class": 7, "confidence": 0.912, "entropy": 0.37, "disagreement": 0.04, "learned": learned}
        names = [part.split(b'"')[0].decode() for part in body.split(b'filename="')[1:]]
        predictions = [{"name": name, **one, "top": top} for name in names]
        return 200, {"predictions": predictions, "stream": query.get("stream", ["default"])[0], "milliseconds": 8.1}

    def control(self, action: str, token: str | None, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.hello["control"]:
            return 403, {"error": "This server was started without a control token."}
        if token != f"Bearer {self.token}":
            return 401, {"error": "The token is missing or wrong: send the one that the server was started with."}
        if action == "snapshots":
            return 200, {"snapshots": self.snapshots}
        self.calls.append((action, content))
        stream = content.get("stream", "default")
        if action == "snapshot":
            name = f"{stream}-{len(self.snapshots):04d}"
            self.snapshots.append({"name": name, "stream": stream, "time": time.time(), "bytes": 318_204})
        self.send("control", {"time": time.time(), "stream": stream, "action": action, "by": "operator"})
        return 200, {"done": action, "stream": stream}


class Handler(BaseHTTPRequestHandler):
    served: PageServer

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, code: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.served.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/events":
            self.stream()
        elif path.startswith("/control/"):
            self.do_POST()
        else:
            file = PAGE / ("index.html" if path == "/" else Path(path).name)
            if (path == "/" or path.startswith("/page/")) and file.is_file():
                self.answer(200, file.read_bytes(), TYPES[file.suffix])
            else:
                self.answer(404, b'{"error": "There is no such page."}')

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path == "/predict":
            code, answer = self.served.predict(body, parse_qs(parts.query))
        else:
            action = parts.path.rpartition("/")[2]
            code, answer = self.served.control(action, self.headers.get("Authorization"), json.loads(body or b"{}"))
        self.answer(code, json.dumps(answer).encode())

    def stream(self) -> None:
        if self.served.refuse:
            self.answer(503, b'{"error": "The server is starting."}')
            return
        events: queue.Queue[str | None] = queue.Queue()
        for name, data in (("hello", self.served.hello), ("history", self.served.history)):
            events.put(f"event: {name}\ndata: {json.dumps(data)}\n\n")
        self.served.listeners.append(events)
        self.served.opened += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            while (event := events.get()) is not None:
                self.wfile.write(event.encode())
                self.wfile.flush()
        except OSError:
            pass  # the page has gone
        finally:
            self.served.listeners.remove(events)


def invented(second: int, at: float) -> dict[str, Any]:
    """Return a status of a model that learns, is attacked, rolled back, paused, and learns again."""
    phase = second % 240
    attacked, paused, source = 120 <= phase < 150, 150 <= phase < 180, 180 <= phase < 195
    climb = (phase - 120) / 30 if attacked else 0
    evidence = climb * 1.1 if attacked else 0.12 + 0.06 * math.sin(phase / 9)
    return status(
        time=at,
        uptime=7000.0 + second,
        images=12480 + 24 * second,
        images_per_second=24 + 3 * math.sin(second / 5),
        queue=max(0, int(6 + 8 * math.sin(second / 4) + random.gauss(0, 2))),
        kept_share=0 if paused or source else 0.4 + 0.08 * math.sin(second / 13) + random.gauss(0, 0.015),
        entropy=0.62 - 0.12 * math.tanh(phase / 60) + 0.4 * climb + random.gauss(0, 0.02),
        distance=0.37 if paused or source else 0.2 + 0.0022 * phase + 0.9 * climb,
        doing="paused" if paused else "source" if source else "learning",
        batches=195 + second // 3,
        state_age=float(second % 30),
        rollbacks=1 + second // 240,
        probe={
            "disagreement": 0.031 + 0.14 * climb,
            "evidence": evidence,
            "wealth": 1.7 * (100**evidence) / 2.6,
            "tolerated": 0.11,
        },
    )


def invent(server: PageServer, back: int = 290) -> None:
    """Fill the history with the last minutes of an invented model."""
    start = time.time() - back
    server.history["status"] = [invented(second, start + second) for second in range(back)]
    server.history["alarms"] = [
        alarm(time=start + 150),
        alarm(time=start + 180, signal="skew", value=0.31, action="source"),
    ]
    server.history["control"] = [{"time": start + 60, "stream": "default", "action": "snapshot", "by": "operator"}]
    server.history["predictions"] = [guess(number) for number in range(48)]


def guess(number: int) -> dict[str, Any]:
    sure = random.betavariate(6, 1)
    learned = None if random.random() < 0.1 else sure > 0.8
    return prediction(random.randrange(10) + 10 * number, confidence=sure, learned=learned)


def main() -> None:
    server = PageServer(8799)
    server.snapshots = [{"name": "default-0000", "stream": "default", "time": time.time() - 900, "bytes": 318_204}]
    invent(server)
    print(server.url)
    number, second = 48, 290
    while True:
        time.sleep(1)
        second += 1
        server.history["status"] = [*server.history["status"][-299:], invented(second, time.time())]
        server.send("status", server.history["status"][-1])
        for _ in range(3):
            number += 1
            server.send("predictions", [guess(number)])


if __name__ == "__main__":
    main()
