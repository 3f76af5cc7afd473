"""The fifteen response details that clients depend on, one test each, in the order in which the
API contract lists them."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from duograph.server.config import HttpConfig

FOX = [{"role": "user", "content": "The quick fox"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events; [DONE] stays a string."""
    answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_01_order_role_content_finish_for_every_choice(http: httpx.Client) -> None:
    *chunks, done = events(http, CHAT, {"messages": FOX, "n": 2})
    assert done == "[DONE]"
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        first, *middle, last = own
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) == {"content"} for choice in middle)
        assert all(choice["delta"]["content"] for choice in middle)
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert last["delta"] == {} and last["finish_reason"] == "stop"


def test_02_usage_comes_when_asked_for_and_only_then(http: httpx.Client) -> None:
    *chunks, _ = events(http, CHAT, {"messages": FOX})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)

    asked: dict[str, Any] = {"messages": FOX, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(http, CHAT, asked)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0

    asked["stream_options"]["continuous_usage_stats"] = True
    *chunks, last, _ = events(http, CHAT, asked)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]


def test_03_one_id_created_and_model_for_all_chunks(http: httpx.Client) -> None:
    for path, body, kind, prefix in (
        (CHAT, {"messages": FOX}, "chat.completion.chunk", "chatcmpl-"),
        (COMPLETIONS, {"prompt": "The"}, "text_completion", "cmpl-"),
    ):
        *chunks, _ = events(http, path, body | {"model": "tiny-alias"})
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert chunks[0]["object"] == kind and chunks[0]["id"].startswith(prefix)
        assert chunks[0]["model"] == "tiny"
    whole = http.post(CHAT, json={"messages": FOX}).json()
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    whole = http.post(COMPLETIONS, json={"prompt": "The"}).json()
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")


def test_the_clients_own_id_is_echoed_streamed_or_not(http: httpx.Client) -> None:
    for name in ("rid", "request_id"):
        mine = {name: 'my "id" ü', "messages": FOX}
        assert http.post(CHAT, json=mine).json()["id"] == 'chatcmpl-my "id" ü'
        *chunks, _ = events(http, CHAT, mine)
        assert {chunk["id"] for chunk in chunks} == {'chatcmpl-my "id" ü'}
    # two at once may have the same: the engine never sees it
    same = {"prompt": ["The", "quick"], "rid": "x"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: http.post(COMPLETIONS, json=same).json(), range(4)))
    assert [answer["id"] for answer in answers] == ["cmpl-x"] * 4
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)


def test_04_finish_reasons_are_openais_and_matched_stop_says_more(http: httpx.Client) -> None:
    for fields, reason, matched in (
        ({}, "stop", 0),
        ({"stop": "quick"}, "stop", "quick"),
        ({"max_tokens": 2}, "length", None),
    ):
        choice = http.post(CHAT, json={"messages": FOX, **fields}).json()["choices"][0]
        assert (choice["finish_reason"], choice["matched_stop"]) == (reason, matched)
        *_, last, _ = events(http, CHAT, {"messages": FOX, **fields})
        assert last["choices"][0]["finish_reason"] == reason
        assert last["choices"][0]["matched_stop"] == matched


