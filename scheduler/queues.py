"""Where every live request stands, and what is handed back when one leaves.

The planner moves requests forward through these lists and the scheduler takes them out; both
see the same object. Holds no policy.
"""

from __future__ import annotations

import bisect
from collections import deque

from duograph.scheduler.admission import EngineLimits, OutputEstimate
from duograph.scheduler.kv_cache import KVCache
from duograph.scheduler.policy import arrival_order
from duograph.scheduler.radix_cache import TOKEN_BYTES, common_length
from duograph.scheduler.request import Request, RequestState
from duograph.scheduler.step import Plan

# A newcomer waits for a twin whose prefix is being computed if that spares it at least so many
# tokens and half of its own prefill. Below, one more step would cost it more than it saves.
MIN_SPARED_TOKENS = 32
TWINS_TO_COMPARE = 4


class Queues:
    def __init__(self, limits: EngineLimits, *, prefix_cache: bool) -> None:
        self.limits = limits
        self.kv = KVCache(limits.num_pages, limits.page_size, prefix_cache=prefix_cache)
        self.estimate = OutputEstimate()
        self.waiting: list[Request] = []  # sorted by arrival_order
        self.prefilling: list[Request] = []  # has pages for its whole prefix; chunks are missing
        self.running: list[Request] = []  # decodes
        self.min_spared_tokens = MIN_SPARED_TOKENS
        # Requests whose prefix is being computed, by namespace and first tokens.
        self._unpublished: dict[tuple[str, bytes], list[Request]] = {}
        self.free_rows = list(range(limits.max_running_requests, 0, -1))  # row 0 is the dummy
        self.in_flight: deque[Plan] = deque()  # launched and not committed, oldest first
        self.exchanged: list[tuple[Request, int, int]] = []  # column, page; see take_exchanged
        self.retractions = 0
        self._has_ended = False

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running or self.in_flight)

    def enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        bisect.insort(self.waiting, request, key=arrival_order)

    def end(self, request: Request, *, keep: bool) -> None:
        """The request is over; the lists drop it at the next ``sweep``."""
        self.release(request, keep=keep)
        request.state = RequestState.FINISHED
        self._has_ended = True

    def sweep(self) -> None:
        """Drops finished requests from the lists."""
        if self._has_ended:
            self._has_ended = False
            for queue in (self.waiting, self.prefilling, self.running):
                queue[:] = [r for r in queue if r.state is not RequestState.FINISHED]

    def is_in_flight(self, request: Request) -> bool:
        return bool(self.in_flight) and request.last_step >= self.in_flight[0].step_id

    def begin_prefix(self, request: Request, key: bytes) -> None:
        """``key`` is being computed for the request, until ``end_prefix``."""
        request.prefill_key = key
        head = (request.cache_salt, key[: self.min_spared_tokens * TOKEN_BYTES])
        self._unpublished.setdefault(head, []).append(request)

    def end_prefix(self, request: Request) -> bytes:
        key, request.prefill_key = request.prefill_key, b""
        if key:
            head = (request.cache_salt, key[: self.min_spared_tokens * TOKEN_BYTES])
            others = self._unpublished[head]
            others.remove(request)
            if not others:
                del self._unpublished[head]
        return key

    def has_twin(self, request: Request, key: bytes) -> bool:
        """Whether a request that is being prefilled will soon have published most of ``key``:
        of n choices, or of a burst with one system prompt, the first computes it for all."""
        if not self.kv.has_prefix_cache or not self._unpublished:
            return False
        if request.cache_limit is not None:  # it computes what it could share
            return False
        head = (request.cache_salt, key[: self.min_spared_tokens * TOKEN_BYTES])
        twins = self._unpublished.get(head)
        if twins is None:
            return False
        cached = self.kv.match(request.cache_salt, key)
        tokens = len(key) // TOKEN_BYTES
        for twin in twins[:TWINS_TO_COMPARE]:
            shared = min(common_length(twin.prefill_key, key) // TOKEN_BYTES, tokens - 1)
            spared = shared // self.kv.page_size * self.kv.page_size - cached
            if spared >= self.min_spared_tokens and 2 * spared >= tokens - cached:
                return True
        return False

    def publish(self, request: Request) -> None:
        """The request's whole prefix has been computed: others may share its pages."""
        if request.lease is not None and request.state is RequestState.DECODE:
            key = self.end_prefix(request)
            changes = self.kv.publish(request.lease, request.cache_salt, key)
            self.exchanged += [(request, column, page) for column, page in changes]

    def take_exchanged(self) -> list[tuple[int, int, int]]:
        """(row, column, page) that the device must learn, of requests that still hold them."""
        if not self.exchanged:
            return []
        exchanged, self.exchanged = self.exchanged, []
        return [
            (request.row, column, page)
            for request, column, page in exchanged
            if request.lease is not None and request.lease.pages[column : column + 1] == [page]
        ]

    def retract(self, request: Request) -> None:
        """Takes pages and row away; the request waits to be computed again. Its output stays,
        and the token that a step in flight still brings is added to it."""
        queue = self.running if request.state is RequestState.DECODE else self.prefilling
        queue.remove(request)
        self.release(request, keep=True)
        request.retractions += 1
        self.retractions += 1
        self.estimate.retracted()
        self.enqueue(request)

    def release(self, request: Request, *, keep: bool) -> None:
        """Hands back row and pages; does nothing for a request that holds none.

        ``keep`` publishes the computed pages in the prefix cache. What a step in flight may
        still write goes into that step's late lists and is free when it has been committed.
        """
        lease = request.lease
        if lease is None:
            return
        computed, newest = request.kv_len, None
        if self.is_in_flight(request):
            for plan in self.in_flight:
                if request in plan.requests:
                    at = plan.requests.index(request)
                    start = plan.starts[at] if plan.is_extend else plan.seq_lens[at] - 1
                    computed, newest = min(computed, start), plan
        if keep:
            self.kv.publish(lease, request.cache_salt, request.key[: computed * 4])
        late = self.kv.close(lease, computed)
        if newest is None:
            self.kv.pool.free(late)
            self.free_rows.append(request.row)
        else:
            newest.late_pages += late
            newest.late_rows.append(request.row)
        self.end_prefix(request)
        request.lease, request.row, request.kv_len = None, 0, 0

    def free_late(self, plan: Plan) -> None:
        """``plan`` is over: nothing writes any more what it held back."""
        self.kv.pool.free(plan.late_pages)
        self.free_rows += plan.late_rows

    def check(self) -> list[int]:
        """The pages in the prefix cache. Raises AssertionError unless every page and every row
        is in exactly one place."""
        held = self.prefilling + self.running
        late_pages = [page for plan in self.in_flight for page in plan.late_pages]
        late_rows = [row for plan in self.in_flight for row in plan.late_rows]
        cached = self.kv.check([r.lease for r in held if r.lease is not None], late_pages)
        rows = sorted(self.free_rows + late_rows + [request.row for request in held])
        if rows != list(range(1, self.limits.max_running_requests + 1)):
            raise AssertionError(f"rows lost or in two places: {rows}")
        strays = [r.rid for r in self.waiting if r.lease is not None or r.row]
        if strays:
            raise AssertionError(f"waiting requests that hold pages or rows: {strays}")
        return cached
