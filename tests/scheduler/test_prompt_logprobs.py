"""Log-probabilities of prompts through the whole engine over a tiny model in float32, compared
with one plain forward over the whole prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from duograph.kernels import sampling
from duograph.runners import prompt_logprobs
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.messages import Logprobs
from duograph.scheduler.model_worker import LoadedWorker, Progress
from duograph.scheduler.offline import OfflineEngine
from duograph.scheduler.step import Step
from duograph.tests.paged_session import PagedSession
from duograph.tests.worker_driver import VOCAB, make_worker, tiny_config, tiny_model

K = 3


class ScoringEngine(OfflineEngine):
    """Keeps the prompt log-probabilities, in the order of the requests."""

    def send(self, step: Step) -> None:
        for message in step.outputs.values():
            for rid, entries in (message.prompt_logprobs or {}).items():
                self.scores.setdefault(rid, []).extend(entries)
        super().send(step)

    def score(self, prompts: list[list[int]], **wishes: Any) -> list[list[Logprobs]]:
        self.scores: dict[int, list[Logprobs]] = {}
        first = self._next_rid
        params = SamplingParams(**({"max_new_tokens": 1, "temperature": 0.0} | wishes))
        self.results = self.generate(prompts, [params] * len(prompts))
        return [self.scores.get(first + index, []) for index in range(len(prompts))]


def make_engine(
    scheduler: SchedulerConfig | None = None, graph: GraphConfig | None = None, **options: Any
) -> ScoringEngine:
    def load(config: EngineConfig, progress: Progress) -> LoadedWorker:
        worker = make_worker(graph=graph or GraphConfig(cuda_graph_bs=(2,)), **options)
        limits = worker.limits
        engine_limits = EngineLimits(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_running_requests=limits.max_running_requests,
            context_length=limits.context_length,
            chunked_prefill_size=limits.chunked_prefill_size,
            vocab_size=VOCAB,
            eos_token_ids=(),
        )
        return LoadedWorker(worker, engine_limits, False, {})

    config = EngineConfig(
        runner=RunnerConfig(),
        scheduler=scheduler or SchedulerConfig(),
        run_dir="",
        num_frontends=1,
        parent_pid=os.getpid(),
        model_folder="",
        served_name="tiny",
    )
    return ScoringEngine(config, load)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    """Chunks of 16 tokens, pages of 4, prefix cache and overlap on."""
    yield make_engine(chunked_prefill_size=16)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def reference(tokens: list[int]) -> torch.Tensor:
    """float32 [len - 1, vocab]: what the model gives to whatever follows each token."""
    model = tiny_model(tiny_config(), torch.device("cpu"), torch.float32)
    session = PagedSession(model, rows=1, max_len=len(tokens))
    return session.extend({1: tokens})[:-1].log_softmax(-1)


def assert_same(found: list[Logprobs], tokens: list[int], start: int = 1, k: int = K) -> None:
    expected = reference(tokens)[start - 1 :]
    assert len(found) == len(expected)
    for entry, row, token in zip(found, expected, tokens[start:], strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        best = row.topk(k)
        assert entry.top_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_prompt_is_scored_over_several_chunks(engine: ScoringEngine) -> None:
    tokens = prompt(53, seed=1)
    [found] = engine.score([tokens], prompt_logprobs=K)
    assert_same(found, tokens)
    assert len(engine.results[0].tokens) == 1


def test_a_cached_prompt_is_scored_again(engine: ScoringEngine) -> None:
    tokens = prompt(40, seed=2)
    engine.score([tokens])
    before = engine.scheduler.stats.cached_tokens
    [found] = engine.score([tokens], prompt_logprobs=K)
    assert_same(found, tokens)
    assert engine.scheduler.stats.cached_tokens == before
    engine.score([tokens])
    assert engine.scheduler.stats.cached_tokens == before + 36, "others may still share it"


def test_what_lies_before_the_start_may_come_from_the_cache(engine: ScoringEngine) -> None:
    tokens = prompt(40, seed=3)
    engine.score([tokens])
    before = engine.scheduler.stats.cached_tokens
    [found] = engine.score([tokens], prompt_logprobs=K, prompt_logprobs_start=23)
    assert_same(found, tokens, start=23)
    assert engine.scheduler.stats.cached_tokens == before + 20, "five pages of 22 tokens"


def test_nothing_need_be_generated(engine: ScoringEngine) -> None:
    tokens = prompt(20, seed=4)
    [found] = engine.score([tokens], prompt_logprobs=K, max_new_tokens=0)
    assert_same(found, tokens)
    assert (engine.results[0].tokens, engine.results[0].finish_reason) == ([], "length")


def test_a_prompt_of_one_token_has_nothing_to_score(engine: ScoringEngine) -> None:
    assert engine.score([[5]], prompt_logprobs=K, max_new_tokens=0) == [[]]
    assert engine.results[0].finish_reason == "length"


def test_several_are_scored_beside_one_that_is_not(engine: ScoringEngine) -> None:
    prompts = [prompt(10 + 7 * i, seed=10 + i) for i in range(4)]
    for tokens, found in zip(prompts, engine.score(prompts, prompt_logprobs=K), strict=True):
        assert_same(found, tokens)
    assert engine.score(prompts) == [[], [], [], []]


def test_only_a_bounded_number_of_rows_is_in_memory_at_once(
    engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    top_logprobs = sampling.top_logprobs

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(logits))
        return top_logprobs(logits, *rest)

    monkeypatch.setattr(sampling, "top_logprobs", watched)
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS_BYTES", 5 * 4 * VOCAB)
    tokens = prompt(33, seed=5)
    [found] = engine.score([tokens], prompt_logprobs=K)
    assert_same(found, tokens)
    assert max(rows) == 5 and sum(rows) == 32


def test_scoring_steps_run_eagerly_and_are_counted(engine: ScoringEngine) -> None:
    before = engine.graph_stats()["eager_steps"]["prefill"]
    engine.score([prompt(12, seed=6)])
    assert engine.graph_stats()["eager_steps"]["prefill"] == before
    engine.score([prompt(12, seed=7)], prompt_logprobs=0)
    after = engine.graph_stats()["eager_steps"]["prefill"]
    assert after["prompt_logprobs"] == before.get("prompt_logprobs", 0) + 1


def test_a_retracted_request_is_scored_once() -> None:
    engine = make_engine(
        SchedulerConfig(),
        GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True),
        max_total_tokens=100,
        chunked_prefill_size=16,
    )
    engine.scheduler.queues.estimate._mean = 0.0  # expects short answers, so that pages run out
    prompts = [prompt(20, seed=20 + i) for i in range(6)]
    found = engine.score(prompts, prompt_logprobs=K, max_new_tokens=20, ignore_eos=True)
    assert engine.scheduler.queues.retractions > 0, "there was room for all"
    for tokens, entries in zip(prompts, found, strict=True):
        assert_same(entries, tokens)
