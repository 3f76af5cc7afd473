"""Token ids to text, piece by piece, and stop strings in that text.

Knows bytes, characters and stop strings of one sequence; does not know requests, HTTP or JSON.

Most tokenizers in use are byte-level: a token is a fixed run of bytes, so text is an incremental
UTF-8 decode of a table look-up, a fraction of a microsecond per token. Others (byte fallback
with a metaspace) depend on neighbouring tokens and are decoded over a short window. The library's
DecodeStream does that too, but waits without end for bytes that form no character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

HOPELESS_TOKENS = 4  # a UTF-8 character has at most 4 bytes: more pending tokens form none

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """Incremental detokenizer of one sequence. The pieces joined are the decoded whole."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is now certain; never half a character."""

    def flush(self) -> str:
        """What was held back, incomplete characters replaced by U+FFFD."""


class ByteTextDecoder:
    """For byte-level tokenizers. ``table[id]`` is the token's bytes; special tokens that are
    to be skipped have none there."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, tokens: Sequence[int]) -> str:
        table = self._table
        if len(tokens) == 1:
            return self._decode(table[tokens[0]])
        return self._decode(b"".join([table[token] for token in tokens]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowTextDecoder:
    """For every other tokenizer: decodes a short window and gives out what is new in it.

    Text that ends in U+FFFD may be the first bytes of a character, so it waits, for at most
    ``HOPELESS_TOKENS`` tokens; the window is what came since the last piece, plus the piece
    before it, whose tokens decide about spaces between the two."""

    __slots__ = ("_decode", "_prefix", "_skip", "_start", "_window")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._start = 0  # window[:start] has been given out
        self._prefix = ""  # its text

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._push_one(token) for token in tokens])

    def flush(self) -> str:
        if self._start == len(self._window):
            return ""
        return self._give(self._decode(self._window, skip_special_tokens=self._skip))

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window, skip_special_tokens=self._skip)
        pending = len(self._window) - self._start
        if text.endswith("\ufffd") and pending < HOPELESS_TOKENS:
            return ""
        return self._give(text)

    def _give(self, text: str) -> str:
        piece = text[len(self._prefix) :]
        self._window = self._window[self._start :]
        self._start = len(self._window)
        self._prefix = self._decode(self._window, skip_special_tokens=self._skip)
        return piece


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may
    become one.

    One Knuth-Morris-Pratt automaton per stop string, so the time is linear in the text and the
    result does not depend on where the pieces are cut: the match that ends first wins, the
    longest of those."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that ended it, if one did.

        The shown text ends before the stop string; what follows it is dropped."""
        end, stop = self._advance(text)
        whole = self._held + text
        if stop is not None:
            self._held = ""
            return whole[: len(whole) - len(text) + end - len(stop)], stop
        keep = max(self._states)
        if keep == 0:
            self._held = ""
            return whole, None
        self._held = whole[-keep:]
        return whole[:-keep], None

    def flush(self) -> str:
        """The text that was held back for a stop string that never came."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held

    def _advance(self, text: str) -> tuple[int, str | None]:
        """Feeds all automata; (index after the match in ``text``, stop) or (0, None)."""
        best_end, best = len(text) + 1, None
        for number, stop in enumerate(self._stops):
            state, failure = self._states[number], self._failures[number]
            if state == 0 and stop[0] not in text:
                continue
            for index, char in enumerate(text):
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        if index + 1 < best_end:
                            best_end, best = index + 1, stop
                        state = 0
                        break
            self._states[number] = state
        return (0, None) if best is None else (best_end, best)


def _failure_function(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    failure = [0] * len(stop)
    border = 0
    for index in range(1, len(stop)):
        while border and stop[border] != stop[index]:
            border = failure[border - 1]
        if stop[border] == stop[index]:
            border += 1
        failure[index] = border
    return failure
