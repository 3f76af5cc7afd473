"""How calls of functions stand in a model's text: the Hermes style, which Qwen speaks too, and
Llama 3's JSON.

For each style: the grammar that lets nothing but calls through, the words that tell a model of
its tools when its template cannot, and calls and results of earlier turns as text. Reading calls
out of an answer is tool_reader.py's. Knows no HTTP and no tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from duograph.scheduler.messages import Grammar
from duograph.server.errors import bad_field
from duograph.server.grammars import lark_text, of_document, styled
from duograph.server.tools import Tool, ToolUse

FormatName = Literal["hermes", "llama3"]

# names that other servers give their parsers for the same text
PARSERS: dict[str, FormatName] = {
    "hermes": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3",
    "llama3_json": "llama3",
}

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS_KEY: dict[FormatName, str] = {"hermes": "arguments", "llama3": "parameters"}

_PREAMBLE = (
    "You may call one or more of the functions below to answer. Each is described by one line "
    "of JSON, with the JSON schema of its {key}.\n\n{tools}\n\n"
)
_HOW: dict[FormatName, str] = {
    "hermes": (
        "To call a function, write this and nothing else, once for each call:\n"
        '<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>\n'
        "If no function helps, answer in words."
    ),
    "llama3": (
        "To call a function, write this and nothing else:\n"
        '{"name": "FUNCTION", "parameters": {"ARGUMENT": VALUE}}\n'
        "If no function helps, answer in words."
    ),
}


def detect(template: str) -> FormatName:
    """The style that a chat template speaks; Hermes if it speaks none."""
    if HERMES_OPEN in template:
        return "hermes"
    if PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    return "hermes"


def grammar(style: FormatName, use: ToolUse, answer: Grammar | None) -> Grammar | None:
    """What the answer must be: calls only, or, when they are not required, ``answer`` or calls.
    None if it may be anything. Raises ApiError 400 if it is too long."""
    if use.mode == "auto" and answer is None:
        return None
    schemas = {
        f"{tool.param}.parameters": styled(tool.parameters, lenient=not tool.strict)
        for tool in use.callable
    }
    calls = _calls_grammar(style, use, list(schemas.values()))
    if use.mode == "required" or answer is None:
        return of_document([{"lark_grammar": calls}], "tools", schemas)
    if answer.kind != "document":
        raise bad_field(answer.param, "GBNF is not possible beside tools; write it in Lark")
    first, *rest = orjson.loads(answer.text)["grammars"]
    either = [
        {"name": "start", "lark_grammar": "start: @calls | @answer"},
        {"name": "calls", "lark_grammar": calls},
        {**first, "name": "answer"},
        *rest,
    ]
    found = {name: orjson.loads(schema) for name, schema in answer.schemas.items()}
    return of_document(either, answer.param, {**found, **schemas})


def _calls_grammar(style: FormatName, use: ToolUse, schemas: list[dict[str, Any]]) -> str:
    key = _ARGUMENTS_KEY[style]
    functions = []
    for position, (tool, schema) in enumerate(zip(use.callable, schemas, strict=True)):
        head = lark_text(f'{{"name": "{tool.name}", "{key}": ')
        functions.append(f'f{position}: {head} %json {orjson.dumps(schema).decode()} "}}"')
    names = " | ".join(f"f{position}" for position in range(len(functions)))
    if style == "hermes":
        body, between = f'"{HERMES_OPEN}\\n" ({names}) "\\n{HERMES_CLOSE}"', '"\\n"'
    else:
        body, between = f"({names})", '"; "'
    start = f"call ({between} call)*" if use.parallel else "call"
    return "\n".join([f"start: {start}", f"call: {body}", *functions])


def instructions(style: FormatName, tools: tuple[Tool, ...]) -> str:
    """A system text that lists the tools and says how to call them."""
    lines = [
        orjson.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        ).decode()
        for tool in tools
    ]
    preamble = _PREAMBLE.format(key=_ARGUMENTS_KEY[style], tools="\n".join(lines))
    return preamble + _HOW[style]


def as_text(style: FormatName, message: dict[str, Any]) -> dict[str, Any]:
    """A message of an earlier turn for a template that knows no tools: calls become text, and
    results come from the user."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [content] if content else []
    for call in calls:
        function = call["function"]
        body = {"name": function["name"], _ARGUMENTS_KEY[style]: function["arguments"]}
        text = orjson.dumps(body).decode()
        texts.append(f"{HERMES_OPEN}\n{text}\n{HERMES_CLOSE}" if style == "hermes" else text)
    return {"role": message["role"], "content": "\n".join(texts)}
