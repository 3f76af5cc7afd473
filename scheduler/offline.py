"""The engine inside the caller's process: token ids in, token ids out, no sockets.

The same scheduler, worker and loops as the daemon's; only the wires are missing. For benchmarks
and for comparing outputs, not for serving. Knows no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from duograph.runners.batch import ForwardBatch
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.grammar import GrammarCompiler
from duograph.scheduler.grammar_masks import GrammarState, MaskMaker
from duograph.scheduler.loop import PendingStep, overlap_loop, plain_loop
from duograph.scheduler.messages import GenerateRequest, Grammar
from duograph.scheduler.model_worker import LoadedWorker, Progress, load_worker
from duograph.scheduler.process import load_grammars, warm_up
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import CompiledRequest, Event, Plan, Step


@dataclass(slots=True)
class Generation:
    """What one request produced. Times are seconds since ``generate`` was called."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when the host learnt of each token
    finish_reason: str = ""
    error: str = ""
    grammar: GrammarState | None = None


class OfflineEngine:
    """Loads on construction. Raises what the runner floor raises."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[EngineConfig, Progress], LoadedWorker] = load_worker,
        progress: Progress | None = None,
    ) -> None:
        loaded = load(config, progress or (lambda phase, done, total: None))
        self._config = config
        self.worker = loaded.worker
        self._builder = BatchBuilder(
            page_size=loaded.limits.page_size,
            pinned=loaded.is_cuda,
            vocab_size=loaded.limits.vocab_size,
            masks=MaskMaker(budget_s=config.scheduler.grammar_timeout),
        )
        self._compiler: GrammarCompiler | None = None
        self.limits = loaded.limits
        self.scheduler = Scheduler(config.scheduler, loaded.limits, num_frontends=1)
        warm_up(self.worker, self._builder, loaded.limits)
        self._events: list[Event] = []
        self._open: dict[int, Generation] = {}
        self._next_rid = 0
        self._started = 0.0

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None] | None = None,
    ) -> list[Generation]:
        """Runs all requests to their end and returns them in order.

        Raises:
            ValueError: the sequences differ in length.
            GrammarError: a grammar cannot be compiled.
        """
        results = []
        wanted = [None] * len(prompts) if grammars is None else grammars
        for prompt, params, grammar in zip(prompts, sampling, wanted, strict=True):
            request = GenerateRequest(
                rid=self._next_rid, input_ids=prompt, sampling=params, grammar=grammar
            )
            result = self._open[self._next_rid] = Generation()
            if grammar is None:
                self._events.append(request)
            else:
                walk = self.compiler.compile(grammar).start()
                result.grammar = GrammarState(walk, grammar.param)
                self._events.append(CompiledRequest(request, result.grammar))
            results.append(result)
            self._next_rid += 1
        self._started = time.perf_counter()
        loop = plain_loop if self._config.scheduler.disable_overlap_schedule else overlap_loop
        loop(self)
        return results

    def graph_stats(self) -> dict[str, Any]:
        return self.worker.graph_stats()

    @property
    def compiler(self) -> GrammarCompiler:
        """Loaded at its first use."""
        if self._compiler is None:
            self._compiler = load_grammars(self._config, self.limits)
        return self._compiler

    # The verbs of the loops

    def alive(self) -> bool:
        return bool(self._open) or not self.scheduler.is_idle

    def now(self) -> float:
        return time.monotonic()

    def receive(self, *, block: bool) -> list[Event]:
        events, self._events = self._events, []
        return events

    def build(self, plan: Plan) -> ForwardBatch:
        return self._builder.build(plan)

    def launch(self, batch: ForwardBatch) -> PendingStep:
        pending = self.worker.launch(batch)
        self._builder.launched(pending)
        return pending

    def send(self, step: Step) -> None:
        now = time.perf_counter() - self._started
        for message in step.outputs.values():
            for rid, token in zip(message.rids, message.tokens, strict=True):
                generation = self._open[rid]
                generation.tokens.append(token)
                generation.times.append(now)
            for finished in message.finished:
                generation = self._open.pop(finished.rid)
                generation.finish_reason = finished.reason
                generation.error = finished.error_message
        if self.scheduler.fault_log:
            raise self.scheduler.fault_log[0][1]
