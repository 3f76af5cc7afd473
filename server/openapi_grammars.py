"""Schemas for /openapi.json of the fields that say what an answer must be: response formats,
grammars and tools, as grammars.py and tools.py read them. A grammar may still be refused when
it is compiled, which no schema can say."""

from __future__ import annotations

from typing import Any

from duograph.server.grammars import FORMAT_NAME, MAX_CHOICES
from duograph.server.tools import FUNCTION_NAME, MAX_DESCRIPTION_CHARS, MAX_TOOLS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
# A schema, the text of one, or true for any value.
_JSON_SCHEMA: Schema = {"anyOf": [{"type": "object"}, {"type": "string"}, {"const": True}]}
_CHOICE: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def grammar_schemas() -> dict[str, Schema]:
    """By the name of the request field."""
    named_schema = _object(
        ["name", "schema"],
        name={"type": "string", "pattern": f"^{FORMAT_NAME.pattern}$"},
        description={},
        strict=_or_null({"type": "boolean"}),
        schema=_JSON_SCHEMA,
    )
    response_format: Schema = {
        "anyOf": [
            _object(["type"], type={"enum": ["text", "json_object"]}),
            _object(
                ["type", "json_schema"], type={"const": "json_schema"}, json_schema=named_schema
            ),
        ]
    }
    nested = {"json": _JSON_SCHEMA, "regex": _TEXT, "choice": _CHOICE, "grammar": _TEXT,
              "json_object": {"type": "boolean"}}  # fmt: skip
    structured = {name: _or_null(schema) for name, schema in nested.items()}
    return {
        "response_format": response_format,
        "structured_outputs": {"type": "object", "properties": structured},
        "regex": _TEXT,
        "ebnf": _TEXT,
        "json_schema": _JSON_SCHEMA,
        "guided_json": _JSON_SCHEMA,
        "guided_regex": _TEXT,
        "guided_choice": _CHOICE,
        "guided_grammar": _TEXT,
    }


def tool_schemas() -> dict[str, Schema]:
    """By the name of the request field."""
    name: Schema = {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}
    function = _object(
        ["name"],
        name=name,
        description=_or_null({"type": "string", "maxLength": MAX_DESCRIPTION_CHARS}),
        parameters=_or_null({"anyOf": [{"type": "object"}, {"const": True}]}),
        strict=_or_null({"type": "boolean"}),
    )
    tool = _object(["type", "function"], type={"const": "function"}, function=function)
    named = _object(
        ["function"],
        type=_or_null({"const": "function"}),
        function=_object(["name"], name={"type": "string"}),
    )
    return {
        "tools": {"type": "array", "items": tool, "maxItems": MAX_TOOLS},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, named]},
    }
