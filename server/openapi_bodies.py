"""Schemas of the request bodies for /openapi.json: what pydantic says of them, and what the code
behind the fields that it reads itself says more narrowly. Knows the model's limits, if they are
known by then; checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from duograph.scheduler.messages import EngineInfo
from duograph.server.native_schema import GenerateBody, NativeSampling
from duograph.server.openai_schema import (
    MAX_LOGIT_BIAS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    TEMPLATE_VARIABLES,
)
from duograph.server.openapi_grammars import grammar_schemas, tool_schemas
from duograph.server.tokenize import MAX_TEXTS

Schema = dict[str, Any]

REF = "#/components/schemas/"
TOKENIZE_CHAT = "TokenizeChatBody"  # ChatRequest as /tokenize needs it
_PROMPT_FIELDS = (
    "model", "messages", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort", "tools",
)  # fmt: skip


def body_schemas(
    models: Sequence[type[BaseModel]], info: EngineInfo | None, max_n: int
) -> dict[str, Schema]:
    """By name; also of the models inside of them. Null stands for a field that is left out."""
    if GenerateBody in models:
        models = [*models, NativeSampling]  # which the body reads itself
    wanted: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (model, "validation") for model in models
    ]
    _, definitions = models_json_schema(wanted, ref_template=REF + "{model}")
    schemas: dict[str, Schema] = definitions["$defs"]
    fields = _fields(info, max_n)
    for model in models:
        schema = schemas[model.__name__]
        for name, known in fields.items():
            if name in schema["properties"]:
                schema["properties"][name] = {"title": name, **known}
        _narrow(model.__name__, schema, fields)
        _allow_null(schema)
    for schema in schemas.values():
        if schema.get("title") == "ChatMessage":
            schema["anyOf"] = _MESSAGE_KINDS
    if "ChatRequest" in schemas:
        schemas[TOKENIZE_CHAT] = _without_sampling(schemas["ChatRequest"])
    return schemas


def _without_sampling(chat: Schema) -> Schema:
    """The fields of a chat that make its prompt; the others are read and have no effect."""
    kept = {name: chat["properties"][name] for name in _PROMPT_FIELDS}
    return {**chat, "title": TOKENIZE_CHAT, "properties": kept}


def _narrow(name: str, schema: Schema, fields: dict[str, Schema]) -> None:
    """What one body has of its own."""
    properties = schema["properties"]
    match name:
        case "GenerateBody":
            schema["oneOf"] = [
                {"required": ["text"], "properties": {"text": fields["text"]}},
                {"required": ["input_ids"], "properties": {"input_ids": fields["input_ids"]}},
            ]
        case "AbortBody":
            schema["anyOf"] = [
                {"required": ["rid"], "properties": {"rid": {"type": "string"}}},
                {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
            ]
        case "TokenizeBody":
            text = {"type": "string"}
            several = {"type": "array", "items": text, "maxItems": MAX_TEXTS}
            properties["prompt"] = {"title": "prompt", "anyOf": [text, several]}
        case "ChatRequest":
            for field in ("max_tokens", "max_completion_tokens"):
                properties[field] = {"title": field, "type": "integer", "minimum": 1}


_MESSAGE_KINDS: list[Schema] = [
    {
        "required": ["content"],
        "properties": {
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            }
        },
    },
    {
        "required": ["tool_calls"],
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
    },
]


def _fields(info: EngineInfo | None, max_n: int) -> dict[str, Schema]:
    """Fields that are ``Any`` to pydantic, or whose bounds come from the model."""
    token: Schema = {"type": "integer", "minimum": 0}
    ids: Schema = {"type": "array", "items": token, "minItems": 1}
    if info is not None:
        token["maximum"] = info.vocab_size - 1
        ids["maxItems"] = info.context_length - 1
    any_ids: Schema = {"type": "array", "items": token}
    if info is not None:
        any_ids["maxItems"] = info.context_length
    text: Schema = {"type": "string", "minLength": 1}
    stop: Schema = {**text, "maxLength": MAX_STOP_CHARS}

    def several(item: Schema) -> Schema:
        return {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_PROMPTS}

    texts, id_lists = [text, several(text)], [ids, several(ids)]
    bias: Schema = {"type": "number", "minimum": -100, "maximum": 100}
    sampling: Schema = {"$ref": REF + NativeSampling.__name__}
    return {
        **grammar_schemas(),
        **tool_schemas(),
        "prompt": {"anyOf": [*texts, *id_lists]},
        "text": {"anyOf": texts},
        "input_ids": {"anyOf": id_lists},
        "tokens": {"anyOf": [any_ids, {"type": "array", "items": any_ids}]},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}]},
        "stop_token_ids": {"type": "array", "items": token, "maxItems": 16},
        "n": {"type": "integer", "minimum": 1, "maximum": max_n, "default": 1},
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": bias,
        },
        "sampling_params": {"anyOf": [sampling, {"type": "array", "items": sampling}]},
        "chat_template_kwargs": {
            "type": "object",
            "properties": {
                name: {"type": ["boolean", "string", "integer"]} for name in TEMPLATE_VARIABLES
            },
            "additionalProperties": False,
        },
        "modalities": {"const": ["text"]},
        "function_call": {"const": "none"},
    }


def _allow_null(schema: Schema) -> None:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name in required or {"type": "null"} in field.get("anyOf", []):
            continue
        if not field.keys() - {"title", "default"}:
            continue  # anything goes
        title, default = field.pop("title", name), field.pop("default", None)
        nullable: Schema = {"title": title, "anyOf": [field, {"type": "null"}]}
        if default is not None:
            nullable["default"] = default
        schema["properties"][name] = nullable
