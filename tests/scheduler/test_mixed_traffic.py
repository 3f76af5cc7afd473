"""The whole engine under a thousand steps of everything at once, on recorded graphs."""

from __future__ import annotations

import pytest

from duograph.runners.config import GraphConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.worker import ModelWorker
from duograph.scheduler.config import SchedulerConfig
from duograph.tests.mixed_traffic import TrafficEngine, mixed_traffic
from duograph.tests.worker_driver import VOCAB, make_worker

pytestmark = pytest.mark.slow
FIRST_ID = 1 << 20  # above those of the traffic
PROMPT = [(7 * i + 3) % VOCAB for i in range(50)]
KINDS = (
    SamplingParams(temperature=0.0, max_new_tokens=24, logprobs=5),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_new_tokens=24, logprobs=5),
)


@pytest.fixture(scope="module")
def worker() -> ModelWorker:
    """Too few rows in the largest graph, too few pages for all, prompts of several chunks."""
    graph = GraphConfig(cuda_graph_bs=(1, 4, 6), piecewise_cuda_graph_tokens=(8, 16))
    return make_worker(
        graph=graph, max_running_requests=8, chunked_prefill_size=32, max_total_tokens=320
    )


def test_after_a_thousand_mixed_steps_the_first_prompt_gets_the_first_answer(
    worker: ModelWorker,
) -> None:
    engine = TrafficEngine(worker, VOCAB)
    first = [engine.ask(FIRST_ID + i, PROMPT, kind, f"first {i}") for i, kind in enumerate(KINDS)]
    traffic = mixed_traffic(620, vocab=VOCAB, longest=60, arrivals=0.4)
    engine.run(traffic)
    stats = engine.scheduler.stats
    assert stats.steps >= 1000
    assert engine.scheduler.queues.retractions > 5
    assert stats.aborted > 10
    assert stats.cached_tokens > 100
    eager = worker.graph_stats()["eager_steps"]
    assert eager["decode"]["too_large"] > 10 and eager["prefill"]["too_large"] > 10
    last = [engine.ask(FIRST_ID + 9 + i, PROMPT, kind, f"l {i}") for i, kind in enumerate(KINDS)]
    assert last == first
    assert all(len(answer.logprobs) == 24 for answer in first)


def test_overlap_changes_no_token_of_mixed_traffic(worker: ModelWorker) -> None:
    engines = []
    for overlap in (True, False):
        config = SchedulerConfig(disable_overlap_schedule=not overlap)
        engine = TrafficEngine(worker, VOCAB, config)
        engine.run(mixed_traffic(150, vocab=VOCAB, longest=60, arrivals=0.4, seed=1))
        engines.append(engine)
    overlapped, plain = (engine.answers for engine in engines)
    assert overlapped.keys() == plain.keys()
    for rid, answer in plain.items():
        if answer.reason:  # else it was aborted, a step earlier or later
            assert overlapped[rid].tokens == answer.tokens, rid
