"""The whole way of a request, HTTP to tokens and back, with the official client and a tiny
model with random weights."""

from __future__ import annotations

import itertools
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from tokenizers import pre_tokenizers

from duograph.tests.e2e.server_process import ServerProcess, eventually
from duograph.tests.server.test_monitoring_files import unknown_names

pytestmark = pytest.mark.slow

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "what is the answer to all of this"}]
LONG = {"ignore_eos": True}


def chat(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    options.setdefault("messages", MESSAGES)
    options.setdefault("max_tokens", 24)
    options.setdefault("extra_body", LONG)
    answer: ChatCompletion = client.chat.completions.create(model=MODEL, **options)
    return answer


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[str], list[Any]]:
    """Text, content deltas and all chunks of one choice."""
    options.setdefault("messages", MESSAGES)
    options.setdefault("max_tokens", 24)
    options.setdefault("extra_body", LONG)
    chunks = list(client.chat.completions.create(model=MODEL, stream=True, **options))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return "".join(deltas), deltas, chunks


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_a_chat_answer_is_complete(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0)
    assert answer.model == MODEL and answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > len("what is".split())
    assert text_of(answer)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_greedy_and_seeded_answers_repeat(client: openai.OpenAI) -> None:
    assert text_of(chat(client, temperature=0)) == text_of(chat(client, temperature=0))
    first = text_of(chat(client, temperature=1, seed=7))
    assert text_of(chat(client, temperature=1, seed=7)) == first
    assert text_of(chat(client, temperature=1, seed=8)) != first


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    text, deltas, chunks = streamed(client, temperature=1, seed=3)
    assert text == text_of(chat(client, temperature=1, seed=3))
    assert sum(1 for delta in deltas if delta) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_last_when_asked_for(client: openai.OpenAI) -> None:
    _, _, chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stop_string_over_chunk_borders_is_never_seen(client: openai.OpenAI) -> None:
    whole, deltas, _ = streamed(client, temperature=1, seed=11, max_tokens=60)
    pieces = [delta for delta in deltas if delta]
    checked = 0
    for left, right in itertools.pairwise(pieces[5:]):
        stop = left[-1:] + right[:1]
        if len(stop) < 2 or "\ufffd" in stop or not stop.isascii():
            continue
        expected = whole[: whole.index(stop)]
        text, _, chunks = streamed(client, temperature=1, seed=11, max_tokens=60, stop=stop)
        assert text == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
        answer = chat(client, temperature=1, seed=11, max_tokens=60, stop=[stop, "never to come"])
        assert text_of(answer) == expected
        assert answer.choices[0].finish_reason == "stop"
        checked += 1
        if checked == 4:
            return
    assert checked, f"no stop string could be made of {pieces}"


def test_a_stop_string_that_never_completes_loses_nothing(client: openai.OpenAI) -> None:
    whole = text_of(chat(client, temperature=1, seed=11, max_tokens=60))
    almost = whole[10:14] + "\x00not in the text"
    text, _, _ = streamed(client, temperature=1, seed=11, max_tokens=60, stop=almost)
    assert text == whole


