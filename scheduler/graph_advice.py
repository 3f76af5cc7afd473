"""Which captured sizes are worth their cost: sizes to add and to drop, from the sizes that steps
really had.

Pure: figures in, figures out. An addition has to save padding or eager steps. A drop may cost
hardly any padding, and never opens a gap: between two sizes that are left the larger is at most
twice the smaller (sizes that are far apart already may stay so), so that other traffic than the
one seen still finds a graph near its size. Knows no tensor, no metric and no page.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

MIN_STEPS = 100  # fewer say nothing of the traffic
MAX_ADDITIONS = 4
MIN_GAIN = 0.01  # of all rows or tokens computed: what an added size has to save
MAX_LOSS = 0.002  # of the same: what all drops together may add
MAX_RATIO = 2.0  # of neighbours after a drop
_MIN_EAGER_SHARE = 0.001  # of all steps: fewer above the largest size are not worth a graph


@dataclass(frozen=True, slots=True)
class Cost:
    """What capturing one size took."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Use:
    """Steps of nearly the same size: none above ``size``, ``total`` rows or tokens in all."""

    size: int
    steps: int
    total: int


@dataclass(frozen=True, slots=True)
class Change:
    """``padding_saved`` rows or tokens over the traffic seen, negative for a drop;
    ``steps_gained`` ran eagerly and would be replays. ``cost`` is what the capture takes (an
    estimate, for an addition) or would no longer take."""

    action: Literal["add", "drop"]
    size: int
    padding_saved: int
    steps_gained: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Advice:
    """``sizes`` is the whole list to capture; the one in force if there is nothing to change, which
    ``reason`` explains. ``padding`` and ``padding_advised`` are rows or tokens over the traffic
    seen, of steps that a graph holds; ``computed`` and ``computed_advised`` are those plus the real
    ones."""

    changes: tuple[Change, ...]
    sizes: tuple[int, ...]
    reason: str
    steps: int
    computed: int
    padding: int
    padding_advised: int
    computed_advised: int


def advise(
    captured: Mapping[int, Cost],
    uses: Sequence[Use],
    *,
    limit: int,
    refused: Collection[int] = (),
) -> Advice:
    """Advice for one phase.

    Args:
        captured: by size; empty if the phase has no graphs.
        uses: the steps seen, in any order.
        limit: the largest size that a step can have.
        refused: sizes for which there was no memory; they are not advised again.
    """
    sizes = tuple(sorted(captured))
    steps = sum(use.steps for use in uses)
    padding = _padding(sizes, uses)

    def computed(of: tuple[int, ...]) -> int:
        return sum(use.total for use in uses if of and use.size <= of[-1]) + _padding(of, uses)

    def answer(changes: Sequence[Change], new: tuple[int, ...], reason: str) -> Advice:
        after = _padding(new, uses)
        now, then = computed(sizes), computed(new)
        return Advice(tuple(changes), new, reason, steps, now, padding, after, then)

    if not sizes:
        return answer((), sizes, "no graphs are captured in this phase")
    if steps < MIN_STEPS:
        return answer((), sizes, f"{steps} steps so far; advice needs {MIN_STEPS}")
    wanted = [use for use in uses if use.size <= limit and use.size not in refused]
    additions = _additions(sizes, captured, uses, wanted)
    grown = tuple(sorted({*sizes, *(change.size for change in additions)}))
    drops = _drops(grown, captured, uses)
    dropped = {change.size for change in drops}
    new = tuple(size for size in grown if size not in dropped)
    changes = (*additions, *drops)
    reason = "" if changes else "the captured sizes fit the traffic seen"
    return answer(changes, new, reason)


def unchanged(advice: Advice, sizes: tuple[int, ...], reason: str) -> Advice:
    """The same traffic, and advice to leave ``sizes``, which are in force, as they are."""
    padding, computed = advice.padding, advice.computed
    return Advice((), sizes, reason, advice.steps, computed, padding, padding, computed)


