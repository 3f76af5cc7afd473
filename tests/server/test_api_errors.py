"""Everything that can be wrong before a request is a request, and what state answers what."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from duograph.server.config import HttpConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def check_envelope(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"] == code
    for private in ("Traceback", "0x", "/usr", "site-packages", ".py"):
        assert private not in error["message"]
    return dict(error)


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    check_envelope(http.get("/nowhere"), 404)
    check_envelope(http.get("/v1/embeddings"), 404)
    check_envelope(http.get(CHAT), 405)
    check_envelope(http.delete("/health"), 405)
    check_envelope(http.get("/v1/models/none"), 404, "model_not_found")
    check_envelope(http.get("/v1/models/..%2f..%2fetc%2fpasswd"), 404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"1", b"null", b"\xff\xfe", b'{"messages": NaN}',
        b'{"temperature": Infinity}', b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 2}}',
        b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"[" * 100_000,
        b'{"a": ' + b'{"b":' * 70 + b"1" + b"}" * 71,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_not_plain_json_objects(http: httpx.Client, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        check_envelope(http.post(path, content=body, headers=JSON), 400)


def test_depth_up_to_the_limit_is_accepted(http: httpx.Client) -> None:
    deep = "[" * 62 + "]" * 62
    body = f'{{"prompt": "The", "unknown": {deep}}}'.encode()
    assert http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


def test_content_types(http: httpx.Client) -> None:
    body = b'{"prompt": "The"}'
    check_envelope(http.post(COMPLETIONS, content=body), 415)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = http.post(COMPLETIONS, content=body, headers={"content-type": kind})
        check_envelope(answer, 415)
    zipped = http.post(COMPLETIONS, content=body, headers=JSON | {"content-encoding": "gzip"})
    check_envelope(zipped, 415)
    charset = {"content-type": "application/json; charset=utf-8"}
    assert http.post(COMPLETIONS, content=body, headers=charset).status_code == 200


def test_large_bodies_are_cut_off_while_they_arrive(new_server: Any) -> None:
    server = new_server(http=HttpConfig(max_body_bytes=10_000))
    http = server.http()
    big = json.dumps({"prompt": "a" * 10_000}).encode()
    check_envelope(http.post(COMPLETIONS, content=big, headers=JSON), 413)

    def endless() -> Any:
        while True:
            yield b" " * 1000

    # no length is given, and it would never end
    try:
        check_envelope(http.post(COMPLETIONS, content=endless(), headers=JSON), 413)
    except httpx.WriteError:
        pass  # the server has answered and closed while the client was still sending
    small = json.dumps({"prompt": "a" * 900}).encode()
    pieces = (small[i : i + 1] for i in range(len(small)))
    assert http.post(COMPLETIONS, content=pieces, headers=JSON).status_code == 200


def test_headers_are_limited(server: Any) -> None:
    for request in (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ):
        answer = raw_exchange(server.port, request)
        assert b" 431 " in answer.split(b"\r\n")[0] and b'"error"' in answer
        assert b"\r\nx-request-id: req-" in answer
    assert b" 400 " in raw_exchange(server.port, b"NONSENSE\r\n\r\n").split(b"\r\n")[0]


@pytest.mark.parametrize(
    "target", [b"CONNECT host:1", b"GET /\xff", b"GET /a\xc3\xa9", b"GET http://[", b"GET //["]
)
def test_a_target_that_is_no_url_is_answered_and_not_logged_as_a_fault(
    server: Any, target: bytes
) -> None:
    answer = raw_exchange(
        server.port, target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert answer.split(b" ")[1] in (b"400", b"404"), answer
    assert b'"error"' in answer
    assert "Traceback" not in server.stderr.read_text()


@pytest.mark.parametrize("origin", ["http://[", "http://a]b", "null", "http://[::1", "x" * 5000])
def test_an_origin_that_is_no_url_is_refused_like_any_other(
    http: httpx.Client, server: Any, origin: str
) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "The"}, headers={"origin": origin})
    check_envelope(answer, 403)
    assert "Traceback" not in server.stderr.read_text()


def raw_exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(request)
        answer = b""
        while data := raw.recv(65536):
            answer += data
        return answer


@pytest.mark.slow
def test_half_a_header_and_silence_is_closed(server: Any) -> None:
    begun = time.monotonic()
    answer = raw_exchange(server.port, b"POST /v1/completions HTTP/1.1\r\nHost: local")
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - begun < 15


@pytest.mark.slow
def test_half_a_body_and_silence_is_closed(server: Any) -> None:
    begun = time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    answer = raw_exchange(server.port, head)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - begun < 15


def test_models_are_listed_with_their_context(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()
    assert [card["id"] for card in cards["data"]] == ["tiny", "tiny-alias"]
    assert all(card["max_model_len"] == 4096 for card in cards["data"])
    assert http.get("/v1/models/tiny-alias").json() == cards["data"][1]


def test_default_is_a_name_for_whatever_is_served(http: httpx.Client) -> None:
    for name in ("default", "tiny", "tiny-alias"):
        body = {"model": name, "prompt": "The"}
        assert http.post(COMPLETIONS, json=body).status_code == 200
    for name in ("../../etc/passwd", "a" * 10_000, "tiny\u0000"):
        answer = http.post(COMPLETIONS, json={"model": name, "prompt": "The"})
        error = check_envelope(answer, 404, "model_not_found")
        assert len(error["message"]) < 500


def test_an_engine_error_before_the_first_token_is_the_status(http: httpx.Client) -> None:
    for code, status, shown in (
        ("overloaded", 503, "overloaded"),
        ("timeout", 503, "timeout"),
        ("internal", 500, None),
        ("context_length_exceeded", 400, "context_length_exceeded"),
    ):
        for stream in (False, True):
            body = {"prompt": "The", "stream": stream, "cache_salt": f"fail:{code}:0"}
            answer = http.post(COMPLETIONS, json=body)
            check_envelope(answer, status, shown)
            assert (answer.headers.get("retry-after") == "1") == (code == "overloaded")


def test_a_starting_engine_answers_with_its_progress(new_server: Any) -> None:
    engine = {"phase": "capturing_decode", "done": 12, "total": 36}
    server = new_server(engine=engine, wait_for="/health/live")
    http = server.http()

    def ready() -> dict[str, Any]:
        return dict(http.get("/ready").json())

    deadline = time.monotonic() + 10
    while ready()["phase"] != "capturing_decode" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert http.get("/ready").status_code == http.get("/health/ready").status_code == 503
    body = ready()
    assert (body["phase"], body["done"], body["total"]) == ("capturing_decode", 12, 36)
    assert body["progress"] == "capturing decode 12/36"
    assert body["error"]["code"] == "starting"
    for answer in (http.get("/health"), http.post(COMPLETIONS, json={"prompt": "The"})):
        error = check_envelope(answer, 503, "starting")
        assert "capturing decode 12/36" in error["message"]
    assert http.get("/health/live").status_code == 200


def test_a_full_queue_is_answered_at_once_and_accepted_work_goes_on(
    new_server: Any, eventually: Any
) -> None:
    server = new_server(
        engine={"max_running_requests": 2},
        frontend={"max_queue": 2},
    )
    http = server.http()
    body = {"prompt": "The quick", "cache_salt": "hang"}
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(lambda: server.http().post(COMPLETIONS, json=body)) for _ in range(4)
        ]
        eventually(lambda: len(server.received("GenerateRequest")) == 4, what="four at work")
        begun = time.monotonic()
        refused = http.post(COMPLETIONS, json={"prompt": "The"})
        assert time.monotonic() - begun < 1.0
        check_envelope(refused, 503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert len(server.received("GenerateRequest")) == 4
        server.frontend.send_signal(signal.SIGTERM)
        for future in waiting:
            check_envelope(future.result(), 503, "draining")


def test_a_request_that_no_empty_queue_could_take_is_not_told_to_try_again(
    new_server: Any,
) -> None:
    server = new_server(engine={"max_running_requests": 2}, frontend={"max_queue": 2})
    http = server.http()
    too_many: list[dict[str, Any]]
    too_many = [{"prompt": "The", "n": 5}, {"prompt": ["The", "a", "b"], "n": 2}]
    for body in too_many:
        error = check_envelope(http.post(COMPLETIONS, json=body), 400)
        assert error["param"] == "n" and "--max-queue" in error["message"]
    assert server.received("GenerateRequest") == []
    few: list[dict[str, Any]]
    few = [{"prompt": "The", "n": 4}, {"prompt": ["The", "a"], "n": 2}, {"prompt": [1, 2]}]
    for body in few:
        assert http.post(COMPLETIONS, json={"max_tokens": 1, **body}).status_code == 200


def test_every_prompt_of_a_request_takes_a_place_in_the_queue(
    new_server: Any, eventually: Any
) -> None:
    server = new_server(engine={"max_running_requests": 2}, frontend={"max_queue": 2})
    hanging = {"prompt": ["The", "a", "b"], "cache_salt": "hang"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: server.http().post(COMPLETIONS, json=hanging))
        eventually(lambda: len(server.received("GenerateRequest")) == 3, what="three at work")
        two = server.http().post(COMPLETIONS, json={"prompt": ["The", "a"]})
        check_envelope(two, 503, "overloaded")
        one = server.http().post(COMPLETIONS, json={"prompt": "The", "max_tokens": 1})
        assert one.status_code == 200
        server.frontend.send_signal(signal.SIGTERM)
        check_envelope(waiting.result(), 503, "draining")
