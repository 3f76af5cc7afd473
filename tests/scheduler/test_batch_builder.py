"""Plans as tensors: positions, slots, row initialisations, sampling facts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from duograph.runners.batch import ForwardBatch, ForwardMode
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.step import Plan
from duograph.tests.scheduler.driver import LIMITS, Driver, request
from duograph.tests.step_arrays import StepArrays, step_arrays


def builder() -> BatchBuilder:
    return BatchBuilder(page_size=LIMITS.page_size, pinned=False)


def arrays_of(batch: ForwardBatch) -> StepArrays:
    return step_arrays(batch.inputs, LIMITS.page_size)


def test_an_extend_step_lays_out_its_chunks_one_after_the_other() -> None:
    driver = Driver()
    driver.step(request(1, prompt=list(range(10, 20))), request(2, prompt=list(range(30, 40))))
    plan = driver.plans[0]
    batch = builder().build(plan)
    pages = [request.lease.pages for request in plan.requests if request.lease]
    slots = [pages[0][p // 4] * 4 + p % 4 for p in range(10)]
    slots += [pages[1][p // 4] * 4 + p % 4 for p in range(6)]
    assert batch.mode is ForwardMode.EXTEND and batch.step_id == 0
    arrays = arrays_of(batch)
    assert arrays.input_ids is not None
    assert arrays.input_ids.tolist() == [*range(10, 20), *range(30, 36)]
    assert arrays.positions.tolist() == [*range(10), *range(6)]
    assert arrays.out_cache_loc.tolist() == slots
    assert batch.extend_lens == [10, 6] and arrays.seq_lens.tolist() == [10, 6]
    assert arrays.rows.tolist() == plan.rows
    assert [init.row for init in batch.row_inits] == plan.rows
    assert {tuple(column) for column in arrays.page_updates.T.tolist()} == {
        (row, at, page)
        for row, own in zip(plan.rows, pages, strict=True)
        for at, page in enumerate(own)
    }


def test_a_later_chunk_starts_where_the_last_one_ended() -> None:
    driver = Driver(chunked_prefill_size=7)
    driver.step(request(1, prompt=list(range(10, 30))))
    driver.step()
    plan = driver.plans[1]
    batch = builder().build(plan)
    lease = plan.requests[0].lease
    arrays = arrays_of(batch)
    assert arrays.input_ids is not None and lease is not None
    assert arrays.input_ids.tolist() == list(range(17, 24))
    assert arrays.positions.tolist() == list(range(7, 14))
    assert arrays.out_cache_loc.tolist() == [lease.pages[p // 4] * 4 + p % 4 for p in range(7, 14)]
    assert arrays.seq_lens.tolist() == [14] and not arrays.page_updates.size


def test_a_decode_step_has_one_token_per_row_and_no_input_ids() -> None:
    driver = Driver()
    driver.step(request(1, prompt=5, new=9), request(2, prompt=4, new=9))
    driver.step()
    plan = driver.plans[1]
    batch = builder().build(plan)
    arrays = arrays_of(batch)
    assert batch.mode is ForwardMode.DECODE and arrays.input_ids is None
    assert batch.num_tokens == batch.batch_size == 2
    assert arrays.positions.tolist() == [5, 4] and arrays.seq_lens.tolist() == [6, 5]
    assert batch.extend_lens == [1, 1]
    pages = [request.lease.pages[-1] for request in plan.requests if request.lease]
    assert arrays.out_cache_loc.tolist() == [pages[0] * 4 + 1, pages[1] * 4]
    assert arrays.page_updates.size, "the second request began a page"
    assert arrays.page_updates.T.tolist() == [[plan.rows[1], 1, pages[1]]]


def test_token_lists_go_along_only_for_penalties_and_after_a_retraction_with_the_output() -> None:
    driver = Driver()
    driver.step(request(1, prompt=3), request(2, prompt=3, presence_penalty=0.5))
    inits = builder().build(driver.plans[0]).row_inits
    assert inits[0].prompt_ids is None and inits[0].output_ids is None
    assert inits[1].prompt_ids == [12, 13, 14] and inits[1].output_ids == []
    driver.step()
    victim = driver.plans[0].requests[1]
    driver.step()
    done = list(victim.output_ids)
    driver.scheduler.queues.retract(victim)
    while victim not in driver.plans[-1].new_rows:
        driver.step()
    init = builder().build(driver.plans[-1]).row_inits[0]
    assert init.output_ids is not None and init.output_ids[: len(done)] == done
    assert driver.plans[-1].penalized == [0]


def test_sampling_facts_carry_batch_indices() -> None:
    driver = Driver()
    driver.step(
        request(1, prompt=3),
        request(2, prompt=3, top_k=5, logprobs=2),
        request(3, prompt=3, frequency_penalty=1.0, logit_bias={4: 2.0}),
    )
    for plan in (driver.plans[0], (driver.step().plan)):
        assert plan is not None
        sampling = builder().build(plan).sampling
        assert sampling.filtered
        assert sampling.logprobs == {1: 2}
        assert sampling.penalized == [2]
        assert sampling.bias == {2: {4: 2.0}}


def test_a_chunk_that_is_not_the_last_asks_for_no_sampling() -> None:
    driver = Driver(chunked_prefill_size=4)
    driver.step(request(1, prompt=6, top_k=5, logprobs=1, presence_penalty=1.0))
    sampling = builder().build(driver.plans[0]).sampling
    assert not sampling.filtered and not sampling.logprobs and not sampling.penalized


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_follow_pages_at_every_page_size(page_size: int) -> None:
    driver = Driver(SchedulerConfig(), page_size=page_size, num_pages=200, context_length=150)
    driver.run(
        request(1, prompt=29, new=20), request(2, prompt=17, new=5), request(3, prompt=40, new=9)
    )
    seen: dict[int, list[int]] = {}

    def slots_of(plan: Plan) -> None:
        built = BatchBuilder(page_size=page_size, pinned=False).build(plan)
        arrays = step_arrays(built.inputs, page_size)
        at = 0
        for index, owner in enumerate(plan.requests):
            start = plan.starts[index] if plan.is_extend else plan.seq_lens[index] - 1
            count = plan.seq_lens[index] - start
            slots = arrays.out_cache_loc[at : at + count].tolist()
            assert arrays.positions[at : at + count].tolist() == [*range(start, start + count)]
            seen.setdefault(owner.rid, []).extend(slots)
            at += count
        assert at == len(arrays.out_cache_loc)

    for plan in driver.plans:
        slots_of(plan)
    # token n of a request shares its page with token n - 1 unless n begins one
    for slots in seen.values():
        for position, (before, slot) in enumerate(pairwise(slots), start=1):
            assert (slot == before + 1) or position % page_size == 0
        assert all(np.array(slots) >= page_size), "never the dummy page"
