"""Launching a step never waits for the step before it: while that one runs long, a step of every
kind is launched behind it and the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.config import GraphConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.worker import ModelWorker
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.messages import GenerateRequest
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Event
from duograph.tests.gpu.cuda_workers import GRAPH_BACKENDS, NONE, cuda_worker
from duograph.tests.graph_checks import on_stream
from duograph.tests.mixed_traffic import engine_limits
from duograph.tests.worker_driver import VOCAB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUSY_CYCLES = 1_000_000_000  # about half a second
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8, seed=3, max_new_tokens=30, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=9, max_new_tokens=30),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.2, max_new_tokens=30),
    "biased": SamplingParams(
        temperature=0.0, logit_bias={5: 3.0}, min_new_tokens=9, stop_token_ids=(1,)
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, max_new_tokens=30),
    "prompt logprobs": SamplingParams(temperature=0.0, prompt_logprobs=3, max_new_tokens=30),
}


class Steps:
    """The scheduler and the pinned batches of the daemon, one step at a time."""

    def __init__(self, worker: ModelWorker) -> None:
        limits = engine_limits(worker, VOCAB)
        config = SchedulerConfig(disable_radix_cache=True)
        self._scheduler = Scheduler(config, limits, num_frontends=1)
        self._builder = BatchBuilder(page_size=limits.page_size, pinned=True)
        self._worker = worker
        self._rid = 0

    def requests(self, prompts: list[int], sampling: SamplingParams) -> list[Event]:
        """With prompts of these lengths."""
        events: list[Event] = []
        for length in prompts:
            ids = [(7 * i + length) % VOCAB for i in range(length)]
            events.append(GenerateRequest(rid=self._rid, input_ids=ids, sampling=sampling))
            self._rid += 1
        return events

    def launch(self, events: list[Event]) -> PendingStep:
        step = self._scheduler.step(events, 0.0)
        assert step.plan is not None
        return self._worker.launch(self._builder.build(step.plan))


@contextmanager
def busy(worker: ModelWorker) -> Iterator[None]:
    """What was launched last runs until the end; who waits for it by a torch call raises."""
    done = torch.cuda.Event()
    with torch.cuda.stream(worker_stream(worker)):
        torch.cuda._sleep(BUSY_CYCLES)
        done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        assert not done.query(), "the host has waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@contextmanager
def idle(worker: ModelWorker) -> Iterator[None]:
    yield


def worker_stream(worker: ModelWorker) -> torch.cuda.Stream:
    with on_stream(worker):
        return torch.cuda.current_stream()


def overlapped_steps(
    worker: ModelWorker,
    sampling: SamplingParams,
    state: Callable[[ModelWorker], AbstractContextManager[None]],
) -> list[int]:
    """Prefill, then as the overlap loop does it: decode behind decode, a prefill of newcomers
    behind decode, decode of all behind that. ``state`` is the worker's while a second step is
    launched. Returns the tokens of the last step."""
    steps = Steps(worker)
    results: list[Any] = [steps.launch(steps.requests([40, 9, 70], sampling)).wait()]
    arrivals: list[list[int]] = [[], [33, 60], []]
    for lengths in arrivals:
        first = steps.launch(results)
        newcomers = steps.requests(lengths, sampling)
        with state(worker):
            second = steps.launch(newcomers)
        results = [first.wait(), second.wait()]
    tokens: list[int] = results[-1].tokens
    return tokens


@pytest.fixture(scope="module", params=GRAPH_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[GraphConfig(), NONE], ids=["graph", "eager"])
def worker(request: pytest.FixtureRequest, backend: str) -> ModelWorker:
    return cuda_worker(request.param, attention_backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_launched_while_the_one_before_it_runs(worker: ModelWorker, kind: str) -> None:
    """The first round loads kernels, which may wait; the daemon warms up too."""
    expected = overlapped_steps(worker, KINDS[kind], idle)
    assert len(expected) == 5
    assert overlapped_steps(worker, KINDS[kind], busy) == expected


def test_nothing_is_left_to_run_on_another_stream_after_start_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker's stream is not ordered with the one that start-up filled tensors on."""
    reset = GraphInputBuffers.reset

    def slow_reset(buffers: GraphInputBuffers) -> None:
        reset(buffers)
        torch.cuda._sleep(BUSY_CYCLES)

    monkeypatch.setattr(GraphInputBuffers, "reset", slow_reset)
    cuda_worker(NONE)
    assert torch.cuda.current_stream().query()
