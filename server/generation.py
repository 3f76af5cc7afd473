"""The running choices of one HTTP request: tokens to text, stop strings, finish, usage.

Knows sequences and text; does not know the JSON around them. Streams and whole answers share it:
a stream sets ``on_output`` and is called at every piece, a whole answer waits for ``done``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Indexable
from dataclasses import dataclass
from typing import Literal

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.messages import Finished, Grammar, Logprobs
from duograph.server import errors
from duograph.server.answer_reader import ReaderPlan
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
    # where each prompt token begins in echo_text, if their logprobs are wanted too
    echo_offsets: tuple[int, ...] = ()
    return_token_ids: bool = False
    grammar: Grammar | None = None
    reader: ReaderPlan | None = None  # of a chat whose answer may be more than words


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
        "_decoder", "_generation", "_stops", "cached_tokens", "completion_tokens", "entries",
        "error", "finish_reason", "matched_stop", "plan", "sequence", "token_ids",
    )  # fmt: skip

    def __init__(self, plan: ChoicePlan, decoder: TextDecoder, generation: Generation) -> None:
        self.plan = plan
        self._generation = generation
        self.sequence: Sequence | None = None
        self._decoder = decoder
        self._stops = StopMatcher(plan.stops) if plan.stops else None
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.entries: list[TokenEntry] = []  # not yet given out
        self.token_ids: list[int] = []  # likewise, if the plan wants them
        # "tool_calls" is set by those who read the text
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None
        self.matched_stop: int | str | None = None
        self.error: ApiError | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def consume(self) -> None:
        """See engine_client.Consumer."""
        self._generation.take_output(self)

    def failed(self) -> None:
        """See engine_client.Consumer."""
        self._generation.fail(errors.internal())

    def take(self) -> str:
        """New text for the client, from all that the sequence has received. May set
        ``finish_reason`` or ``error``."""
        sequence = self.sequence
        assert sequence is not None
        tokens = sequence.take()
        finished = sequence.finished
        # the stop token that ended the sequence has no text, unless it was asked for
        hides_last = (
            finished is not None
            and finished.matched_token is not None
            and not self.plan.keep_stop_text
        )
        if sequence.logprobs:
            self._take_logprobs(tokens[: len(tokens) - hides_last], sequence)
        self.cached_tokens = sequence.cached_tokens
        before = self.completion_tokens
        if self._stops is None:
            self.completion_tokens += len(tokens)
            text = self._decoder.push(tokens[:-1] if hides_last else tokens)
        else:
            text = self._push_to_stop(tokens, len(tokens) - hides_last)
        if self.plan.return_token_ids:
            self.token_ids += tokens[: self.completion_tokens - before]
        if finished is not None and not self.ended:
            text += self._finish(finished)
        return text

    def _push_to_stop(self, tokens: list[int], visible: int) -> str:
        """Text of the first ``visible`` tokens, up to a stop string: one by one, so that the
        count of tokens is right where it matches."""
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

    @property
    def prompt_entries(self) -> list[Logprobs]:
        """Of the prompt's own tokens, from ``sampling.prompt_logprobs_start`` on."""
        return [] if self.sequence is None else self.sequence.prompt_logprobs

    def take_token_ids(self) -> list[int]:
        ids, self.token_ids = self.token_ids, []
        return ids

    def take_entries(self) -> list[TokenEntry]:
        entries, self.entries = self.entries, []
        return entries


