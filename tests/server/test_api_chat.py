"""The chat endpoint on the wire, with the official client. The scripted engine repeats the
prompt's tokens, so the text of an answer is the rendered chat without its special tokens."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from duograph.server.translate import choice_seed

FOX = [{"role": "user", "content": "The quick fox"}]
FOX_TEXT = "user\nThe quick fox\nassistant\n"
MIXED = "日本語 🙂🚀 Größe, Ελληνικά und naïve façade. " * 3


def streamed_text(client: Any, **options: Any) -> str:
    chunks = client.chat.completions.create(model="tiny", stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def plain_text(client: Any, **options: Any) -> str:
    answer = client.chat.completions.create(model="tiny", **options)
    return answer.choices[0].message.content or ""


def test_a_chat_is_answered_with_what_the_engine_gave(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=FOX)
    assert answer.choices[0].message.content == FOX_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"


def test_a_streamed_chat_is_the_same_text(client: Any) -> None:
    assert streamed_text(client, messages=FOX) == FOX_TEXT


def test_characters_of_many_bytes_are_never_split(client: Any) -> None:
    messages = [{"role": "user", "content": MIXED}]
    stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == f"user\n{MIXED}\nassistant\n"
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_parts_are_joined(client: Any) -> None:
    parts = [{"type": "text", "text": "The quick"}, {"type": "text", "text": "fox"}]
    messages = [{"role": "user", "content": parts}]
    assert plain_text(client, messages=messages) == "user\nThe quick\nfox\nassistant\n"


def test_an_image_part_is_refused(client: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    with pytest.raises(openai.BadRequestError) as caught:
        plain_text(client, messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages.0.content"


def test_max_tokens_ends_with_length(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="tiny", messages=FOX, **{name: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", ["quick", ["zzz", "e quick f"], "fox\na", "\n"])
def test_a_stop_string_cuts_the_text_the_same_way_streamed_or_not(
    client: Any, stop: str | list[str]
) -> None:
    found = [s for s in ([stop] if isinstance(stop, str) else stop) if s in FOX_TEXT]
    expected = FOX_TEXT[: FOX_TEXT.index(found[0])]
    assert plain_text(client, messages=FOX, stop=stop) == expected
    assert streamed_text(client, messages=FOX, stop=stop) == expected


def test_a_stop_string_can_be_kept(client: Any) -> None:
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        text = streamed_text(client, messages=FOX, stop="quick", extra_body={name: True})
        assert text == "user\nThe quick"


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_out(client: Any) -> None:
    assert streamed_text(client, messages=FOX, stop="assistant\nX") == FOX_TEXT


def test_a_stop_string_counts_only_after_min_tokens(client: Any) -> None:
    options: dict[str, Any] = {"messages": FOX, "stop": "\n"}
    assert plain_text(client, **options) == "user"
    later = plain_text(client, **options, extra_body={"min_tokens": 10})
    assert later.startswith("user\nThe") and later != FOX_TEXT


def test_a_matched_stop_string_is_named_and_the_engine_is_told_to_stop(
    server: Any, http: httpx.Client, eventually: Any
) -> None:
    body = {"messages": FOX, "stop": "quick", "ignore_eos": True, "max_tokens": 4000}
    before = len(server.received("AbortRequest"))
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["matched_stop"] == "quick"
    assert answer["choices"][0]["finish_reason"] == "stop"
    eventually(lambda: len(server.received("AbortRequest")) > before, what="an abort")


def test_a_stop_token_is_not_in_the_text_unless_asked_for(
    http: httpx.Client, raw_tokenizer: Any
) -> None:
    token = raw_tokenizer.token_to_id("\u0120fox")
    body: dict[str, Any] = {"messages": FOX, "stop_token_ids": [token]}
    answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["message"]["content"] == "user\nThe quick"
    assert (answer["finish_reason"], answer["matched_stop"]) == ("stop", token)
    body["include_stop_str_in_output"] = True
    kept = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert kept["message"]["content"] == "user\nThe quick fox"


def test_special_tokens_can_be_shown(client: Any) -> None:
    text = plain_text(client, messages=FOX, extra_body={"skip_special_tokens": False})
    assert text.startswith("<|im_start|>user\nThe quick fox<|im_end|>\n<|im_start|>assistant\n")


def test_n_choices_are_all_there(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=FOX, n=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {FOX_TEXT}
    usage = answer.usage
    assert usage is not None
    # the prompt counts once, the outputs three times
    assert usage.completion_tokens == 3 * (usage.prompt_tokens + 1)


def test_n_streamed_choices_carry_their_index(client: Any) -> None:
    stream = client.chat.completions.create(model="tiny", messages=FOX, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: FOX_TEXT, 1: FOX_TEXT}


def test_seeds_reach_the_engine_one_for_each_choice(server: Any, client: Any) -> None:
    client.chat.completions.create(model="tiny", messages=FOX, n=2, seed=-5)
    seeds = [m["sampling"]["seed"] for m in server.received("GenerateRequest")[-2:]]
    assert seeds == [-5, choice_seed(-5, 1)]
    client.chat.completions.create(model="tiny", messages=FOX, n=2)
    drawn = [m["sampling"]["seed"] for m in server.received("GenerateRequest")[-2:]]
    assert len(set(drawn)) == 2


def test_sampling_fields_reach_the_engine(server: Any, client: Any) -> None:
    extensions = {
        "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True,
        "min_tokens": 2, "stop_token_ids": [5, 6],
    }  # fmt: skip
    client.chat.completions.create(
        model="tiny", messages=FOX, temperature=0.5, top_p=0.75, presence_penalty=-1,
        frequency_penalty=2, max_tokens=4, logit_bias={"11": -100, "12": 2.5}, seed=9,
        extra_body=extensions,
    )  # fmt: skip
    sampling = server.received("GenerateRequest")[-1]["sampling"]
    assert sampling == {
        "max_new_tokens": 4, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 7,
        "min_p": 0.25, "seed": 9, "presence_penalty": -1.0, "frequency_penalty": 2.0,
        "repetition_penalty": 1.5, "logit_bias": {"11": -100.0, "12": 2.5},
        "stop_token_ids": [5, 6], "ignore_eos": True, "logprobs": None,
        "prompt_logprobs": None, "prompt_logprobs_start": 1,
    }  # fmt: skip


def test_what_the_models_author_recommends_is_the_default_and_a_client_may_differ(
    new_server: Any, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    advice = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    server = new_server(folder=folder)
    with httpx.Client(base_url=server.url) as http:
        for fields, expected in (
            ({}, (0.6, 20, 1.0)),
            ({"temperature": 1, "top_k": -1}, (1, -1, 1)),
        ):
            assert (
                http.post("/v1/chat/completions", json={"messages": FOX, **fields}).status_code
                == 200
            )
            sampling = server.received("GenerateRequest")[-1]["sampling"]
            assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == expected
            assert sampling["repetition_penalty"] == 1.1


def test_logprobs_have_exactly_the_asked_number_and_raw_bytes(
    client: Any, raw_tokenizer: Any
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "日本"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens - 1  # the end mark is no text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert [entry.logprob for entry in logprobs.content[:3]] == [-0.5, -1.0, -1.5]
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert "user\n日本" in raw.decode()


def test_streamed_logprobs_are_the_same(client: Any) -> None:
    options: dict[str, Any] = {"messages": FOX, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(model="tiny", **options).choices[0].logprobs
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(model="tiny", stream=True, **options):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed += choice.logprobs.content or []
    assert whole is not None
    assert [e.model_dump() for e in streamed] == [e.model_dump() for e in whole.content or []]


def test_a_final_message_is_continued(client: Any) -> None:
    messages = [*FOX, {"role": "assistant", "content": "It jumps"}]
    text = plain_text(
        client,
        messages=messages,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert text == "user\nThe quick fox\nassistant\nIt jumps"
    alone = plain_text(client, messages=messages, extra_body={"continue_final_message": True})
    assert alone == text


def test_an_empty_end_gives_no_text_but_a_finish(client: Any, raw_tokenizer: Any) -> None:
    # the first token of every chat is the begin mark, and it stops this one
    begin = raw_tokenizer.token_to_id("<|im_start|>")
    stream = client.chat.completions.create(
        model="tiny", messages=FOX, stream=True, extra_body={"stop_token_ids": [begin]}
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", None]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_tools_that_must_not_be_called_and_nulls_are_accepted(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {
        "model": None, "messages": FOX, "tools": [tool], "tool_choice": "none", "stop": None,
        "response_format": {"type": "text"}, "seed": None, "logprobs": None, "n": None,
        "stream_options": None, "lora_path": None, "temperature": None, "max_tokens": None,
        "user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto",
        "some_future_field": [1, 2],
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == FOX_TEXT


def test_a_conversation_with_tool_calls_can_be_sent(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *FOX,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    # the template knows no tools: they are told in words
    assert "user\n<tool_response>\n42\n</tool_response>" in text


def test_many_streams_at_once_equal_the_same_requests_alone(client: Any) -> None:
    prompts = [[{"role": "user", "content": f"number {i} " + MIXED[: 7 * i]}] for i in range(32)]
    alone = [streamed_text(client, messages=p) for p in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda p: streamed_text(client, messages=p), prompts))
    assert together == alone
