"""Advice on sizes, from planted traffic whose best answer is known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duograph.scheduler.graph_advice import (
    MAX_LOSS,
    MIN_STEPS,
    Advice,
    Change,
    Cost,
    Use,
    advise,
)


def captured(*sizes: int) -> dict[int, Cost]:
    return {size: Cost(size / 10, size << 20) for size in sizes}


def exact(**steps: int) -> list[Use]:
    """``r5=100``: a hundred steps of five rows."""
    return [Use(int(name[1:]), n, n * int(name[1:])) for name, n in steps.items()]


def changes(advice: Advice) -> list[tuple[str, int]]:
    return [(change.action, change.size) for change in advice.changes]


def padding_of(sizes: tuple[int, ...], uses: list[Use]) -> int:
    """Row by row, as a runner pads."""
    padded = 0
    for use in uses:
        held = [size for size in sizes if size >= use.size]
        if held:
            padded += use.steps * min(held) - use.total
    return padded


def test_a_busy_size_between_two_captured_ones_is_added() -> None:
    advice = advise(captured(1, 2, 4, 8), exact(r1=50, r5=1000, r8=50), limit=64)
    assert changes(advice) == [("add", 5)]
    assert advice.changes[0].padding_saved == 3000
    assert advice.sizes == (1, 2, 4, 5, 8)
    assert (advice.padding, advice.padding_advised) == (3000, 0)
    assert (advice.computed, advice.computed_advised) == (50 + 8 * 1050, 50 + 5400)


def test_the_cost_of_an_addition_is_its_neighbours() -> None:
    advice = advise(captured(1, 2, 4, 8), exact(r5=1000), limit=64)
    assert advice.changes[0].cost == Cost(0.4, 4 << 20), "not the largest's: that holds the pool"


def test_steps_above_the_largest_size_ask_for_a_larger_one() -> None:
    advice = advise(captured(1, 2, 4), exact(r4=1000, r6=30, r7=20), limit=64)
    first = advice.changes[0]
    assert (first.action, first.size, first.steps_gained) == ("add", 7, 50)
    assert first.cost.nbytes == 7 << 20 and first.cost.seconds == pytest.approx(0.7)
    assert max(advice.sizes) == 7


def test_no_size_above_the_limit_is_advised() -> None:
    assert changes(advise(captured(1, 2, 4), exact(r4=1000, r9=500), limit=8)) == []


def test_a_size_that_had_no_memory_is_not_advised_again() -> None:
    uses = exact(r4=1000, r6=30, r9=20)
    advice = advise(captured(1, 2, 4), uses, limit=64, refused=[9])
    assert changes(advice) == [("add", 6)] and advice.changes[0].steps_gained == 30


def test_a_size_that_nobody_uses_is_dropped_with_what_it_took() -> None:
    advice = advise(captured(8, 12, 16), exact(r8=500, r16=500), limit=16)
    assert advice.changes == (Change("drop", 12, 0, 0, Cost(1.2, 12 << 20)),)
    assert advice.sizes == (8, 16)


def test_drops_leave_a_graph_near_every_size() -> None:
    sizes = tuple(range(1, 65))
    advice = advise(captured(*sizes), exact(r1=1000), limit=64)
    kept = advice.sizes
    assert {action for action, _ in changes(advice)} == {"drop"}
    assert kept[0] == 1 and kept[-1] == 64 and len(kept) <= 8
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(kept))


def test_a_size_that_saves_padding_is_not_dropped() -> None:
    advice = advise(captured(8, 12, 16), exact(r8=500, r11=100, r16=500), limit=16)
    assert ("drop", 12) not in changes(advice)


def test_few_steps_give_no_advice() -> None:
    uses = exact(r5=MIN_STEPS - 1)
    advice = advise(captured(1, 8), uses, limit=8)
    assert advice.changes == () and str(MIN_STEPS) in advice.reason and advice.sizes == (1, 8)
    assert advise(captured(1, 8), exact(r5=MIN_STEPS), limit=8).changes


def test_a_phase_without_graphs_gives_no_advice() -> None:
    advice = advise({}, exact(r5=1000), limit=8)
    assert (advice.changes, advice.sizes, advice.padding, advice.computed) == ((), (), 0, 0)
    assert "no graphs" in advice.reason


def test_sizes_that_fit_are_left_alone() -> None:
    advice = advise(captured(1, 2, 4), exact(r1=100, r2=100, r4=100), limit=4)
    assert advice.changes == () and "fit" in advice.reason


def test_a_gain_of_a_hundredth_is_not_worth_a_graph() -> None:
    uses = exact(r7=10, r8=1000)
    assert changes(advise(captured(4, 8), uses, limit=8)) == []


@given(
    sizes=st.sets(st.integers(1, 96), min_size=1, max_size=24),
    steps=st.dictionaries(st.integers(1, 128), st.integers(1, 5000), max_size=24),
)
def test_what_is_promised_is_what_the_new_list_does(sizes: set[int], steps: dict[int, int]) -> None:
    uses = [Use(size, n, n * size) for size, n in steps.items()]
    advice = advise(captured(*sizes), uses, limit=128)
    new = set(sizes)
    for change in advice.changes:
        (new.add if change.action == "add" else new.remove)(change.size)
    assert advice.sizes == tuple(sorted(new)), "each change once, none against another"
    assert advice.padding == padding_of(tuple(sorted(sizes)), uses)
    assert advice.padding_advised == padding_of(advice.sizes, uses)
    assert max(new) >= max(sizes) and max(new) <= 128
    dropped = [change for change in advice.changes if change.action == "drop"]
    lost = -sum(change.padding_saved for change in dropped)
    held = [use for use in uses if use.size <= max(new)]
    grown = sorted({*sizes, *(c.size for c in advice.changes if c.action == "add")})
    computed = sum(use.total for use in held) + padding_of(tuple(grown), uses)
    assert 0 <= lost <= computed * MAX_LOSS
    if max(new) == max(sizes):
        saved = sum(change.padding_saved for change in advice.changes)
        assert advice.padding - advice.padding_advised == pytest.approx(saved)
