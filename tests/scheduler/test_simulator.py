"""The scheduler against simulated histories: see sim/. A failure prints its seed, its options
and the command that replays it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duograph.runners.step_inputs import StepInputs
from duograph.scheduler import planner
from duograph.scheduler.kv_cache import KVCache, PageLease
from duograph.scheduler.page_pool import PagePool
from duograph.scheduler.queues import Queues
from duograph.scheduler.radix_cache import Node, RadixCache
from duograph.scheduler.request import Request, RequestState
from duograph.scheduler.step import Outbox, Plan
from duograph.tests.scheduler.sim import device
from duograph.tests.scheduler.sim.runner import (
    MUST_REACH,
    SimulationFailed,
    run_seed,
    run_seeds,
    run_steps,
)
from duograph.tests.step_arrays import StepArrays, step_arrays

CI_STEPS = 300_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_history_keeps_the_invariants_and_the_answers() -> None:
    reached = run_steps(CI_STEPS)
    missed = {name: reached[name] for name, least in MUST_REACH.items() if reached[name] < least}
    assert not missed, f"the histories did not get there often enough: {missed}"


def test_a_few_histories_as_a_quick_check() -> None:
    reached, steps = run_seeds(range(10_000, 10_040))
    assert steps > 4_000 and reached["finished length"] > 100


def test_a_failure_names_the_seed_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "finished", lambda *_: None)
    with pytest.raises(SimulationFailed, match=r"seed 3,[\s\S]*page_size=[\s\S]*sim --seed 3"):
        run_seed(3)


Patch = pytest.MonkeyPatch


def wrong_out_cache_loc(patch: Patch) -> None:
    def shifted(inputs: StepInputs, page_size: int) -> StepArrays:
        arrays = step_arrays(inputs, page_size)
        arrays.out_cache_loc[-1] += 1
        return arrays

    patch.setattr(device, "step_arrays", shifted)


def pages_freed_twice(patch: Patch) -> None:
    honest = PagePool.free

    def free(pool: PagePool, pages: list[int]) -> None:
        honest(pool, pages)
        pool._free += pages[:1]  # behind the back of the pool's own guard

    patch.setattr(PagePool, "free", free)


def pages_of_a_step_in_flight_freed_at_once(patch: Patch) -> None:
    honest = KVCache.close

    def close(kv: KVCache, lease: PageLease, computed_tokens: int) -> list[int]:
        kv.pool.free(honest(kv, lease, computed_tokens))
        return []

    patch.setattr(KVCache, "close", close)


def pages_lost_on_retraction(patch: Patch) -> None:
    honest = Queues.retract

    def retract(queues: Queues, request: Request) -> None:
        assert request.lease is not None
        request.lease.pages.pop()
        honest(queues, request)

    patch.setattr(Queues, "retract", retract)


def locks_ignored_by_eviction(patch: Patch) -> None:
    def is_evictable(_: RadixCache, node: Node, used: int) -> bool:
        return node.used == used and not node.children and node.parent is not None

    patch.setattr(RadixCache, "_is_evictable", is_evictable)
    patch.setattr(RadixCache, "_lock", lambda *_: None)
    patch.setattr(RadixCache, "unlock", lambda *_: None)
    honest = RadixCache.insert

    def insert(cache: RadixCache, *args: object) -> tuple[Node, list[int]]:
        end, pages = honest(cache, *args)  # type: ignore[arg-type]
        cache._push(end)
        return end, pages

    patch.setattr(RadixCache, "insert", insert)


def prefix_match_one_page_too_long(patch: Patch) -> None:
    honest = RadixCache._walk

    def walk(cache: RadixCache, root: Node, key: bytes, max_pages: int) -> tuple[list[Node], int]:
        path, partial = honest(cache, root, key, max_pages)
        return path, partial + 1 if partial else 0

    patch.setattr(RadixCache, "_walk", walk)


def namespaces_ignored(patch: Patch) -> None:
    honest_lock, honest_insert = RadixCache.lock_prefix, RadixCache.insert
    patch.setattr(RadixCache, "lock_prefix", lambda c, _, *rest: honest_lock(c, "", *rest))
    patch.setattr(RadixCache, "insert", lambda c, _, *rest: honest_insert(c, "", *rest))


def chunk_starts_one_token_late(patch: Patch) -> None:
    honest = Request.tokens

    def tokens(request: Request, start: int, end: int):  # type: ignore[no-untyped-def]
        return honest(request, start - (start > 0), end - (start > 0))

    patch.setattr(Request, "tokens", tokens)


def last_chunk_leaves_a_token_out(patch: Patch) -> None:
    honest = planner.Planner._add_chunk

    def add_chunk(self: planner.Planner, plan: Plan, request: Request, budget: int) -> int:
        if request.kv_len and request.prefill_len - request.kv_len > 1:
            request.prefill_len -= 1
        return honest(self, plan, request, budget)

    patch.setattr(planner.Planner, "_add_chunk", add_chunk)


def exchanged_pages_never_reach_the_device(patch: Patch) -> None:
    patch.setattr(Queues, "take_exchanged", lambda _: [])


def output_lost_on_retraction(patch: Patch) -> None:
    honest = Queues.retract

    def retract(queues: Queues, request: Request) -> None:
        honest(queues, request)
        del request.output_ids[-1:]

    patch.setattr(Queues, "retract", retract)


def min_new_tokens_not_enforced(patch: Patch) -> None:
    patch.setattr(planner, "_note_sampling", lambda *_: None)


def decode_starves(patch: Patch) -> None:
    patch.setattr(planner, "MAX_EXTENDS_IN_A_ROW", 10**9)


def retracted_requests_forgotten(patch: Patch) -> None:
    honest = Queues.enqueue

    def enqueue(queues: Queues, request: Request) -> None:
        if request.retractions:
            request.state = RequestState.WAITING
        else:
            honest(queues, request)

    patch.setattr(Queues, "enqueue", enqueue)


@pytest.mark.parametrize(
    "plant",
    [
        wrong_out_cache_loc,
        pages_freed_twice,
        pages_of_a_step_in_flight_freed_at_once,
        pages_lost_on_retraction,
        locks_ignored_by_eviction,
        prefix_match_one_page_too_long,
        namespaces_ignored,
        chunk_starts_one_token_late,
        last_chunk_leaves_a_token_out,
        exchanged_pages_never_reach_the_device,
        output_lost_on_retraction,
        min_new_tokens_not_enforced,
        decode_starves,
        retracted_requests_forgotten,
    ],
)
def test_a_planted_bug_is_caught(
    plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationFailed):
        run_seeds(range(150))
