"""What graphs are predicted to take; how many pages that leaves is in test_worker.py."""

from __future__ import annotations

from duograph.runners.capture import SizeStats
from duograph.runners.memory_plan import MIB, predict_graph_bytes


class Phase:
    """Takes ``shared`` at the first capture, as its tensors are reused by later ones, and what the
    driver has for each; the device counts in steps of 2 MiB."""

    def __init__(self, shared: int, each: int) -> None:
        self._shared = shared
        self._each = each
        self._taken = 0.0
        self.captured: list[int] = []

    def capture_one(self, size: int) -> SizeStats:
        before = self._counted()
        self._taken += self._each + (0 if self.captured else self._shared)
        self.captured.append(size)
        return SizeStats(seconds=0.1, nbytes=self._counted() - before)

    def _counted(self) -> int:
        return int(self._taken // (2 * MIB)) * 2 * MIB


SIZES = tuple(range(4, 33, 4))


def test_few_of_the_largest_sizes_predict_what_all_take() -> None:
    for shared, each in ((200 * MIB, 3 * MIB), (0, 2 * MIB), (64 * MIB, 5 * MIB // 2)):
        phase = Phase(shared, each)
        predicted = predict_graph_bytes(phase, SIZES)
        assert phase.captured == [32, 28, 24, 20]
        real = shared + each * len(SIZES)
        assert abs(predicted - real) <= 2 * MIB + len(SIZES) * MIB


def test_graphs_too_small_to_be_seen_count_a_mebibyte_each() -> None:
    assert predict_graph_bytes(Phase(0, 100), SIZES) == (len(SIZES) - 1) * MIB


def test_a_single_size_is_measured_itself_and_none_takes_nothing() -> None:
    assert predict_graph_bytes(Phase(10 * MIB, 2 * MIB), (8,)) == 12 * MIB
    assert predict_graph_bytes(Phase(10 * MIB, 2 * MIB), ()) == 0
