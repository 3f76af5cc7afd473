"""Constrained rows of the whole engine over a tiny model: every token is allowed by the grammar's
own history, however the request is scheduled, and the rows beside it get their own tokens."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.grammar import GrammarError
from duograph.scheduler.messages import Grammar
from duograph.scheduler.model_worker import LoadedWorker, Progress
from duograph.scheduler.offline import Generation, OfflineEngine
from duograph.tests.worker_driver import VOCAB, make_worker

pytestmark = pytest.mark.slow

NO_GRAPHS = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
EOS = 2
NEW_TOKENS = 16
NEXT = 5  # tokens that may follow


def allowed_after(tokens: list[int]) -> set[int]:
    """Depends on all that came before: a lost, doubled or swapped token shows at once."""
    seed = 1
    for token in tokens:
        seed = (seed * 31 + token + 1) % 100_003
    return {3 + (seed + 17 * i) % (VOCAB - 3) for i in range(NEXT)}


@dataclass
class HistoryGrammar:
    """Ends after ``length`` tokens if one is given; fails before token ``fail_at``."""

    length: int | None = None
    fail_at: int | None = None
    seconds: float = 0.0  # of computing per mask
    history: list[int] = field(default_factory=list)

    def consume(self, token: int) -> None:
        assert token in self._allowed(), f"{token} after {self.history}"
        self.history.append(token)

    def fill(self, pointer: int, nbytes: int) -> None:
        if len(self.history) == self.fail_at:
            raise GrammarError("no way on")
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        words = np.zeros(nbytes // 4, np.uint32)
        for token in self._allowed():
            words[token // 32] |= np.uint32(1 << token % 32)
        ctypes.memmove(pointer, words.ctypes.data, nbytes)

    def _allowed(self) -> set[int]:
        if self.length is not None and len(self.history) >= self.length:
            return {EOS}
        return allowed_after(self.history)


@dataclass
class Compiler:
    """Compiles "LENGTH FAIL_AT SECONDS", "-" for none; keeps the walks that it has begun."""

    walks: list[HistoryGrammar] = field(default_factory=list)

    def compile(self, grammar: Grammar) -> Compiler:
        length, fail_at, seconds = grammar.text.split()
        walk = HistoryGrammar(
            None if length == "-" else int(length),
            None if fail_at == "-" else int(fail_at),
            float(seconds),
        )
        self.walks.append(walk)
        return self

    def start(self) -> HistoryGrammar:
        return self.walks[-1]


def grammar(length: str = "-", fail_at: str = "-", seconds: str = "0") -> Grammar:
    return Grammar("document", f"{length} {fail_at} {seconds}", "regex")


def create_engine(
    *, scheduler: SchedulerConfig | None = None, graph: GraphConfig = NO_GRAPHS, **options: Any
) -> OfflineEngine:
    sizes = {"chunked_prefill_size": 64, "max_running_requests": 8, "max_total_tokens": 1024}

    def load(config: EngineConfig, progress: Progress) -> LoadedWorker:
        worker = make_worker(graph=graph, **(sizes | options))
        limits = worker.limits
        engine_limits = EngineLimits(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_running_requests=limits.max_running_requests,
            context_length=limits.context_length,
            chunked_prefill_size=limits.chunked_prefill_size,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
        )
        return LoadedWorker(worker, engine_limits, worker.device.type == "cuda", {})

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
    engine._compiler = Compiler()
    return engine


KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.9, seed=6, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.2, logprobs=2),
)


def requests() -> Iterator[tuple[list[int], SamplingParams, Grammar | None]]:
    """Eight; every kind of sampling with a grammar and without."""
    for k in range(8):
        prompt = [3 + (11 * i + 13 * k) % (VOCAB - 3) for i in range(10 + 5 * k)]
        sampling = replace(KINDS[k // 2], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        yield prompt, sampling, grammar() if k % 2 else None


def run(engine: OfflineEngine) -> list[list[int]]:
    prompts, params, grammars = zip(*requests(), strict=True)
    results = engine.generate(prompts, params, grammars)
    assert [result.error for result in results] == [""] * 8
    for result in results[1::2]:
        for position, token in enumerate(result.tokens):
            assert token in allowed_after(result.tokens[:position])
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each request alone, without overlap."""
    plain = SchedulerConfig(disable_radix_cache=True, disable_overlap_schedule=True)
    engine = create_engine(scheduler=plain)
    return [engine.generate([p], [s], [g])[0].tokens for p, s, g in requests()]


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_with_a_grammar_and_without_get_the_tokens_of_each_alone(
    expected: list[list[int]], overlap: bool
) -> None:
    config = SchedulerConfig(disable_overlap_schedule=not overlap)
    assert run(create_engine(scheduler=config)) == expected


