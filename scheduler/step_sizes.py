"""Actual sizes of steps, finely enough to judge the captured ones, and how long steps took.

A power-of-two histogram cannot tell whether one more captured size would be of use; a count of
every size would grow with the chunk. Sizes up to 32 are counted one by one, larger ones in 16 bins
per doubling, and each bin knows the largest size that it has met. Knows no captured size.
"""

from __future__ import annotations

from dataclasses import dataclass

_EXACT_BITS = 5  # sizes up to 1 << 5 have a bin each


@dataclass(slots=True)
class _Bin:
    largest: int
    steps: int = 0
    total: int = 0
    timed: int = 0
    seconds: float = 0.0


SizeRow = tuple[int, int, int, int, float]
"""Largest size met, steps, sum of their sizes, steps that were timed, their seconds."""


class StepSizes:
    """Rows (decode) or tokens (prefill) of the steps of one phase."""

    __slots__ = ("_bins",)

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}

    def observe(self, size: int, seconds: float | None) -> None:
        """One step. ``seconds`` from the result before it to its own; None if the device was idle
        meanwhile, so that this says nothing of the step."""
        shift = max(0, (size - 1).bit_length() - _EXACT_BITS)
        key = -(-size >> shift) << shift
        found = self._bins.get(key)
        if found is None:
            found = self._bins[key] = _Bin(size)
        elif size > found.largest:
            found.largest = size
        found.steps += 1
        found.total += size
        if seconds is not None:
            found.timed += 1
            found.seconds += seconds

    def rows(self) -> list[SizeRow]:
        """By size, ascending."""
        return [
            (one.largest, one.steps, one.total, one.timed, one.seconds)
            for _, one in sorted(self._bins.items())
        ]
