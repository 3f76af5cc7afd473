"""The engine's first steps: every kind of sampling once, and no model that computes NaN."""

from __future__ import annotations

import math

import pytest

from duograph.runners.batch import ForwardBatch, StepResult, TokenLogprobs
from duograph.runners.config_file import ModelError
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.process import warm_up
from duograph.tests.scheduler.fake_worker import LIMITS, FakeWorker, Pending


def run(worker: FakeWorker) -> None:
    warm_up(worker, BatchBuilder(page_size=LIMITS.page_size, pinned=False), LIMITS)


class Watcher(FakeWorker):
    """Keeps what it was given; its probabilities are ``logprob``."""

    def __init__(self, logprob: float) -> None:
        super().__init__()
        self.logprob = logprob
        self.batches: list[ForwardBatch] = []

    def launch(self, batch: ForwardBatch) -> Pending:
        self.batches.append(batch)
        result = super().launch(batch).wait()
        found = {index: TokenLogprobs(self.logprob, [], []) for index in batch.sampling.logprobs}
        return Pending(lambda: StepResult(result.step_id, result.tokens, found))


def test_every_way_of_sampling_is_warm_before_the_first_request() -> None:
    worker = Watcher(-1.0)
    run(worker)
    for mode in {batch.mode for batch in worker.batches}:
        wishes = [batch.sampling for batch in worker.batches if batch.mode is mode]
        assert any(not wish.filtered and not wish.penalized for wish in wishes)
        assert any(wish.filtered and wish.penalized and wish.logprobs for wish in wishes)
        assert any(wish.bias for wish in wishes)  # of min_new_tokens
    assert len({batch.mode for batch in worker.batches}) == 2


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_weights_that_give_no_numbers_are_refused(logprob: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        run(Watcher(logprob))
