"""The client of ``bench frontend``: many streams and a health check on one selector.

``python -m duograph.server.bench.frontend_client`` reads a ClientConfig as JSON from standard
input and prints what it saw as JSON. It keeps the bytes as they come and takes them apart when
the clock has stopped. Knows HTTP and SSE; does not import the server.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

HEALTH_PERIOD_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What the client process is told."""

    port: int
    streams: int
    request: str  # the bytes of one HTTP request


class _Connection:
    """One stream, or the health check's connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.parts: list[bytes] = []
        self.first: float | None = None


def run_client(config: ClientConfig) -> dict[str, Any]:
    """Reads all streams to their ends. Seconds count from the first token to the last."""
    selector = selectors.DefaultSelector()
    connections = [_Connection(config.port) for _ in range(config.streams)]
    request = config.request.encode()
    begun = time.perf_counter()
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.socket.sendall(request)
    health = _HealthProbe(config.port)
    selector.register(health.connection.socket, selectors.EVENT_READ, health)
    left = len(connections)
    while left:
        now = time.perf_counter()
        health.tick(now)
        for key, _ in selector.select(HEALTH_PERIOD_S):
            if key.data is health:
                health.read()
                continue
            connection = key.data
            data = connection.socket.recv(1 << 18)
            if connection.first is None:
                connection.first = time.perf_counter()
            connection.parts.append(data)
            if not data:
                raise RuntimeError("a stream was closed before its end")
            if data.endswith(b"0\r\n\r\n"):
                selector.unregister(connection.socket)
                left -= 1
    ended = time.perf_counter()
    firsts = [c.first for c in connections if c.first is not None]
    answers = [_take_apart(b"".join(c.parts)) for c in connections]
    return {
        "seconds": ended - min(firsts),
        "ttft": [first - begun for first in firsts],
        "health": health.times,
        "texts": [text for text, _ in answers],
        "chunks": [count for _, count in answers],
    }


class _HealthProbe:
    """GET /health at a steady pace, one at a time."""

    def __init__(self, port: int) -> None:
        self.connection = _Connection(port)
        self.times: list[float] = []
        self._sent: float | None = None
        self._due = 0.0
        self._answer = b""

    def tick(self, now: float) -> None:
        if self._sent is None and now >= self._due:
            self._sent, self._due = now, now + HEALTH_PERIOD_S
            self.connection.socket.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

    def read(self) -> None:
        self._answer += self.connection.socket.recv(1 << 16)
        if not self._answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"/health: {self._answer[:80]!r}")
        if self._answer.endswith(b"}") and self._sent is not None:
            self._answer = b""
            self.times.append(time.perf_counter() - self._sent)
            self._sent = None


def _take_apart(response: bytes) -> tuple[str, int]:
    """Text and number of events with text of one streamed answer."""
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a stream was answered {head[:80]!r}")
    text, count, ended = [], 0, False
    for event in re.findall(rb"data: (.*)\n\n", body):
        if event == b"[DONE]":
            ended = True
            continue
        content = json.loads(event)["choices"][0]["delta"].get("content")
        if content:
            text.append(content)
            count += 1
    if not ended:
        raise RuntimeError("a stream ended without [DONE]")
    return "".join(text), count


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ClientConfig)
    print(json.dumps(run_client(config)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