def test_rows_in_a_graph_get_them_too(expected: list[list[int]]) -> None:
    engine = create_engine(graph=GraphConfig())
    assert run(engine) == expected
    assert engine.graph_stats()["eager_steps"]["decode"] == {}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_retraction_moves_no_grammar(expected: list[list[int]], overlap: bool) -> None:
    config = SchedulerConfig(disable_overlap_schedule=not overlap)
    engine = create_engine(scheduler=config, max_total_tokens=120)
    engine.scheduler.queues.estimate._mean = 0.0  # lets in more than there is room for
    assert run(engine) == expected
    assert engine.scheduler.queues.retractions > 0, "there was room for all"


def test_chunks_of_a_prompt_move_no_grammar(expected: list[list[int]]) -> None:
    assert run(create_engine(chunked_prefill_size=16)) == expected


def one(engine: OfflineEngine, wanted: Grammar, **sampling: Any) -> Generation:
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0} | sampling
    [result] = engine.generate([[5, 6, 7]], [SamplingParams(**options)], [wanted])
    return result


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_at_its_end_ends_the_answer_whatever_the_request_says(overlap: bool) -> None:
    engine = create_engine(scheduler=SchedulerConfig(disable_overlap_schedule=not overlap))
    for options in ({}, {"ignore_eos": True}, {"min_new_tokens": 9}, {"stop_token_ids": (96,)}):
        result = one(engine, grammar(length="4"), **options)
        assert (result.finish_reason, len(result.tokens)) == ("stop", 5)
        assert result.tokens[-1] == EOS


def test_stop_tokens_wait_for_min_new_tokens_where_the_grammar_has_others() -> None:
    engine = create_engine()
    free = one(engine, grammar()).tokens
    stopped = one(engine, grammar(), stop_token_ids=(free[0],))
    assert stopped.tokens == free[:1] and stopped.finish_reason == "stop"
    banned = one(engine, grammar(), stop_token_ids=(free[0],), min_new_tokens=3).tokens
    assert len(banned) > 3 and free[0] not in banned[:3]
    assert banned[0] in allowed_after([])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [0, 3])
def test_a_grammar_that_cannot_go_on_ends_its_request_only(overlap: bool, at: int) -> None:
    engine = create_engine(scheduler=SchedulerConfig(disable_overlap_schedule=not overlap))
    plain = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10]]
    alone = engine.generate(prompts[1:], [plain])[0].tokens
    failed, other = engine.generate(prompts, [plain] * 2, [grammar(fail_at=str(at)), None])
    assert failed.finish_reason == "error" and len(failed.tokens) == at
    assert failed.error == "regex: the grammar cannot go on: no way on"
    assert other.tokens == alone and other.error == ""


def test_masks_that_take_too_long_in_all_end_the_request() -> None:
    engine = create_engine(scheduler=SchedulerConfig(grammar_timeout=0.05))
    result = one(engine, grammar(seconds="0.02"))
    assert result.finish_reason == "error" and 1 <= len(result.tokens) <= 4
    assert "more than 0.05 s of computing" in result.error
