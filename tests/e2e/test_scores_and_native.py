"""Scoring and SGLang's routes on a real process tree with two frontends and both graph runners."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

import openai
import pytest

from duograph.tests.e2e.server_process import ServerProcess, eventually

pytestmark = pytest.mark.slow

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the town"


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return json.load(answer)


def test_generated_tokens_score_the_same_as_a_prompt(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1}
    first = client.completions.create(
        prompt=TEXT, max_tokens=20, extra_body={"return_token_ids": True, "ignore_eos": True},
        **options,
    )  # fmt: skip
    choice: Any = first.choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    again = client.completions.create(prompt=ids, max_tokens=0, echo=True, **options)
    scored, generated = again.choices[0].logprobs, choice.logprobs
    assert scored is not None and scored.token_logprobs is not None
    assert len(scored.token_logprobs) == len(ids) and scored.token_logprobs[0] is None
    assert scored.token_logprobs[-20:] == pytest.approx(generated.token_logprobs, abs=1e-4)
    repeat = client.completions.create(prompt=ids, max_tokens=0, echo=True, **options)
    assert repeat.choices[0].logprobs == scored, "cached or not"
    counted = eventually_eager(server)
    assert counted >= 1


def eventually_eager(server: ServerProcess) -> int:
    def count() -> int:
        found: dict[str, int] = get(server, "/graphs")["eager_steps"]["prefill"]
        return found.get("prompt_logprobs", 0)

    eventually(count, 10, "a snapshot with eager prefill steps")
    return count()


def test_generate_gives_what_completions_gives(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    native = post(
        server,
        "/generate",
        {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 12},
         "return_logprob": True, "logprob_start_len": 0},
    )  # fmt: skip
    other: Any = client.completions.create(
        model="tiny", prompt=TEXT, temperature=0, max_tokens=12, logprobs=0,
        extra_body={"return_token_ids": True},
    ).choices[0]  # fmt: skip
    assert native["text"] == other.text
    assert native["output_ids"] == other.token_ids
    values = [entry[0] for entry in native["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
    assert len(native["meta_info"]["input_token_logprobs"]) == len(other.prompt_token_ids)


def test_an_abort_finds_its_request_behind_any_frontend(server: ServerProcess) -> None:
    """Eight requests over two frontends, each ended by a call that may reach the other one."""
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        body = {
            "text": TEXT, "rid": name, "stream": False,
            "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        }  # fmt: skip
        results[name] = post(server, "/generate", body)

    names = [f"abort-{index}" for index in range(8)]
    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    aborted: set[str] = set()
    deadline = time.monotonic() + 30
    while len(aborted) < len(names) and time.monotonic() < deadline:
        for name in set(names) - aborted:
            if post(server, "/abort_request", {"rid": name})["aborted"]:
                aborted.add(name)
    for thread in threads:
        thread.join(30)
    assert aborted == set(names)
    for name in names:
        reason = results[name]["meta_info"]["finish_reason"]
        assert reason["type"] == "abort", (name, reason)
        assert len(results[name]["output_ids"]) < 4000


def test_the_tokenizer_routes_and_the_generating_health_check(server: ServerProcess) -> None:
    tokens = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens})["text"] == TEXT
    assert get(server, "/health_generate") == {"status": "ok"}
    assert get(server, "/get_model_info")["architectures"] == ["LlamaForCausalLM"]


def test_the_start_was_told_in_a_few_lines(server: ServerProcess) -> None:
    log = server.log()
    for word in ("Model: LlamaForCausalLM", "KV pool: ", "Graphs: decode "):
        assert word in log
