"""Capture lists and the choice of a captured size."""

from __future__ import annotations

import pytest

from duograph.runners.buckets import (
    clip_sizes,
    get_batch_sizes_to_capture,
    get_token_levels_to_capture,
    padded_size,
)


def test_the_decode_schedule_is_the_documented_one() -> None:
    sizes = get_batch_sizes_to_capture(256)
    assert sizes[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert len(sizes) == 36
    assert get_batch_sizes_to_capture(640)[-11:] == (
        384, 400, 416, 432, 448, 464, 480, 496, 512, 544, 576, 608, 640
    )[-11:]  # fmt: skip


def test_the_prefill_schedule_is_the_documented_one() -> None:
    levels = get_token_levels_to_capture(8192)
    assert levels[:10] == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert len(levels) == 58
    assert levels[-3:] == (7168, 7680, 8192)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("maximum", [1, 2, 3, 5, 9, 13, 100, 255, 257, 300, 500, 513, 700])
def test_the_maximum_is_always_the_last_size(maximum: int, device: str) -> None:
    for schedule in (get_batch_sizes_to_capture, get_token_levels_to_capture):
        sizes = schedule(maximum, device_type=device)
        assert sizes[-1] == maximum
        assert list(sizes) == sorted(set(sizes)) and sizes[0] >= 1


def test_the_cpu_lists_are_short() -> None:
    assert get_batch_sizes_to_capture(8, device_type="cpu") == (1, 2, 4, 8)
    assert get_batch_sizes_to_capture(24, device_type="cpu") == (1, 2, 4, 8, 16, 24)
    assert get_token_levels_to_capture(512, device_type="cpu") == (16, 64, 128, 256, 512)


def test_without_padding_every_size_is_captured() -> None:
    assert get_batch_sizes_to_capture(5, disable_padding=True) == (1, 2, 3, 4, 5)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        get_batch_sizes_to_capture(0)


def test_asked_for_sizes_are_clipped_sorted_and_unique() -> None:
    assert clip_sizes((16, 2, 64, 2, 8), 10) == (2, 8, 10)


def test_a_size_is_padded_to_the_next_captured_one() -> None:
    sizes = (1, 2, 4, 8)
    assert [padded_size(sizes, n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert padded_size(sizes, 9) is None
    assert padded_size((), 1) is None
