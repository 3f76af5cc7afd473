"""What the next step computes. Decides and books; nothing is launched here.

A step is either *extend* (chunks of prompts, up to the token budget, oldest first, then
newcomers) or *decode* (one token for every request whose prefix is planned). Extend goes first,
for throughput, but at most MAX_EXTENDS_IN_A_ROW times while a decode waits. A newcomer gets the
pages of its whole prefix at once, so a half-prefilled request never waits for a page; only
decode grows, by a page each page_size tokens. When pages run out, running requests are
retracted: their output stays and their prefix is computed again later. Plans are made from
planned lengths, so step n + 1 can be planned while n runs. Knows no clock and no message.
"""

from __future__ import annotations

import math

from duograph.scheduler import policy
from duograph.scheduler.admission import MAX_EXPECTED_TOKENS
from duograph.scheduler.queues import Queues
from duograph.scheduler.request import Request, RequestState
from duograph.scheduler.step import Plan, PromptSpan

# With 2, a burst stays one: 256 streams of one length that began together end together, and each
# waits for half of the others' prompts, over and over. With 1, those that came in with one step
# are a decode step apart from those of the next, and meet an empty queue when they come back.
MAX_EXTENDS_IN_A_ROW = 1


class Planner:
    def __init__(self, queues: Queues, *, schedule_policy: str) -> None:
        self._queues = queues
        self._lpm = schedule_policy == "lpm"
        self._next_step_id = 0
        self._extends_in_a_row = 0  # while a decode waited
        self.faulted: list[tuple[Request, Exception]] = []  # admission failed; for the caller

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing to run before the next result."""
        decode_waits = any(r.kv_len < r.kv_limit for r in self._queues.running)
        extend_first = not decode_waits or self._extends_in_a_row < MAX_EXTENDS_IN_A_ROW
        plan = self._plan_extend() if extend_first else None
        if plan is None and decode_waits:
            plan = self._plan_decode()
        if plan is None and not extend_first:
            plan = self._plan_extend()
        if plan is None:
            return None
        self._extends_in_a_row = (
            self._extends_in_a_row + 1 if plan.is_extend and decode_waits else 0
        )
        self._next_step_id += 1
        plan.page_updates += self._queues.take_exchanged()
        return plan

    def _new_plan(self, *, is_extend: bool) -> Plan:
        return Plan(
            step_id=self._next_step_id,
            is_extend=is_extend,
            requests=[],
            rows=[],
            seq_lens=[],
            starts=[],
            emits=[],
            pages=[],
            tokens=[],
        )

    # Extend

    def _plan_extend(self) -> Plan | None:
        queues = self._queues
        if not queues.prefilling and not (queues.waiting and queues.free_rows):
            return None
        plan = self._new_plan(is_extend=True)
        budget = queues.limits.chunked_prefill_size
        for request in queues.prefilling:
            if budget == 0:
                break
            budget -= self._add_chunk(plan, request, budget)
        if any(plan.emits):
            queues.prefilling = [r for r in queues.prefilling if r.state is RequestState.PREFILL]
        if budget and queues.waiting and queues.free_rows:
            self._admit(plan, budget)
        return plan if plan.requests else None

    def _admit(self, plan: Plan, budget: int) -> None:
        """Lets waiting requests in, in order, as long as tokens, rows and pages last. The first
        that does not fit ends it: overtaking would starve the large ones."""
        queues = self._queues
        order = queues.waiting
        if self._lpm:
            order = policy.longest_prefix_first(
                order, lambda r: queues.kv.match(r.cache_salt, r.key, r.cache_limit)
            )
        growth = self._expected_growth()
        for request in order[: policy.WINDOW]:
            if budget == 0 or not queues.free_rows or queues.is_in_flight(request):
                break
            try:
                key = request.key
                if queues.has_twin(request, key):
                    continue
                if not self._open(request, key, growth):
                    break
            except Exception as error:  # ends this request only; reported by the caller
                self.faulted.append((request, error))
                continue
            self._enter(plan, request, key)
            growth += self._expected_output(request)
            budget -= self._add_chunk(plan, request, budget)
            if request.state is RequestState.PREFILL:
                queues.prefilling.append(request)
        if plan.new_rows:
            queues.waiting = [r for r in queues.waiting if r.state is RequestState.WAITING]
            if self._lpm:
                for request in queues.waiting[: policy.WINDOW]:
                    request.deferred += 1

    def _open(self, request: Request, key: bytes, growth: float) -> bool:
        """Gives the request its pages if they, and what the others are expected to need, are
        there. A request that would be alone needs its pages only."""
        queues, kv = self._queues, self._queues.kv
        need = kv.cost(request.cache_salt, key, request.cache_limit)
        if queues.running or queues.prefilling:
            need += math.ceil((growth + self._expected_output(request)) / kv.page_size)
        if need > kv.available:
            return False
        request.lease = kv.open(request.cache_salt, key, request.cache_limit)
        return request.lease is not None

    def _enter(self, plan: Plan, request: Request, key: bytes) -> None:
        assert request.lease is not None
        queues = self._queues
        request.state = RequestState.PREFILL
        request.row = queues.free_rows.pop()
        request.kv_len = request.lease.num_cached_pages * queues.kv.page_size
        request.prefill_len = request.prompt_len + len(request.output_ids)
        queues.begin_prefix(request, key)
        plan.new_rows.append(request)
        plan.cached_tokens += request.kv_len
        row = request.row
        plan.page_updates += [(row, col, page) for col, page in enumerate(request.lease.pages)]

    def _add_chunk(self, plan: Plan, request: Request, budget: int) -> int:
        """Plans up to ``budget`` tokens of the request's prefix; returns how many."""
        start = request.kv_len
        end = min(start + budget, request.prefill_len)
        is_last = end == request.prefill_len
        plan.requests.append(request)
        plan.rows.append(request.row)
        plan.starts.append(start)
        plan.seq_lens.append(end)
        plan.emits.append(is_last)
        plan.tokens.append(request.tokens(start, end))
        page_size = self._queues.kv.page_size
        assert request.lease is not None
        plan.pages += request.lease.pages[start // page_size : (end - 1) // page_size + 1]
        request.kv_len = end
        request.last_step = plan.step_id
        if request.scored < request.prompt_len:
            _note_scores(plan, request, start, end)
        if is_last:
            request.state = RequestState.DECODE
            self._queues.running.append(request)
            plan.filtered |= request.needs_filter
            if request.is_special:
                _note_sampling(plan, len(plan.requests) - 1, request)
        return end - start

    def _expected_growth(self) -> float:
        """Tokens that the requests inside are expected still to write."""
        held = self._queues.running + self._queues.prefilling
        left = [
            min(r.max_new_tokens, MAX_EXPECTED_TOKENS) - max(0, r.kv_len - r.prompt_len)
            for r in held
        ]
        return sum(n for n in left if n > 0) * self._queues.estimate.ratio + len(held)

    def _expected_output(self, request: Request) -> float:
        left = min(request.max_new_tokens, MAX_EXPECTED_TOKENS) - len(request.output_ids)
        return max(0, left) * self._queues.estimate.ratio + 1

    # Decode

    def _plan_decode(self) -> Plan | None:
        queues = self._queues
        page_size = queues.kv.page_size
        needy = self._needy()
        if len(needy) > queues.kv.available:
            self._retract()
            needy = self._needy()
        granted, stalled = needy, set[int]()
        if len(needy) > queues.kv.available:  # more comes back when the step in flight is over
            order = policy.victims(needy)
            granted = order[len(needy) - queues.kv.available :]
        if granted and not queues.kv.grow([r.lease for r in granted if r.lease is not None]):
            granted = []
        if len(granted) < len(needy):
            stalled = {r.row for r in needy} - {r.row for r in granted}
        ready = [r for r in queues.running if r.kv_len < r.kv_limit]
        if stalled:
            ready = [r for r in ready if r.row not in stalled]
        if not ready:
            return None
        plan = self._new_plan(is_extend=False)
        plan.requests = ready
        plan.rows = [r.row for r in ready]
        plan.page_updates = [
            (r.row, r.kv_len // page_size, r.lease.pages[-1]) for r in granted if r.lease
        ]
        plan.pages = [r.lease.pages[-1] for r in ready if r.lease]
        step_id = plan.step_id
        for request in ready:
            request.kv_len += 1
            request.last_step = step_id
        plan.seq_lens = [r.kv_len for r in ready]
        plan.filtered = True in [r.needs_filter for r in ready]
        for index in [i for i, r in enumerate(ready) if r.is_special]:
            _note_sampling(plan, index, ready[index])
        return plan

    def _needy(self) -> list[Request]:
        """Requests whose next token begins a page."""
        page_size = self._queues.kv.page_size
        return [
            r for r in self._queues.running if r.kv_len % page_size == 0 and r.kv_len < r.kv_limit
        ]

    def _retract(self) -> None:
        """Retracts until the rest can go on, now or when the step in flight gives pages back.
        Always keeps one."""
        queues = self._queues
        finishing = [r for r in queues.running if r.kv_len >= r.kv_limit]
        coming = sum(r.lease.num_own_pages for r in finishing if r.lease)
        candidates = policy.victims(
            [r for r in queues.running if r.kv_len < r.kv_limit] + queues.prefilling
        )
        for victim in candidates[:-1]:
            late = sum(len(plan.late_pages) for plan in queues.in_flight)
            if len(self._needy()) <= queues.kv.available + late + coming:
                return
            queues.retract(victim)


def _note_scores(plan: Plan, request: Request, start: int, end: int) -> None:
    """The chunk start .. end - 1, planned last, is followed by tokens start + 1 .. end."""
    begin, stop = request.scored, min(end + 1, request.prompt_len)
    if begin < stop:
        k = request.sampling.prompt_logprobs or 0
        span = PromptSpan(skip=begin - 1 - start, begin=begin, end=stop, k=k)
        plan.prompt_logprobs[len(plan.requests) - 1] = span
        request.scored = stop


def _note_sampling(plan: Plan, index: int, request: Request) -> None:
    """What sampling the next token of ``requests[index]`` needs besides the row tables."""
    sampling = request.sampling
    if sampling.needs_penalty:
        plan.penalized.append(index)
    if sampling.logprobs is not None:
        plan.logprobs[index] = sampling.logprobs
    bias = dict(sampling.logit_bias)
    if request.grammar is not None:
        plan.constrained.append(index)
    if request.planned_outputs <= request.min_new_tokens:
        bias |= dict.fromkeys(request.stop_ids, -math.inf)
    if bias:
        plan.bias[index] = bias
