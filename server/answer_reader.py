"""The parts of a chat answer: thoughts, words, calls of functions; as deltas, and joined.

One AnswerReader per choice of a request that has such parts; plain requests have none. Knows
OpenAI's message fields; knows no server-sent events and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from duograph.server.reasoning import ReasoningSplitter
from duograph.server.tool_formats import FormatName
from duograph.server.tool_reader import CallStart, Content, Event, new_reader

Delta = dict[str, Any]  # of a message: what one chunk adds


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """What the answers of one request may have. ``names`` of functions; None if none are
    offered."""

    splits_thoughts: bool = False
    begins_inside: bool = False  # of the thoughts
    shows_thoughts: bool = True
    style: FormatName = "hermes"
    names: frozenset[str] | None = None
    parallel: bool = True

    @property
    def is_needed(self) -> bool:
        return self.splits_thoughts or self.names is not None


class AnswerReader:
    """``calls`` is the number of calls so far."""

    def __init__(self, plan: ReaderPlan) -> None:
        self._shows_thoughts = plan.shows_thoughts
        self._thoughts = ReasoningSplitter(inside=plan.begins_inside)
        self._splits = plan.splits_thoughts
        self._tools = None
        if plan.names is not None:
            self._tools = new_reader(plan.style, plan.names, parallel=plan.parallel)

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls and all of them are whole, once the text has been flushed."""
        return self._tools is not None and self._tools.calls > 0 and not self._tools.is_cut

    def push(self, text: str) -> list[Delta]:
        if not self._splits:
            return self._words(text)
        thoughts, words = self._thoughts.push(text)
        return self._thinking(thoughts) + self._words(words)

    def flush(self) -> list[Delta]:
        """What was held back; the text has ended."""
        deltas: list[Delta] = []
        if self._splits:
            thoughts, words = self._thoughts.flush()
            deltas += self._thinking(thoughts) + self._words(words)
        if self._tools is not None:
            deltas += map(_delta, self._tools.flush())
        return deltas

    def _thinking(self, text: str) -> list[Delta]:
        return [{"reasoning_content": text}] if text and self._shows_thoughts else []

    def _words(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._tools is None:
            return [{"content": text}]
        return [_delta(event) for event in self._tools.push(text)]


def _delta(event: Event) -> Delta:
    match event:
        case Content(text):
            return {"content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The fields of a whole message. ``content`` is null if there are calls and no words."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content", ""))
        thoughts.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type", "function")})
                calls[-1]["function"] = {**call["function"]}
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    words = "".join(content)
    message: dict[str, Any] = {"content": words if words or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
