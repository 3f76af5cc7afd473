"""Actual sizes of steps, what they took, and when a graph was used last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duograph.scheduler.last_use import LastUse
from duograph.scheduler.stats import SchedulerStats
from duograph.scheduler.step_sizes import StepSizes
from duograph.tests.scheduler.driver import Driver, request


def test_small_sizes_are_counted_one_by_one() -> None:
    sizes = StepSizes()
    for size in (32, 1, 31, 32):
        sizes.observe(size, None)
    assert sizes.rows() == [(1, 1, 1, 0, 0.0), (31, 1, 31, 0, 0.0), (32, 2, 64, 0, 0.0)]


def test_a_bin_tells_the_largest_size_that_it_has_met() -> None:
    sizes = StepSizes()
    for size in (993, 1000, 995):
        sizes.observe(size, 0.5)
    assert sizes.rows() == [(1000, 3, 2988, 3, 1.5)]


@given(st.lists(st.integers(1, 16384), max_size=200))
def test_bins_are_narrow_and_lose_nothing(observed: list[int]) -> None:
    sizes = StepSizes()
    for size in observed:
        sizes.observe(size, None)
    rows = sizes.rows()
    assert sum(row[1] for row in rows) == len(observed)
    assert sum(row[2] for row in rows) == sum(observed)
    for largest, steps, total, _, _ in rows:
        assert largest in observed
        assert total / steps > largest * (1 - 1 / 16)
    edges = [row[0] for row in rows]
    assert edges == sorted(edges)


def test_the_number_of_bins_has_a_bound() -> None:
    sizes = StepSizes()
    for size in range(1, 16385):
        sizes.observe(size, None)
    assert len(sizes.rows()) == 32 + 16 * 9


def test_a_step_is_timed_only_while_the_device_had_work() -> None:
    stats = SchedulerStats()
    stats.observe_step(False, 4, 10.0, True)  # nothing came before it
    stats.observe_step(False, 4, 10.25, False)
    stats.observe_step(False, 4, 99.0, True)  # the device was idle meanwhile
    stats.observe_step(True, 7, 99.5, False)
    assert stats.decode_steps_by_size.rows() == [(4, 3, 12, 1, 0.25)]
    assert stats.prefill_steps_by_size.rows() == [(7, 1, 7, 1, 0.5)]
    assert (stats.steps, stats.decode_steps, stats.extend_steps) == (4, 3, 1)


def test_the_scheduler_counts_each_step_by_its_rows_or_tokens() -> None:
    driver = Driver()
    driver.run(request(1, prompt=6, new=3), request(2, prompt=5, new=3))
    stats = driver.scheduler.stats
    assert [row[:3] for row in stats.prefill_steps_by_size.rows()] == [(11, 1, 11)]
    assert [row[:3] for row in stats.decode_steps_by_size.rows()] == [(2, 2, 4)]


def replays(**decode: int) -> dict[str, Any]:
    sizes = {name[1:]: {"replays": count} for name, count in decode.items()}
    return {"decode": {"sizes": sizes}, "prefill": {"sizes": {"64": {"replays": 2}}}}


def test_a_size_is_used_when_its_replays_have_grown() -> None:
    last, name = LastUse(), "duograph_graph_last_replay_timestamp_seconds"
    assert last.update(replays(s1=5, s8=0), 100.0) == {}, "the start's own warm-up"
    assert last.update(replays(s1=5, s8=3), 101.0) == {f'{name}{{phase="decode",size="8"}}': 101.0}
    found = last.update(replays(s1=6, s8=3), 102.0)
    assert found == {
        f'{name}{{phase="decode",size="8"}}': 101.0,
        f'{name}{{phase="decode",size="1"}}': pytest.approx(102.0),
    }
