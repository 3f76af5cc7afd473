"""What one call of ``Scheduler.step`` decides: the work for the device and the messages.

Data only. A ``Plan`` names requests by object, so that a late result can never meet a newcomer
that carries an old id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from duograph.scheduler.messages import (
    AbortRequest,
    ErrorCode,
    Finished,
    GenerateRequest,
    Logprobs,
    StepTokens,
)
from duograph.scheduler.request import Constraint, Request


class BestTokens(Protocol):
    """runners.batch.TokenLogprobs, without importing torch."""

    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> list[int]: ...
    @property
    def top_logprobs(self) -> list[float]: ...


class CompletedStep(Protocol):
    """runners.batch.StepResult, without importing torch."""

    @property
    def step_id(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Mapping[int, BestTokens]: ...
    @property
    def prompt_logprobs(self) -> Mapping[int, Sequence[BestTokens]]: ...


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request with a grammar that is ready, or with the reason why it is refused."""

    message: GenerateRequest
    grammar: Constraint | None
    code: ErrorCode = "invalid_grammar"
    error: str = ""


Event = GenerateRequest | CompiledRequest | AbortRequest | CompletedStep


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens begin .. end - 1, whose log-probabilities are wanted. Row ``skip`` of the
    sequence's rows in this step comes before token ``begin``."""

    skip: int
    begin: int
    end: int
    k: int


@dataclass(slots=True, eq=False)
class Plan:
    """One step of the model. Lists run parallel to ``requests``.

    In decode the input token is not here: the device has it (see runners/batch.py).
    """

    step_id: int
    is_extend: bool
    requests: list[Request]
    rows: list[int]
    seq_lens: list[int]  # tokens including this step's
    starts: list[int]  # extend: tokens before this step's; empty in decode
    emits: list[bool]  # extend: False for a chunk that is not the last; empty in decode
    pages: list[int]  # decode: the page of each new token; extend: those of each chunk, in order
    tokens: list[npt.NDArray[np.int32]]  # extend: each chunk's tokens; empty in decode
    new_rows: list[Request] = field(default_factory=list)  # took their row in this step
    page_updates: list[tuple[int, int, int]] = field(default_factory=list)  # row, column, page
    filtered: bool = False
    penalized: list[int] = field(default_factory=list)
    bias: dict[int, dict[int, float]] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)
    constrained: list[int] = field(default_factory=list)  # by a grammar
    prompt_logprobs: dict[int, PromptSpan] = field(default_factory=dict)
    cached_tokens: int = 0  # extend: found in the prefix cache by the new rows
    # Rows and pages whose requests are gone but which this step may still write.
    late_rows: list[int] = field(default_factory=list)
    late_pages: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens) - sum(self.starts) if self.is_extend else len(self.rows)


@dataclass(slots=True)
class Step:
    """``plan`` is None if there is nothing to run. ``outputs`` by frontend number."""

    plan: Plan | None
    outputs: dict[int, StepTokens]


class Outbox:
    """Collects the messages of one step, one per frontend."""

    __slots__ = ("_cached", "_finished", "_logprobs", "_prompt_logprobs", "rids", "tokens")

    def __init__(self, num_frontends: int) -> None:
        self.rids: list[list[int]] = [[] for _ in range(num_frontends)]
        self.tokens: list[list[int]] = [[] for _ in range(num_frontends)]
        self._finished: list[list[Finished]] = [[] for _ in range(num_frontends)]
        self._logprobs: list[dict[int, Logprobs]] = [{} for _ in range(num_frontends)]
        self._cached: list[dict[int, int]] = [{} for _ in range(num_frontends)]
        self._prompt_logprobs: list[dict[int, list[Logprobs]]] = [{} for _ in range(num_frontends)]

    def logprobs(self, frontend: int, logprobs: Logprobs) -> None:
        """Of the token that was appended last to ``tokens[frontend]``."""
        self._logprobs[frontend][len(self.tokens[frontend]) - 1] = logprobs

    def cached(self, frontend: int, rid: int, tokens: int) -> None:
        self._cached[frontend][rid] = tokens

    def prompt_logprobs(self, frontend: int, rid: int, entries: list[Logprobs]) -> None:
        self._prompt_logprobs[frontend].setdefault(rid, []).extend(entries)

    def finished(self, frontend: int, message: Finished) -> None:
        self._finished[frontend].append(message)

    def take(self) -> dict[int, StepTokens]:
        messages: dict[int, StepTokens] = {}
        for frontend, rids in enumerate(self.rids):
            scores = self._prompt_logprobs[frontend]
            if not rids and not self._finished[frontend] and not scores:
                continue
            messages[frontend] = StepTokens(
                rids,
                self.tokens[frontend],
                self._finished[frontend],
                self._logprobs[frontend] or None,
                self._cached[frontend] or None,
                scores or None,
            )
            self.rids[frontend], self.tokens[frontend] = [], []
            self._finished[frontend], self._logprobs[frontend] = [], {}
            self._cached[frontend], self._prompt_logprobs[frontend] = {}, {}
        return messages
