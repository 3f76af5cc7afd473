"""The parts that the loops of loop.py move: sockets, clock, worker, heartbeat, log lines.

Knows no policy and no tensor.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from typing import Any, Protocol

from duograph.runners.batch import ForwardBatch
from duograph.runners.config import MAX_PROFILED_STEPS
from duograph.runners.profiler import ProfilerError, StepProfiler
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.grammar_gate import GrammarGate
from duograph.scheduler.graph_metrics import eager_steps, graph_metrics
from duograph.scheduler.last_use import LastUse
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.messages import (
    ControlAnswer,
    ControlRequest,
    GenerateRequest,
    Heartbeat,
    ProcessFailed,
)
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.stats import snapshot
from duograph.scheduler.step import Event, Plan, Step
from duograph.scheduler.wires import Wires

_log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
# The integrity check takes 25 ms over 4 million tokens: not between two requests of one client.
IDLE_WAITS_TO_CHECK = 2


class Worker(Protocol):
    """What the engine needs of runners.worker.ModelWorker."""

    def launch(self, batch: ForwardBatch) -> PendingStep: ...

    def graph_stats(self) -> dict[str, Any]: ...

    @property
    def profiler(self) -> StepProfiler: ...

    def close(self) -> None: ...


class Engine:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        worker: Worker,
        builder: BatchBuilder,
        wires: Wires,
        gate: GrammarGate,
        model_name: str,
        log_interval: int,
        watchdog_timeout: float,
    ) -> None:
        self.scheduler = scheduler
        self._stopping = False
        self._worker = worker
        self._builder = builder
        self._wires = wires
        self._gate = gate
        self._model_name = model_name
        self._log_interval = log_interval
        self._watchdog_timeout = watchdog_timeout
        self._next_beat = 0.0
        self._said_full = False  # the last heartbeat has kept the frontends from sending
        self._built: Plan | None = None  # the plan that was built last
        self._idle_waits = 0  # in a row, each up to a heartbeat, without a message
        self._decode_steps = 0
        self._eager_mark = 0  # decode steps without a graph at the last decode line
        self._log_mark = (time.monotonic(), 0)  # time and tokens at the last decode line
        self._metric_mark = (time.monotonic(), 0)
        self._last_use = LastUse()

    # The verbs of the loops

    def alive(self) -> bool:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._beat(now)
        elif self._said_full and not self._is_full():
            # a short queue can be empty long before the next beat, and nobody would send
            self._send_heartbeat()
        return not self._stopping

    def now(self) -> float:
        return time.monotonic()

    def receive(self, *, block: bool) -> list[Event]:
        if block:
            timeout = max(0.001, self._next_beat - time.monotonic())
            other = self._gate.fileno() if self._gate.busy else None
            if not self._wires.requests.wait(timeout, other=other):
                self._idle_waits += 1
                if self._idle_waits == IDLE_WAITS_TO_CHECK:
                    self._check_books()
        else:
            self._idle_waits = 0
        arrived = self._wires.requests.drain()
        if any(type(message) is ControlRequest for message in arrived):
            arrived = self._carry_out(arrived)
        if self._gate.busy or any(
            type(message) is GenerateRequest and message.grammar is not None for message in arrived
        ):
            return self._gate.sift(arrived)
        return arrived

    def build(self, plan: Plan) -> ForwardBatch:
        self._built = plan
        return self._builder.build(plan)

    def launch(self, batch: ForwardBatch) -> PendingStep:
        pending = self._worker.launch(batch)
        self._builder.launched(pending)
        if self._built is not None:
            self._log_step(self._built)  # now that the device has work
        return pending

    def send(self, step: Step) -> None:
        for frontend, message in step.outputs.items():
            self._wires.to_frontend(frontend, message)
        for rid, error in self.scheduler.fault_log:
            _log.error("request %d failed inside the engine", rid, exc_info=error)
        self.scheduler.fault_log.clear()

    def _carry_out(self, arrived: list[Event | ControlRequest]) -> list[Event]:
        """Obeys the orders among ``arrived`` and returns the rest."""
        events: list[Event] = []
        for message in arrived:
            if isinstance(message, ControlRequest):
                self._wires.to_frontend_of(message.id, self._obey(message))
            else:
                events.append(message)
        return events

    def _obey(self, order: ControlRequest) -> ControlAnswer:
        scheduler = self.scheduler
        match order.command:
            case "flush_cache":
                pages = scheduler.flush_cache()
                text = "requests are in work" if pages is None else f"{pages} pages freed"
                return ControlAnswer(order.id, pages is not None, text)
            case "abort_named" | "abort_all":
                name = order.argument if order.command == "abort_named" else None
                compiling = self._gate.take_named(name)
                for request in compiling:
                    scheduler.refuse(request, "aborted", "the request was aborted")
                number = len(compiling) + scheduler.abort_by_client(name)
                return ControlAnswer(order.id, True, str(number))
            case "start_profile" | "stop_profile":
                profiler = self._worker.profiler
                try:
                    steps = int(order.argument or MAX_PROFILED_STEPS)
                    starts = order.command == "start_profile"
                    done = profiler.start(steps) if starts else profiler.stop()
                    return ControlAnswer(order.id, True, done)
                except (ProfilerError, ValueError) as error:
                    return ControlAnswer(order.id, False, str(error))

    # The end

    def stop(self) -> None:
        """The loop ends after the step at hand. Safe in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Waits for a step that is still in flight."""
        self._worker.close()
        self._gate.close()

    def fail(self, exit_code: int, message: str) -> None:
        """Tells everybody that the engine ends; whoever cannot be told learns it from its death."""
        text = "the engine failed; the server is going down"
        for request in self._gate.take_named(None):
            self.scheduler.refuse(request, "internal", text)
        self.send(self.scheduler.fail_all(text))
        self._wires.to_supervisor(ProcessFailed(exit_code, message))

    # What nobody waits for

    def _beat(self, now: float) -> None:
        # The watchdog: if no beat follows in time, a C thread dumps all stacks and ends the
        # process.
        faulthandler.dump_traceback_later(self._watchdog_timeout, exit=True, file=sys.stderr)
        self._send_heartbeat()
        stats, gauges = self.scheduler.stats, self.scheduler.gauges()
        since, tokens = self._metric_mark
        throughput = (stats.generation_tokens - tokens) / max(now - since, 1e-9)
        self._metric_mark = (now, stats.generation_tokens)
        graphs = self._worker.graph_stats()
        counters, levels = graph_metrics(graphs)
        levels |= self._last_use.update(graphs, time.time())
        counters |= self._gate.stats.as_metrics()
        self._wires.to_frontends(
            snapshot(
                stats,
                gauges,
                model_name=self._model_name,
                gen_throughput=throughput,
                graph_counters=counters,
                graph_gauges=levels,
            )
        )

    def _is_full(self) -> bool:
        """Frontends that hear of so long a queue send nothing."""
        return len(self.scheduler.queues.waiting) >= self.scheduler.config.max_queue

    def _send_heartbeat(self) -> None:
        self._said_full = self._is_full()
        gauges = self.scheduler.gauges()
        heartbeat = Heartbeat(self.scheduler.stats.steps, gauges.running, gauges.waiting)
        self._wires.to_frontends(heartbeat)
        self._wires.to_supervisor(heartbeat)

    def _check_books(self) -> None:
        try:
            self.scheduler.queues.check()
        except AssertionError as error:
            _log.error("integrity check failed: %s", error)

    def _log_step(self, plan: Plan) -> None:
        if plan.is_extend:
            _log.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d",
                len(plan.new_rows),
                plan.num_tokens,
                plan.cached_tokens,
            )
            return
        self._decode_steps += 1
        if self._decode_steps % self._log_interval:
            return
        now, gauges = time.monotonic(), self.scheduler.gauges()
        since, tokens = self._log_mark
        total = self.scheduler.stats.generation_tokens
        self._log_mark = (now, total)
        eager = eager_steps(self._worker.graph_stats(), "decode")
        _log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            len(plan.rows),
            gauges.used_tokens,
            gauges.used_tokens / gauges.total_tokens,
            self._eager_mark == eager,
            (total - tokens) / max(now - since, 1e-9),
            gauges.waiting,
        )
        self._eager_mark = eager
