"""One process of load: streams of completions over HTTP, each sending its next request as soon as
the last one has ended (closed loop).

``python -m duograph.server.bench.http_load`` reads a LoadConfig as JSON from one line of standard
input, says ``ready`` when its connections stand, begins at the line ``go`` and leaves a
LoadResult as msgpack in a file. While requests run it only notes when bytes came; answers are
checked when the clock has stopped. Knows HTTP, SSE and the completions endpoint; does not import
the server.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` are shared by the ``streams`` of this process."""

    host: str
    port: int
    streams: int
    requests: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int
    timeout_s: float  # of one request
    result_path: str  # where the LoadResult goes: it may be larger than a pipe


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. Times are seconds of the system's monotonic clock."""

    sent: float
    first: float  # the first piece of the body has come
    last: float
    gaps: list[float]  # between arrivals of pieces, in order
    pieces: int  # server-sent events with text


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    records: list[RequestRecord]
    failures: dict[str, int]  # what went wrong -> how often
    cpu_s: float  # of this process, from ``go`` to the last answer


class _Answer:
    """The bytes of one response, as they come."""

    __slots__ = ("arrivals", "done", "parts", "sent", "status")

    def __init__(self, sent: float, done: asyncio.Future[str]) -> None:
        self.sent = sent
        self.done = done  # "" or what went wrong
        self.status = 0
        self.arrivals: list[float] = []
        self.parts: list[bytes] = []


class _Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes) -> _Answer:
        assert self._transport is not None
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answer = _Answer(time.perf_counter(), done)
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        before = len(answer.parts) if answer is not None else 0
        now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP: {error}")
            self.close()
        if answer is not None and len(answer.parts) > before:
            answer.arrivals.append(now)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection was closed in the middle of an answer")

    # the parser's callbacks

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.parts.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()
            # the arrival of this piece is noted after the parser has returned
            asyncio.get_running_loop().call_soon(self._end, "")

    def _end(self, problem: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done.done():
            answer.done.set_result(problem)


class _Load:
    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        rng = random.Random(config.seed)
        self._waiting = deque(_request(config, rng) for _ in range(config.requests))
        self._answers: list[_Answer] = []
        self._failures: Counter[str] = Counter()

    async def run(self) -> LoadResult:
        streams = range(self._config.streams)
        connections = await asyncio.gather(*(self._connect() for _ in streams))
        gc.disable()  # a pause here would read as one of the server's
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        cpu = time.process_time()
        await asyncio.gather(*map(self._stream, connections))
        cpu_s = time.process_time() - cpu
        records = [record for record in map(self._check, self._answers) if record is not None]
        return LoadResult(records=records, failures=dict(self._failures), cpu_s=cpu_s)

    async def _connect(self) -> _Connection:
        """Raises OSError."""
        config, loop = self._config, asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, config.host, config.port)
        return connection

    async def _stream(self, connection: _Connection) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            if not connection.is_open:
                try:
                    connection = await self._connect()
                except OSError as error:
                    self._failures[f"no connection: {error}"] += 1
                    continue
            answer = connection.ask(request)
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    problem = await answer.done
            except TimeoutError:
                problem = f"no end within {self._config.timeout_s:g} s"
                connection.close()
            if problem:
                self._failures[problem] += 1
            else:
                self._answers.append(answer)
        connection.close()

    def _check(self, answer: _Answer) -> RequestRecord | None:
        problem, pieces = _problem_of(answer, self._config.output_len)
        if problem:
            self._failures[problem] += 1
            return None
        times = answer.arrivals
        return RequestRecord(
            sent=answer.sent,
            first=times[0],
            last=times[-1],
            gaps=[after - before for before, after in itertools.pairwise(times)],
            pieces=pieces,
        )


def _request(config: LoadConfig, rng: random.Random) -> bytes:
    body = json.dumps(
        {
            "prompt": [rng.randrange(config.vocab_size) for _ in range(config.input_len)],
            "max_tokens": config.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {config.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _problem_of(answer: _Answer, output_len: int) -> tuple[str, int]:
    """What is wrong with a complete answer ("" if nothing), and its events with text."""
    body = b"".join(answer.parts)
    if answer.status != 200:
        return f"status {answer.status}: {body[:200].decode(errors='replace')}", 0
    lines = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return f"no [DONE] at the end: {body[-200:].decode(errors='replace')}", 0
    pieces, written = 0, None
    for line in lines[:-1]:
        event: dict[str, Any] = json.loads(line)
        if "error" in event:
            return f"an error event: {event['error'].get('message')}", pieces
        pieces += any(choice["text"] for choice in event["choices"])
        if event.get("usage"):
            written = event["usage"]["completion_tokens"]
    if written != output_len:
        return f"{written} tokens and not {output_len}", pieces
    return "", pieces


def main() -> int:
    config = msgspec.json.decode(sys.stdin.readline(), type=LoadConfig)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_Load(config).run())
    Path(config.result_path).write_bytes(msgspec.msgpack.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
