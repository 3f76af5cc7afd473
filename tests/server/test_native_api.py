"""POST /generate in SGLang's own form, and the routes around it."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

WORDS = "The quick brown fox"


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def ids(raw_tokenizer: Any) -> list[int]:
    found: list[int] = raw_tokenizer.encode(WORDS).ids
    return found


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_one_text_gives_one_object(http: Any, ids: list[int], method: str) -> None:
    answer = http.request(method, "/generate", json={"text": WORDS, "rid": "mine"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["text"], body["output_ids"]) == (WORDS, [*ids, 0])
    meta = body["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}
    assert meta["prompt_tokens"] == len(ids) and meta["completion_tokens"] == len(ids) + 1
    assert meta["cached_tokens"] == len(ids) // 2 and 0 < meta["e2e_latency"] < 30
    assert set(body) == {"text", "output_ids", "meta_info"}


def test_ids_and_a_limit(http: Any, ids: list[int]) -> None:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}
    answer = http.post("/generate", json=body).json()
    assert answer["output_ids"] == ids[:2]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_the_default_limit_and_defaults_are_sglangs(server: Any, http: Any) -> None:
    http.post("/generate", json={"text": WORDS})
    sampling = server.received("GenerateRequest")[-1]["sampling"]
    assert sampling["max_new_tokens"] == 128
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)


def test_every_sampling_parameter_reaches_the_engine(server: Any, http: Any) -> None:
    params = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 7,
        "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5,
        "repetition_penalty": 1.25, "ignore_eos": True, "logit_bias": {"7": 1.5},
        "stop_token_ids": [5], "sampling_seed": 11, "stop": None,
    }  # fmt: skip
    body = {"text": WORDS, "sampling_params": params, "priority": -2}
    assert http.post("/generate", json=body).status_code == 200
    received = server.received("GenerateRequest")[-1]
    assert received["priority"] == -2
    expected = {key: value for key, value in params.items() if key not in ("sampling_seed", "stop")}
    sampling = {**received["sampling"]}
    assert {key: sampling[key] for key in expected} == expected
    assert sampling["seed"] == 11


def test_several_prompts_and_choices_give_a_list(http: Any, ids: list[int]) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}]
    body = {"text": [WORDS, WORDS], "sampling_params": params, "rid": ["a", "b"]}
    answers = http.post("/generate", json=body).json()
    assert [answer["output_ids"] for answer in answers] == [ids[:1], ids[:2], ids[:2]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "b"]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len(http.post("/generate", json={"text": [WORDS]}).json()) == 1


def test_a_stream_is_cumulative(http: Any, ids: list[int]) -> None:
    answer = http.post("/generate", json={"text": WORDS, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    texts = [event["text"] for event in events]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons[:-1] == [None] * (len(events) - 1)
    assert texts[-1] == WORDS and reasons[-1] == {"type": "stop", "matched": 0}
    assert events[-1]["output_ids"] == [*ids, 0]
    whole = http.post("/generate", json={"text": WORDS}).json()
    assert events[-1].keys() == whole.keys()
    assert events[-1]["meta_info"].keys() == whole["meta_info"].keys()


def test_a_stream_of_two_prompts_ends_once(http: Any) -> None:
    body = {"text": [WORDS, "lazy"], "stream": True}
    events = events_of(http.post("/generate", json=body).text)
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: WORDS, 1: "lazy"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_triples(http: Any, ids: list[int], stream: bool) -> None:
    body = {
        "text": WORDS, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0,
        "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 2},
        "stream": stream,
    }  # fmt: skip
    answer = http.post("/generate", json=body)
    meta = (events_of(answer.text)[-1] if stream else answer.json())["meta_info"]
    prompt = meta["input_token_logprobs"]
    assert prompt[0][:2] == [None, ids[0]]
    assert [entry[:2] for entry in prompt[1:]] == [
        [-0.25 * at, ids[at]] for at in range(1, len(ids))
    ]
    assert "".join(entry[2] for entry in prompt) == WORDS
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
        [-0.5, ids[0]],
        [-1.0, ids[1]],
    ]
    assert meta["input_top_logprobs"][0] is None
    assert [len(best) for best in meta["input_top_logprobs"][1:]] == [2] * (len(ids) - 1)
    assert [len(best) for best in meta["output_top_logprobs"]] == [2, 2]


def test_logprobs_of_the_output_alone(http: Any, ids: list[int]) -> None:
    body = {"text": WORDS, "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, ids[0], None]]
    assert "output_top_logprobs" not in meta


def test_logprobs_from_the_middle_of_the_prompt(http: Any, ids: list[int]) -> None:
    body = {
        "input_ids": ids, "return_logprob": True, "logprob_start_len": 2,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    answer = http.post("/generate", json=body).json()
    assert answer["output_ids"] == []
    expected = [[-0.25 * at, ids[at], None] for at in range(2, len(ids))]
    assert answer["meta_info"]["input_token_logprobs"] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"text": {"a": 1}}, "text"),
        ({"text": ["a"] * 5}, "text"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"input_ids": [[1], [-1]]}, "input_ids"),
        ({"input_ids": [512]}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": [1] * 5000}, "input_ids"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": "x"}, "sampling_params"),
        ({"text": "a", "sampling_params": [None]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"top_k": 0.5}}, "sampling_params.top_k"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"stop": ""}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [600]}}, "sampling_params.stop_"),
        ({"text": "a", "sampling_params": {"n": 9}}, "sampling_params.n"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(http: Any, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/generate", json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].split(".0")[0].startswith(param), error
    assert param.split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"


def test_an_abort_is_a_finish_reason(server: Any, http: Any, eventually: Any) -> None:
    body = {"text": WORDS, "rid": "to-abort", "cache_salt": "hang:2"}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(http.post, "/generate", json=body)
        stream = pool.submit(http.post, "/generate", json=body | {"stream": True})
        count = lambda: sum(m["name"] == "to-abort" for m in server.received("GenerateRequest"))  # noqa: E731
        eventually(lambda: count() == 2, what="both requests at the engine")
        eventually(lambda: server_has_two_tokens(http), what="tokens")
        aborted = http.post("/abort_request", json={"rid": "to-abort"})
        assert aborted.json() == {"aborted": 2}
        answer = whole.result(10)
        assert answer.status_code == 200
        reason = answer.json()["meta_info"]["finish_reason"]
        assert reason == {
            "type": "abort", "message": "scripted failure", "status_code": 400,
        }  # fmt: skip
        assert len(answer.json()["output_ids"]) == 2
        last = events_of(stream.result(10).text)[-1]
        assert last["meta_info"]["finish_reason"] == reason and len(last["output_ids"]) == 2


def test_a_stream_that_is_aborted_before_its_first_token_is_a_stream(
    server: Any, http: Any, eventually: Any
) -> None:
    body = {"text": WORDS, "rid": "early", "cache_salt": "hang", "stream": True}
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(http.post, "/generate", json=body)
        names = lambda: [m["name"] for m in server.received("GenerateRequest")]  # noqa: E731
        eventually(lambda: "early" in names(), what="the request at the engine")
        assert http.post("/abort_request", json={"rid": "early"}).json() == {"aborted": 1}
        answer = stream.result(10)
    assert answer.headers["content-type"].startswith("text/event-stream")
    (event,) = events_of(answer.text)
    assert event["output_ids"] == []
    assert event["meta_info"]["finish_reason"]["type"] == "abort"


def server_has_two_tokens(http: Any) -> bool:
    """The scripted engine steps every millisecond: half a second is enough for two tokens."""
    return bool(http.get("/health_generate").status_code == 200)


def test_an_aborted_chat_gets_an_error(server: Any, http: Any, eventually: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}], "rid": "chat-to-abort",
        "cache_salt": "hang",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json=body)
        names = lambda: [m["name"] for m in server.received("GenerateRequest")]  # noqa: E731
        eventually(lambda: "chat-to-abort" in names(), what="the request at the engine")
        assert http.post("/abort_request", json={"rid": "chat-to-abort"}).json() == {"aborted": 1}
        assert answer.result(10).status_code == 400
        assert answer.result(10).json()["error"]["code"] == "aborted"


def test_an_unknown_name_aborts_nothing(http: Any) -> None:
    assert http.post("/abort_request", json={"rid": "nobody"}).json() == {"aborted": 0}
    assert http.post("/abort_request", json={}).json()["error"]["param"] == "rid"


def test_health_generate_runs_a_real_token(server: Any, http: Any) -> None:
    before = len(server.received("GenerateRequest"))
    assert http.get("/health_generate").json() == {"status": "ok"}
    asked = server.received("GenerateRequest")[before:]
    assert [m["sampling"]["max_new_tokens"] for m in asked] == [1]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize(http: Any, ids: list[int], path: str) -> None:
    answer = http.post(path, json={"prompt": WORDS, "return_token_strs": True}).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 4096
    assert "".join(answer["token_strs"]) == WORDS
    both = http.post(path, json={"prompt": [WORDS, "lazy"]}).json()
    assert both["tokens"][0] == ids and both["count"][0] == len(ids)


def test_tokenize_a_chat_gives_its_prompt(http: Any) -> None:
    chat = {"messages": [{"role": "user", "content": WORDS}]}
    tokens = http.post("/tokenize", json=chat).json()["tokens"]
    body = chat | {"return_token_ids": True, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert tokens == answer["prompt_token_ids"]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize(http: Any, ids: list[int], path: str) -> None:
    answer = http.post(path, json={"tokens": [1, *ids]}).json()
    assert answer == {"text": WORDS, "prompt": WORDS}
    kept = http.post(path, json={"tokens": [1, *ids], "skip_special_tokens": False}).json()
    assert kept["text"] == "<|im_start|>" + WORDS
    assert http.post(path, json={"tokens": [ids, []]}).json()["text"] == [WORDS, ""]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
    ],
)
def test_wrong_tokenizer_bodies(http: Any, path: str, fields: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(http: Any, path: str) -> None:
    info = http.get(path).json()
    assert info["served_model_name"] == "tiny" and info["is_generation"] is True
    assert (info["max_model_len"], info["vocab_size"]) == (4096, 512)


def test_invocations_is_what_its_prompt_says(http: Any) -> None:
    chat = {"messages": [{"role": "user", "content": WORDS}]}
    assert http.post("/invocations", json=chat).json()["object"] == "chat.completion"
    text = http.post("/invocations", json={"prompt": WORDS}).json()
    assert text["object"] == "text_completion"
    assert "meta_info" in http.post("/invocations", json={"text": WORDS}).json()
    assert http.post("/invocations", json={"x": 1}).status_code == 400
    assert http.get("/ping").status_code == 200


def test_the_default_limit_is_cut_at_the_context(http: Any, server: Any) -> None:
    body: dict[str, Any] = {"input_ids": [300] * 4090}
    assert http.post("/generate", json=body).status_code == 200
    assert server.received("GenerateRequest")[-1]["sampling"]["max_new_tokens"] == 6
    refused = http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 7}})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_of_too_many_logprobs_is_refused(http: Any) -> None:
    prompt = [[300] * 4000] * 4
    body = {"prompt": prompt, "echo": True, "logprobs": 20, "max_tokens": 0, "n": 2}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    native = {
        "input_ids": prompt, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 20, "sampling_params": {"n": 2, "max_new_tokens": 1},
    }  # fmt: skip
    answer = http.post("/generate", json=native)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs_num")


def test_a_stream_tells_the_prompts_logprobs_first_and_last(http: Any, ids: list[int]) -> None:
    body = {
        "text": WORDS * 20, "return_logprob": True, "logprob_start_len": 0, "stream": True,
        "sampling_params": {"max_new_tokens": 60},
    }  # fmt: skip
    events = events_of(http.post("/generate", json=body).text)
    told = ["input_token_logprobs" in event["meta_info"] for event in events]
    assert len(events) > 2 and told[0] and told[-1] and not any(told[1:-1])
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 60