def _additions(
    sizes: tuple[int, ...],
    captured: Mapping[int, Cost],
    uses: Sequence[Use],
    wanted: Sequence[Use],
) -> list[Change]:
    """The best one first, each judged with those before it in place. ``wanted`` are those of
    ``uses`` whose size may be added."""
    changes: list[Change] = []
    traffic = _Traffic(uses)
    steps = sum(use.steps for use in uses)
    above = [use for use in wanted if use.size > sizes[-1]]
    eager = sum(use.steps for use in above)
    if eager > steps * _MIN_EAGER_SHARE:
        size = max(use.size for use in above)
        changes.append(Change("add", size, 0, eager, _estimate(size, captured)))
        sizes = (*sizes, size)
    computed = sum(use.total for use in uses if use.size <= sizes[-1]) + _padding(sizes, uses)
    candidates = {use.size for use in wanted if use.size <= sizes[-1]}
    while len(changes) < MAX_ADDITIONS:
        gains = {size: _saved(size, sizes, traffic) for size in candidates - {*sizes}}
        if not gains:
            break
        size = max(gains, key=lambda one: (gains[one], -one))
        if gains[size] <= computed * MIN_GAIN:
            break
        changes.append(Change("add", size, gains[size], 0, _estimate(size, captured)))
        sizes = tuple(sorted((*sizes, size)))
    return changes


def _drops(
    sizes: tuple[int, ...], captured: Mapping[int, Cost], uses: Sequence[Use]
) -> list[Change]:
    """Captured sizes that (nearly) nobody uses, from the largest down; never the
    smallest, which a single request uses, nor the largest."""
    changes: list[Change] = []
    computed = sum(use.total for use in uses if use.size <= sizes[-1]) + _padding(sizes, uses)
    budget = computed * MAX_LOSS
    traffic = _Traffic(uses)
    for size in sorted(captured, reverse=True):
        index = bisect_left(sizes, size)
        if index in (0, len(sizes) - 1):
            continue
        if sizes[index + 1] > MAX_RATIO * sizes[index - 1]:
            continue
        without = sizes[:index] + sizes[index + 1 :]
        loss = _saved(size, without, traffic)
        if loss > budget:
            continue
        budget -= loss
        sizes = without
        changes.append(Change("drop", size, -loss, 0, captured[size]))
    return changes


class _Traffic:
    """Steps by size, for many questions."""

    def __init__(self, uses: Sequence[Use]) -> None:
        ordered = sorted(uses, key=lambda use: use.size)
        self._sizes = [use.size for use in ordered]
        self._sums = [0, *accumulate(use.steps for use in ordered)]

    def steps(self, above: int, up_to: int) -> int:
        begin, end = (bisect_right(self._sizes, size) for size in (above, up_to))
        return self._sums[end] - self._sums[begin]


def _saved(size: int, sizes: tuple[int, ...], traffic: _Traffic) -> int:
    """Rows or tokens of padding that ``size`` saves beside ``sizes``, of which one is larger."""
    index = bisect_left(sizes, size)
    smaller = sizes[index - 1] if index else 0
    return (sizes[index] - size) * traffic.steps(smaller, size)


def _padding(sizes: Sequence[int], uses: Sequence[Use]) -> int:
    """Rows or tokens that the steps which a size holds are padded by. A bin lies as a whole where
    its largest member does, so this is no less than the truth."""
    padded = 0
    for use in uses:
        index = bisect_left(sizes, use.size)
        if index < len(sizes):
            padded += use.steps * sizes[index] - use.total
    return padded


def _estimate(size: int, captured: Mapping[int, Cost]) -> Cost:
    """As the nearest captured size. The largest is captured first and brings the memory that all
    share, so it counts as an example for sizes above it only, in proportion."""
    largest = max(captured)
    if size > largest:
        cost = captured[largest]
        return Cost(cost.seconds * size / largest, round(cost.nbytes * size / largest))
    smaller = [one for one in captured if one != largest] or [largest]
    return captured[min(smaller, key=lambda one: (abs(one - size), one))]
