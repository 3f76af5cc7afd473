"""Where launched steps run: behind the caller's back, in order, one after the other.

On CUDA that is a stream; on the CPU one worker thread plays its part, so that ``launch``
returns at once on both and the scheduler's Python overlaps with the forward. This file knows
no batch content and no runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from duograph.runners.batch import ForwardBatch, StepOutput, StepResult
from duograph.runners.prompt_logprobs import PromptScores
from duograph.runners.sampler import LogprobTensors, SampledStep

Work = Callable[[], SampledStep]


class DeviceStream(Protocol):
    def launch(self, batch: ForwardBatch, work: Work) -> StepOutput:
        """Starts ``work`` after all that was launched before, and returns at once. What it
        raises comes out of ``StepOutput.wait``, on CUDA partly here already."""

    def call(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the thread that runs Python's part of the steps, after all that was
        launched before, and waits for it. Raises what it raises."""

    def close(self) -> None:
        """Waits for what was launched."""


class CpuStream:
    """One thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def launch(self, batch: ForwardBatch, work: Work) -> StepOutput:
        future = self._thread.submit(_run_to_result, work)
        return StepOutput(batch, future.result)

    def call(self, work: Callable[[], None]) -> None:
        self._thread.submit(work).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class CudaStream:
    """One CUDA stream, on which graphs are captured and replayed too."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # Host memory that kernels may still have to read or write, also where nobody waits for
        # the result: its allocator knows of copies only.
        self._in_use: deque[tuple[torch.cuda.Event, ForwardBatch, SampledStep]] = deque()

    def launch(self, batch: ForwardBatch, work: Work) -> StepOutput:
        with torch.cuda.stream(self.stream), torch.no_grad():
            on_host = _to_pinned(work())
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self.stream)
        self._in_use.append((done, batch, on_host))
        while self._in_use and self._in_use[0][0].query():  # type: ignore[no-untyped-call]
            self._in_use.popleft()

        def wait() -> StepResult:
            done.synchronize()  # raises what a kernel has done wrong
            return on_host.to_result()

        return StepOutput(batch, wait)

    def call(self, work: Callable[[], None]) -> None:
        self.stream.synchronize()
        work()

    def close(self) -> None:
        self.stream.synchronize()


def _run_to_result(work: Work) -> StepResult:
    with torch.no_grad():
        return work().to_result()


def _to_pinned(step: SampledStep) -> SampledStep:
    found = step.logprobs
    if found is not None:
        found = LogprobTensors(
            found.wanted,
            _pinned_copy(found.chosen),
            _pinned_copy(found.top_ids),
            _pinned_copy(found.top_logprobs),
        )
    scores = step.prompt_scores
    if scores is not None:
        scores = PromptScores(
            scores.wishes,
            _pinned_copy(scores.chosen),
            _pinned_copy(scores.top_ids),
            _pinned_copy(scores.top_logprobs),
        )
    tokens = torch.empty(step.tokens.shape, dtype=step.tokens.dtype, pin_memory=True)
    # imported here: Triton is there where CUDA is
    from duograph.kernels.step_inputs_triton import to_host

    to_host(step.tokens, tokens)
    return SampledStep(step.step_id, tokens, found, scores)


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
