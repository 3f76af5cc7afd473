"""What the Triton attention kernels share: paged tiles of keys and values, and one pass of
softmax over such a tile (online softmax, Milakov & Gimelshein 2018), in base 2.

Queries that share a KV head are packed into one tile, so every key and value is read once per
group. This file knows no launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pages_of(
    table_row: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    end: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """int32 page ids of positions ``first + offsets``, 0 from ``end`` on: a scalar where the
    whole tile lies in one page. ``first`` is a multiple of BLOCK_N."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_row + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        positions = first + offsets
        pages = tl.load(table_row + positions // PAGE_SIZE, mask=positions < end, other=0)
    return pages


@triton.jit
def slots_of(
    pages: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """int64 pool slots [BLOCK_N] of positions ``first + offsets``."""
    if PAGE_SIZE % BLOCK_N == 0:
        slots = pages.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE + offsets
    else:
        slots = pages.to(tl.int64) * PAGE_SIZE + (first + offsets) % PAGE_SIZE
    return slots


@triton.jit
def load_tile(
    k_head: tl.tensor,  # pointers to slot 0 of one head
    v_head: tl.tensor,
    k_stride: tl.tensor,  # elements between slots
    v_stride: tl.tensor,
    slots: tl.tensor,  # int64 [BLOCK_N]
    live: tl.tensor,  # bool [BLOCK_N]; not read unless MASKED
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] of the slots. Those that are not
    live are not loaded: a freed slot may hold NaN, and NaN times a zero weight would still
    poison the row."""
    dims = tl.arange(0, BLOCK_D)
    k_ptrs = k_head + slots[None, :] * k_stride + dims[:, None]
    v_ptrs = v_head + slots[:, None] * v_stride + dims[None, :]
    if HEAD_DIM != BLOCK_D:
        k = tl.load(k_ptrs, mask=live[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
        v = tl.load(v_ptrs, mask=live[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=live[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=live[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    return k, v


@triton.jit
def attend_tile(
    q: tl.tensor,  # [M, D]
    k: tl.tensor,  # [D, BLOCK_N]
    v: tl.tensor,  # [BLOCK_N, D]
    visible: tl.tensor,  # bool, broadcasts to [M, BLOCK_N]; not read unless MASKED
    acc: tl.tensor,  # [M, D] float32
    row_max: tl.tensor,  # [M] unscaled logits
    row_sum: tl.tensor,  # [M]
    qk_scale: tl.tensor,  # softmax scale * log2(e)
    MASKED: tl.constexpr,
) -> tl.tensor:
    """One step of online softmax. Every row must have seen a key after it."""
    logits = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    # scaled here, in one fused multiply-add, not by a multiplication of its own
    rescale = tl.exp2((row_max - new_max) * qk_scale)
    weights = tl.exp2(logits * qk_scale - (new_max * qk_scale)[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def attend_range(
    q: tl.tensor,  # [M, D]
    acc: tl.tensor,  # [M, D] float32
    row_max: tl.tensor,  # [M] unscaled logits
    row_sum: tl.tensor,  # [M]
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    table_row: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    last_key: tl.tensor,  # [M] largest position that each row may see
    qk_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Online softmax over positions [start, end). Without MASKED, all rows see all of them and
    they fill whole tiles."""
    offsets = tl.arange(0, BLOCK_N)
    # Page ids are read one tile ahead: loads of K and V that do not wait for another load of
    # the same iteration are what lets the compiler keep several stages in flight.
    pages = pages_of(table_row, start, offsets, end, PAGE_SIZE, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        keys = first + offsets
        live = keys < end
        slots = slots_of(pages, first, offsets, PAGE_SIZE, BLOCK_N)
        pages = pages_of(table_row, first + BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
        k, v = load_tile(k_head, v_head, k_stride, v_stride, slots, live, HEAD_DIM, BLOCK_D, MASKED)
        visible = live[None, :] & (keys[None, :] <= last_key[:, None])
        acc, row_max, row_sum = attend_tile(
            q, k, v, visible, acc, row_max, row_sum, qk_scale, MASKED
        )
    return acc, row_max, row_sum


@triton.jit
def attend_ahead(
    q: tl.tensor,
    k: tl.tensor,  # the first tile, loaded already
    v: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    table_row: tl.tensor,
    pages: tl.tensor,  # of the second tile
    start: tl.tensor,
    end: tl.tensor,
    qk_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """As ``attend_range`` with MASKED, but tiles wait in registers, the next one always on its
    way: sooner there where a program has few of them, at the price of its registers."""
    offsets = tl.arange(0, BLOCK_N)
    live = start + offsets < end
    for first in tl.range(start, end, BLOCK_N, num_stages=1):
        k_now, v_now, live_now = k, v, live
        live = first + BLOCK_N + offsets < end
        slots = slots_of(pages, first + BLOCK_N, offsets, PAGE_SIZE, BLOCK_N)
        pages = pages_of(table_row, first + 2 * BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
        k, v = load_tile(k_head, v_head, k_stride, v_stride, slots, live, HEAD_DIM, BLOCK_D, True)
        acc, row_max, row_sum = attend_tile(
            q, k_now, v_now, live_now[None, :], acc, row_max, row_sum, qk_scale, True
        )
    return acc, row_max, row_sum
