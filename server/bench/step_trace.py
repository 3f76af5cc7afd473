"""What the steps of a run cost: a worker that times each step and hands it on.

On CUDA two events around each launch give the device's time of a step and the time between two
steps in which the device had nothing to do. The host's time is that of ``launch`` and of
``wait``. Knows batches by size and kind only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode
from duograph.runners.profiler import StepProfiler
from duograph.runners.worker import ModelWorker
from duograph.scheduler.engine import Worker
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.model_worker import LoadedWorker, Progress, load_worker
from duograph.scheduler.step import CompletedStep


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step. Seconds, by the host's clock but for ``device_s`` and ``idle_s``."""

    kind: str  # extend or decode
    rows: int
    tokens: int
    launch_at: float
    launch_s: float  # what the call of launch took
    wait_at: float
    wait_s: float  # how long the host waited for the result
    device_s: float | None  # from the step's first kernel to its last copy; None on CPU
    idle_s: float | None  # device: between the end of the step before and this one's begin


class _TimedStep:
    """A launched step that notes when its result was waited for."""

    def __init__(self, step: PendingStep) -> None:
        self._step = step
        self.wait_at = 0.0
        self.wait_s = 0.0

    def wait(self) -> CompletedStep:
        self.wait_at = time.perf_counter()
        result = self._step.wait()
        self.wait_s = time.perf_counter() - self.wait_at
        return result


@dataclass(slots=True)
class _Launched:
    kind: str
    rows: int
    tokens: int
    launch_at: float
    launch_s: float
    timed: _TimedStep
    begin: Any  # torch.cuda.Event, or None
    end: Any


class TracedWorker:
    """See ``engine.Worker``; ``records`` tells of every step since the last ``clear``."""

    def __init__(self, worker: Worker, stream: torch.cuda.Stream | None) -> None:
        """``stream`` is where the worker's steps run; None on CPU."""
        self._worker = worker
        self._stream = stream
        self._launched: list[_Launched] = []

    def launch(self, batch: ForwardBatch) -> PendingStep:
        begin = self._event()
        started = time.perf_counter()
        timed = _TimedStep(self._worker.launch(batch))
        seconds = time.perf_counter() - started
        kind = "extend" if batch.mode is ForwardMode.EXTEND else "decode"
        self._launched.append(
            _Launched(
                kind, batch.batch_size, batch.num_tokens, started, seconds, timed, begin,
                self._event(),
            )
        )  # fmt: skip
        return timed

    def graph_stats(self) -> dict[str, Any]:
        return self._worker.graph_stats()

    @property
    def profiler(self) -> StepProfiler:
        return self._worker.profiler

    def close(self) -> None:
        self._worker.close()

    def clear(self) -> None:
        self._launched.clear()

    def records(self) -> list[StepRecord]:
        """Of steps whose results have been waited for."""
        found: list[StepRecord] = []
        before: _Launched | None = None
        for step in self._launched:
            device_s = idle_s = None
            if self._stream is not None:
                device_s = step.begin.elapsed_time(step.end) / 1e3
                idle_s = before.end.elapsed_time(step.begin) / 1e3 if before is not None else 0.0
            found.append(
                StepRecord(
                    kind=step.kind,
                    rows=step.rows,
                    tokens=step.tokens,
                    launch_at=step.launch_at,
                    launch_s=step.launch_s,
                    wait_at=step.timed.wait_at,
                    wait_s=step.timed.wait_s,
                    device_s=device_s,
                    idle_s=idle_s,
                )
            )
            before = step
        return found

    def _event(self) -> Any:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def load_traced(config: EngineConfig, progress: Progress) -> LoadedWorker:
    """As ``load_worker``, with a TracedWorker."""
    loaded = load_worker(config, progress)
    stream = loaded.worker.cuda_stream if isinstance(loaded.worker, ModelWorker) else None
    return replace(loaded, worker=TracedWorker(loaded.worker, stream))


def step_table(records: Iterable[StepRecord]) -> list[str]:
    """A line for each kind of step: how many, how large, and where their time went."""
    lines = [
        "   kind  steps  rows a step  tokens a step  device s  idle before s  "
        "launch ms  host waits s"
    ]
    for kind in ("extend", "decode"):
        steps = [record for record in records if record.kind == kind]
        if not steps:
            continue
        count = len(steps)
        device, idle = (
            sum(getattr(step, name) or 0.0 for step in steps) for name in ("device_s", "idle_s")
        )
        lines.append(
            f"{kind:>7}  {count:5}  {sum(s.rows for s in steps) / count:11.1f}  "
            f"{sum(s.tokens for s in steps) / count:13.1f}  {device:8.3f}  {idle:13.3f}  "
            f"{sum(s.launch_s for s in steps) / count * 1e3:9.3f}  "
            f"{sum(s.wait_s for s in steps):12.3f}"
        )
    return lines


def as_dicts(records: Iterable[StepRecord]) -> list[dict[str, Any]]:
    return [asdict(record) for record in records]
