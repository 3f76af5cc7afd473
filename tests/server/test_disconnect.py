"""Clients that leave, readers that are slow, servers that are told to end: on real sockets, since
in-process transports do not deliver a disconnect."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from duograph.server.config import HttpConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"prompt": [40] * 8, "ignore_eos": True, "max_tokens": 4000}


def send_request(port: int, body: dict[str, Any], path: str = COMPLETIONS) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = socket.create_connection(("127.0.0.1", port), timeout=20)
    raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return raw


def reset(raw: socket.socket) -> None:
    """Leaves without a farewell: RST instead of FIN."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def metric(http: httpx.Client, name: str) -> float:
    page = http.get("/metrics").text
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", page, re.M)
    return float(found[1]) if found else -1.0


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["waiting", "running"])
def test_a_client_that_leaves_is_aborted_at_once(
    server: Any, http: httpx.Client, eventually: Any, leave: Any, stream: bool, moment: str
) -> None:
    script = "hang" if moment == "waiting" else "hang:3"
    body = {**ENDLESS, "stream": stream, "n": 2, "cache_salt": script}
    asked, aborted = len(server.received("GenerateRequest")), len(server.received("AbortRequest"))
    raw = send_request(server.port, body)
    eventually(lambda: len(server.received("GenerateRequest")) == asked + 2, what="two at work")
    if stream and moment == "running":
        assert raw.recv(10).startswith(b"HTTP/1.1 2")
    left_at = time.time()
    leave(raw)
    eventually(lambda: len(server.received("AbortRequest")) == aborted + 2, what="two aborts")
    started = [m["rid"] for m in server.received("GenerateRequest")[asked:]]
    aborts = server.received("AbortRequest")[aborted:]
    assert sorted(m["rid"] for m in aborts) == sorted(started)
    assert all(m["at"] - left_at < 1.0 for m in aborts)
    eventually(lambda: metric(http, "duograph_frontend_active_requests") == 0, what="none active")


def test_a_finished_request_is_not_aborted(server: Any, http: httpx.Client) -> None:
    before = len(server.received("AbortRequest"))
    for stream in (True, False):
        answer = http.post(COMPLETIONS, json={"prompt": "The quick", "stream": stream})
        assert answer.status_code == 200
    assert len(server.received("AbortRequest")) == before


def test_a_storm_of_leaving_clients_leaves_nothing_behind(new_server: Any, eventually: Any) -> None:
    server = new_server()
    http = server.http()
    assert http.post(COMPLETIONS, json={"prompt": "The quick"}).status_code == 200
    process = psutil.Process(server.frontend.pid)
    fds = process.num_fds()

    def visit(number: int) -> None:
        raw = send_request(server.port, {**ENDLESS, "stream": number % 3 > 0})
        if number % 2:
            raw.recv(100 + number)
        (reset if number % 5 else socket.socket.close)(raw)

    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(visit, range(60)))
    eventually(lambda: metric(http, "duograph_frontend_active_requests") == 0, what="none active")
    eventually(lambda: metric(http, "sglang:num_running_reqs") == 0, what="an idle engine")
    eventually(lambda: process.num_fds() <= fds + 1, what="sockets closed")
    answer = http.post(COMPLETIONS, json={"prompt": "The quick"}).json()
    assert answer["choices"][0]["text"] == "The quick"
    assert "Traceback" not in server.stderr.read_text()


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_and_others_are_not(
    new_server: Any, eventually: Any
) -> None:
    server = new_server(engine={"context_length": 1 << 20, "step_s": 0.0002})
    http = server.http()
    begun = psutil.Process(server.frontend.pid).memory_info().rss
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    body = {**ENDLESS, "stream": True, "max_tokens": 500_000}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\n"
    raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    eventually(lambda: server.received("AbortRequest"), timeout_s=60, what="the abort")
    # what waited for it was bounded: the kernel's buffers and 256 KiB
    assert psutil.Process(server.frontend.pid).memory_info().rss < begun + 20 * 2**20
    assert http.post(COMPLETIONS, json={"prompt": "The"}).status_code == 200
    raw.close()


def stream_until_end(server: Any, body: dict[str, Any], seen: threading.Event) -> list[str]:
    lines = []
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            seen.set()
            if line:
                lines.append(line.removeprefix("data: "))
    return lines


def test_a_drain_refuses_new_requests_and_finishes_the_running_ones(
    new_server: Any, eventually: Any
) -> None:
    server = new_server(engine={"step_s": 0.01}, http=HttpConfig(shutdown_timeout=20.0))
    http = server.http()
    seen = threading.Event()
    body = {"prompt": [40] * 100, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(stream_until_end, server, body, seen)
        whole = pool.submit(
            httpx.post, server.url + COMPLETIONS, json=body | {"stream": False}, timeout=30
        )
        assert seen.wait(10)
        eventually(lambda: len(server.received("GenerateRequest")) == 2, what="two at work")
        server.frontend.send_signal(signal.SIGTERM)
        eventually(lambda: http.get("/health").status_code == 503, what="draining")
        refused = http.post(COMPLETIONS, json={"prompt": "The"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert http.get("/ready").json()["phase"] == "draining"
        assert server.frontend.poll() is None
        lines = streamed.result()
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert whole.result().json()["usage"]["completion_tokens"] == 100
    assert server.frontend.wait(timeout=10) == 0


def test_what_still_runs_at_the_shutdown_timeout_ends_with_an_error(
    new_server: Any, eventually: Any
) -> None:
    server = new_server(http=HttpConfig(shutdown_timeout=0.5))
    seen = threading.Event()
    body = {**ENDLESS, "stream": True, "cache_salt": "hang:3"}
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(stream_until_end, server, body, seen)
        whole = pool.submit(
            httpx.post, server.url + COMPLETIONS, json=body | {"stream": False}, timeout=30
        )
        assert seen.wait(10)
        eventually(lambda: len(server.received("GenerateRequest")) == 2, what="two at work")
        begun = time.monotonic()
        server.frontend.send_signal(signal.SIGTERM)
        lines = streamed.result()
        assert json.loads(lines[-1])["error"]["code"] == "draining"
        assert "[DONE]" not in lines
        assert whole.result().status_code == 503
    assert server.frontend.wait(timeout=10) == 0
    assert time.monotonic() - begun < 5


def test_an_idle_frontend_ends_at_once_and_ctrl_c_is_not_its_business(new_server: Any) -> None:
    server = new_server()
    server.frontend.send_signal(signal.SIGINT)
    assert server.http().get("/health").status_code == 200
    begun = time.monotonic()
    server.frontend.send_signal(signal.SIGTERM)
    assert server.frontend.wait(timeout=10) == 0
    assert time.monotonic() - begun < 3
