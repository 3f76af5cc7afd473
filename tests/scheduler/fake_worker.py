"""A worker without a model: the next token of a request follows from its seed and its length.

Takes ForwardBatches and answers StepResults like the real one, strictly in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from duograph.runners.batch import ForwardBatch, ForwardMode, StepResult, TokenLogprobs
from duograph.runners.profiler import StepProfiler
from duograph.scheduler.admission import EngineLimits

LIMITS = EngineLimits(
    num_pages=65,
    page_size=4,
    max_running_requests=4,
    context_length=128,
    chunked_prefill_size=16,
    vocab_size=1000,
    eos_token_ids=(2,),
)


def token_at(seed: int, position: int) -> int:
    """The token at ``position`` of prompt + output."""
    return (seed * 131 + position * 17) % 990 + 10  # never the eos id


class Pending:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run

    def wait(self) -> StepResult:
        return self._run()


class FakeWorker:
    def __init__(self, *, seconds_per_step: float = 0.0, fail_at_step: int | None = None) -> None:
        self.launched: list[int] = []  # step ids
        self.waited: list[int] = []
        self._seconds = seconds_per_step
        self._fail_at_step = fail_at_step
        self._seeds = [0] * (LIMITS.max_running_requests + 1)
        self.closed = False
        self.profiler = StepProfiler(None, lambda work: work())

    def launch(self, batch: ForwardBatch) -> Pending:
        self.launched.append(len(self.launched))
        number = self.launched[-1]
        for init in batch.row_inits:
            self._seeds[init.row] = init.sampling.seed
        if batch.mode is ForwardMode.EXTEND:
            assert batch.inputs.layout.tokens == batch.num_tokens == sum(batch.extend_lens)
        tokens = [
            token_at(self._seeds[row], length)
            for row, length in zip(
                batch.inputs.rows.tolist(), batch.inputs.seq_lens.tolist(), strict=True
            )
        ]
        logprobs = {
            index: TokenLogprobs(-1.0, [tokens[index]] * k, [-1.0] * k)
            for index, k in batch.sampling.logprobs.items()
        }

        def run() -> StepResult:
            if self._seconds:
                time.sleep(self._seconds)
            if number == self._fail_at_step:
                raise RuntimeError("device-side assert triggered")
            self.waited.append(number)
            return StepResult(batch.step_id, tokens, logprobs)

        return Pending(run)

    def graph_stats(self) -> dict[str, Any]:
        phase: dict[str, Any] = {"enabled": False, "sizes": {}, "dropped": []}
        return {
            "recompiles": 0,
            "pool_bytes": 0,
            "decode": phase,
            "prefill": phase,
            "eager_steps": {"decode": {"disabled": len(self.launched)}, "prefill": {}},
        }

    def close(self) -> None:
        self.closed = True
