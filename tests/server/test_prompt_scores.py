"""Echo with logprobs, token ids in the answer, and when cached tokens are known, on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

WORDS = "The quick brown fox"


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined_logprobs(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_scores_the_prompt(
    http: Any, raw_tokenizer: Any, stream: bool, max_tokens: int, as_ids: bool
) -> None:
    ids = raw_tokenizer.encode(WORDS).ids
    prompt = ids if as_ids else WORDS
    body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    answer = http.post("/v1/completions", json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer.text)
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        logprobs = joined_logprobs(events)
    else:
        [choice] = answer.json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
    generated = raw_tokenizer.decode(ids[:max_tokens])
    assert text == WORDS + generated
    count = len(ids)
    assert "".join(logprobs["tokens"]) == text
    values = logprobs["token_logprobs"]
    assert values[0] is None and values[1:count] == [-0.25 * at for at in range(1, count)]
    assert values[count:] == [-0.5 * at for at in range(1, max_tokens + 1)]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    at = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == at
        at += len(token)


def test_special_tokens_of_an_echoed_text_keep_their_places(http: Any) -> None:
    prompt = "<|im_start|>The quick"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == prompt
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:2] == [0, len("<|im_start|>")]
    assert "".join(choice["logprobs"]["tokens"]) == prompt


def test_every_prompt_is_scored(http: Any) -> None:
    body = {"prompt": [WORDS, "The lazy dog"], "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    texts = ["".join(choice["logprobs"]["tokens"]) for choice in choices]
    assert texts == [WORDS, WORDS, "The lazy dog", "The lazy dog"]


def test_an_engine_error_while_scoring_is_the_status(http: Any) -> None:
    body = {"prompt": WORDS, "echo": True, "logprobs": 0, "cache_salt": "fail:timeout:0"}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_completion(http: Any, raw_tokenizer: Any, stream: bool) -> None:
    ids = raw_tokenizer.encode(WORDS).ids
    body = {"prompt": WORDS, "max_tokens": 100, "return_token_ids": True, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    if stream:
        choices = [choice for event in events_of(answer.text) for choice in event["choices"]]
        given = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        found = [token for choice in choices for token in choice["token_ids"]]
    else:
        choices = answer.json()["choices"]
        given, found = [choices[0]["prompt_token_ids"]], choices[0]["token_ids"]
    assert given == [ids]
    assert found == [*ids, 0], "the end token is one of them"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(http: Any, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": WORDS}],
        "return_token_ids": True,
        "stream": stream,
        "max_tokens": 5,
        "skip_special_tokens": False,
    }
    answer = http.post("/v1/chat/completions", json=body)
    if stream:
        events = events_of(answer.text)
        [prompt] = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
        assert "prompt_token_ids" in events[0]
        choices = [choice for event in events for choice in event["choices"]]
        found = [token for choice in choices for token in choice.get("token_ids", [])]
    else:
        prompt = answer.json()["prompt_token_ids"]
        found = answer.json()["choices"][0]["token_ids"]
    assert found == prompt[:5]


def test_token_ids_end_with_the_stop_string(http: Any, raw_tokenizer: Any) -> None:
    ids = raw_tokenizer.encode(WORDS).ids
    body = {"prompt": WORDS, "max_tokens": 100, "stop": "quick", "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    found = answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert found == ids[: len(found)] and len(found) == answer["usage"]["completion_tokens"]


def test_no_token_ids_unless_asked_for(http: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": WORDS}).json()
    assert "token_ids" not in answer["choices"][0]


def test_cached_tokens_are_known_when_a_stop_string_ends_it(http: Any, raw_tokenizer: Any) -> None:
    ids = raw_tokenizer.encode(WORDS).ids
    answer = http.post("/v1/completions", json={"prompt": WORDS, "stop": "quick"}).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(ids) // 2}


def test_cached_tokens_are_in_the_first_continuous_usage(http: Any, raw_tokenizer: Any) -> None:
    ids = raw_tokenizer.encode(WORDS).ids
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": WORDS, "stream": True, "stream_options": options}
    events = events_of(http.post("/v1/completions", json=body).text)
    assert all(
        event["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) // 2
        for event in events
    )
