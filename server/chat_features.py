"""What a chat asks for beyond words: tools, structured output, thoughts kept apart.

From the request's fields to the messages that the template gets, the engine's grammar and the
reader of the answer. Knows no sampling and no responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from duograph.scheduler.messages import Grammar
from duograph.server import reasoning, tool_formats
from duograph.server.answer_reader import ReaderPlan
from duograph.server.chat import ChatTemplate, Message
from duograph.server.grammars import requested_grammar
from duograph.server.openai_schema import ChatRequest
from duograph.server.reasoning import ReasoningStyle
from duograph.server.tool_formats import FormatName
from duograph.server.tools import ToolUse, tool_use

# names that other servers give their parsers for the same text
REASONING_PARSERS: dict[str, ReasoningStyle] = {
    "qwen3": "qwen3",
    "qwen3-thinking": "deepseek-r1",
    "deepseek-r1": "deepseek-r1",
    "deepseek_r1": "deepseek-r1",
}
PROMPT_TAIL_TOKENS = 16  # hold what a template writes after the last message


@dataclass(frozen=True)
class ParserFlags:
    """--tool-call-parser and --reasoning-parser, by our own names; None: by the template, and
    none at all."""

    tools: FormatName | None = None
    reasoning: ReasoningStyle | None = None

    @classmethod
    def named(cls, tool_call_parser: str, reasoning_parser: str | None) -> ParserFlags:
        return cls(
            tool_formats.PARSERS.get(tool_call_parser),
            None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser],
        )


@dataclass(frozen=True)
class ChatFeatures:
    """Those of one request."""

    request: ChatRequest
    flags: ParserFlags
    style: FormatName
    use: ToolUse | None

    @classmethod
    def of(cls, request: ChatRequest, template: ChatTemplate, flags: ParserFlags) -> ChatFeatures:
        """Raises ApiError 400 naming the field."""
        style = flags.tools or tool_formats.detect(template.source)
        use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
        return cls(request, flags, style, use)

    def prompt(
        self, messages: list[Message], template: ChatTemplate
    ) -> tuple[list[Message], list[Any] | None]:
        """(messages, tools) for the template. One that knows no tools gets them as text."""
        messages = [_with_objects(message) for message in messages]
        if template.reads("tools"):
            return messages, None if self.use is None else [t.definition for t in self.use.tools]
        messages = [tool_formats.as_text(self.style, message) for message in messages]
        if self.use is None:
            return messages, None
        text = tool_formats.instructions(self.style, self.use.tools)
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": text}, *messages], None
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]], None

    def grammar(self, *, prompt_tail: str) -> Grammar | None:
        """Raises ApiError 400 naming the field."""
        grammar = requested_grammar(self.request.grammar_fields)
        if self.use is not None:
            grammar = tool_formats.grammar(self.style, self.use, grammar)
        if grammar is None or self.flags.reasoning is None:
            return grammar
        inside = reasoning.begins_inside(self.flags.reasoning, prompt_tail)
        return msgspec.structs.replace(grammar, prelude=reasoning.grammar_prelude(inside=inside))

    def reader(self, *, prompt_tail: str) -> ReaderPlan | None:
        """None for an answer that is words only."""
        style, request = self.flags.reasoning, self.request
        splits = style is not None and request.separate_reasoning
        plan = ReaderPlan(
            splits_thoughts=splits,
            begins_inside=style is not None and reasoning.begins_inside(style, prompt_tail),
            shows_thoughts=request.include_reasoning,
            style=self.style,
            names=None if self.use is None else frozenset(t.name for t in self.use.callable),
            parallel=self.use is not None and self.use.parallel,
        )
        return plan if plan.is_needed else None


def _with_objects(message: Message) -> Message:
    """Templates write the arguments of earlier calls as JSON: they want objects, not text."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        try:
            arguments = orjson.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            continue  # a model wrote it, and its client gives it back: shown as it is
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return {**message, "tool_calls": calls}
