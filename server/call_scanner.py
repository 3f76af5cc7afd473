"""One JSON object that is a call of a function, read while it arrives.

Linear in the text, whatever the pieces. Knows JSON and the keys of a call; no marks around it.
"""

from __future__ import annotations

from collections.abc import Set

import orjson

_SPACE = " \t\r\n"


class NotACall(ValueError):
    """The text is no call of a function that was offered."""


class CallScanner:
    """One JSON object with the name and the arguments of a call, character by character.

    ``push`` says where in the text the object ended. Arguments are given out as they come, once
    the name is known; JSON inside a string, as some models write it, at its end."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # None: a key comes next
        self._part: list[str] = []  # of the key or value that is being read
        self._early: str | None = None  # arguments that came before the name
        self._has_arguments = False
        self._streamed = False  # a part of the value has been given out
        self.name: str | None = None
        self.done = False

    def push(self, text: str) -> tuple[list[str], int]:
        """(pieces of arguments, characters used). All are used unless the object has ended.
        Raises NotACall."""
        pieces: list[str] = []
        for position, char in enumerate(text):
            self._take(char, pieces)
            if self.done:
                return self._joined(pieces), position + 1
        if self._part and self._streams:
            pieces += self._part
            self._part, self._streamed = [], True
        return self._joined(pieces), len(text)

    @property
    def _streams(self) -> bool:
        """Whether the value that is being read is given out as it comes."""
        if self.name is None or self._key not in ("arguments", "parameters"):
            return False
        return self._streamed or self._part[0] != '"'

    def _joined(self, pieces: list[str]) -> list[str]:
        if self.done and not self._has_arguments:
            return ["{}"]
        text = "".join(pieces)
        return [text] if text else []

    def _take(self, char: str, pieces: list[str]) -> None:
        if self._in_string:
            self._part.append(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _SPACE:
                raise NotACall
            return
        if self._depth == 1 and self._take_between(char, pieces):
            return
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                raise NotACall
        elif char == '"':
            self._in_string = True
        if self._depth > 1 or char not in _SPACE:
            self._part.append(char)

    def _take_between(self, char: str, pieces: list[str]) -> bool:
        """The separators of the outer object; False for what belongs to a key or a value."""
        if char == ":" and self._key is None:
            self._key = _string("".join(self._part))
            self._part = []
        elif char in ",}":
            if self._key is not None:
                self._end_value("".join(self._part), pieces)
            elif self._part or char == ",":
                raise NotACall
            self._key, self._part, self._streamed = None, [], False
            if char == "}":
                if self.name is None:
                    raise NotACall
                self.done = True
        else:
            return False
        return True

    def _end_value(self, value: str, pieces: list[str]) -> None:
        if self._key == "name" and self.name is None:
            self.name = _string(value)
            if self.name not in self._names:
                raise NotACall
            if self._early is not None:
                pieces.append(self._early)
        elif self._key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            is_text = value.startswith('"') and not self._streamed
            text = _string(value) if is_text else value
            if self.name is None:
                self._early = text
            else:
                pieces.append(text)


def _string(literal: str) -> str:
    """Raises NotACall if it is no JSON string."""
    try:
        value = orjson.loads(literal)
    except ValueError as error:
        raise NotACall from error
    if not isinstance(value, str):
        raise NotACall
    return value
