"""Server-sent events: the chunks of a streamed answer, and the response that carries them.

The hot path of the frontend. A chunk is prepared bytes + the escaped text + prepared bytes; no
dict and no task per token. Knows the OpenAI chunk shapes and the wire; knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duograph.server.answers import AnswerHead, CompletionLogprobs, chat_logprobs
from duograph.server.errors import ApiError
from duograph.server.generation import Choice, Generation
from duograph.server.protocol import SLOW_READER_S, WIRE_EXTENSION, Wire
from duograph.server.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ChunkFormat:
    """Bytes of the chunks of one answer; ``chat`` or completion."""

    def __init__(
        self,
        head: AnswerHead,
        *,
        chat: bool,
        include_usage: bool,
        continuous_usage: bool,
        token_ids: bool,
        tokenizer: Tokenizer,
    ) -> None:
        """``token_ids``: the plans want them."""
        kind = "chat.completion.chunk" if chat else "text_completion"
        fields = orjson.dumps(
            {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        )
        self._head = b"data: " + fields[:-1] + b',"choices":['
        self.chat = chat
        self.include_usage = include_usage
        self._continuous = continuous_usage
        self._token_ids = token_ids
        self._is_plain = not continuous_usage and not token_ids  # but for logprobs
        self._told_prompt: set[int] = set()  # choices whose prompt ids have been given out
        self._tokenizer = tokenizer
        self._completion_logprobs: dict[int, CompletionLogprobs] = {}
        self._tail = b"]}\n\n" if not include_usage else b'],"usage":null}\n\n'
        self._text_closer = b"}" if chat else b""
        self._text_end = self._text_closer + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._field = b'"delta":{"content":' if chat else b'"text":'
        self._openers: dict[int, bytes] = {}  # by choice index

    def role(self, choice: Choice, generation: Generation) -> bytes:
        """The first chunk of a chat choice."""
        end = self._end(generation)
        if self._token_ids:
            end = b'],"prompt_token_ids":%b%b' % (orjson.dumps(choice.plan.input_ids), end[1:])
        return b'%b{"index":%d,%b,"logprobs":null,"finish_reason":null}%b' % (
            self._head,
            choice.plan.index,
            b'"delta":{"role":"assistant","content":""}',
            end,
        )

    def text(self, choice: Choice, text: str, generation: Generation) -> bytes:
        index = choice.plan.index
        opener = self._openers.get(index)
        if opener is None:
            opener = self._openers[index] = self._head + b'{"index":%d,%b' % (index, self._field)
        if choice.plan.sampling.logprobs is None and self._is_plain:
            return opener + orjson.dumps(text) + self._text_end
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}%b' % (
            opener,
            orjson.dumps(text),
            self._text_closer,
            self._logprobs(choice),
            self._ids(choice),
            self._end(generation),
        )

    def delta(self, choice: Choice, delta: dict[str, Any], generation: Generation) -> bytes:
        """A chunk of a chat that adds ``delta`` to the message."""
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}%b' % (
            self._head,
            choice.plan.index,
            orjson.dumps(delta),
            self._logprobs(choice) if choice.entries else b"null",
            self._ids(choice),
            self._end(generation),
        )

    def finish(self, choice: Choice, generation: Generation) -> bytes:
        """The last chunk of a choice: an empty delta and the reason."""
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":"%b","matched_stop":%b%b}%b' % (
            self._head,
            choice.plan.index,
            b'"delta":{}' if self.chat else b'"text":""',
            self._logprobs(choice) if choice.entries else b"null",
            str(choice.finish_reason).encode(),
            orjson.dumps(choice.matched_stop),
            self._ids(choice),
            self._end(generation),
        )

    def usage(self, generation: Generation) -> bytes:
        """The chunk after all choices, with no choices."""
        usage = orjson.dumps(generation.usage().as_dict())
        return b'%b],"usage":%b}\n\n' % (self._head, usage)

    def _end(self, generation: Generation) -> bytes:
        if not self._continuous:
            return self._tail
        return b'],"usage":%b}\n\n' % orjson.dumps(generation.usage().as_dict())

    def _ids(self, choice: Choice) -> bytes:
        """Members of a choice: the ids of the tokens since the last chunk, and in the first one
        of a completion those of its prompt."""
        if not self._token_ids:
            return b""
        ids = b',"token_ids":%b' % orjson.dumps(choice.take_token_ids())
        if self.chat or choice.plan.index in self._told_prompt:
            return ids
        self._told_prompt.add(choice.plan.index)
        return b'%b,"prompt_token_ids":%b' % (ids, orjson.dumps(choice.plan.input_ids))

    def _logprobs(self, choice: Choice) -> bytes:
        if choice.plan.sampling.logprobs is None:
            return b"null"
        if self.chat:
            return orjson.dumps(chat_logprobs(choice, self._tokenizer))
        index = choice.plan.index
        if index not in self._completion_logprobs:
            self._completion_logprobs[index] = CompletionLogprobs(choice, self._tokenizer)
        return orjson.dumps(self._completion_logprobs[index].take())


class EventStream(Response):
    """The running response of one generation that has begun without an error. A subclass says
    what is written for each piece."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, *, on_close: Callable[[], None]) -> None:
        """``on_close`` is called once, when the response has been sent or given up."""
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)
        self.generation = generation
        self._on_close = on_close
        self._wire: Wire | None = None

    def payload(self, choice: Choice, text: str) -> bytes:
        """The events for new ``text`` of ``choice``, which may have ended; empty for none."""
        raise NotImplementedError

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        """And no [DONE] after it, which would read as success."""
        return b"data: " + error.body() + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope["extensions"][WIRE_EXTENSION], send)
        finally:
            self._on_close()

    async def _run(self, wire: Wire, send: Send) -> None:
        self._wire = wire
        wire.begin()
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        self.generation.attach(self._write)
        await self.generation.done
        try:
            async with asyncio.timeout(SLOW_READER_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            wire.cut()

    def _write(self, choice: Choice, text: str) -> None:
        """Called by the generation at every piece; runs within the engine client's turn."""
        payload = self.payload(choice, text)
        if payload and self._wire is not None and not self._wire.write_chunk(payload):
            self.generation.abort()


class ChunkStream(EventStream):
    """Chunks of the two OpenAI endpoints."""

    def __init__(
        self, generation: Generation, chunks: ChunkFormat, *, on_close: Callable[[], None]
    ) -> None:
        super().__init__(generation, on_close=on_close)
        self.chunks = chunks
        self._opened = [False] * len(generation.choices)
        self._open_choices = len(generation.choices)

    def payload(self, choice: Choice, text: str) -> bytes:
        index = choice.plan.index
        if self._opened[index] and choice.finish_reason is None and choice.error is None:
            return self.chunks.text(choice, text, self.generation) if text else b""
        payload = b""
        if not self._opened[index]:
            self._opened[index] = True
            payload = self.chunks.role(choice, self.generation) if self.chunks.chat else b""
            text = choice.plan.echo_text + text
        payload += self.pieces(choice, text)
        if choice.finish_reason is not None:
            payload += self.chunks.finish(choice, self.generation)
            self._open_choices -= 1
            if self._open_choices == 0:
                payload += self.chunks.usage(self.generation) if self.chunks.include_usage else b""
                payload += DONE
        if choice.error is not None:
            payload += self.error_event(choice.error)
        return payload

    def pieces(self, choice: Choice, text: str) -> bytes:
        """The chunks for ``text``, apart from those that open and close a choice."""
        return self.chunks.text(choice, text, self.generation) if text else b""
