"""Tools on the wire, before a scripted engine whose answer is the last message: what is read out
of it, what the engine is told, and what is wrong with a definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from duograph.server.config import HttpConfig
from duograph.tests.server.conftest import RunningServer, start_server

CHAT = "/v1/chat/completions"
ECHO = "{% if tools %}{% endif %}{{ messages[-1]['content'] }}"
LLAMA = "{# <|python_tag|> #}" + ECHO
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: list[Any] = [WEATHER, TIME]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def folder_with(template: str, model_folder: Path, target: Path) -> Path:
    shutil.copytree(model_folder, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return target


@pytest.fixture(scope="module")
def echo_server(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("echo")
    server = start_server(
        folder_with(ECHO, model_folder, folder / "model"),
        folder,
        http=HttpConfig(reasoning_parser="qwen3"),
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def echo(echo_server: RunningServer) -> httpx.Client:
    return echo_server.http()


@pytest.fixture(scope="module")
def echo_client(echo_server: RunningServer) -> openai.OpenAI:
    return echo_server.openai()


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message that the deltas make, and the finish reason."""
    content, thoughts, calls, reason = "", "", {}, ""
    for chunk in client.chat.completions.create(model="default", stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    found = [tuple(calls[index]) for index in sorted(calls)]
    return {"content": content, "reasoning": thoughts, "calls": found}, reason


def whole(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    choice = client.chat.completions.create(model="default", **fields).choices[0]
    message = choice.message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    thoughts = getattr(message, "reasoning_content", None) or ""
    return {
        "content": message.content or "", "reasoning": thoughts, "calls": calls
    }, choice.finish_reason  # fmt: skip


PARIS = '{"city": "Paris"}'


@pytest.mark.parametrize("answer", [streamed, whole])
@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        ("Hello there.", "Hello there.", [], "stop"),
        (hermes("get_weather", PARIS), "", [("get_weather", PARIS)], "tool_calls"),
        (
            "I look.\n" + hermes("get_weather", PARIS) + "\n" + hermes("get_time", "{}"),
            "I look.",
            [("get_weather", PARIS), ("get_time", "{}")],
            "tool_calls",
        ),
        (hermes("unknown", "{}"), hermes("unknown", "{}"), [], "stop"),
        ("<tool_call>{nonsense", "<tool_call>{nonsense", [], "stop"),
    ],
)
def test_calls_are_told_from_words(
    echo_client: openai.OpenAI,
    answer: Callable[..., Any],
    text: str,
    content: str,
    calls: list[Any],
    reason: str,
) -> None:
    message, finished = answer(echo_client, messages=says(text), tools=TOOLS)
    assert (message["content"], message["calls"], finished) == (content, calls, reason)


@pytest.mark.parametrize("answer", [streamed, whole])
def test_only_the_first_call_counts_without_parallel_tool_calls(
    echo_client: openai.OpenAI, answer: Callable[..., Any]
) -> None:
    text = hermes("get_time", "{}") + hermes("get_weather", PARIS)
    message, _ = answer(echo_client, messages=says(text), tools=TOOLS, parallel_tool_calls=False)
    assert message["calls"] == [("get_time", "{}")]


@pytest.mark.parametrize("answer", [streamed, whole])
def test_thoughts_come_apart_from_words_and_calls(
    echo_client: openai.OpenAI, answer: Callable[..., Any]
) -> None:
    text = f"<think>\nHm, {hermes('get_time', '{}')}?\n</think>\n\n{hermes('get_weather', PARIS)}"
    message, reason = answer(echo_client, messages=says(text), tools=TOOLS)
    assert message["reasoning"] == f"Hm, {hermes('get_time', '{}')}?\n"
    assert message["calls"] == [("get_weather", PARIS)] and message["content"] == ""
    assert reason == "tool_calls"