def test_05_streamed_calls_begin_with_id_and_name_and_go_on_with_arguments(
    http: httpx.Client,
) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "b c"}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": call}], "tools": [tool]}
    *chunks, last, done = events(http, CHAT, body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["type"] == "function" and first["function"] == {"name": "f", "arguments": ""}
    assert all(set(other) == {"index", "function"} for other in others)
    assert all(set(other["function"]) == {"arguments"} for other in others)
    assert json.loads("".join(o["function"]["arguments"] for o in others)) == {"a": "b c"}
    assert last["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"

    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "b c"}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"functions": [{"name": "f"}]}, "functions"), ({"function_call": "auto"}, "function_call")],
)
def test_05_the_older_fields_for_functions_are_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post(CHAT, json={"messages": FOX, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_06_chat_logprobs_carry_raw_bytes(http: httpx.Client) -> None:
    text = "🙂"
    body = {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 1}
    content = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in content)
    assert all(set(t) == {"token", "logprob", "bytes"} for e in content for t in e["top_logprobs"])
    assert text in b"".join(bytes(entry["bytes"]) for entry in content).decode()


def test_07_usage_has_all_counts_and_the_cached_tokens(client: Any, server: Any) -> None:
    usage = client.chat.completions.create(model="tiny", messages=FOX).usage
    assert usage is not None
    prompt = len(server.received("GenerateRequest")[-1]["input_ids"])
    assert usage.prompt_tokens == prompt
    assert usage.completion_tokens == prompt + 1  # its echo and the end mark
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == prompt // 2


def test_08_errors_are_nested_and_have_the_right_status(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=FOX, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert "[0.0, 2.0]" in caught.value.message and "got 3" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-nothing", messages=FOX)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_09_an_error_in_mid_stream_is_an_event_without_done(http: httpx.Client, path: str) -> None:
    script = {"cache_salt": "fail:internal:300", "ignore_eos": True, "max_tokens": 4000}
    body = {"messages": FOX, "prompt": "The quick fox", **script}
    items = events(http, path, body)
    assert items[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in items
    assert len(items) > 2  # what came before the error was delivered


def test_09_the_official_client_raises_on_it(client: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=FOX,
        stream=True,
        max_tokens=4000,
        extra_body={"cache_salt": "fail:internal:300", "ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="Internal error"):
        list(stream)


def test_10_streams_are_events_flushed_per_token(server: Any) -> None:
    # the engine hangs after five tokens: they must be here all the same
    body = {"prompt": [40] * 9, "stream": True, "cache_salt": "hang:5"}
    with server.http().stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        shown = ""
        for line in answer.iter_lines():
            if line:
                shown += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if len(shown) == 5:
                break
        assert len(shown) == 5


def test_11_every_response_has_a_request_id(http: httpx.Client, client: Any) -> None:
    for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("PUT", CHAT), ("POST", CHAT)):
        assert http.request(method, path).headers["x-request-id"]
    given = http.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    forged = http.get("/health", headers={"x-request-id": "a b<script>"})
    assert forged.headers["x-request-id"].startswith("req-")
    answer = client.chat.completions.create(model="tiny", messages=FOX)
    assert answer._request_id
    with http.stream("POST", CHAT, json={"messages": FOX, "stream": True}) as stream:
        assert stream.headers["x-request-id"]


def test_12_no_event_ends_in_half_a_character(http: httpx.Client) -> None:
    text = "日本🙂" * 20
    items = events(http, CHAT, {"messages": [{"role": "user", "content": text}]})
    pieces = [item["choices"][0]["delta"].get("content", "") for item in items[:-1]]
    assert text in "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_13_length_is_an_error_to_openais_stream_helper_but_not_to_a_raw_stream(
    client: Any,
) -> None:
    raw = client.chat.completions.create(model="tiny", messages=FOX, max_tokens=2, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in raw][-1] == "length"
    with client.chat.completions.stream(model="tiny", messages=FOX) as helper:
        assert helper.get_final_completion().choices[0].finish_reason == "stop"


def test_14_the_bearer_key_guards_every_route_but_the_health_ones(new_server: Any) -> None:
    server = new_server(frontend={"api_keys": ("key-one", "key-two")})
    bare = httpx.Client(base_url=server.url)
    for method, path in (
        ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
        ("GET", "/metrics"), ("GET", "/server_info"), ("GET", "/graphs"), ("GET", "/nowhere"),
        ("GET", "/openapi.json"),
    ):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-one"}):
            answer = bare.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/health/live", "/ready", "/health/ready"):
        assert bare.get(path).status_code == 200
    for key in ("key-one", "key-two"):
        client = OpenAI(base_url=f"{server.url}/v1", api_key=key)
        assert client.models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{server.url}/v1", api_key="x").models.list()
    assert "key-one" not in server.stderr.read_text()


def test_15_other_sites_may_not_read_unless_they_are_allowed(
    http: httpx.Client, new_server: Any
) -> None:
    foreign = {"origin": "https://example.org"}
    refused = http.get("/v1/models", headers=foreign)
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    same_site = {"origin": str(http.base_url).rstrip("/")}
    assert http.get("/v1/models", headers=same_site).status_code == 200

    server = new_server(http=HttpConfig(allowed_origins=("https://example.org",)))
    allowed = server.http().get("/v1/models", headers=foreign)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    preflight = server.http().options(
        CHAT,
        headers=foreign
        | {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,authorization",
        },
    )
    assert preflight.status_code == 200
    other = server.http().get("/v1/models", headers={"origin": "https://other.example"})
    assert other.status_code == 403


def test_a_foreign_host_is_refused(server: Any, new_server: Any) -> None:
    def status(port: int, host: str) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            raw.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            return raw.recv(4096).split(b" ")[1]

    assert status(server.port, "localhost:1") == b"200"
    assert status(server.port, "[::1]:80") == b"200"
    assert status(server.port, "rebound.example") == b"421"
    named = new_server(http=HttpConfig(allowed_hosts=("llm.example",)))
    assert status(named.port, "llm.example") == b"200"
    assert status(named.port, "rebound.example") == b"421"
