"""One simulated run: clients, the scheduler, the device, faults, and the checks on all of them.

Drives ``Scheduler.step`` as the two loops do, with one step in flight when options.overlap is
set. Every choice comes from the seed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits, OutputEstimate
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    Finished,
    GenerateRequest,
    StepTokens,
)
from duograph.scheduler.request import Request, RequestState
from duograph.scheduler.scheduler import MAX_FAULTS, EngineFault, Scheduler
from duograph.scheduler.step import Event, Plan, Step
from duograph.tests.scheduler.sim.device import CheckingDevice, Launched, Result, score_of
from duograph.tests.scheduler.sim.invariants import check_books, check_plan
from duograph.tests.scheduler.sim.options import Options
from duograph.tests.scheduler.sim.oracle import EOS, VOCAB, Task, create_task

SHARED_LENGTH = 20
QUEUE_TIMEOUT_S = 500.0
REQUEST_TIMEOUT_S = 5_000.0


class DeviceFailure(RuntimeError):
    pass


class Optimist(OutputEstimate):
    """Expects nobody to write anything, so that pages run out."""

    @property
    def ratio(self) -> float:
        return 0.0


@dataclass
class Client:
    """The far end of one request: compares what comes with the oracle, token by token."""

    rid: int
    task: Task
    k: int | None  # logprobs asked for
    received: list[int] = field(default_factory=list)
    may_fail: set[str] = field(default_factory=set)  # error codes that are right
    scored_from: int | None = None  # the first prompt token whose score was asked for
    scores: list[float] = field(default_factory=list)

    def token(self, token: int) -> None:
        assert len(self.received) < len(self.task.answer), f"{self.rid}: token after the last"
        wanted = self.task.answer[len(self.received)]
        assert token == wanted, f"{self.rid}: token {len(self.received)} is {token}, not {wanted}"
        self.received.append(token)

    def finish(self, finished: Finished) -> None:
        assert finished.completion_tokens == len(self.received)
        assert finished.prompt_tokens == len(self.task.prompt)
        assert 0 <= finished.cached_tokens < max(1, len(self.task.prompt))
        if finished.reason == "error":
            assert finished.error_code in self.may_fail, f"{self.rid}: {finished}"
            assert finished.error_message
            return
        assert finished.reason == self.task.reason
        assert self.received == self.task.answer
        begin, end = self.scored_from, len(self.task.prompt)
        wanted = self.task.hashes[:0] if begin is None else self.task.hashes[begin - 1 : end - 1]
        assert self.scores == [score_of(int(state)) for state in wanted]
        matched = self.received[-1] if finished.reason == "stop" else None
        assert finished.matched_token == matched


class World:
    def __init__(self, options: Options, reached: Counter[str]) -> None:
        self.options = options
        self.reached = reached
        self.limits = EngineLimits(
            num_pages=options.pool_pages + 1,
            page_size=options.page_size,
            max_running_requests=options.max_running,
            context_length=options.context,
            chunked_prefill_size=options.chunk,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
        )
        config = SchedulerConfig(
            schedule_policy=options.policy,
            disable_radix_cache=not options.prefix_cache,
            max_queue=options.max_queue,
            queue_timeout=QUEUE_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        self.scheduler = Scheduler(config, self.limits, options.frontends)
        self.tasks: dict[int, Task] = {}
        self.device = CheckingDevice(self.limits, self.tasks)
        self.steps = 0
        self._rng = random.Random(f"world {options.seed}")
        self._now = 0.0
        self._clients: dict[int, Client] = {}  # live, by rid
        self._leaving: dict[int, Client] = {}  # abort sent in this step, after a result
        self._ended: deque[int] = deque(maxlen=20)
        self._launched: deque[Launched] = deque()
        self._events: list[Event] = []
        self._next_rid = 0
        self._extends_over: Counter[int] = Counter()  # prefill steps since the last decode
        self._allocations = 0
        self._arriving = 0  # requests of this step so far
        self._prefixes = [
            [self._rng.randrange(VOCAB) for _ in range(SHARED_LENGTH)]
            for _ in range(options.shared_prefixes)
        ]
        self._plant_faults()
        self.scheduler.queues.min_spared_tokens = options.min_spared_tokens
        if options.optimistic:
            self.scheduler.queues.estimate = Optimist()

    def run(self) -> None:
        """Raises AssertionError if anything is wrong."""
        try:
            for _ in range(self.options.steps):
                self._invent_events()
                self._step()
            self._drain()
        except (EngineFault, DeviceFailure) as error:
            if isinstance(error, EngineFault):
                assert self.scheduler.stats.faults >= MAX_FAULTS, f"unprovoked: {error}"
            self.reached["engine failed"] += 1
            self._fail_all()

    # The loops of loop.py

    def _step(self) -> None:
        rng, scheduler = self._rng, self.scheduler
        self._now += rng.random()
        if rng.random() < self.options.clock_jump_rate:
            self._now += rng.choice((-1e6, 100.0, QUEUE_TIMEOUT_S + 1))
            for client in self._clients.values():
                client.may_fail.add("timeout")
        events, self._events = self._events, []
        decodable = self._decodable()
        before = (scheduler.queues.retractions, scheduler.queues.kv.tree.evictions)
        step = scheduler.step(events, self._now)
        self.steps += 1
        self._deliver(step)
        if step.plan is not None:
            check_plan(scheduler, step.plan)
            self._check_gap(step.plan, decodable)
            self._launched.append(self.device.launch(step.plan))
        check_books(scheduler)
        assert scheduler.live.keys() == self._clients.keys(), "ids of scheduler and clients"  # I9
        self._note_reached(step, before)
        depth = 1 if self.options.overlap and step.plan is not None else 0
        if len(self._launched) > depth:
            self._events.append(self._result(self._launched.popleft()))

    def _result(self, launched: Launched) -> Result:
        if self._rng.random() < self.options.device_failure_rate:
            for client in self._clients.values():
                client.may_fail.add("internal")
            raise DeviceFailure
        return self.device.run(launched)

    def _drain(self) -> None:
        """No more arrivals: all must end within the liveness bound."""
        chunk = self.options.chunk
        bound = 100 + 2 * sum(
            -(-len(client.task.prompt) // chunk) + client.task.max_new
            for client in self._clients.values()
        )
        if self.options.refuse_allocation_at:
            bound *= 2  # each refused allocation may cost a step
        for _ in range(bound):
            if self.scheduler.is_idle and not self._events:
                break
            self._step()
        assert self.scheduler.is_idle and not self._clients, f"not done after {bound} more steps"
        kv = self.scheduler.queues.kv
        assert kv.available == kv.pool.num_usable, "pages are held by nobody"

    def _fail_all(self) -> None:
        for client in self._clients.values():
            client.may_fail.add("internal")
        self._deliver(self.scheduler.fail_all("the engine failed"))
        assert not self._clients, "requests without a last word"

    # Clients

    def _invent_events(self) -> None:
        rng, options = self._rng, self.options
        events: list[Event] = []
        # In the loops results come first; nothing may depend on it.
        early = rng.random() < 0.3
        self._arriving = 0
        expected = options.arrivals
        while rng.random() < expected:
            expected -= 1
            events.append(self._new_request())
        live = [rid for rid in self._clients if rid in self.scheduler.live]
        # Before the abort, which might make room for a request with a duplicate's id.
        duplicates = self._duplicate(rng.choice(live)) if live else []
        if live and rng.random() < options.abort_rate:
            rare = [rid for rid in live if self.scheduler.live[rid].retractions]
            events += self._abort(rng.choice(rare or live), early=early)
        if rng.random() < options.abuse_rate:
            events += self._abuse()
        self._events = events + self._events if early else self._events + events
        self._events = duplicates + self._events

    def _new_request(self, rid: int | None = None) -> GenerateRequest:
        rng, options = self._rng, self.options
        if rid is None:
            rid = self._next_rid | rng.randrange(options.frontends) << RID_FRONTEND_SHIFT
            self._next_rid += 1
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, options.prompt_max))]
        if self._prefixes and rng.random() < 0.7:
            shared = rng.choice(self._prefixes)[: rng.randint(1, SHARED_LENGTH)]
            prompt = (shared + prompt)[: options.prompt_max]
        max_new = rng.randint(0 if rng.random() < 0.05 else 1, options.output_max)
        extra = [rng.randrange(VOCAB)] if rng.random() < options.stop_rate else []
        ignore_eos = rng.random() < 0.2
        task = create_task(
            seed=len(self.tasks),
            salt=f"salt {rng.randrange(options.salts)}",
            prompt=prompt,
            max_new=max_new,
            min_new=rng.randint(0, max_new) if rng.random() < 0.2 else 0,
            stop_ids=frozenset(extra if ignore_eos else [*extra, EOS]),
        )
        k = rng.randint(0, 3) if rng.random() < 0.1 else None
        aside = random.Random(f"{options.seed} {task.seed}")  # the other choices stay as they were
        scored_from = aside.randint(1, len(prompt)) if aside.random() < 0.1 else None
        sampling = SamplingParams(
            max_new_tokens=max_new,
            min_new_tokens=task.min_new,
            stop_token_ids=tuple(extra),
            ignore_eos=ignore_eos,
            seed=task.seed,
            logprobs=k,
            prompt_logprobs=None if scored_from is None else 0,
            prompt_logprobs_start=scored_from or 1,
            top_k=5 if rng.random() < 0.1 else -1,
            presence_penalty=1.0 if rng.random() < 0.1 else 0.0,
        )
        self.tasks[task.seed] = task
        client = self._clients[rid] = Client(rid, task, k, scored_from=scored_from)
        need = len(prompt) + max_new
        if need > min(self.limits.context_length, self.limits.max_total_num_tokens):
            client.may_fail.add("context_length_exceeded")
        self._arriving += 1
        if len(self.scheduler.queues.waiting) + self._arriving > options.max_queue:
            client.may_fail.add("overloaded")
        if rng.random() < options.fault_rate:
            rng.choice((self._faulty_admission, self._faulty_commit)).add(task.seed)
            client.may_fail.add("internal")
        return GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, cache_salt=task.salt)

    def _abort(self, rid: int, *, early: bool) -> list[Event]:
        self.reached[f"abort {self._state_of(self.scheduler.live[rid], early)}"] += 1
        client = self._clients.pop(rid)
        self._ended.append(rid)
        events: list[Event] = [AbortRequest(rid)]
        if not early:  # a result that is committed before may still bring its last words
            self._leaving[rid] = client
        elif self._rng.random() < 0.3:  # the id comes back while the old step flies
            events.append(self._new_request(rid))
            self.reached["id used again"] += 1
        return events

    def _duplicate(self, rid: int) -> list[Event]:
        if self._rng.random() >= self.options.abuse_rate / 2:
            return []
        return [GenerateRequest(rid=rid, input_ids=[1, 2], sampling=SamplingParams())]

    def _abuse(self) -> list[Event]:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0 and self._ended:
            late = rng.choice(self._ended)
            return [] if late in self._clients else [AbortRequest(late)]
        if kind == 1:
            return [AbortRequest(rng.choice((-1, 10**9, 2**63)))]
        stranger = self.options.frontends << RID_FRONTEND_SHIFT
        return [GenerateRequest(rid=stranger, input_ids=[1], sampling=SamplingParams())]

    def _deliver(self, step: Step) -> None:
        for frontend, message in step.outputs.items():
            assert type(message) is StepTokens and len(message.rids) == len(message.tokens)
            assert len(set(message.rids)) == len(message.rids)
            for index, (rid, token) in enumerate(zip(message.rids, message.tokens, strict=True)):
                assert rid >> RID_FRONTEND_SHIFT == frontend
                # I8: KeyError = a token after the end
                client = self._leaving[rid] if rid in self._leaving else self._clients[rid]
                client.token(token)
                best = (message.logprobs or {}).get(index)
                assert (best is None) == (client.k is None)
                if best is not None:
                    assert best.logprob == -float(token) and len(best.top_ids) == client.k
            for rid, entries in (message.prompt_logprobs or {}).items():
                asked = self._leaving[rid] if rid in self._leaving else self._clients[rid]
                asked.scores += [entry.logprob for entry in entries]
                self.reached["prompt scored"] += 1
            for finished in message.finished:
                assert finished.rid >> RID_FRONTEND_SHIFT == frontend
                pool = self._leaving if finished.rid in self._leaving else self._clients
                pool.pop(finished.rid).finish(finished)  # I8: exactly one
                self._ended.append(finished.rid)
        self._leaving.clear()

    # Faults

    def _plant_faults(self) -> None:
        self._faulty_admission: set[int] = set()
        self._faulty_commit: set[int] = set()
        queues, planner = self.scheduler.queues, self.scheduler._planner
        pool = queues.kv.pool
        allocate, admit, publish = pool.allocate, planner._open, queues.publish

        def allocate_or_refuse(count: int) -> list[int] | None:
            self._allocations += 1
            every = self.options.refuse_allocation_at
            if count and every and self._allocations % every == 0:
                self.reached["allocation refused"] += 1
                return None
            return allocate(count)

        def admit_or_raise(request: Request, key: bytes, growth: float) -> bool:
            if request.sampling.seed in self._faulty_admission:
                self.reached["admission fault"] += 1
                raise RuntimeError("planted")
            return admit(request, key, growth)

        def publish_or_raise(request: Request) -> None:
            if request.sampling.seed in self._faulty_commit:
                self.reached["commit fault"] += 1
                raise RuntimeError("planted")
            publish(request)

        pool.allocate = allocate_or_refuse  # type: ignore[method-assign]
        planner._open = admit_or_raise  # type: ignore[method-assign]
        queues.publish = publish_or_raise  # type: ignore[method-assign]

    # What the run has seen

    def _decodable(self) -> set[int]:
        return {r.seq for r in self.scheduler.queues.running if r.kv_len < r.kv_limit}

    def _check_gap(self, plan: Plan, waited: set[int]) -> None:
        if not plan.is_extend or self.options.refuse_allocation_at:  # a refusal stalls decode
            self._extends_over.clear()
            return
        for seq in waited & self._decodable():
            self._extends_over[seq] += 1
            assert self._extends_over[seq] <= 2, "decode starves"

    def _state_of(self, request: Request, early: bool) -> str:
        """Where the abort will meet it; an early one meets steps whose result is at hand."""
        flying = any(request in launched.plan.requests for launched in self._launched)
        flying |= early and self.scheduler.queues.is_in_flight(request)
        if request.state is RequestState.WAITING:
            return "retracted" if request.retractions else "queued"
        if request.state is RequestState.PREFILL:
            return "prefill" if flying else "chunk gap"
        if flying and request.kv_len == request.prefill_len:
            return "prefill"
        return "finishing" if request.kv_len >= request.kv_limit else "decode"

    def _note_reached(self, step: Step, before: tuple[int, int]) -> None:
        queues, reached = self.scheduler.queues, self.reached
        reached["retraction"] += queues.retractions - before[0]
        reached["eviction"] += queues.kv.tree.evictions - before[1]
        reached["pool full"] += queues.kv.pool.num_free == 0
        if step.plan is not None:
            reached["chunk split"] += step.plan.is_extend and not all(step.plan.emits)
            reached["cache hit"] += step.plan.cached_tokens > 0
        for message in step.outputs.values():
            for finished in message.finished:
                reached[f"finished {finished.error_code or finished.reason}"] += 1
