"""What must hold after every step, whatever the schedule. Raises AssertionError."""

from __future__ import annotations

from duograph.scheduler.request import RequestState
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Plan


def check_books(scheduler: Scheduler) -> None:
    """I1 to I4, and that no page which a step in flight writes is anybody else's."""
    queues, page_size = scheduler.queues, scheduler.limits.page_size
    in_tree = set(queues.check())  # I1: every page in one place; I3: every row in one place
    owners: dict[int, int] = {}
    for request in queues.running + queues.prefilling:
        lease = request.lease
        assert lease is not None and request.row, f"{request.rid} runs without pages or row"
        length = request.kv_len if request.state is RequestState.DECODE else request.prefill_len
        assert len(lease.pages) == -(-length // page_size), (
            f"{request.rid}: pages for {length}"
        )  # I2
        assert len(set(lease.pages)) == len(lease.pages)
        locked = set(lease.pages[: lease.shared])
        assert locked <= in_tree, f"locked pages evicted: {locked - in_tree}"  # I4
        for page in lease.pages[lease.shared :]:
            owners[page] = request.seq
    free = set(queues.kv.pool.free_pages())
    for plan in queues.in_flight:
        for request, page in written_pages(plan, page_size):
            assert page not in free and page not in in_tree, f"page {page} is still written"
            owner = owners.setdefault(page, request.seq)
            assert owner == request.seq, f"page {page} is written for one and held by another"
    for request in queues.waiting:
        assert request.state is RequestState.WAITING


def written_pages(plan: Plan, page_size: int):  # type: ignore[no-untyped-def]
    """(request, page) for each page that ``plan`` writes."""
    at = 0
    for index, request in enumerate(plan.requests):
        first = plan.starts[index] if plan.is_extend else plan.seq_lens[index] - 1
        count = (plan.seq_lens[index] - 1) // page_size - first // page_size + 1
        for page in plan.pages[at : at + count]:
            yield request, page
        at += count


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """I5, and that a plan says the same thing in all its lists."""
    limits = scheduler.limits
    size = len(plan.requests)
    assert 0 < size <= limits.max_running_requests
    assert len(set(plan.rows)) == size == len(plan.rows) == len(plan.seq_lens)
    assert 0 < min(plan.rows) and max(plan.rows) <= limits.max_running_requests
    if plan.is_extend:
        assert plan.num_tokens <= limits.chunked_prefill_size
        assert len(plan.starts) == len(plan.emits) == len(plan.tokens) == size
        assert sum(not emits for emits in plan.emits) <= 1, "two prompts cut in one step"
    sampled = [
        r for r, emits in zip(plan.requests, plan.emits or [True] * size, strict=True) if emits
    ]
    assert plan.filtered == any(r.sampling.needs_filter for r in sampled)
    assert len(plan.logprobs) == sum(r.sampling.logprobs is not None for r in sampled)
    assert len(plan.penalized) == sum(r.sampling.needs_penalty for r in sampled)