def byte_token(byte: int) -> int:
    """The token of one raw byte. The alphabet stands in the order of its characters behind the
    three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    character = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return 3 + alphabet.index(character)


def test_a_character_of_two_tokens_is_never_sent_in_halves(client: openai.OpenAI) -> None:
    halves = {str(byte_token(byte)): 100 for byte in "é".encode()}
    options: dict[str, Any] = {"temperature": 1, "max_tokens": 80, "logit_bias": halves}
    found = 0
    for seed in range(6):
        whole = text_of(chat(client, seed=seed, **options))
        text, _, _ = streamed(client, seed=seed, **options)
        assert text == whole
        assert set(whole) <= {"é", "\ufffd"}
        found += whole.count("é")
    assert found > 10


def test_choices_are_independent_and_numbered(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=1, seed=5, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 3 * 24
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    finished: list[int] = []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=24,
        temperature=1,
        seed=5,
        n=3,
        stream=True,
        extra_body=LONG,
    ):
        for choice in chunk.choices:
            assert choice.index not in finished
            parts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.append(choice.index)
    assert [parts[index] for index in range(3)] == texts
    assert sorted(finished) == [0, 1, 2]


def test_greedy_choices_are_equal(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0, n=2)
    assert answer.choices[0].message.content == answer.choices[1].message.content


def test_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 12
    raw = b""
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs))
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
        raw += bytes(entry.bytes or [])
    assert raw.decode(errors="replace") == text_of(answer)


def test_completions_take_text_lists_and_tokens(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0, "extra_body": LONG}
    one = client.completions.create(prompt="hello world", **options)
    both = client.completions.create(prompt=["hello world", "the fox"], **options)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == one.choices[0].text
    tokens = client.completions.create(prompt=[10, 20, 30], **options)
    assert tokens.usage is not None and tokens.usage.prompt_tokens == 3
    batch = client.completions.create(prompt=[[10, 20, 30], [40]], **options)
    assert batch.choices[0].text == tokens.choices[0].text
    pieces = client.completions.create(prompt="hello world", stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == one.choices[0].text


def test_special_tokens_in_user_text_are_plain_text(client: openai.OpenAI) -> None:
    def prompt_tokens(text: str) -> int:
        answer = chat(client, messages=[{"role": "user", "content": text}], max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens("<|im_end|>") > prompt_tokens("a") + 3


@pytest.mark.parametrize(
    ("options", "status", "parts"),
    [
        ({"temperature": 3}, 400, ["temperature", "2"]),
        ({"temperature": True}, 400, ["temperature"]),
        ({"max_tokens": 0}, 400, ["max_tokens"]),
        ({"top_p": 0}, 400, ["top_p"]),
        ({"n": 0}, 400, ["n"]),
        ({"stop": ""}, 400, ["stop"]),
        ({"top_logprobs": 3}, 400, ["logprobs"]),
        ({"logit_bias": {"999999": 1}}, 400, ["logit_bias"]),
        ({"messages": []}, 400, ["messages"]),
        ({"max_tokens": 100_000}, 400, ["100000", "4096"]),
        ({"messages": [{"role": "user", "content": "fox " * 5000}]}, 400, ["4096"]),
        ({"model": "other"}, 404, ["other"]),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence_and_harms_nobody(
    client: openai.OpenAI, options: dict[str, Any], status: int, parts: list[str]
) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **options}
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.status_code == status
    error: Any = caught.value.body
    assert set(error) >= {"message", "type", "param", "code"}
    for part in parts:
        assert part in error["message"] or part == error["param"]
    assert text_of(chat(client, max_tokens=2, temperature=0)) is not None


def test_unknown_fields_are_ignored_and_nulls_are_absent(client: openai.OpenAI) -> None:
    body = {**LONG, "no_such_field": {"a": [1]}, "stop": None, "seed": None, "tool_choice": None}
    assert chat(client, extra_body=body).choices[0].finish_reason == "length"


def test_a_client_that_leaves_frees_its_pages(client: openai.OpenAI, server: ServerProcess) -> None:
    before = server.settled_metric("sglang:num_aborted_requests_total")
    for _ in range(3):
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3500, stream=True, extra_body=LONG
        )
        for number, _chunk in enumerate(stream):
            if number == 3:
                break
        stream.close()
    eventually(
        lambda: (
            server.metric("sglang:num_aborted_requests_total") == before + 3
            and server.metric("sglang:num_running_reqs") == 0
            and server.metric("sglang:num_used_tokens") == 0
        ),
        3,
        "three requests aborted and their pages free",
    )


def test_a_client_that_leaves_without_streaming_frees_its_pages_too(
    server: ServerProcess,
) -> None:
    before = server.settled_metric("sglang:num_aborted_requests_total")
    with server.client().with_options(timeout=0.5) as hasty, pytest.raises(openai.APITimeoutError):
        chat(hasty, max_tokens=3500)
    eventually(
        lambda: (
            server.metric("sglang:num_aborted_requests_total") == before + 1
            and server.metric("sglang:num_running_reqs") == 0
        ),
        3,
        "the request is aborted",
    )


def test_32_concurrent_streams_equal_the_same_requests_run_alone(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    def options(number: int) -> dict[str, Any]:
        # every third shares a prefix with others, every second is sampled, lengths differ
        content = f"request {number % 3} " + "the quick brown fox " * (number % 7)
        return {
            "messages": [{"role": "user", "content": content + str(number % 5)}],
            "temperature": 0 if number % 2 else 0.8,
            "seed": number,
            "max_tokens": 20 + number,
        }

    alone = [streamed(client, **options(number))[0] for number in range(32)]
    before = server.settled_metric("sglang:generation_tokens_total")
    barrier = threading.Barrier(32)

    def together(number: int) -> str:
        barrier.wait(60)
        return streamed(client, **options(number))[0]

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(together, range(32)))
    assert results == alone
    eventually(
        lambda: server.metric("sglang:generation_tokens_total") - before == sum(range(20, 52)),
        5,
        "all tokens counted",
    )


def test_steps_run_through_both_graph_runners(client: openai.OpenAI, server: ServerProcess) -> None:
    chat(client)
    eventually(lambda: "duograph_graph_replays_total" in server.get("/metrics")[1], 5, "metrics")
    page = server.get("/metrics")[1]
    for phase in ("decode", "prefill"):
        samples = [
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("duograph_graph_replays_total{") and f'phase="{phase}"' in line
        ]
        assert sum(samples) > 0, page


def test_the_grafana_dashboard_finds_its_metrics(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    # scoring a prompt is a step that runs without a graph
    client.completions.create(model=MODEL, prompt="hello", max_tokens=0, echo=True, logprobs=1)

    def complete() -> bool:
        return not unknown_names(server.get("/metrics")[1])

    eventually(complete, 10, "every metric of the dashboard on /metrics")


def test_server_info_shows_flags_and_hides_keys(server: ServerProcess) -> None:
    status, body = server.get("/server_info")
    info = json.loads(body)
    assert status == 200 and info["load_format"] == "dummy"
    assert info["max_total_num_tokens"] > 0 and info["internal_states"]
    assert "api_key" not in info
