"""Chunks of a chat whose answers have parts: thoughts, words, calls of functions.

As sse.ChunkStream, for the requests that need more than its prepared bytes around text.
"""

from __future__ import annotations

from collections.abc import Callable

from duograph.server.answer_reader import AnswerReader, Delta
from duograph.server.generation import Choice, Generation
from duograph.server.sse import ChunkFormat, ChunkStream


class ReadingStream(ChunkStream):
    """Each choice's text goes through a reader of its own."""

    def __init__(
        self, generation: Generation, chunks: ChunkFormat, *, on_close: Callable[[], None]
    ) -> None:
        super().__init__(generation, chunks, on_close=on_close)
        plans = [choice.plan.reader for choice in generation.choices]
        self._readers = [AnswerReader(plan) for plan in plans if plan is not None]
        assert len(self._readers) == len(plans), "all choices of a request are read alike"

    def payload(self, choice: Choice, text: str) -> bytes:
        if self._opened[choice.plan.index] and not choice.ended:
            return self.pieces(choice, text)
        return super().payload(choice, text)

    def pieces(self, choice: Choice, text: str) -> bytes:
        reader = self._readers[choice.plan.index]
        deltas: list[Delta] = reader.push(text) if text else []
        if choice.finish_reason is not None:
            deltas += reader.flush()
            if reader.ends_with_calls and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
        return b"".join([self.chunks.delta(choice, delta, self.generation) for delta in deltas])
