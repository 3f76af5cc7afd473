"""Calls of functions read out of an answer's text while it arrives.

Time is linear in the text, whatever the pieces. What looks like a call and is none (broken JSON,
a function that was not offered) is given out as the text that it is. Knows the styles of
tool_formats.py; no HTTP, no tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from duograph.server.call_scanner import CallScanner, NotACall
from duograph.server.reasoning import MarkFinder
from duograph.server.tool_formats import HERMES_CLOSE, HERMES_OPEN, PYTHON_TAG, FormatName

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function ``name`` begins; ``index`` counts calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the JSON arguments of call ``index``."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolReader(Protocol):
    """One choice's answer. ``calls`` counts those that have begun; ``is_cut`` says that one of
    them has ended before its end."""

    calls: int
    is_cut: bool

    def push(self, text: str) -> list[Event]: ...

    def flush(self) -> list[Event]:
        """What was held back; the text has ended."""


def new_reader(style: FormatName, names: Set[str], *, parallel: bool) -> ToolReader:
    """``names`` of the functions that may be called. Without ``parallel`` only the first call
    counts."""
    if style == "hermes":
        return HermesReader(names, parallel=parallel)
    return LlamaReader(names, parallel=parallel)


class _Calls:
    """What both readers share: calls in a row, each read by a scanner, and the text of the one
    that is being read, should it turn out to be none."""

    def __init__(self, names: Set[str], *, parallel: bool) -> None:
        self.calls = 0
        self.is_cut = False
        self._names = names
        self._parallel = parallel
        self._scanner: CallScanner | None = None
        self._raw: list[str] = []
        self._started = False  # the call that is being read has been told of
        self._space = ""  # white space after words, dropped before a call

    def _open(self, raw: str) -> None:
        self._scanner, self._raw, self._started = CallScanner(self._names), [raw], False

    def _scan(self, text: str) -> Iterator[Event | str]:
        """Events of the call, and at its end the rest of the text. Raises NotACall."""
        scanner = self._scanner
        assert scanner is not None
        pieces, used = scanner.push(text)
        if not self._started:
            self._raw.append(text[:used])
        counts = self._parallel or self.calls == 0 or self._started
        if scanner.name is not None and not self._started and counts:
            self._started = True
            self._space = ""
            yield CallStart(self.calls, f"call_{secrets.token_hex(12)}", scanner.name)
            self.calls += 1
        if self._started:
            for piece in pieces:
                yield CallArguments(self.calls - 1, piece)
        if scanner.done:
            self._scanner = None
            yield text[used:]

    def _words(self, text: str) -> Iterator[Event]:
        """Words, without white space at their end until more words follow."""
        text = self._space + text
        shown = text.rstrip(_SPACE)
        self._space = text[len(shown) :]
        if shown:
            yield Content(shown)

    def _unread(self) -> str:
        """The text of a call that is none; empty if it has been told of already."""
        self._scanner = None
        self.is_cut |= self._started
        return "" if self._started else "".join(self._raw)

    def _last_words(self, text: str) -> list[Event]:
        whole = (self._space if self.calls == 0 or text else "") + text
        self._space = ""
        return [Content(whole)] if whole else []


class HermesReader(_Calls):
    """<tool_call> JSON </tool_call>, among words."""

    def __init__(self, names: Set[str], *, parallel: bool) -> None:
        super().__init__(names, parallel=parallel)
        self._finder: MarkFinder | None = MarkFinder(HERMES_OPEN)
        self._closer: MarkFinder | None = None  # after a call

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._step(text, events)
        return events

    def _step(self, text: str, events: list[Event]) -> str:
        """Takes a part of ``text`` and returns the rest."""
        if self._closer is not None:
            _, rest = self._closer.push(text)
            if rest is None:
                return ""
            self._closer, self._finder = None, MarkFinder(HERMES_OPEN)
            return rest
        if self._scanner is not None:
            return self._read_call(text, events)
        assert self._finder is not None
        words, rest = self._finder.push(text)
        events += self._words(words)
        if rest is None:
            return ""
        self._open(HERMES_OPEN)
        return rest

    def _read_call(self, text: str, events: list[Event]) -> str:
        rest = ""
        try:
            for event in self._scan(text):
                if isinstance(event, str):
                    rest, self._closer = event, MarkFinder(HERMES_CLOSE)
                else:
                    events.append(event)
        except NotACall:
            self._finder = MarkFinder(HERMES_OPEN)
            if self._started:  # it cannot be taken back: what follows of it is dropped
                self.is_cut = True
                self._scanner, self._closer = None, MarkFinder(HERMES_CLOSE)
            else:
                events += self._words(self._unread())
            return text
        return rest

    def flush(self) -> list[Event]:
        if self._scanner is not None:
            return self._last_words(self._unread())
        if self._closer is not None or self._finder is None:
            return []
        return self._last_words(self._finder.flush())


class LlamaReader(_Calls):
    """An answer that is JSON from its first character: calls, with semicolons between them."""

    def __init__(self, names: Set[str], *, parallel: bool) -> None:
        super().__init__(names, parallel=parallel)
        self._is_words = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._step(text, events)
        return events

    def _step(self, text: str, events: list[Event]) -> str:
        if self._is_words:
            events.append(Content(text))
            return ""
        if self._scanner is None:
            return self._between(text, events)
        rest = ""
        try:
            for event in self._scan(text):
                if isinstance(event, str):
                    rest, self._space = event, ""
                else:
                    events.append(event)
        except NotACall:
            self._is_words = True
            return self._unread() + text if not self._started else self._drop()
        return rest

    def _between(self, text: str, events: list[Event]) -> str:
        """Before the first call, or between two: white space, semicolons, the tag."""
        whole = self._space + text
        seen = whole.lstrip(_SPACE + (";" if self.calls else ""))
        if not seen or (len(seen) < len(PYTHON_TAG) and PYTHON_TAG.startswith(seen)):
            self._space = whole
            return ""
        self._space = ""
        if seen.startswith(PYTHON_TAG):
            return seen[len(PYTHON_TAG) :]
        if seen[0] != "{":
            self._is_words = True
            return whole
        self._open(whole[: len(whole) - len(seen)])
        return seen

    def _drop(self) -> str:
        """A call that has been told of cannot be taken back: what follows of it is dropped."""
        self._scanner = None
        self.is_cut = True
        return ""

    def flush(self) -> list[Event]:
        if self._scanner is not None:
            return self._last_words(self._unread())
        return self._last_words("")
