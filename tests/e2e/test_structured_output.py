"""The default model under grammars, through the real process tree: answers that are what was
asked for, calls that are required, wrong grammars, and requests beside them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from duograph.tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.model]

CHAT = "/v1/chat/completions"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
POINT = {
    "type": "object",
    "properties": {"x": DIGIT, "y": DIGIT},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "address": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "address"],
        "additionalProperties": False,
    },
    "enum": {
        "type": "object",
        "properties": {"mood": {"enum": ["happy", "sad"]}, "level": {"enum": [1, 2, 3]}},
        "required": ["mood", "level"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "anyOf": {
        "type": "object",
        "properties": {"value": {"anyOf": [DIGIT, {"type": "null"}, POINT]}},
        "required": ["value"],
        "additionalProperties": False,
    },
    "ref": {
        "$defs": {"point": POINT},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def smol(
    default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--cuda-graph-bs", "1", "2", "4", "--disable-piecewise-cuda-graph"]
    with ServerProcess(flags, tmp_path_factory.mktemp("structured")) as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log()
        server.assert_nothing_left()


@pytest.fixture(scope="module")
def client(smol: ServerProcess) -> Iterator[openai.OpenAI]:
    with smol.client() as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    options = {"temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(model="default", messages=messages, **options)


def post(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    return answer.status_code, answer.text


def schema_format(schema: Any, **options: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **options}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_keeps_its_schema(client: openai.OpenAI, name: str) -> None:
    schema = SCHEMAS[name]
    answer = ask(
        client,
        "Tell me something as JSON.",
        response_format=schema_format(schema, strict=True),
        temperature=1.0,
        seed=5,
        top_p=0.9,
        n=2,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_a_streamed_answer_with_everything_else_asked_for_keeps_its_schema(
    client: openai.OpenAI,
) -> None:
    text, entries = "", 0
    for chunk in ask(
        client,
        "Where is it?",
        response_format=schema_format(POINT),
        stream=True,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        logit_bias={"100": 5},
        extra_body={"min_tokens": 3, "top_k": 20},
    ):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        entries += len(choice.logprobs.content) if choice.logprobs else 0
    jsonschema.validate(json.loads(text), POINT)
    assert entries > 5


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        'Answer with the JSON object {"answer": "yes"}.',
        response_format={"type": "json_object"},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")


GRAMMAR = 'root ::= sum\nsum ::= number (" + " number){1,3}\nnumber ::= [0-9]{1,3}'
LARK = 'start: word ("-" word){2}\nword: /[a-z]{2,6}/'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"regex": r"https?://[a-z]{3,8}\.com/x"}, r"https?://[a-z]{3,8}\.com/x"),
        ({"ebnf": GRAMMAR}, r"[0-9]{1,3}( \+ [0-9]{1,3}){1,3}"),
        ({"json_schema": json.dumps({"enum": ["red", "green"]})}, '"(red|green)"'),
        ({"structured_outputs": {"choice": ["größe", 'a "b"\n']}}, 'größe|a "b"\n'),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"structured_outputs": {"grammar": LARK}}, "[a-z]{2,6}(-[a-z]{2,6}){2}"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_choice": ["one"], "min_tokens": 9}, "one"),
        ({"guided_regex": "a{5}", "ignore_eos": True}, "aaaaa"),
    ],
)
def test_every_kind_of_grammar_is_kept(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    answer = ask(client, "Say something.", extra_body=fields, max_tokens=40)
    assert re.fullmatch(pattern, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason in ("stop", "length")
    completion = client.completions.create(
        model="default", prompt="Say", max_tokens=40, seed=3, extra_body=fields
    )
    assert re.fullmatch(pattern, completion.choices[0].text)


def test_sglangs_own_route_takes_grammars(smol: ServerProcess) -> None:
    sampling = {"max_new_tokens": 20, "temperature": 0, "regex": "(yes|no)"}
    status, text = post(smol, "/generate", {"text": "Is it?", "sampling_params": sampling})
    assert status == 200 and json.loads(text)["text"] in ("yes", "no")
    sampling["regex"] = "(a"
    status, text = post(smol, "/generate", {"text": "Is it?", "sampling_params": sampling})
    assert status == 400 and json.loads(text)["error"]["param"] == "sampling_params.regex"


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]


def test_a_named_function_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    for name, parameters in (
        ("get_weather", TOOLS[0]["function"]["parameters"]),
        ("get_time", {"maxProperties": 0}),
    ):
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = ask(client, "How is it in Paris?", tools=TOOLS, tool_choice=choice)
        [(called, arguments)] = calls_of(answer)
        assert called == name
        jsonschema.validate(arguments, parameters)


def test_a_required_call_is_streamed_and_whole_the_same(client: openai.OpenAI) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = calls_of(ask(client, "Weather in Paris, in celsius?", **options))
    name, arguments, ids = "", "", set()
    for chunk in ask(client, "Weather in Paris, in celsius?", stream=True, **options):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            ids |= {call.id} - {None}
    assert whole == [(name, json.loads(arguments))] and len(ids) == 1


def test_a_schema_or_a_call_is_possible_in_one_answer(client: openai.OpenAI) -> None:
    answer = ask(
        client, "Weather in Paris?", tools=TOOLS, response_format=schema_format(POINT)
    ).choices[0]
    if answer.message.tool_calls:
        assert answer.message.tool_calls[0].function.name in ("get_weather", "get_time")
    else:
        jsonschema.validate(json.loads(answer.message.content), POINT)


MISSPELT = {"type": "object", "properties": {"a": {"type": "strin"}}}
BAD = [
    (
        {"response_format": schema_format(MISSPELT)},
        "response_format.json_schema.schema.properties.a",
        "Invalid type",
    ),
    (
        {"response_format": schema_format({"type": "array", "items": {"$ref": "#/$defs/no"}})},
        "response_format.json_schema.schema.items",
        "does not exist",
    ),
    (
        {
            "response_format": schema_format(
                {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, strict=True
            )
        },
        "response_format.json_schema.schema.anyOf.1",
        "uniqueItems",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    ({"response_format": {"type": "xml"}}, "response_format", "type must be"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"regex": 3}, "regex", "string"),
    ({"regex": "a" * 70_000}, "regex", "65536"),
    ({"regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one"),
    ({"ebnf": "root ::= nothing"}, "ebnf", "nothing"),
    ({"ebnf": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "ebnf", "deep"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
    ({"json_schema": "{"}, "json_schema", "JSON"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"type": "strin"}}}}}],
            "tool_choice": "required",
        },
        "tools.0.function.parameters.properties.a",
        "Invalid type",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_grammar_is_a_400_that_says_where(
    smol: ServerProcess, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": stream}
    status, answer = post(smol, CHAT, body | fields)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    assert error["param"] == param and text in error["message"]


def test_requests_beside_a_grammar_get_the_tokens_that_they_get_alone(
    client: openai.OpenAI,
) -> None:
    questions = ["What is the capital of France?", "Write a poem."]
    options: list[Any] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]

    def plain(index: int) -> str:
        answer = ask(client, questions[index], max_tokens=24, **options[index])
        return str(answer.choices[0].message.content)

    def constrained(index: int) -> str:
        answer = ask(
            client, questions[index], response_format=schema_format(SCHEMAS["anyOf"]), seed=7
        )
        return str(answer.choices[0].message.content)

    alone = [plain(i) for i in range(2)], [constrained(i) for i in range(2)]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(plain, i) for i in range(2)]
        beside = [pool.submit(constrained, i) for i in range(2)]
        assert [f.result() for f in together] == alone[0]
        assert [f.result() for f in beside] == alone[1]


def test_a_client_that_leaves_takes_its_grammar_with_it(
    smol: ServerProcess, client: openai.OpenAI
) -> None:
    endless = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
    stream = ask(
        client, "Count.", response_format=schema_format(endless), stream=True, max_tokens=4000
    )
    for number, _ in enumerate(stream):
        if number == 5:
            break
    stream.close()
    smol.settled_metric("sglang:num_aborted_requests_total")
    deadline = time.monotonic() + 20
    while smol.metric("sglang:num_running_reqs") or smol.metric("sglang:num_used_tokens") > 2000:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.2)
    answer = ask(client, "Say yes.", extra_body={"regex": "yes"})
    assert answer.choices[0].message.content == "yes"


def test_a_hostile_grammar_does_not_hold_up_others(
    smol: ServerProcess, client: openai.OpenAI
) -> None:
    properties = {f"property_{i}": {"type": "string"} for i in range(1500)}
    hostile = schema_format({"type": "object", "properties": properties})
    started = threading.Event()

    def attack() -> int:
        body = {"messages": [{"role": "user", "content": "hi"}], "response_format": hostile,
                "max_tokens": 2}  # fmt: skip
        started.set()
        with httpx.Client(timeout=60) as http:
            return http.post(smol.url + CHAT, json=body).status_code

    with ThreadPoolExecutor(1) as pool:
        attacked = pool.submit(attack)
        started.wait()
        begun = time.monotonic()
        answer = ask(client, "What is the capital of France?", max_tokens=8)
        assert answer.choices[0].message.content
        assert time.monotonic() - begun < 5
        assert attacked.result() in (200, 400)
