"""Bounds of FlashInfer's scratch, against what its planners reserve."""

from __future__ import annotations

import pytest

from duograph.kernels.attention.flashinfer_workspace import Scratch

SMS = 132


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 8), (6, 2), (128, 1), (8, 8), (32, 1)])
@pytest.mark.parametrize("bs", [1, 8, 256, 512])
def test_every_plan_of_a_captured_decode_fits(heads: tuple[int, int], bs: int) -> None:
    q_heads, kv_heads = heads
    scratch = Scratch(q_heads, kv_heads, 128, SMS)
    group = q_heads // kv_heads
    rows = 16 if group <= 16 else 64 if group <= 64 else 128
    # PrefillSplitQOKVIndptr with CUDA graphs, then PrefillPlan's allocations
    items = max(2 * SMS // kv_heads, -(-bs * group // rows) + bs - 1)
    floats = q_heads * items * rows * (128 + 1) * 4
    ints = 4 * (3 * items + (bs + 1) + 1 + 1 + (bs + 1)) + items
    assert floats + 2 * 16 <= scratch.decode_float_bytes(bs) <= 3 * floats + 5000
    assert ints + 8 * 16 <= scratch.decode_int_bytes(bs)
    # DecodePlan, as many blocks as a multiprocessor takes
    items = max(32 * SMS // kv_heads, bs)
    ints = 4 * (2 * items + (items + 1) + 1) + items
    assert ints + 6 * 16 <= scratch.decode_int_bytes(bs)


def test_a_served_8b_model_needs_some_tens_of_megabytes() -> None:
    scratch = Scratch(32, 8, 128, SMS)
    assert 80e6 < scratch.decode_float_bytes(256) < 90e6
    assert scratch.decode_int_bytes(256) < 200_000
    assert 60e6 < scratch.extend_float_bytes() < 75e6