def test_thoughts_stay_in_the_text_or_are_left_out_on_demand(echo_client: openai.OpenAI) -> None:
    text = "<think>Hm.</think>Yes."
    for fields, content in (
        ({"separate_reasoning": False}, text),
        ({"include_reasoning": False}, "Yes."),
    ):
        for answer in (streamed, whole):
            message, _ = answer(echo_client, messages=says(text), extra_body=fields)
            assert (message["content"], message["reasoning"]) == (content, "")


def test_the_length_of_an_answer_ends_a_call_where_it_is(echo_client: openai.OpenAI) -> None:
    fields = {"messages": says(hermes("get_weather", PARIS)), "tools": TOOLS, "max_tokens": 40}
    for answer in (streamed, whole):
        message, reason = answer(echo_client, **fields)
        assert reason == "length"
        assert all(PARIS.startswith(arguments) for _, arguments in message["calls"])


def test_a_stop_string_within_a_call_is_no_call_to_be_made(echo_client: openai.OpenAI) -> None:
    fields = {"messages": says(hermes("get_weather", PARIS)), "tools": TOOLS, "stop": [PARIS[-2:]]}
    for answer in (streamed, whole):
        message, reason = answer(echo_client, **fields)
        assert reason == "stop"
        assert message["calls"] == [("get_weather", PARIS[:-2])]


def test_calls_in_llama_style_are_known_by_the_template(
    new_server: Callable[..., RunningServer], model_folder: Path, tmp_path: Path
) -> None:
    server = new_server(folder=folder_with(LLAMA, model_folder, tmp_path / "llama"))
    text = '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time"}'
    for answer in (streamed, whole):
        message, reason = answer(server.openai(), messages=says(text), tools=TOOLS)
        assert message["calls"] == [("get_weather", PARIS), ("get_time", "{}")]
        assert reason == "tool_calls" and message["content"] == ""


def grammar_sent(server: RunningServer, eventually: Callable[..., Any], body: Any) -> Any:
    before = len(server.received("GenerateRequest"))
    assert server.http().post(CHAT, json=body).status_code == 200
    received = eventually(lambda: server.received("GenerateRequest")[before:])
    return received[0]["grammar"]


def test_the_engine_gets_a_grammar_when_calls_are_required_and_only_then(
    echo_server: RunningServer, eventually: Callable[..., Any]
) -> None:
    body = {"messages": says("hi"), "tools": TOOLS}
    named = {"type": "function", "function": {"name": "get_time"}}
    assert grammar_sent(echo_server, eventually, body) is None
    assert grammar_sent(echo_server, eventually, body | {"tool_choice": "none"}) is None
    required = grammar_sent(echo_server, eventually, body | {"tool_choice": "required"})
    assert "get_weather" in required[1] and "get_time" in required[1]
    one = grammar_sent(echo_server, eventually, body | {"tool_choice": named})
    assert "get_weather" not in one[1] and "get_time" in one[1]
    both = body | {"response_format": {"type": "json_object"}}
    either = grammar_sent(echo_server, eventually, both)
    assert "@calls | @answer" in either[1]


def test_a_template_without_tools_gets_them_as_text(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *says("Weather in Paris?")]
    answer = http.post(CHAT, json={"messages": messages, "tools": TOOLS}).json()
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("system\nBe brief.\n\nYou may call one or more of the functions below")
    assert '"name":"get_weather"' in text and "Weather of a city" in text
    assert answer["choices"][0]["finish_reason"] == "stop"  # the example in it is no call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools.0"),
        ({"tools": [{"type": "code"}]}, "tools.0.type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TIME, TIME]}, "tools.1.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools.0.function.strict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools.0.function.description",
        ),
        (
            {"tools": [{**TIME, "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters.type",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TIME] * 200}, "tools"),
        ({"tools": TOOLS, "ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)  # fmt: skip
def test_a_wrong_definition_is_refused_by_the_name_of_its_field(
    echo: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = echo.post(CHAT, json={"messages": says("hi"), **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
