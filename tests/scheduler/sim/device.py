"""A device that checks what it is told to compute.

Every KV slot holds the hash of the prefix it stands for. A step reads its rows' whole prefixes
through the page table, as attention would, and asserts that each slot holds what the request in
that row demands; then it writes its new slots. So a wrong slot, a page used twice or reused too
early, a wrong prefix match and a wrong chunk edge all fail at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.step import Plan
from duograph.tests.scheduler.sim.oracle import FACTOR, PRIME, VOCAB, Task
from duograph.tests.step_arrays import StepArrays, step_arrays

BUCKET = 4  # batches are padded to a multiple of this many rows


class Best(NamedTuple):
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class Result:
    step_id: int
    tokens: list[int]
    logprobs: dict[int, Best] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Best]] = field(default_factory=dict)


@dataclass(frozen=True)
class Launched:
    plan: Plan
    arrays: StepArrays
    inits: list[tuple[int, int]]  # row, seed


class CheckingDevice:
    def __init__(self, limits: EngineLimits, tasks: dict[int, Task]) -> None:
        """``tasks`` by seed; read when a row is taken."""
        rows = limits.max_running_requests + 1
        self._limits = limits
        self._builder = BatchBuilder(page_size=limits.page_size, pinned=False)
        self._tasks = tasks
        self._slots = np.full(limits.num_pages * limits.page_size, -1, np.int64)
        columns = -(-limits.context_length // limits.page_size)
        self._page_table = np.zeros((rows, columns), np.int64)
        self._next_tokens = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, limits.context_length), np.int64)
        self._hashes = np.zeros((rows, limits.context_length), np.int64)
        self._owners: list[Task | None] = [None] * rows
        self._index = np.arange(limits.context_length)
        self._columns = self._index // limits.page_size
        self._offsets = self._index % limits.page_size

    def launch(self, plan: Plan) -> Launched:
        """What the batch builder does: everything is read from the requests now."""
        inits = [(request.row, request.sampling.seed) for request in plan.new_rows]
        arrays = step_arrays(self._builder.inputs(plan), self._limits.page_size)
        return Launched(plan, arrays, inits)

    def run(self, launched: Launched) -> Result:
        """Called as late as the pipeline allows, but in order, as on a stream."""
        plan, arrays = launched.plan, launched.arrays
        for row, seed in launched.inits:
            self._take_row(row, self._tasks[seed])
        rows, columns, pages = arrays.page_updates
        self._page_table[rows, columns] = pages
        for request, row in zip(plan.requests, plan.rows, strict=True):
            owner = self._owners[row]
            assert owner is not None and owner.seed == request.sampling.seed, (
                f"row {row} is not its"
            )
        starts = np.array(plan.starts) if plan.is_extend else arrays.seq_lens - 1
        self._check_prefixes(arrays, starts)
        self._write(arrays, starts)
        return self._sample(plan, arrays)

    def _take_row(self, row: int, task: Task) -> None:
        self._owners[row] = task
        self._page_table[row] = 0
        self._next_tokens[row] = -1
        self._tokens[row, : len(task.tokens)] = task.tokens
        self._hashes[row, : len(task.hashes)] = task.hashes

    def _check_prefixes(self, arrays: StepArrays, starts: np.ndarray) -> None:
        rows = arrays.rows
        longest = int(starts.max())
        if longest == 0:
            return
        pages = self._page_table[rows][:, self._columns[:longest]]
        found = self._slots[pages * self._limits.page_size + self._offsets[:longest]]
        wrong = (found != self._hashes[rows, :longest]) & (self._index[:longest] < starts[:, None])
        assert not wrong.any(), (
            f"KV slots of other prefixes at (sequence, position) {_where(wrong)}"
        )

    def _write(self, arrays: StepArrays, starts: np.ndarray) -> None:
        positions, slots = arrays.positions, arrays.out_cache_loc
        if arrays.input_ids is None:
            token_rows, expected = arrays.rows, starts
            tokens = self._next_tokens[token_rows]
        else:
            lens = arrays.seq_lens - starts
            token_rows = np.repeat(arrays.rows, lens)
            spans = zip(starts, arrays.seq_lens, strict=True)
            expected = np.concatenate([self._index[start:end] for start, end in spans])
            tokens = arrays.input_ids
        assert (positions == expected).all(), "positions do not follow the sequence lengths"
        wrong = tokens != self._tokens[token_rows, positions]
        assert not wrong.any(), f"input tokens of somebody else at {_where(wrong)}"
        # Attention would look new tokens up through the page table: they must be there too.
        own = self._page_table[token_rows, positions // self._limits.page_size]
        addressed = own * self._limits.page_size + positions % self._limits.page_size
        assert (slots == addressed).all(), "out_cache_loc is not where the page table looks"
        assert slots.min() >= self._limits.page_size, "a real token goes to the dummy page"
        assert len(set(slots.tolist())) == len(slots), "two tokens go to one slot"
        # Prefix and tokens are proven equal to the task's, so its hashes are what mix() gives.
        self._slots[slots] = self._hashes[token_rows, positions]
        self._slots[0] = -2  # what padding rows leave behind: garbage, in the dummy slot only

    def _sample(self, plan: Plan, arrays: StepArrays) -> Result:
        last = np.cumsum(arrays.seq_lens - plan.starts) - 1 if plan.is_extend else slice(None)
        states = self._slots[arrays.out_cache_loc[last]]
        tokens = ((states >> 7) % VOCAB).tolist()
        for index, bias in plan.bias.items():
            while bias.get(tokens[index], 0.0) == -np.inf:
                tokens[index] = (tokens[index] + 1) % VOCAB
        self._next_tokens[arrays.rows] = tokens
        best = {
            index: Best(-float(tokens[index]), list(range(k)), [0.0] * k)
            for index, k in plan.logprobs.items()
        }
        return Result(plan.step_id, tokens, best, self._score(plan, arrays))

    def _score(self, plan: Plan, arrays: StepArrays) -> dict[int, list[Best]]:
        """What a row says of the token after it follows from its prefix, like everything."""
        ends = np.cumsum(arrays.seq_lens - plan.starts) if plan.is_extend else None
        found = {}
        for index, span in plan.prompt_logprobs.items():
            assert ends is not None and span.begin < span.end, "only prefill has prompt rows"
            assert plan.starts[index] + span.skip == span.begin - 1
            first = int(ends[index] - arrays.seq_lens[index] + span.begin - 1)
            states = self._slots[arrays.out_cache_loc[first : first + span.end - span.begin]]
            found[index] = [Best(score_of(int(state)), [], []) for state in states]
        return found


def score_of(state: int) -> float:
    """The log-probability of whatever follows the prefix with this hash."""
    return -float(state % 1_000)


def _where(wrong: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = np.argwhere(wrong)[:4].tolist()
    return found


assert FACTOR * PRIME < 2**62  # the hashes fit int64 arithmetic
