"""The whole engine on CUDA under a thousand steps of everything at once: chunks, aborts,
retraction, every way of sampling, steps that fit a graph and steps that do not."""

from __future__ import annotations

import pytest
import torch

from duograph.runners.config import GraphConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.worker import ModelWorker
from duograph.scheduler.config import SchedulerConfig
from duograph.tests.gpu.cuda_workers import GRAPH_BACKENDS, NONE, cuda_worker
from duograph.tests.mixed_traffic import Answer, TrafficEngine, mixed_traffic
from duograph.tests.worker_driver import VOCAB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GRAPHS = GraphConfig(cuda_graph_bs=(1, 2, 4, 6), piecewise_cuda_graph_max_tokens=96)
FIRST_ID = 1 << 20  # above those of the traffic
PROMPT = [(7 * i + 3) % VOCAB for i in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, logprobs=5)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_new_tokens=40, logprobs=5)


def traffic_worker(dtype: torch.dtype, graph: GraphConfig, backend: str = "triton") -> ModelWorker:
    return cuda_worker(
        graph, dtype, attention_backend=backend, chunked_prefill_size=128, max_total_tokens=1600
    )


def ask(engine: TrafficEngine, first_id: int) -> list[Answer]:
    """The same requests in namespaces of their own: nothing is cached, and pages differ."""
    return [
        engine.ask(first_id + i, PROMPT[:length], kind, f"{first_id} {i}")
        for i, (kind, length) in enumerate([(GREEDY, 300), (SEEDED, 300), (GREEDY, 1)])
    ]


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_after_a_thousand_mixed_steps_the_first_prompts_get_the_first_answers(backend: str) -> None:
    """Tokens and log-probabilities, bit for bit; and no memory has been kept."""
    worker = traffic_worker(torch.bfloat16, GRAPHS, backend)
    engine = TrafficEngine(worker, VOCAB)
    first = ask(engine, FIRST_ID)
    engine.run(mixed_traffic(100, vocab=VOCAB, longest=300, arrivals=0.8, seed=5))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    steps = engine.scheduler.stats.steps
    warm = len(engine.answers)
    engine.run(mixed_traffic(620, vocab=VOCAB, longest=300, arrivals=0.8, first_id=1 << 16))
    assert ask(engine, FIRST_ID + 16) == first
    stats = engine.scheduler.stats
    assert stats.steps - steps >= 1000, stats.steps
    assert engine.scheduler.queues.retractions > 5
    assert stats.aborted > 20
    assert stats.cached_tokens > 1000
    assert len(engine.answers) > warm + 200
    eager = worker.graph_stats()["eager_steps"]
    assert eager["decode"]["too_large"] > 20 and eager["prefill"]["too_large"] > 20
    assert worker.graph_stats()["recompiles"] == 0
    assert all(len(answer.logprobs) == 40 for answer in first)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("graph", [GRAPHS, NONE], ids=["graph", "eager"])
def test_overlap_changes_no_token_of_mixed_traffic(graph: GraphConfig) -> None:
    """In float32, where another batch size shifts no token."""
    worker = traffic_worker(torch.float32, graph)
    answers = []
    for overlap in (True, False):
        engine = TrafficEngine(worker, VOCAB, SchedulerConfig(disable_overlap_schedule=not overlap))
        engine.run(mixed_traffic(250, vocab=VOCAB, longest=300, arrivals=0.8, seed=1))
        assert engine.scheduler.queues.retractions > 1
        answers.append(engine.answers)
    overlapped, plain = answers
    assert overlapped.keys() == plain.keys()
    for rid, answer in plain.items():
        if answer.reason:  # else it was aborted, a step earlier or later
            assert overlapped[rid].tokens == answer.tokens, rid
