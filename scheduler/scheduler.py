"""The scheduler: ``step(events, now)`` takes what happened and says what to run and to send. Or in
two halves, ``take`` and ``plan``, so that tokens need not wait for the plan of the next step.

Pure: no clock, socket, thread, torch or random number inside, so the same events and times give
the same steps, and a test may drive it through any history. Events are messages of the
frontends and results of steps, oldest first. The caller launches each plan in order and brings
each result back once; one plan may be in flight while the next is made (overlap).

One step, in order: commit results, take arrivals and aborts, end what timed out, plan. Every
request that passes the door gets exactly one ``Finished``, except after its AbortRequest.

Finish rules. An eos id of the model ends a request unless ignore_eos; a stop_token_id ends it
always, as in vLLM. Neither counts before min_new_tokens, until when both are banned. A request
with a grammar ends by eos even with ignore_eos: eos comes only where the grammar ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from duograph.scheduler import endings
from duograph.scheduler.admission import EngineLimits, RequestRefused, check_request
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    ErrorCode,
    FinishReason,
    GenerateRequest,
    Logprobs,
)
from duograph.scheduler.planner import Planner
from duograph.scheduler.queues import Queues
from duograph.scheduler.request import Constraint, Request, RequestState
from duograph.scheduler.stats import Gauges, SchedulerStats
from duograph.scheduler.step import CompiledRequest, CompletedStep, Event, Outbox, Plan, Step

MAX_FAULTS = 3  # requests that end by an exception of ours within FAULT_WINDOW_S
FAULT_WINDOW_S = 60.0
_EXPIRY_INTERVAL_S = 0.25
MAX_STALLED_STEPS = 1_000  # without anything to run or to wait for, while requests wait


class EngineFault(RuntimeError):
    """The engine cannot go on: its books or its results can no longer be trusted."""


class Scheduler:
    def __init__(self, config: SchedulerConfig, limits: EngineLimits, num_frontends: int) -> None:
        self.config = config
        self.limits = limits
        self.num_frontends = num_frontends
        self.stats = SchedulerStats()
        self.queues = Queues(limits, prefix_cache=not config.disable_radix_cache)
        self.live: dict[int, Request] = {}
        self._planner = Planner(self.queues, schedule_policy=config.schedule_policy)
        self._outbox = Outbox(num_frontends)
        self._eos = frozenset(limits.eos_token_ids)
        self._by_priority = config.schedule_policy == "priority"
        self._arrivals = 0
        self._now = float("-inf")
        self._next_expiry = float("-inf")
        self._faults: deque[float] = deque(maxlen=MAX_FAULTS)
        self._fatal: EngineFault | None = None
        self._stalled = 0
        self.fault_log: list[tuple[int, Exception]] = []  # for the caller to log and clear

    @property
    def is_idle(self) -> bool:
        return self.queues.is_idle

    # All three raise EngineFault if the engine must end; ``fail_all`` then gives the last messages.

    def step(self, events: Sequence[Event], now: float) -> Step:
        """``take`` and ``plan`` at once: all that is to be sent, and the next plan."""
        self._settle(events, now)
        return self.plan()

    def take(self, events: Sequence[Event], now: float) -> Step:
        """No plan, but what to send; ``plan`` comes next."""
        self._settle(events, now)
        return Step(None, self._outbox.take())

    def _settle(self, events: Sequence[Event], now: float) -> None:
        self._now = now = max(now, self._now)  # a clock that jumps back must not undo timeouts
        for event in events:
            if isinstance(event, GenerateRequest):
                self._accept(event, None)
            elif isinstance(event, CompiledRequest):
                self._accept_compiled(event)
            elif isinstance(event, AbortRequest):
                self._abort(event.rid)
            else:
                self._commit(event)
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRY_INTERVAL_S
            self._expire()
        self.queues.sweep()
        if self._fatal is not None:
            raise self._fatal

    def plan(self) -> Step:
        """What to run next, and the ends of requests that could not be planned."""
        plan = self._planner.plan()
        if self._planner.faulted:
            for request, error in self._planner.faulted:
                self._fault(request, error)
            self._planner.faulted.clear()
            self.queues.sweep()
            if self._fatal is not None:
                raise self._fatal
        if plan is not None:
            self.queues.in_flight.append(plan)
            if plan.new_rows:
                self._note_admissions(plan)
        self._check_progress()
        return Step(plan, self._outbox.take())

    def fail_all(self, message: str) -> Step:
        """Ends every live request with an internal error; nothing can run afterwards."""
        for request in self.live.values():
            request.state = RequestState.FINISHED
            self._outbox.finished(request.frontend, endings.failed(request, "internal", message))
        self.live.clear()
        return Step(None, self._outbox.take())

    def abort_by_client(self, name: str | None) -> int:
        """Ends every request of that name, or all if None, with the error "aborted"; returns how
        many. The messages come with the next step."""
        named = [r for r in self.live.values() if name is None or r.name == name]
        for request in named:
            self.stats.aborted += 1
            self._finish_with_error(request, "aborted", "the request was aborted")
        return len(named)

    def flush_cache(self) -> int | None:
        """Empties the prefix cache; the pages freed, or None if requests are in work."""
        return self.queues.kv.clear() if self.is_idle else None

    def gauges(self) -> Gauges:
        queues = self.queues
        return Gauges(
            running=len(queues.running) + len(queues.prefilling),
            waiting=len(queues.waiting),
            used_tokens=queues.kv.held_tokens,
            total_tokens=self.limits.max_total_num_tokens,
            cached_pages=queues.kv.tree.cached_pages,
            evictions=queues.kv.tree.evictions,
            retractions=queues.retractions,
            new_token_ratio=queues.estimate.ratio,
        )

    def _check_progress(self) -> None:
        """A bug that left requests waiting for nothing must not become a busy loop."""
        if self.queues.in_flight or not self.live:
            self._stalled = 0
            return
        self._stalled += 1
        if self._stalled >= MAX_STALLED_STEPS:
            raise EngineFault(f"{len(self.live)} requests wait, and nothing can run")

    # Arrivals, aborts, timeouts

    def _accept_compiled(self, event: CompiledRequest) -> None:
        if event.grammar is None:
            self.refuse(event.message, event.code, event.error)
        else:
            self._accept(event.message, event.grammar)

    def _accept(self, message: GenerateRequest, grammar: Constraint | None) -> None:
        frontend = message.rid >> RID_FRONTEND_SHIFT
        if not 0 <= frontend < self.num_frontends or message.rid in self.live:
            # Nobody to answer, or an answer would reach the request that is running.
            self.stats.ignored += 1
            return
        try:
            prompt = check_request(message, self.limits)
            if message.grammar is not None and grammar is None:
                raise RequestRefused("invalid_request", "no grammar is compiled here")
            waiting = len(self.queues.waiting) - len(self.queues.free_rows)
            if waiting >= self.config.max_queue:
                raise RequestRefused("overloaded", f"the queue is full ({waiting} requests wait)")
        except RequestRefused as refusal:
            self.refuse(message, refusal.code, str(refusal))
            return
        sampling = message.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        if grammar is not None or not sampling.ignore_eos:
            stop_ids |= self._eos
        request = Request(
            rid=message.rid,
            frontend=frontend,
            seq=self._arrivals,
            prompt=prompt,
            sampling=sampling,
            stop_ids=stop_ids,
            cache_salt=message.cache_salt,
            arrival=self._now,
            name=message.name,
            rank=message.priority if self._by_priority else 0,
            grammar=grammar,
        )
        self._arrivals += 1
        self.stats.requests += 1
        self.live[request.rid] = request
        if request.max_new_tokens == 0 and request.cache_limit is None:
            self._finish(request, "length")  # it wants to know nothing of its prompt either
        else:
            self.queues.enqueue(request)

    def refuse(self, message: GenerateRequest, code: ErrorCode, text: str) -> None:
        """Ends a request that never was in; the message comes with the next step."""
        frontend = message.rid >> RID_FRONTEND_SHIFT
        if not 0 <= frontend < self.num_frontends:
            self.stats.ignored += 1
            return
        self.stats.refused += 1
        self._outbox.finished(frontend, endings.refused(message, code, text))

    def _abort(self, rid: int) -> None:
        request = self.live.get(rid)
        if request is not None:  # else it has ended already, or never was
            self.stats.aborted += 1
            self._leave(request, keep=False)

    def _expire(self) -> None:
        queue_limit = self._now - self.config.queue_timeout
        total_limit = self._now - self.config.request_timeout
        for request in list(self.live.values()):
            if request.arrival < total_limit:
                text = f"the request took more than {self.config.request_timeout:g} s"
            elif request.first_admitted is None and request.arrival < queue_limit:
                text = f"the request waited more than {self.config.queue_timeout:g} s"
            else:
                continue
            self.stats.timeouts += 1
            self._finish_with_error(request, "timeout", text)

    def _note_admissions(self, plan: Plan) -> None:
        for request in plan.new_rows:
            if request.first_admitted is not None:
                continue  # back from a retraction
            assert request.lease is not None
            request.first_admitted = self._now
            request.cached_tokens = request.lease.num_cached_pages * self.limits.page_size
            self.stats.prompt_tokens += request.prompt_len
            self.stats.cached_tokens += request.cached_tokens
            self.stats.queue_time.observe(self._now - request.arrival)

    # Results

    def _commit(self, result: CompletedStep) -> None:
        in_flight = self.queues.in_flight
        if not in_flight or in_flight[0].step_id != result.step_id:
            raise EngineFault(f"result of step {result.step_id} does not belong to the oldest one")
        plan = in_flight.popleft()
        if len(result.tokens) != len(plan.requests):
            raise EngineFault(f"step {plan.step_id} brought the wrong number of tokens")
        self.queues.free_late(plan)
        self.stats.observe_step(plan.is_extend, plan.num_tokens, self._now, bool(in_flight))
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        for index in plan.constrained:
            self._end_failed_grammar(plan.requests[index])
        self._take_tokens(plan, result)

    def _take_prompt_logprobs(self, plan: Plan, result: CompletedStep) -> None:
        for index, found in result.prompt_logprobs.items():
            request = plan.requests[index]
            if request.state is not RequestState.FINISHED:
                entries = [Logprobs(one.logprob, one.top_ids, one.top_logprobs) for one in found]
                self._outbox.prompt_logprobs(request.frontend, request.rid, entries)

    def _end_failed_grammar(self, request: Request) -> None:
        """What this step sampled for a grammar that could not go on is no token of it."""
        grammar = request.grammar
        if request.state is RequestState.FINISHED or grammar is None:
            return
        if grammar.failed_at is not None and len(request.output_ids) >= grammar.failed_at:
            self._finish_with_error(request, "invalid_grammar", grammar.error)

    def _take_tokens(self, plan: Plan, result: CompletedStep) -> None:
        # The host's hottest loop: once per token. Locals and lists, nothing else, on the way of
        # a plain token.
        stats, outbox, now = self.stats, self._outbox, self._now
        rids, tokens, logprobs = outbox.rids, outbox.tokens, result.logprobs
        emits, vocab, finished = plan.emits, self.limits.vocab_size, RequestState.FINISHED
        gaps: list[float] = []
        for index, (request, token) in enumerate(zip(plan.requests, result.tokens, strict=True)):
            if request.state is finished:
                stats.wasted_rows += 1
                continue
            if emits and not emits[index]:
                continue
            try:
                if not 0 <= token < vocab:
                    raise ValueError(f"the sampler gave token {token} of {vocab}")
                if emits:
                    self.queues.publish(request)
                    if request.max_new_tokens == 0:
                        self._finish(request, "length")
                        continue
                output = request.output_ids
                output.append(token)
                frontend = request.frontend
                rids[frontend].append(request.rid)
                tokens[frontend].append(token)
                if index in logprobs:
                    best = logprobs[index]
                    outbox.logprobs(
                        frontend, Logprobs(best.logprob, best.top_ids, best.top_logprobs)
                    )
                if request.first_token_time is None:
                    self._note_first_token(request)
                else:
                    gaps.append(request.last_token_time)
                request.last_token_time = now
                if token in request.stop_ids and len(output) > request.min_new_tokens:
                    self._finish(request, "stop", token)
                elif len(output) >= request.max_new_tokens:
                    self._finish(request, "length")
            except Exception as error:  # ends this request only
                self._fault(request, error)
        stats.generation_tokens += len(gaps)
        stats.observe_gaps(gaps, now)

    def _note_first_token(self, request: Request) -> None:
        request.first_token_time = self._now
        self._outbox.cached(request.frontend, request.rid, request.cached_tokens)
        self.stats.generation_tokens += 1
        self.stats.time_to_first_token.observe(self._now - request.arrival)

    # Endings

    def _finish(self, request: Request, reason: FinishReason, token: int | None = None) -> None:
        self._leave(request, keep=True)
        stats, now = self.stats, self._now
        stats.finished += 1
        stats.e2e_latency.observe(now - request.arrival)
        if request.first_admitted is not None and request.first_token_time is not None:
            stats.prefill_time.observe(request.first_token_time - request.first_admitted)
            stats.decode_time.observe(now - request.first_token_time)
            self.queues.estimate.finished(len(request.output_ids), request.max_new_tokens)
        self._outbox.finished(request.frontend, endings.finished(request, reason, token))

    def _finish_with_error(self, request: Request, code: ErrorCode, message: str) -> None:
        self._leave(request, keep=False)
        self._outbox.finished(request.frontend, endings.failed(request, code, message))

    def _leave(self, request: Request, *, keep: bool) -> None:
        """The request is over. The lists drop it at the next sweep; a step in flight may still
        compute a row for it, which is thrown away."""
        self.queues.end(request, keep=keep)
        del self.live[request.rid]

    def _fault(self, request: Request, error: Exception) -> None:
        """An exception of ours while one request was handled: it ends, unless that is a habit."""
        self.stats.faults += 1
        self.fault_log.append((request.rid, error))
        if request.state is not RequestState.FINISHED:
            self._finish_with_error(request, "internal", "the request failed inside the engine")
        self._faults.append(self._now)
        if len(self._faults) == MAX_FAULTS and self._now - self._faults[0] <= FAULT_WINDOW_S:
            # Raised when all events have been taken, so that fail_all reaches every request.
            self._fatal = EngineFault(f"{MAX_FAULTS} requests failed within {FAULT_WINDOW_S:g} s")
