"""Finished choices and log-probabilities in OpenAI's JSON shapes.

Knows the shapes of whole answers and of logprobs; server-sent events are in sse.py, which shares
the logprobs. Builds plain dicts; once per request, not per token.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from duograph.server.answer_reader import AnswerReader, joined
from duograph.server.generation import Choice, Generation, TokenEntry
from duograph.server.text_stream import TextDecoder
from duograph.server.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclass(frozen=True)
class AnswerHead:
    """What all chunks of one answer share."""

    id: str
    created: int  # Unix seconds
    model: str

    @classmethod
    def new(cls, prefix: str, model: str, client_id: str | None = None) -> AnswerHead:
        """``prefix`` is chatcmpl or cmpl; the rest of the id is the client's or made here."""
        rest = uuid.uuid4().hex if client_id is None else client_id
        return cls(id=f"{prefix}-{rest}", created=int(time.time()), model=model)


def chat_answer(head: AnswerHead, generation: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """A chat.completion object."""
    choices = []
    for choice, pieces in zip(generation.choices, generation.texts, strict=True):
        wants = choice.plan.sampling.logprobs is not None
        message = _message(choice, "".join(pieces))
        choices.append(
            {
                "index": choice.plan.index,
                "message": message,
                "logprobs": chat_logprobs(choice, tokenizer) if wants else None,
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.matched_stop,
            }
        )
        if choice.plan.return_token_ids:
            choices[-1]["token_ids"] = choice.take_token_ids()
    answer = _answer("chat.completion", head, choices, generation)
    plan = generation.choices[0].plan  # all have the same prompt
    if plan.return_token_ids:
        answer["prompt_token_ids"] = plan.input_ids
    return answer


def _message(choice: Choice, text: str) -> dict[str, Any]:
    """Of the assistant. A call of a function changes why the choice has ended."""
    head: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.plan.reader is None:
        return head
    reader = AnswerReader(choice.plan.reader)
    parts = joined([*reader.push(text), *reader.flush()])
    if reader.ends_with_calls and choice.finish_reason == "stop":
        choice.finish_reason = "tool_calls"
    return head | parts


def completion_answer(
    head: AnswerHead, generation: Generation, tokenizer: Tokenizer
) -> dict[str, Any]:
    """A text_completion object."""
    choices = []
    for choice, pieces in zip(generation.choices, generation.texts, strict=True):
        logprobs = None
        if choice.plan.sampling.logprobs is not None:
            logprobs = CompletionLogprobs(choice, tokenizer).take()
        choices.append(
            {
                "index": choice.plan.index,
                "text": choice.plan.echo_text + "".join(pieces),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.matched_stop,
            }
        )
        if choice.plan.return_token_ids:
            choices[-1]["token_ids"] = choice.take_token_ids()
            choices[-1]["prompt_token_ids"] = choice.plan.input_ids
    return _answer("text_completion", head, choices, generation)


def _answer(
    kind: str, head: AnswerHead, choices: list[dict[str, Any]], generation: Generation
) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": generation.usage().as_dict(),
    }


def chat_logprobs(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    """{"content": [...]} of the entries that have not been given out yet. ``bytes`` are raw, so
    that characters split over tokens can be put together again."""
    content = []
    for entry in choice.take_entries():
        shown = _chat_token(entry.token, entry.logprobs.logprob, tokenizer)
        top = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=False)
        shown["top_logprobs"] = [_chat_token(token, value, tokenizer) for token, value in top]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(data),
    }


class CompletionLogprobs:
    """The four parallel lists of the completions endpoint, over one or many chunks."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        skip = choice.plan.skip_special_tokens
        self._decoder: TextDecoder = tokenizer.new_decoder(skip_special_tokens=skip)
        self._offset = len(choice.plan.echo_text)  # characters of the answer so far
        self._has_prompt = bool(choice.plan.echo_offsets)  # not yet given out

    def take(self) -> dict[str, Any]:
        """Of the prompt, if its log-probabilities are wanted, and then of the entries that have
        not been given out yet. Nothing comes before the first token, so it has null."""
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        entries = self._choice.take_entries()
        if self._has_prompt:
            self._has_prompt = False
            first, *others = self._choice.plan.input_ids
            tokens, values, top = [self._name(first)], [None], [None]
            offsets = list(self._choice.plan.echo_offsets)
            told = zip(others, self._choice.prompt_entries, strict=False)
            entries = [TokenEntry(token, logprobs) for token, logprobs in told] + entries
        for entry in entries:
            tokens.append(self._name(entry.token))
            values.append(max(entry.logprobs.logprob, LOWEST_LOGPROB))
            top.append(self._top(entry))
            if len(offsets) < len(tokens):
                offsets.append(self._offset)
                self._offset += len(self._decoder.push((entry.token,)))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        pairs = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=False)
        named = {self._name(token): max(value, LOWEST_LOGPROB) for token, value in pairs}
        named.setdefault(self._name(entry.token), max(entry.logprobs.logprob, LOWEST_LOGPROB))
        return named

    def _name(self, token: int) -> str:
        """The token's text; half a character is written as OpenAI does, ``bytes:\\xe2\\x82``."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
