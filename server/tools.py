"""The functions that a chat offers the model, checked, and which of them it must call.

Knows the request fields tools, tool_choice and parallel_tool_calls; knows no text format and no
template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from duograph.server.errors import bad_field, not_supported, quote
from duograph.server.grammars import checked_schema

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 16 * 1024
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. ``param`` is where it stands in the request."""

    name: str
    description: str
    parameters: dict[str, Any]  # the JSON schema of its arguments
    strict: bool
    param: str
    definition: dict[str, Any]  # as the client wrote it, for templates


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may and must call."""

    tools: tuple[Tool, ...]
    mode: Literal["auto", "required"]  # required: at least one call and nothing else
    parallel: bool  # several calls in one answer
    callable: tuple[Tool, ...]  # those that may be called: one, if a function was named


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """None if no tool is to be called. Arguments are request fields, null or absent as None.
    Raises ApiError 400 naming the field."""
    offered = _tools(tools)
    if choice is None:
        choice = "auto" if offered else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_field("tool_choice", "must be none, auto, required or a function")
        if choice == "none" or (choice == "auto" and not offered):
            return None
        if not offered:
            raise bad_field("tool_choice", f"{choice} needs tools")
        mode: Literal["auto", "required"] = "auto" if choice == "auto" else "required"
        return ToolUse(offered, mode, parallel is not False, offered)
    named = _named(choice, offered)
    return ToolUse(offered, "required", False, (named,))


def _named(choice: Any, offered: tuple[Tool, ...]) -> Tool:
    if not isinstance(choice, dict):
        raise bad_field("tool_choice", "must be none, auto, required or a function")
    if choice.get("type") not in ("function", None):
        raise not_supported("tool_choice.type", "only function is served")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_field("tool_choice.function.name", "this field is required")
    for tool in offered:
        if tool.name == name:
            return tool
    raise bad_field("tool_choice.function.name", f"{quote(name)} is not one of the tools")


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_field("tools", "must be a list")
    if len(value) > MAX_TOOLS:
        raise bad_field("tools", f"must be at most {MAX_TOOLS}, got {len(value)}")
    tools: dict[str, Tool] = {}
    for position, definition in enumerate(value):
        tool = _tool(definition, f"tools.{position}")
        if tool.name in tools:
            raise bad_field(f"{tool.param}.name", f"{quote(tool.name)} is there twice")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(value: Any, param: str) -> Tool:
    if not isinstance(value, dict):
        raise bad_field(param, "must be an object")
    if value.get("type") != "function":
        raise bad_field(f"{param}.type", "must be function")
    function, param = value.get("function"), f"{param}.function"
    if not isinstance(function, dict):
        raise bad_field(param, "this field is required: an object")
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise bad_field(f"{param}.name", f"must match {FUNCTION_NAME.pattern}")
    description = function.get("description")
    if description is None:
        description = ""
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS:
        raise bad_field(
            f"{param}.description",
            f"must be a string of at most {MAX_DESCRIPTION_CHARS} characters",
        )
    if strict is not None and not isinstance(strict, bool):
        raise bad_field(f"{param}.strict", "must be true or false")
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        raise bad_field(f"{param}.parameters", "must be a JSON schema: an object")
    if parameters is None or parameters == {}:
        parameters = _NO_ARGUMENTS
    schema = checked_schema(parameters, f"{param}.parameters")
    if schema.get("type", "object") != "object":
        raise bad_field(f"{param}.parameters.type", "must be object")
    return Tool(
        name=name,
        description=description,
        parameters={**schema, "type": "object"},
        strict=bool(strict),
        param=param,
        definition=value,
    )
