"""The running choices of one HTTP request: tokens to text, stop strings, finish, usage.

Knows sequences and text; does not know the JSON around them. Streams and whole answers share it:
a stream sets ``on_output`` and is called at every piece, a whole answer waits for ``done``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.messages import Finished, Logprobs
from duograph.server import errors
from duograph.server.engine_client import EngineClient, Sequence
from duograph.server.errors import ApiError
from duograph.server.metrics import FrontendMetrics
from duograph.server.text_stream import StopMatcher, TextDecoder
from duograph.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What one choice is to be: made before anything is sent to the engine."""

    index: int
    input_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    keep_stop_text: bool = False
    skip_special_tokens: bool = True
    echo_text: str = ""  # the prompt, if the answer begins with it


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One generated token with its log-probabilities, and where its text begins."""

    token: int
    logprobs: Logprobs


@dataclass(slots=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` is None while the engine has not said."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None

    def as_dict(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


class Choice:
    """Text and state of one sequence."""

    __slots__ = (
        "_decoder", "_stops", "cached_tokens", "completion_tokens", "entries", "error",
        "finish_reason", "matched_stop", "plan", "sequence",
    )  # fmt: skip

    def __init__(self, plan: ChoicePlan, decoder: TextDecoder) -> None:
        self.plan = plan
        self.sequence: Sequence | None = None
        self._decoder = decoder
        self._stops = StopMatcher(plan.stops) if plan.stops else None
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.entries: list[TokenEntry] = []  # not yet given out
        self.finish_reason: Literal["stop", "length"] | None = None
        self.matched_stop: int | str | None = None
        self.error: ApiError | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self) -> str:
        """New text for the client, from all that the sequence has received. May set
        ``finish_reason`` or ``error``."""
        sequence = self.sequence
        assert sequence is not None
        tokens = sequence.take()
        finished = sequence.finished
        if sequence.logprobs:
            self._take_logprobs(tokens, sequence)
        if self._stops is None and finished is None:
            self.completion_tokens += len(tokens)
            return self._decoder.push(tokens)
        text = self._push(tokens, finished)
        if finished is not None and not self.ended:
            text += self._finish(finished)
        return text

    def _push(self, tokens: list[int], finished: Finished | None) -> str:
        """Text of ``tokens`` up to a stop string; the stop token that ended the sequence has
        none, unless it was asked for."""
        self_stopped = finished is not None and finished.matched_token is not None
        visible = len(tokens)
        if self_stopped and tokens and not self.plan.keep_stop_text:
            visible -= 1
        if self._stops is None:
            self.completion_tokens += len(tokens)
            return self._decoder.push(tokens[:visible])
        pieces = []
        for position, token in enumerate(tokens):
            self.completion_tokens += 1
            if position < visible:
                pieces.append(self._match(self._decoder.push((token,))))
            if self.ended:
                break
        return "".join(pieces)

    def _match(self, text: str) -> str:
        """The part of ``text`` (and of what was held back) that may be shown."""
        stops = self._stops
        assert stops is not None
        if not text:
            return ""
        if self.completion_tokens < self.plan.sampling.min_new_tokens:
            return text  # a stop string only counts once enough tokens are there
        shown, stop = stops.push(text)
        if stop is not None:
            self.finish_reason, self.matched_stop = "stop", stop
            if self.plan.keep_stop_text:
                shown += stop
        return shown

    def _finish(self, finished: Finished) -> str:
        if finished.reason == "error":
            self.error = errors.from_engine(finished.error_code, finished.error_message)
            return ""
        rest = self._decoder.flush()
        if self._stops is not None:
            rest = self._match(rest)
            if self.ended:
                return rest
            rest += self._stops.flush()
        self.finish_reason = finished.reason
        self.matched_stop = finished.matched_token
        self.cached_tokens = finished.cached_tokens
        return rest

    def _take_logprobs(self, tokens: list[int], sequence: Sequence) -> None:
        entries, sequence.logprobs = sequence.logprobs, []
        self.entries += [TokenEntry(t, e) for t, e in zip(tokens, entries, strict=False)]

    def take_entries(self) -> list[TokenEntry]:
        entries, self.entries = self.entries, []
        return entries


@dataclass(slots=True, eq=False)
class Generation:
    """All choices of one request. ``started`` is set by the first output or error."""

    choices: list[Choice]
    client: EngineClient
    metrics: FrontendMetrics
    started: asyncio.Future[None]
    done: asyncio.Future[None]
    on_output: Callable[[Choice, str], None] | None = None
    texts: list[list[str]] = field(default_factory=list)  # by choice, for a whole answer
    streamed: bool = False
    abandoned: bool = False  # the client has gone
    _begun: float = 0.0
    _last_output: float = 0.0
    _live: int = 0
    _counted: bool = False  # in the metrics as active

    @classmethod
    def begin(
        cls,
        plans: list[ChoicePlan],
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: FrontendMetrics,
        streamed: bool,
        cache_salt: str = "",
    ) -> Generation:
        """Sends all sequences to the engine. Raises ApiError 503, with none of them running."""
        loop = asyncio.get_running_loop()
        choices = [
            Choice(p, tokenizer.new_decoder(skip_special_tokens=p.skip_special_tokens))
            for p in plans
        ]
        generation = cls(
            choices, client, metrics, loop.create_future(), loop.create_future(),
            texts=[[] for _ in choices], streamed=streamed,
        )  # fmt: skip
        generation._begun = generation._last_output = time.monotonic()
        generation._live = len(choices)
        try:
            for choice in choices:
                if choice.plan.sampling.max_new_tokens == 0:
                    generation._end_without_tokens(choice)
                    continue
                choice.sequence = client.submit(
                    choice.plan.input_ids,
                    choice.plan.sampling,
                    generation._consumer(choice),
                    cache_salt=cache_salt,
                )
        except BaseException:
            generation.abort()
            raise
        metrics.begin(generation.usage().prompt_tokens)
        generation._counted = True
        return generation

    @property
    def error(self) -> ApiError | None:
        return next((choice.error for choice in self.choices if choice.error), None)

    def attach(self, on_output: Callable[[Choice, str], None]) -> None:
        """From now on ``on_output`` gets every piece, first of all what has waited."""
        self.on_output = on_output
        for choice in self.choices:
            sequence = choice.sequence
            if sequence is None:
                on_output(choice, "")
            elif (sequence.tokens or sequence.finished) and not self.done.done():
                self._consume(choice)

    def abandon(self) -> None:
        """The client has gone."""
        self.abandoned = not self.done.done()
        self.abort()

    def abort(self) -> None:
        """Ends what still runs, for a client that has gone or an error. May be called twice."""
        for choice in self.choices:
            if choice.sequence is not None:
                self.client.abort(choice.sequence)
        if not self.started.done():
            self.started.set_result(None)
        if not self.done.done():
            self.done.set_result(None)
            if self._counted:
                seconds = time.monotonic() - self._begun
                self.metrics.end(seconds, aborted=self._live > 0 and self.error is None)

    def fail(self, error: ApiError) -> None:
        """Ends the request with ``error``."""
        for choice in self.choices:
            if not choice.ended:
                choice.error = error
        if self.on_output is not None and not self.done.done():
            self.on_output(self.choices[0], "")
        self.abort()

    def usage(self) -> Usage:
        """Prompts count once each, however many choices they have."""
        usage = Usage()
        seen: set[int] = set()
        for choice in self.choices:
            usage.completion_tokens += choice.completion_tokens
            if id(choice.plan.input_ids) not in seen:
                seen.add(id(choice.plan.input_ids))
                usage.prompt_tokens += len(choice.plan.input_ids)
                if choice.cached_tokens is not None:
                    usage.cached_tokens = (usage.cached_tokens or 0) + choice.cached_tokens
        return usage

    def _consumer(self, choice: Choice) -> Callable[[Sequence], None]:
        def consume(_: Sequence) -> None:
            try:
                self._consume(choice)
            except Exception:
                self.fail(errors.internal())
                raise

        return consume

    def _consume(self, choice: Choice) -> None:
        if self.done.done():
            return
        if not self.started.done():
            self.started.set_result(None)
            self.metrics.first_token(time.monotonic() - self._begun)
        if self.streamed and self.on_output is None:
            if choice.sequence is not None and choice.sequence.finished is not None:
                self._note_early_error(choice, choice.sequence.finished)
            return  # the response has not begun: the sequence keeps its tokens until then
        before = choice.completion_tokens
        text = choice.take()
        now = time.monotonic()
        self.metrics.tokens(choice.completion_tokens - before, now - self._last_output)
        self._last_output = now
        if choice.ended:
            self._end(choice)
        if self.on_output is not None:
            self.on_output(choice, text)
        elif text:
            self.texts[choice.plan.index].append(text)
        if self._live == 0 or choice.error is not None:
            self.abort()

    def _end(self, choice: Choice) -> None:
        self._live -= 1
        assert choice.sequence is not None
        self.client.abort(choice.sequence)  # a stop string: the engine does not know yet

    def _end_without_tokens(self, choice: Choice) -> None:
        """An echo of the prompt alone needs no engine."""
        choice.finish_reason = "length"
        self._live -= 1
        if not self.started.done():
            self.started.set_result(None)
        if self._live == 0:
            self.done.set_result(None)

    def _note_early_error(self, choice: Choice, finished: Finished) -> None:
        """An error before the response has begun can still become its status."""
        if finished.reason == "error":
            choice.error = errors.from_engine(finished.error_code, finished.error_message)
