"""The completions endpoint on the wire. A prompt of token ids is repeated by the scripted engine,
so these tests know every token."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

WORDS = "The quick brown fox jumps over the lazy dog"


def ids_of(raw_tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = raw_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_all_four_prompt_forms(client: Any, raw_tokenizer: Any) -> None:
    one, two = ids_of(raw_tokenizer, "The quick"), ids_of(raw_tokenizer, "lazy dog")
    forms: list[tuple[Any, list[str]]] = [
        ("The quick", ["The quick"]),
        (["The quick", "lazy dog"], ["The quick", "lazy dog"]),
        (one, ["The quick"]),
        ([one, two], ["The quick", "lazy dog"]),
    ]
    for prompt, texts in forms:
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_times_prompts_are_ordered_by_prompt(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["The", "dog"], n=2)
    assert [choice.text for choice in answer.choices] == ["The", "The", "dog", "dog"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_text_prompt_gets_the_begin_mark_only_from_the_tokenizer(
    server: Any, client: Any, raw_tokenizer: Any
) -> None:
    client.completions.create(model="tiny", prompt="The quick")
    sent = server.received("GenerateRequest")[-1]["input_ids"]
    assert sent == raw_tokenizer.encode("The quick", add_special_tokens=True).ids


def test_max_tokens_is_sixteen_if_left_out(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=[30] * 40)
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(client: Any, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="tiny", prompt=["The ", "dog "], echo=True, stream=stream
    )
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["The The ", "dog dog "]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_generates_nothing(server: Any, http: httpx.Client, stream: bool) -> None:
    before = len(server.received("GenerateRequest"))
    body = {"prompt": WORDS, "max_tokens": 0, "echo": True, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if stream:
        assert WORDS in answer.text and answer.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in answer.text
    else:
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (WORDS, "length")
        assert answer.json()["usage"]["completion_tokens"] == 0
    assert len(server.received("GenerateRequest")) == before


def test_logprobs_are_four_parallel_lists(client: Any, raw_tokenizer: Any) -> None:
    prompt = ids_of(raw_tokenizer, WORDS)
    answer = client.completions.create(model="tiny", prompt=prompt, logprobs=2, max_tokens=100)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.tokens or []
    assert "".join(tokens) == answer.choices[0].text == WORDS
    assert logprobs.token_logprobs == [-0.5 * (i + 1) for i in range(len(prompt))]
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])
    offsets = logprobs.text_offset or []
    assert [WORDS[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True)] == [True] * len(
        tokens
    )


def test_logprobs_of_zero_give_the_sampled_token_alone(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="The quick", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tops = logprobs.top_logprobs or []
    assert [list(top) for top in tops] == [[token] for token in logprobs.tokens or []]


def test_half_characters_in_logprobs_are_named_by_their_bytes(
    client: Any, raw_tokenizer: Any
) -> None:
    lead = next(i for i in range(480) if raw_tokenizer.id_to_token(i) == "\u00e2")
    answer = client.completions.create(model="tiny", prompt=[lead], logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xe2"]
    assert answer.choices[0].text == "\ufffd"


def test_streamed_logprobs_are_the_same(client: Any, raw_tokenizer: Any) -> None:
    prompt = ids_of(raw_tokenizer, WORDS)
    options: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "max_tokens": 100}
    whole = client.completions.create(model="tiny", **options).choices[0].logprobs
    assert whole is not None
    joined: dict[str, list[Any]] = {name: [] for name in whole.model_dump()}
    for chunk in client.completions.create(model="tiny", stream=True, **options):
        part = chunk.choices[0].logprobs
        if part is not None:
            for name, values in part.model_dump().items():
                joined[name] += values
    assert joined == whole.model_dump()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": ["a"] * 4, "n": 5}, "n"),
        ({"n": 9}, "n"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_k": 513}, "top_k"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_embeds": "abc"}, "prompt_embeds"),
        ({"lora_path": "x"}, "lora_path"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "The", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


def test_best_of_equal_to_n_is_accepted(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "The", "n": 2, "best_of": 2})
    assert len(answer.json()["choices"]) == 2


def test_too_long_prompts_name_both_numbers(new_server: Any) -> None:
    server = new_server(engine={"context_length": 20})
    http: httpx.Client = server.http()

    def post(**fields: Any) -> httpx.Response:
        return http.post("/v1/completions", json=fields)

    # the last token that fits
    fits = post(prompt=[30] * 19, ignore_eos=True)
    assert fits.json()["usage"]["completion_tokens"] == 1
    assert fits.json()["choices"][0]["finish_reason"] == "length"
    for body in (
        {"prompt": [30] * 20},
        {"prompt": [30] * 200},
        {"prompt": [30] * 10, "max_tokens": 11},
        {"prompt": "The quick brown fox " * 20},
    ):
        answer = post(**body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert "20 tokens" in error["message"]
    assert (
        "21 tokens (10 tokens in the prompt, 11 in the completion)"
        in post(prompt=[30] * 10, max_tokens=11).text
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        server.openai().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "The quick brown fox " * 9}]
        )


def test_the_kv_pool_limits_a_request_too(new_server: Any) -> None:
    server = new_server(engine={"max_total_num_tokens": 16})
    answer = server.http().post("/v1/completions", json={"prompt": [30] * 8, "max_tokens": 9})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_newer_name_of_the_limit_goes_first(http: Any, raw_tokenizer: Any) -> None:
    ids = ids_of(raw_tokenizer, WORDS)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "max_completion_tokens": 3}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 3
    refused = http.post("/v1/completions", json=body | {"max_completion_tokens": 0})
    assert refused.json()["error"]["param"] == "max_completion_tokens"
    assert refused.status_code == 400
