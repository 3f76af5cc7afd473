"""Thoughts, words and calls read out of text: the same wherever the pieces are cut, and nothing
that is no call is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duograph.server.answer_reader import AnswerReader, ReaderPlan, joined
from duograph.server.reasoning import begins_inside
from duograph.server.tool_formats import FormatName, detect

NAMES = frozenset({"get", "put"})
HERMES = ReaderPlan(names=NAMES)
LLAMA = ReaderPlan(names=NAMES, style="llama3")


def read(plan: ReaderPlan, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(thoughts, words, calls)"""
    reader = AnswerReader(plan)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.flush()
    message = joined(deltas)
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    assert len(calls) == reader.calls
    return message.get("reasoning_content", ""), message["content"] or "", calls


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


TRICKY = '{"a": "}, {\\" </tool_call>", "b": [1, {"c": "]"}], "d": {}}'
CASES: list[tuple[ReaderPlan, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Words, <b> and </b>.\n ", "Words, <b> and </b>.\n ", []),
    (HERMES, hermes(f'{{"name": "get", "arguments": {TRICKY}}}'), "", [("get", TRICKY)]),
    (HERMES, hermes(f'{{"arguments": {TRICKY}, "name": "get"}}'), "", [("get", TRICKY)]),
    (HERMES, hermes('{"id": 1, "name": "get"}'), "", [("get", "{}")]),
    (HERMES, hermes('{"name": "get", "arguments": "{\\"a\\": 1}"}'), "", [("get", '{"a": 1}')]),
    (HERMES, "I do.\n\n" + hermes('{"name": "get"}') + "\n", "I do.", [("get", "{}")]),
    (HERMES, hermes('{"name": "no"}') + " end", hermes('{"name": "no"}') + " end", []),
    (HERMES, hermes("{]"), hermes("{]"), []),
    (HERMES, hermes('{"name": 1}'), hermes('{"name": 1}'), []),
    (HERMES, hermes("[]") + hermes('{"name": "put"}'), hermes("[]"), [("put", "{}")]),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"a', "", [("get", '{"a')]),
    (HERMES, '<tool_call>{"name": "ge', '<tool_call>{"name": "ge', []),
    (HERMES, "almost <tool_cal", "almost <tool_cal", []),
    (LLAMA, '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    (
        LLAMA,
        ' <|python_tag|>{"name": "get"}; {"name": "put", "parameters": {"x": [2]}}',
        "",
        [("get", "{}"), ("put", '{"x": [2]}')],
    ),
    (LLAMA, '{"name": "other"}', '{"name": "other"}', []),
    (LLAMA, '{"key": "value"} is JSON', '{"key": "value"} is JSON', []),
    (LLAMA, 'Words {"name": "get"}', 'Words {"name": "get"}', []),
    (LLAMA, "  ", "  ", []),
]


@pytest.mark.parametrize(("plan", "text", "words", "calls"), CASES)
def test_calls_and_words_are_told_apart_wherever_the_pieces_are_cut(
    plan: ReaderPlan, text: str, words: str, calls: list[tuple[str, str]]
) -> None:
    for size in (*range(1, 13), len(text)):
        assert read(plan, cut(text, size)) == ("", words, calls)


PARTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", '{"name": "get"', '"arguments": ', '{"a": "b"}',
            "}", "{", '"', "\\", ",", " ", "\n", "words", "<think>", "</think>", '{"name": "no"}',
            "[", "]", ":", hermes('{"name": "put", "arguments": {"x": 1}}'),
        ]
    ),
    max_size=12,
).map("".join)  # fmt: skip
PLANS = st.builds(
    ReaderPlan,
    splits_thoughts=st.booleans(),
    begins_inside=st.booleans(),
    style=st.sampled_from(["hermes", "llama3"]),
    names=st.sampled_from([None, NAMES]),
    parallel=st.booleans(),
)


@given(plan=PLANS, text=PARTS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_no_cut_changes_what_is_read(plan: ReaderPlan, text: str, sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    thoughts, words, calls = read(plan, [*pieces, rest])
    assert (thoughts, words, calls) == read(plan, [text])
    if not calls and not plan.splits_thoughts:
        assert words == text


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nWhy?\n</think>\n\nSo.", ("Why?\n", "So.")),
        (False, "No thoughts, <think> no.", ("", "No thoughts, <think> no.")),
        (False, "<think>\n\n</think>\n\nSo.", ("", "So.")),
        (True, "Why?</think>So.", ("Why?", "So.")),
        (True, "<think>Why?</think>So.", ("Why?", "So.")),
        (True, "Never done </thi", ("Never done </thi", "")),
        (False, "<thi", ("", "<thi")),
    ],
)
def test_thoughts_end_at_their_mark(inside: bool, text: str, expected: tuple[str, str]) -> None:
    plan = ReaderPlan(splits_thoughts=True, begins_inside=inside)
    for size in (*range(1, 10), len(text)):
        assert read(plan, cut(text, size))[:2] == expected


@pytest.mark.parametrize(
    ("style", "tail", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "<|Assistant|>", True),
        ("deepseek-r1", "<think>\n\n</think>\n\n", False),
        ("qwen3", "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_answer_begins(
    style: Any, tail: str, inside: bool
) -> None:
    assert begins_inside(style, tail) is inside


@pytest.mark.parametrize("plan", [HERMES, LLAMA])
def test_time_is_linear_in_the_text(plan: ReaderPlan) -> None:
    def seconds(size: int) -> float:
        key = "arguments" if plan.style == "hermes" else "parameters"
        body = json.dumps({"name": "get", key: {"a": "x" * size}})
        text = hermes(body) if plan.style == "hermes" else body
        begun = time.thread_time()
        assert read(plan, cut(text, 4))[2]
        return time.thread_time() - begun

    seconds(1000)
    assert seconds(40_000) < 20 * max(seconds(8_000), 0.002)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_style_is_known_by_the_template(template: str, style: FormatName) -> None:
    assert detect(template) == style
