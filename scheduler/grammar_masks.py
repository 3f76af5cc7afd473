"""Which tokens each constrained row of a step may take: computed while the step's forward runs.

A mask depends on the token before, which the step before may still be computing. So a step is
launched first, and its masks are made in threads beside it: they wait for the earlier result,
walk the grammars on and fill the masks, and the sampler waits for them after the forward. Plain
rows need none of this; their tokens come out of the graph. Knows plans and grammars; no tensor.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duograph.scheduler.grammar import GrammarError, TokenGrammar
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.request import Request
from duograph.scheduler.step import Plan

WORD_BITS = 32
MAX_THREADS = 8
ROWS_PER_THREAD = 16  # fewer are not worth another thread

Masks = npt.NDArray[np.int32]


class GrammarState:
    """One request's place in its grammar, kept beside the request from its arrival to its end,
    through retractions: it moves by tokens that were sampled, never by those computed again."""

    __slots__ = ("consumed", "error", "failed_at", "param", "seconds", "walk")

    def __init__(self, walk: TokenGrammar, param: str = "") -> None:
        """``param`` is the field that the grammar came from."""
        self.walk = walk
        self.param = param
        self.consumed = 0  # output tokens
        self.seconds = 0.0  # of one CPU, for all masks so far
        self.failed_at: int | None = None  # output tokens that are still good
        self.error = ""

    def fail(self, at: int, error: str) -> None:
        if self.failed_at is None:
            self.failed_at, self.error = at, f"{self.param}: {error}"


class OpenGrammar:
    """A TokenGrammar that allows everything; for warming up."""

    def consume(self, token: int) -> None:
        pass

    def fill(self, pointer: int, nbytes: int) -> None:
        ctypes.memset(pointer, 0xFF, nbytes)


@dataclass(frozen=True, slots=True)
class _Row:
    """A mask to make: of the request's output token ``position``."""

    request: Request
    state: GrammarState
    position: int
    at: int  # row of the block


class MaskMaker:
    """``start`` at every plan with constrained rows, ``launched`` at every plan."""

    def __init__(self, *, budget_s: float) -> None:
        """``budget_s``: CPU seconds that all masks of one request may take together."""
        self._budget_s = budget_s
        self._latest: tuple[Plan, PendingStep] | None = None
        cores = os.cpu_count() or 1
        self._num_threads = max(1, min(MAX_THREADS, cores // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="mask")

    def launched(self, plan: Plan, pending: PendingStep) -> None:
        self._latest = (plan, pending)

    def start(self, plan: Plan, masks: Masks) -> Callable[[], None]:
        """Begins to fill ``masks``, [len(plan.constrained), words], contiguous. The result
        waits for that; it raises what the step before raised."""
        earlier = _Earlier(self._latest)
        rows = []
        for at, index in enumerate(plan.constrained):
            request = plan.requests[index]
            assert isinstance(request.grammar, GrammarState)
            rows.append(_Row(request, request.grammar, request.planned_outputs - 1, at))
        parts = min(self._num_threads, -(-len(rows) // ROWS_PER_THREAD))
        futures = [
            self._threads.submit(self._fill, rows[part::parts], earlier, masks)
            for part in range(parts)
        ]

        def wait() -> None:
            for future in futures:
                future.result()

        return wait

    def _fill(self, rows: list[_Row], earlier: _Earlier, masks: Masks) -> None:
        base, nbytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
        for row in rows:
            latest = earlier.token_of(row.request)
            if row.state.failed_at is None:
                self._advance(row, latest, base + row.at * nbytes, nbytes)
            if row.state.failed_at is not None:
                masks[row.at] = -1  # the scheduler ends it before it looks at the token
            elif row.position < row.request.sampling.min_new_tokens:
                _ban(masks[row.at], row.request.stop_ids)

    def _advance(self, row: _Row, latest: int | None, pointer: int, nbytes: int) -> None:
        state, known = row.state, row.request.output_ids
        begun = time.thread_time()
        try:
            while state.consumed < row.position:
                at = state.consumed
                token = known[at] if at < len(known) else latest
                assert token is not None, "a token that no step has computed"
                state.walk.consume(token)
                state.consumed += 1
            state.walk.fill(pointer, nbytes)
        except GrammarError as error:
            state.fail(row.position, f"the grammar cannot go on: {error}")
        state.seconds += time.thread_time() - begun
        if state.seconds > self._budget_s:
            text = f"the grammar took more than {self._budget_s:g} s of computing"
            state.fail(row.position, text)


class _Earlier:
    """The step before, which may still run."""

    def __init__(self, latest: tuple[Plan, PendingStep] | None) -> None:
        self._pending = None if latest is None else latest[1]
        requests = [] if latest is None else latest[0].requests
        self._places = {request.rid: place for place, request in enumerate(requests)}

    def token_of(self, request: Request) -> int | None:
        """What it sampled for ``request``, or None if it had no such row. When this returns,
        masks of the request that were begun before are done: that step needed them."""
        place = self._places.get(request.rid)
        if place is None or self._pending is None:
            return None
        return self._pending.wait().tokens[place]


def _ban(mask: Masks, tokens: frozenset[int]) -> None:
    """Forbids ``tokens``, unless nothing else is allowed: a grammar that is at its end ends."""
    kept = mask.copy()
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // WORD_BITS] &= np.uint32(~(1 << token % WORD_BITS) & 0xFFFFFFFF)
    if not words.any():
        mask[:] = kept
