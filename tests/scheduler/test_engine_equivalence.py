"""The whole engine over a tiny model in float32: how a request is scheduled never shows in its
tokens. Prefix cache, chunks, batch size, overlap, retraction and graphs, one at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.model_worker import LoadedWorker, Progress
from duograph.scheduler.offline import OfflineEngine
from duograph.tests.worker_driver import VOCAB, make_worker

pytestmark = pytest.mark.slow  # some twenty seconds in all

NO_GRAPHS = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
LONGEST_PROMPT = 70
NEW_TOKENS = 20
# The longest prompt in one chunk, every request at once, and room for all of them.
PLENTY: dict[str, Any] = {
    "chunked_prefill_size": 128,
    "max_running_requests": 8,
    "max_total_tokens": 1024,
}


def prompts() -> list[list[int]]:
    """Eight, of 10 to 70 tokens; half of them share 40 tokens."""
    shared = [(7 * i) % VOCAB for i in range(40)]
    own = [[(11 * i + 13 * k) % VOCAB for i in range(10 + 3 * k)] for k in range(8)]
    own[2] = [(5 * i) % VOCAB for i in range(LONGEST_PROMPT)]
    return [shared + tokens if k % 2 else tokens for k, tokens in enumerate(own)]


def params() -> list[SamplingParams]:
    """Greedy and seeded by turns, some filtered, some penalised."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.9, seed=6, top_k=20, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5),
    )
    return [replace(kinds[k % 4], max_new_tokens=NEW_TOKENS, ignore_eos=True) for k in range(8)]


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    engine: OfflineEngine


def run(
    *,
    scheduler: SchedulerConfig | None = None,
    graph: GraphConfig = NO_GRAPHS,
    rounds: int = 1,
    at_once: bool = True,
    **options: Any,
) -> Run:
    """Tokens of the last of ``rounds`` over the same requests."""

    def load(config: EngineConfig, progress: Progress) -> LoadedWorker:
        worker = make_worker(graph=graph, **(PLENTY | options))
        limits = worker.limits
        return LoadedWorker(
            worker,
            EngineLimits(
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                max_running_requests=limits.max_running_requests,
                context_length=limits.context_length,
                chunked_prefill_size=limits.chunked_prefill_size,
                vocab_size=VOCAB,
                eos_token_ids=(),
            ),
            False,
            {},
        )

    config = EngineConfig(
        runner=RunnerConfig(),
        scheduler=scheduler or SchedulerConfig(),
        run_dir="",
        num_frontends=1,
        parent_pid=os.getpid(),
        model_folder=str(Path()),
        served_name="tiny",
    )
    engine = OfflineEngine(config, load)
    results = []
    for _ in range(rounds):
        if at_once:
            results = engine.generate(prompts(), params())
        else:
            results = [
                engine.generate([prompt], [sampling])[0]
                for prompt, sampling in zip(prompts(), params(), strict=True)
            ]
    assert [result.finish_reason for result in results] == ["length"] * 8
    return Run([result.tokens for result in results], engine)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request at a time, eager, nothing shared, nothing cut."""
    plain = SchedulerConfig(disable_radix_cache=True, disable_overlap_schedule=True)
    tokens = run(scheduler=plain, at_once=False).tokens
    assert all(len(answer) == NEW_TOKENS for answer in tokens)
    assert len({tuple(answer) for answer in tokens}) == 8, "the requests should differ"
    return tokens


def test_eight_at_once_get_the_tokens_of_each_alone(expected: list[list[int]]) -> None:
    result = run(scheduler=SchedulerConfig(disable_radix_cache=True))
    assert result.tokens == expected


def test_a_cached_prefix_changes_no_token(expected: list[list[int]]) -> None:
    result = run(rounds=2)
    assert result.tokens == expected
    assert result.engine.scheduler.stats.cached_tokens > 8 * 10, "the cache was hardly used"


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
def test_chunks_change_no_token(expected: list[list[int]], chunk: int, cached: bool) -> None:
    scheduler = SchedulerConfig(disable_radix_cache=not cached)
    result = run(scheduler=scheduler, chunked_prefill_size=chunk, rounds=1 + cached)
    assert result.tokens == expected
    assert result.engine.scheduler.stats.extend_steps > LONGEST_PROMPT // chunk


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
def test_a_retraction_changes_no_token(expected: list[list[int]], cached: bool) -> None:
    scheduler = SchedulerConfig(disable_radix_cache=not cached)
    result = run(scheduler=scheduler, max_total_tokens=120)
    assert result.engine.scheduler.queues.retractions > 0, "there was room for all"
    assert result.tokens == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_page_size_changes_no_token(expected: list[list[int]], page_size: int) -> None:
    assert run(page_size=page_size, rounds=2).tokens == expected


def test_graphs_change_no_token(expected: list[list[int]]) -> None:
    result = run(graph=GraphConfig(), chunked_prefill_size=16, max_total_tokens=200)
    assert result.tokens == expected
    stats = result.engine.graph_stats()
    assert stats["eager_steps"] == {"decode": {}, "prefill": {}}
    assert sum(size["replays"] for size in stats["decode"]["sizes"].values()) > NEW_TOKENS
