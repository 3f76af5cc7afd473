"""Structured output: what a request asks for, as a grammar for the engine.

Knows the request fields of OpenAI, SGLang and vLLM and the grammar document of llguidance; loads
no library and compiles nothing: the engine does, and says what it cannot use.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from duograph.scheduler.grammar import MAX_GRAMMAR_BYTES
from duograph.scheduler.messages import Grammar
from duograph.server.errors import bad_field, not_supported, quote

MAX_CHOICES = 1024
# JSON is written as Python's json.dumps does, with no whitespace left to choose: a small model
# that may write spaces can go on writing them for ever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_SGLANG = ("regex", "ebnf", "json_schema")
_OLD_VLLM = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FIELDS = ("response_format", *_SGLANG, "structured_outputs", *_OLD_VLLM)
_GRAMMARS = ("json", "regex", "choice", "grammar")
_NESTED = (*_GRAMMARS, "json_object")  # of structured_outputs
FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNWRITABLE = re.compile(r"\\.|/|\n|\r", re.DOTALL)


def requested_grammar(fields: dict[str, Any]) -> Grammar | None:
    """``fields`` holds those of FIELDS that are not null. Raises ApiError 400."""
    fields = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    response = fields.pop("response_format", None)
    grammars = [] if response is None else [_response_format(response)]
    grammars += [_of_field(name, value) for name, value in fields.items()]
    wanted = [grammar for grammar in grammars if grammar is not None]
    if len(wanted) > 1:
        other = wanted[0].param.partition(".")[0]
        raise bad_field(wanted[1].param, f"only one grammar is possible, {other} is another")
    return wanted[0] if wanted else None


def of_document(
    grammars: list[dict[str, Any]], param: str, schemas: dict[str, Any] | None = None
) -> Grammar:
    """The first of ``grammars`` is the answer's; it may name the others. ``schemas`` by field."""
    text = orjson.dumps({"grammars": grammars}).decode()
    if len(text) > MAX_GRAMMAR_BYTES:
        raise bad_field(param, f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    found = {name: orjson.dumps(schema).decode() for name, schema in (schemas or {}).items()}
    return Grammar("document", text, param, found)


def checked_schema(value: Any, param: str) -> dict[str, Any]:
    """A JSON schema, or the text of one. Raises ApiError 400."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise bad_field(param, "is not valid JSON") from error
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise bad_field(param, "must be a JSON schema: an object")
    return value


def styled(schema: dict[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """The schema as the library is to read it: JSON in one style, no keys that it does not name.
    ``lenient`` ignores keywords that cannot be enforced."""
    closed = schema if _holds_all_of(schema) else _closed(schema)
    return {**closed, "x-guidance": {**JSON_STYLE, "lenient": lenient}}


def _response_format(value: dict[str, Any]) -> Grammar | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _json_grammar({"type": "object"}, "response_format")
        case "json_schema":
            return _json_schema_format(value.get("json_schema"))
    raise bad_field("response_format", "type must be text, json_object or json_schema")


def _json_schema_format(value: Any) -> Grammar:
    param = "response_format.json_schema"
    if not isinstance(value, dict):
        raise bad_field(param, "must be an object with name and schema")
    name, strict = value.get("name"), value.get("strict")
    if not isinstance(name, str) or not FORMAT_NAME.fullmatch(name):
        raise bad_field(f"{param}.name", f"must match {FORMAT_NAME.pattern}")
    if strict is not None and not isinstance(strict, bool):
        raise bad_field(f"{param}.strict", "must be true or false")
    if value.get("schema") is None:
        raise bad_field(f"{param}.schema", "this field is required")
    schema = checked_schema(value["schema"], f"{param}.schema")
    return _json_grammar(schema, f"{param}.schema", lenient=not strict)


def _of_field(name: str, value: Any) -> Grammar | None:
    if name == "structured_outputs":
        return _structured_outputs(value)
    if name in _OLD_VLLM:
        return _of_kind(name.removeprefix("guided_"), value, name)
    return _of_kind({"json_schema": "json", "ebnf": "grammar"}.get(name, name), value, name)


def _structured_outputs(value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise bad_field("structured_outputs", "must be an object")
    given = {
        key: setting
        for key, setting in value.items()
        if setting is not None and not (setting is False and key not in _GRAMMARS)  # flags, off
    }
    if not isinstance(given.get("json_object", True), bool):
        raise bad_field("structured_outputs.json_object", "must be true or false")
    for key in given.keys() - set(_NESTED):
        raise not_supported(f"structured_outputs.{quote(key)[1:-1]}")
    if len(given) > 1:
        raise bad_field("structured_outputs", f"must have one of {', '.join(_NESTED)}")
    for key, setting in given.items():
        return _of_kind(key, setting, f"structured_outputs.{key}")
    return None


def _of_kind(kind: str, value: Any, param: str) -> Grammar:
    match kind:
        case "json":
            return _json_grammar(checked_schema(value, param), param)
        case "json_object":
            return _json_grammar({"type": "object"}, param)
        case "choice":
            return _choice(value, param)
    if not isinstance(value, str) or not value:
        raise bad_field(param, "must be a non-empty string")
    if kind == "regex":
        return of_document([{"lark_grammar": f"start: /{_in_slashes(value)}/"}], param)
    if "::=" in value:  # no Lark grammar has that
        return Grammar("ebnf", value, param)
    return of_document([{"lark_grammar": value}], param)


def _json_grammar(schema: dict[str, Any], param: str, *, lenient: bool = False) -> Grammar:
    whole = styled(schema, lenient=lenient)
    return of_document([{"json_schema": whole}], param, {param: whole})


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise bad_field(param, f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(text, str) and text for text in value):
        raise bad_field(param, "must be non-empty strings")
    texts = " | ".join(lark_text(text) for text in dict.fromkeys(value))
    return of_document([{"lark_grammar": f"start: {texts}"}], param)


def lark_text(text: str) -> str:
    """A literal of a Lark grammar."""
    return orjson.dumps(text).decode()


def _in_slashes(regex: str) -> str:
    """The same regex as it stands between two slashes on one line."""
    newlines = {"\n": "\\n", "\r": "\\r", "/": "\\/"}
    return _UNWRITABLE.sub(lambda match: newlines.get(match[0], match[0]), regex)


def _holds_all_of(schema: Any) -> bool:
    """Closed objects cannot be joined by allOf."""
    if isinstance(schema, dict):
        return "allOf" in schema or any(_holds_all_of(child) for child in schema.values())
    return isinstance(schema, list) and any(_holds_all_of(child) for child in schema)


def _closed(schema: Any, *, inherits: bool = False) -> Any:
    """Objects that name their keys have no others unless the schema says so, as in both peers.
    ``inherits``: an alternative of an object that names keys too."""
    if isinstance(schema, list):
        return [_closed(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    names_keys = "properties" in schema
    closed: dict[str, Any] = {}
    for key, child in schema.items():
        if key in ("const", "enum", "default", "examples"):
            closed[key] = child  # values, no schemas
        elif key in ("properties", "patternProperties", "$defs", "definitions"):
            is_map = isinstance(child, dict)
            closed[key] = {name: _closed(one) for name, one in child.items()} if is_map else child
        elif key in ("anyOf", "oneOf") and isinstance(child, list):
            closed[key] = [_closed(one, inherits=names_keys or inherits) for one in child]
        else:
            closed[key] = _closed(child)
    joined = {"anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties"}
    if names_keys and not inherits and not joined & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed
