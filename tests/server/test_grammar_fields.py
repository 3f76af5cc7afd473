"""Fields of structured output and tools at the edges where schemathesis looks: values that are
false, empty or of a kind that only resembles the right one."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

CHAT = "/v1/chat/completions"


def body_with(fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields


def tools(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


WRONG = [
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json_object": 0}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": False}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 0}}, "structured_outputs.regex"),
    (tools(parameters=False), "tools.0.function.parameters"),
    (tools(parameters=0), "tools.0.function.parameters"),
    (tools(parameters=[]), "tools.0.function.parameters"),
    (tools(strict=0), "tools.0.function.strict"),
    ({"regex": ""}, "regex"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
     "response_format.json_schema.name"),
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"structured_outputs": {"json_object": False, "regex": None}},
    {"structured_outputs": {"disable_any_whitespace": False, "disable_fallback": False}},
    tools(parameters={}),
    tools(parameters=None, description=None, strict=None),
    {"tool_choice": "none"},
]


@pytest.fixture(scope="module")
def chat_schema(server: Any) -> Any:
    document = server.http().get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    return {"components": document["components"], **schema}


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_only_resembles_the_right_value_is_a_400(
    http: Any, chat_schema: Any, fields: dict[str, Any], param: str
) -> None:
    answer = http.post(CHAT, json=body_with(fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body_with(fields), chat_schema)


@pytest.mark.parametrize("fields", RIGHT)
def test_what_asks_for_nothing_is_taken(
    http: Any, chat_schema: Any, fields: dict[str, Any]
) -> None:
    answer = http.post(CHAT, json=body_with(fields))
    assert answer.status_code == 200, answer.text
    jsonschema.validate(body_with(fields), chat_schema)


def test_the_document_has_sglangs_sampling_under_its_names(http: Any) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    body = schemas["GenerateBody"]["properties"]["sampling_params"]
    assert "#/components/schemas/NativeSampling" in str(body)
    sampling = {"components": {"schemas": schemas}, **schemas["NativeSampling"]}
    jsonschema.validate({"max_new_tokens": 4, "min_new_tokens": 1, "regex": "a"}, sampling)
    for wrong in ({"max_new_tokens": -1}, {"min_new_tokens": "1"}, {"temperature": 3}, {"n": 9}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, sampling)
