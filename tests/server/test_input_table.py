"""Every numeric field with every kind of wrong number: never a 500, always an OpenAI error or an
answer, and the server answers rightly afterwards."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from duograph.server.openai_schema import parse_completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "The quick fox"}]

# name -> (lowest, highest, is it an integer); what lies between them is accepted
COMMON: dict[str, tuple[float, float, bool]] = {
    "max_tokens": (1, 2**31 - 1, True),
    "temperature": (0, 2, False),
    "top_p": (0.01, 1, False),
    "top_k": (-1, 512, True),
    "min_p": (0, 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0.01, 2, False),
    "n": (1, 8, True),
    "seed": (-(2**63), 2**63 - 1, True),
    "min_tokens": (0, 2**31 - 1, True),
    "priority": (-(2**63), 2**63 - 1, True),
}
CHAT_FIELDS = COMMON | {
    "max_completion_tokens": (1, 2**31 - 1, True),
    "top_logprobs": (0, 20, True),
}
COMPLETION_FIELDS = COMMON | {"logprobs": (0, 20, True), "best_of": (1, 8, True)}
LISTS = {"stop_token_ids": (0, 511), "logit_bias": (-100, 100), "stop": (1, 4)}

CASES = [(CHAT, name, *spec) for name, spec in CHAT_FIELDS.items()]
CASES += [(COMPLETIONS, name, *spec) for name, spec in COMPLETION_FIELDS.items()]


def texts(low: float, high: float, integer: bool) -> list[str]:
    """JSON texts, some of which no JSON library would write."""
    step = 1 if integer else 0.5
    around = [low - step, low, high, high + step]
    wrong = [
        "-0.0", "NaN", "Infinity", "-Infinity", "1e-300", "1e999", str(2**31), str(2**63),
        str(2**64), "9" * 400, "true", '"1"', "null", "[]", "{}", '"' + "a" * 1000 + '"',
    ]  # fmt: skip
    return [json.dumps(value) for value in around] + wrong


def post(http: httpx.Client, path: str, fields: str) -> httpx.Response:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "The quick fox"}
    body = json.dumps(base)[:-1] + f", {fields}}}"
    return http.post(path, content=body, headers={"content-type": "application/json"})


def check(answer: httpx.Response, param: str, text: str) -> None:
    assert answer.status_code in (200, 400), (param, text, answer.text)
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 600
        # broken JSON has no field; a sum that is too large is the prompt's business too
        assert error["param"] in (param, None, "prompt", "messages", "n", "best_of"), error


def check_canary(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "The quick fox"})
    assert answer.json()["choices"][0]["text"] == "The quick fox"


@pytest.mark.parametrize(("path", "name", "low", "high", "integer"), CASES)
def test_numbers(
    http: httpx.Client, path: str, name: str, low: float, high: float, integer: bool
) -> None:
    extra = ', "logprobs": true' if name == "top_logprobs" else ""
    for text in texts(low, high, integer):
        check(post(http, path, f'"{name}": {text}{extra}'), name, text)
    check_canary(http)


@pytest.mark.parametrize(("path", "name", "low", "high", "integer"), CASES)
def test_numbers_out_of_range_are_refused_and_those_on_the_edge_are_not(
    http: httpx.Client, path: str, name: str, low: float, high: float, integer: bool
) -> None:
    extra = ', "logprobs": true' if name == "top_logprobs" else ""
    too_large_for_the_context = name in ("max_tokens", "max_completion_tokens", "min_tokens")
    needs_another = name == "best_of"
    step = 1 if integer else 0.5
    accepted = [low] if too_large_for_the_context or needs_another else [low, high]
    refused = [low - step, high + step]
    for value in accepted:
        answer = post(http, path, f'"{name}": {json.dumps(value)}{extra}')
        assert answer.status_code == 200, (value, answer.text)
    for value in refused:
        answer = post(http, path, f'"{name}": {json.dumps(value)}{extra}')
        assert answer.status_code == 400, value
        assert answer.json()["error"]["param"] in (name, None), answer.text
    for text in ("true", '"1"', "[]", "{}", "1.5" if integer else '"x"'):
        answer = post(http, path, f'"{name}": {text}{extra}')
        assert answer.status_code == 400, text
        assert answer.json()["error"]["param"] == name
    answer = post(http, path, f'"{name}": null{extra}')
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", LISTS)
def test_numbers_in_lists_and_objects(http: httpx.Client, path: str, name: str) -> None:
    low, high = LISTS[name]
    for text in texts(low, high, True):
        forms = [text, f"[{text}]", f'{{"1": {text}}}', f"[[{text}]]", f'{{"a": {text}}}']
        for form in forms:
            answer = post(http, path, f'"{name}": {form}')
            assert answer.status_code in (200, 400), (name, form, answer.text)
            if answer.status_code == 400:
                param = answer.json()["error"]["param"]
                assert param is None or param.split(".")[0] == name, answer.text
    check_canary(http)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_booleans_strings_and_objects(http: httpx.Client, path: str) -> None:
    names = [
        "stream", "echo", "ignore_eos", "skip_special_tokens", "model", "messages", "prompt",
        "stream_options", "response_format", "tools", "tool_choice", "cache_salt", "rid",
        "chat_template_kwargs", "modalities", "logprobs", "add_generation_prompt", "user",
        "continue_final_message", "reasoning_effort", "include_stop_str_in_output",
    ]  # fmt: skip
    values = [
        "1", "0", "-1", "1.5", '"x"', '""', "[]", "{}", "[{}]", '{"type": 1}', "[[1]]", "true",
        "false", "null", '["x"]', '{"include_usage": 1}', "[null]", '[{"role": 1}]',
        '[{"role": "user", "content": [{"type": "text"}]}]', '[{"role": "user"}]',
        '[{"role": "user", "content": [1, null]}]', '[{"role": "\\u0000", "content": "x"}]',
    ]  # fmt: skip
    for name in names:
        for value in values:
            answer = post(http, path, f'"{name}": {value}')
            # the field may stand there twice, which is a 400 as well
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    check_canary(http)


def test_limits_are_checked_before_work(http: httpx.Client, server: Any) -> None:
    before = len(server.received("GenerateRequest"))
    for fields in (
        '"stop": [' + '"a",' * 400_000 + '"a"]',
        '"stop": "' + "a" * 1_000_000 + '"',
        '"stop_token_ids": [' + "1," * 400_000 + "1]",
        '"logit_bias": {' + ",".join(f'"{i}": 1' for i in range(100_000)) + "}",
        '"n": 1000000',
    ):
        answer = post(http, COMPLETIONS, fields)
        assert answer.status_code == 400
        assert answer.elapsed.total_seconds() < 2.0  # 0.1 s, on a machine that is not shared
    assert len(server.received("GenerateRequest")) == before


def test_a_wrong_number_of_choices_is_told_the_limit_of_this_server(http: httpx.Client) -> None:
    for n, bounds in ((9, "in [1, 8], got 9"), (0, "of at least 1, got 0")):
        error = post(http, COMPLETIONS, f'"n": {n}').json()["error"]
        assert error["message"] == f"n: must be an integer {bounds}"


def test_unknown_fields_are_named_in_a_debug_line_and_nowhere_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b'{"prompt": "secret", "zeta\\n": 1, "alpha": {"x": 2}, "user": "me"}'
    with caplog.at_level(logging.DEBUG, "duograph"):
        request = parse_completion(body)
    assert not hasattr(request, "alpha")
    lines = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert lines == [("DEBUG", "fields without effect: 'alpha, user, zeta\\n'")]