class Generation:
    """All choices of one request, from the engine's door to their ends.

    ``started`` is set by the first output or error, ``done`` when nothing more will come. A
    streamed one keeps its tokens until ``attach``, so that an error before that can still
    become the response's status."""

    __slots__ = (
        "_begun", "_client", "_last_output", "_live", "_metrics", "_on_output", "_streamed",
        "abandoned", "choices", "done", "started", "texts",
    )  # fmt: skip

    def __init__(
        self,
        plans: list[ChoicePlan],
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: FrontendMetrics,
        streamed: bool,
    ) -> None:
        """Must be called on the event loop."""
        loop = asyncio.get_running_loop()
        self._client = client
        self._metrics = metrics
        self._streamed = streamed
        self._on_output: Callable[[Choice, str], None] | None = None
        self.choices = [
            Choice(p, tokenizer.new_decoder(skip_special_tokens=p.skip_special_tokens), self)
            for p in plans
        ]
        self.texts: list[list[str]] = [[] for _ in plans]  # by choice, for a whole answer
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.abandoned = False  # the client has gone
        self._live = len(plans)
        self._begun = self._last_output = time.monotonic()

    def submit(self, *, cache_salt: str, names: Indexable[str] = (), priority: int = 0) -> None:
        """Sends all sequences to the engine, by their clients' ``names`` if there are any.
        Raises ApiError 503, with none of them running."""
        self._metrics.begin(self.usage().prompt_tokens)
        try:
            for choice in self.choices:
                plan = choice.plan
                wants_scores = plan.sampling.prompt_logprobs is not None
                if plan.sampling.max_new_tokens == 0 and not wants_scores:
                    # an echo of the prompt needs no engine
                    choice.finish_reason = "length"
                    self._live -= 1
                    continue
                choice.sequence = self._client.submit(
                    plan.input_ids,
                    plan.sampling,
                    choice,
                    cache_salt=cache_salt,
                    name=names[plan.index] if names else "",
                    priority=priority,
                    grammar=plan.grammar,
                )
        except ApiError as error:
            self.fail(error)
            raise
        if self._live == 0:
            self._mark_started()
            if not self._streamed:
                self.abort()

    @property
    def seconds(self) -> float:
        """Since the request was accepted."""
        return time.monotonic() - self._begun

    @property
    def error(self) -> ApiError | None:
        return next((choice.error for choice in self.choices if choice.error), None)

    def attach(self, on_output: Callable[[Choice, str], None]) -> None:
        """From now on ``on_output`` gets every piece, first of all what has waited."""
        self._on_output = on_output
        for choice in self.choices:
            sequence = choice.sequence
            if sequence is None:
                on_output(choice, "")
            elif sequence.tokens or sequence.finished:
                self.take_output(choice)
        if self._live == 0:
            self.abort()

    def take_output(self, choice: Choice) -> None:
        """The sequence of ``choice`` has tokens or has ended."""
        if self.done.done():
            return
        if not self.started.done():
            self._mark_started()
            self._metrics.first_token(time.monotonic() - self._begun)
        if self._streamed and self._on_output is None:
            self._note_early_error(choice)
            return
        before = choice.completion_tokens
        text = choice.take()
        now = self._client.now
        self._metrics.tokens(choice.completion_tokens - before, now - self._last_output)
        self._last_output = now
        if choice.ended:
            self._live -= 1
            assert choice.sequence is not None
            self._client.abort(choice.sequence)  # a stop string: the engine does not know yet
        if self._on_output is not None:
            self._on_output(choice, text)
        elif text:
            self.texts[choice.plan.index].append(text)
        if self._live == 0 or choice.error is not None:
            self.abort()

    def abandon(self) -> None:
        """The client has gone."""
        self.abandoned = not self.done.done()
        self.abort()

    def fail(self, error: ApiError) -> None:
        """Ends the request with ``error``."""
        if self.done.done():
            return
        for choice in self.choices:
            if not choice.ended:
                choice.error = error
        if self._on_output is not None:
            failed = next(choice for choice in self.choices if choice.error)
            self._on_output(failed, "")
        self.abort()

    def abort(self) -> None:
        """Ends what still runs. May be called again."""
        for choice in self.choices:
            if choice.sequence is not None:
                self._client.abort(choice.sequence)
        self._mark_started()
        if not self.done.done():
            self.done.set_result(None)
            cut_short = self._live > 0 and self.error is None
            self._metrics.end(time.monotonic() - self._begun, aborted=cut_short)

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

    def _mark_started(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def _note_early_error(self, choice: Choice) -> None:
        """An error before the response has begun can still become its status."""
        finished = choice.sequence.finished if choice.sequence is not None else None
        if finished is not None and finished.reason == "error":
            choice.error = errors.from_engine(finished.error_code, finished.error_message)
            self.abort()
