"""The thinking part of an answer, told from the answer itself.

Knows the marks of the two styles, and text in pieces; no tokens, no JSON.
"""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"

# qwen3: the model opens its thoughts itself, if it has any. deepseek-r1: it begins inside them.
ReasoningStyle = Literal["qwen3", "deepseek-r1"]


def begins_inside(style: ReasoningStyle, prompt_tail: str) -> bool:
    """Whether the answer's first words are thoughts. ``prompt_tail`` is the end of the prompt:
    templates open or close the thoughts there."""
    opened, closed = prompt_tail.rfind(OPEN), prompt_tail.rfind(CLOSE)
    if max(opened, closed) < 0 or prompt_tail[max(opened, closed) :].strip() not in (OPEN, CLOSE):
        return style == "deepseek-r1"
    return opened > closed


def grammar_prelude(*, inside: bool) -> str:
    """A Lark grammar in which @constrained comes after the thoughts, which are free text and,
    unless the answer begins inside them, may be missing."""
    head = "thoughts GAP" if inside else f'("{OPEN}" thoughts GAP)?'
    return (
        f'start: {head} @constrained\nGAP: /\\n{{0,2}}/\nthoughts[suffix="{CLOSE}"]: /(.|\\n)*/\n'
    )


class MarkFinder:
    """Finds one mark in a text that arrives in pieces; holds back what may be its beginning."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text before the mark, and what follows it once it has been found, else None."""
        whole = self._held + text
        before, mark, after = whole.partition(self._mark)
        if mark:
            self._held = ""
            return before, after
        keep = next(
            n for n in range(min(len(self._mark) - 1, len(whole)), -1, -1)
            if self._mark.startswith(whole[len(whole) - n :])
        )  # fmt: skip
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """Pieces of an answer to (thoughts, rest). The marks, and the line breaks after them, belong
    to neither."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._begun = False  # something other than white space and the opening mark was seen
        self._waiting = ""  # the beginning, while it may be white space and the opening mark
        self._close = MarkFinder(CLOSE)
        self._trims = False  # white space between the marks and the text is dropped

    def push(self, text: str) -> tuple[str, str]:
        if not self._begun:
            text = self._begin(text)
        if not text:
            return "", ""
        if not self._inside:
            return "", self._trimmed(text)
        thoughts, rest = self._close.push(text)
        thoughts = self._trimmed(thoughts)
        if rest is None:
            return thoughts, ""
        self._inside, self._trims = False, True
        return thoughts, self._trimmed(rest)

    def flush(self) -> tuple[str, str]:
        """What was held back; the text has ended."""
        waiting, self._waiting = self._waiting, ""
        if not self._begun:
            return (waiting, "") if self._inside else ("", waiting)
        return self._close.flush(), ""

    def _begin(self, text: str) -> str:
        """Drops the opening mark at the very beginning; empty while that is not decided."""
        self._waiting += text
        seen = self._waiting.lstrip()
        if len(seen) < len(OPEN) and OPEN.startswith(seen):
            return ""
        self._begun = True
        waiting, self._waiting = self._waiting, ""
        if not seen.startswith(OPEN):
            self._trims = self._inside
            return waiting
        self._inside = self._trims = True
        return seen[len(OPEN) :]

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\r\n")
            self._trims = not text
        return text
