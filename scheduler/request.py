"""One request on its way through the scheduler: its tokens, its lengths and its pages.

Lengths. ``kv_len`` counts the tokens whose keys and values some launched step writes or has
written. While a prompt (or, after a retraction, prompt + output) is prefilled, kv_len walks up
to ``prefill_len``; every decode step then adds one. The step that brings kv_len to n samples the
token at position n, so ``kv_limit`` = prompt + max_new_tokens - 1 is where the last token has
been planned: a finish by length is known before any result is.
"""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.kv_cache import PageLease


class RequestState(enum.Enum):
    WAITING = "waiting"  # also after a retraction
    PREFILL = "prefill"  # has a row and its pages; some tokens are not planned yet
    DECODE = "decode"
    FINISHED = "finished"


class Constraint(Protocol):
    """A request's place in its grammar (grammar_masks.GrammarState), as the scheduler sees it."""

    @property
    def failed_at(self) -> int | None:
        """After how many output tokens it can go on no more; None while it can."""

    @property
    def error(self) -> str: ...


class Request:
    __slots__ = (
        "arrival",
        "cache_salt",
        "cached_tokens",
        "deferred",
        "first_admitted",
        "first_token_time",
        "frontend",
        "grammar",
        "is_special",
        "kv_len",
        "kv_limit",
        "last_step",
        "last_token_time",
        "lease",
        "max_new_tokens",
        "min_new_tokens",
        "name",
        "needs_filter",
        "output_ids",
        "prefill_key",
        "prefill_len",
        "prompt",
        "prompt_len",
        "rank",
        "retractions",
        "rid",
        "row",
        "sampling",
        "scored",
        "seq",
        "state",
        "stop_ids",
    )

    def __init__(
        self,
        *,
        rid: int,
        frontend: int,
        seq: int,
        prompt: npt.NDArray[np.int32],
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        cache_salt: str,
        arrival: float,
        name: str = "",
        rank: int = 0,
        grammar: Constraint | None = None,
    ) -> None:
        self.rid = rid
        self.frontend = frontend
        self.seq = seq  # order of arrival
        self.name = name
        self.rank = rank  # smaller comes first; all 0 unless the policy is priority
        self.prompt = prompt
        self.prompt_len = len(prompt)
        self.sampling = sampling
        self.grammar = grammar
        self.max_new_tokens = sampling.max_new_tokens
        self.stop_ids = stop_ids
        # A grammar lets no stop token come too early unless it allows nothing else.
        self.min_new_tokens = sampling.min_new_tokens if grammar is None else 0
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.state = RequestState.WAITING
        self.output_ids: list[int] = []
        self.row = 0  # of the device tables; 0 = none
        self.lease: PageLease | None = None
        self.kv_len = 0
        self.prefill_len = self.prompt_len
        self.prefill_key = b""  # the prefix that is being computed, until it is published
        self.kv_limit = self.prompt_len + self.max_new_tokens - 1
        self.last_step = -1  # id of the last step this request is part of
        self.retractions = 0
        self.deferred = 0  # prefill steps planned while this request waited
        self.cached_tokens = 0
        # The first prompt token whose wanted log-probability no launched step computes.
        wants_scores = sampling.prompt_logprobs is not None
        self.scored = sampling.prompt_logprobs_start if wants_scores else self.prompt_len
        self.first_admitted: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time = 0.0
        self.needs_filter = sampling.needs_filter
        self.is_special = bool(
            sampling.needs_penalty
            or sampling.logit_bias
            or self.min_new_tokens
            or sampling.logprobs is not None
            or grammar is not None
        )

    @property
    def key(self) -> bytes:
        """All known tokens as the prefix cache compares them."""
        if not self.output_ids:
            return self.prompt.tobytes()
        return self.prompt.tobytes() + np.array(self.output_ids, np.int32).tobytes()

    @property
    def cache_limit(self) -> int | None:
        """Tokens that may come from the prefix cache, which keeps no hidden states to take
        log-probabilities from; None = all."""
        return self.scored - 1 if self.scored < self.prompt_len else None

    @property
    def planned_outputs(self) -> int:
        """Output tokens that exist or that a launched step will bring."""
        if self.kv_len < self.prefill_len:
            return len(self.output_ids)
        return self.kv_len - self.prompt_len + 1

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens start .. end - 1 of prompt + output."""
        if end <= self.prompt_len:
            return self.prompt[start:end]
        tail = self.output_ids[max(0, start - self.prompt_len) : end - self.prompt_len]
        return np.concatenate((self.prompt[start:], np.array(tail, np.int32)))
