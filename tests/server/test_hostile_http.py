"""What only a hostile or an old client sends: very many values, pipelined requests that nobody
waits for, several Host headers, HTTP/1.0."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from duograph.server.body import MAX_JSON_PARTS, parse_object
from duograph.server.errors import ApiError

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request_of(fields: dict[str, Any], head: bytes = HEAD) -> bytes:
    body = json.dumps(fields).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def exchange(port: int, request: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(request)
        answer = b""
        while data := raw.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b",".join([b"[]"] * MAX_JSON_PARTS) + b"]}",
        b'{"a": [' + b",".join([b"{}"] * MAX_JSON_PARTS) + b"]}",
        b'{"a": [' + b",".join([b'"["'] * MAX_JSON_PARTS) + b"]}",
        b'{"a": ' + b"[" * MAX_JSON_PARTS,
        json.dumps({"a": {str(i): i for i in range(MAX_JSON_PARTS)}}).encode(),
    ],
)
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(ApiError, match="strings, lists and objects") as refused:
        parse_object(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ['{"a": ["b"]}', '\\"[', "\\\\", '"', "[{"])
def test_what_a_text_is_made_of_is_not_counted(text: str) -> None:
    prompt = text * MAX_JSON_PARTS
    assert parse_object(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


@pytest.mark.parametrize(
    "body",
    [
        b'{"n": 1, "n": 1}',
        b'{"n": 1, "\\u006e": 2}',
        b'{"n": {"m": 1}, "n": 2}',
        b'{"n": [1, [{"m": 1, "m": 2}]]}',
        b'{"n": [{"m": [1]}, {"m": {"k": 1, "k": ":"}}]}',
        b'{"n": "[{", "o": [{"m": 1, "m": 2}]}',
    ],
)
def test_a_key_that_is_there_twice_is_refused_wherever_it_is(body: bytes) -> None:
    with pytest.raises(ApiError, match="twice"):
        parse_object(body)


@pytest.mark.parametrize(
    "document",
    [
        {"n": 1},
        {"n": [1, 2, {"n": [{"n": {}}, {"n": []}]}]},
        {"n": ":", ":": "[{:", "m": [{"n": "]"}, {"n": ":"}]},
    ],
)
def test_keys_of_different_objects_may_be_the_same(document: dict[str, Any]) -> None:
    assert parse_object(json.dumps(document).encode()) == document


def test_others_are_served_while_a_large_body_is_refused(http: httpx.Client) -> None:
    body = b'{"prompt": "The", "metadata": [' + b",".join([b"[]"] * 1_300_000) + b"]}"
    answer = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert http.post("/v1/completions", json={"prompt": "The"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_too_much_gets_the_answer_and_no_reset(server: Any, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 12_000_000 + b'"}'
    content = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers)
    assert answer.status_code == 413 and "larger than 4194304" in answer.json()["error"]["message"]


def test_two_hosts_are_one_too_many(server: Any) -> None:
    answer = exchange(
        server.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 400 ") and b"more than one Host" in answer


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_http_1_0_gets_a_stream_without_chunks(server: Any, connection: bytes) -> None:
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + connection
    fields = {"prompt": "The quick", "max_tokens": 3, "stream": True}
    top, _, body = exchange(server.port, request_of(fields, head)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top and b"connection: close" in top
    assert body.startswith(b"data: {") and body.endswith(b"\n\ndata: [DONE]\n\n")
    assert b"\r\n" not in body
    whole = exchange(
        server.port, request_of(fields | {"stream": False}, HEAD.replace(b"1.1", b"1.0"))
    )
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_requests_in_its_pipe_is_aborted(
    server: Any, eventually: Any, stream: bool
) -> None:
    asked, aborted = len(server.received("GenerateRequest")), len(server.received("AbortRequest"))
    endless = {"prompt": [40] * 8, "ignore_eos": True, "max_tokens": 4000, "cache_salt": "hang:3"}
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    raw.sendall(request_of(endless | {"stream": stream}) + request_of({"prompt": "The"}))
    eventually(lambda: len(server.received("GenerateRequest")) == asked + 1, what="at work")
    left_at = time.time()
    raw.close()
    eventually(lambda: len(server.received("AbortRequest")) == aborted + 1, what="an abort")
    assert server.received("AbortRequest")[-1]["at"] - left_at < 1.0
    assert len(server.received("GenerateRequest")) == asked + 1


def test_several_texts_that_are_long_together_go_there_and_back(http: httpx.Client) -> None:
    texts = ["The quick brown fox jumps over the lazy dog. " * 4] * 50
    body = {"prompt": texts, "add_special_tokens": False, "return_token_strs": True}
    tokens = http.post("/tokenize", json=body).json()
    assert ["".join(strings) for strings in tokens["token_strs"]] == texts
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["text"] == texts
