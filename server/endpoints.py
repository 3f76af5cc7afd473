"""The answer of each generating endpoint: how a generation is sent to the engine, and how its
output is told, whole or streamed. Knows the formats by name and leaves the JSON to their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response

from duograph.server.answers import AnswerHead, chat_answer, completion_answer
from duograph.server.errors import ApiError
from duograph.server.generation import ChoicePlan, Generation
from duograph.server.native import NativeHead, NativeStream, is_abort, native_answer
from duograph.server.native_schema import GenerateBody
from duograph.server.openai_schema import ChatRequest, CompletionRequest
from duograph.server.reading_stream import ReadingStream
from duograph.server.sse import ChunkFormat, ChunkStream
from duograph.server.tokenizer import Tokenizer


class Answer(Protocol):
    """One request's way of being answered."""

    @property
    def streamed(self) -> bool: ...

    def submit(self, generation: Generation) -> None:
        """Sends it to the engine. Raises ApiError 503."""

    def stream(self, generation: Generation, on_close: Callable[[], None]) -> Response: ...

    def whole(self, generation: Generation) -> Any:
        """The JSON of a generation that has ended."""

    def tells(self, error: ApiError) -> bool:
        """Whether ``whole`` can tell of this error; else it becomes the response."""


@dataclass(frozen=True)
class OpenAIAnswer:
    """Of chat and completions."""

    head: AnswerHead
    request: ChatRequest | CompletionRequest
    tokenizer: Tokenizer

    @property
    def streamed(self) -> bool:
        return self.request.stream

    def submit(self, generation: Generation) -> None:
        generation.submit(
            cache_salt=self.request.cache_salt,
            names=[self.request.client_id or ""] * len(generation.choices),
            priority=self.request.priority or 0,
        )

    def stream(self, generation: Generation, on_close: Callable[[], None]) -> Response:
        chunks = ChunkFormat(
            self.head,
            chat=isinstance(self.request, ChatRequest),
            include_usage=self.request.include_usage,
            continuous_usage=self.request.continuous_usage,
            token_ids=self.request.return_token_ids,
            tokenizer=self.tokenizer,
        )
        if generation.choices[0].plan.reader is not None:
            return ReadingStream(generation, chunks, on_close=on_close)
        return ChunkStream(generation, chunks, on_close=on_close)

    def whole(self, generation: Generation) -> Any:
        make = chat_answer if isinstance(self.request, ChatRequest) else completion_answer
        return make(self.head, generation, self.tokenizer)

    def tells(self, error: ApiError) -> bool:
        return False


@dataclass(frozen=True)
class NativeAnswer:
    """Of /generate."""

    head: NativeHead

    @classmethod
    def new(cls, body: GenerateBody, plans: list[ChoicePlan], tokenizer: Tokenizer) -> NativeAnswer:
        """Raises ApiError 400."""
        return cls(NativeHead.new(body, plans, tokenizer))

    @property
    def streamed(self) -> bool:
        return self.head.body.stream

    def submit(self, generation: Generation) -> None:
        body = self.head.body
        generation.submit(
            cache_salt=body.cache_salt,
            names=self.head.ids if body.rid is not None else (),
            priority=body.priority or 0,
        )

    def stream(self, generation: Generation, on_close: Callable[[], None]) -> Response:
        return NativeStream(generation, self.head, on_close=on_close)

    def whole(self, generation: Generation) -> Any:
        return native_answer(self.head, generation)

    def tells(self, error: ApiError) -> bool:
        return is_abort(error)
