"""The decode kernel: one query row per sequence, split over its keys (split-KV, Dao et al. 2023).

Each (KV head, sequence) has a fixed number of programs; each derives its own stretch of the
sequence from the length on the device, and the one that arrives last weighs the partial results
by their log-sum-exp. Launch shapes are the caller's business.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.attention.triton_tiles import (
    attend_ahead,
    attend_range,
    load_tile,
    pages_of,
    slots_of,
)

_JOIN_SPLITS: tl.constexpr = tl.constexpr(16)  # partial results loaded at once


@triton.jit
def chunk_of(
    seq_len: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Tokens per split, a multiple of BLOCK_N."""
    chunk = tl.maximum(tl.cdiv(seq_len, num_splits), min_chunk)
    return tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit
def _join(
    partial: tl.tensor,
    lse: tl.tensor,
    out_ptrs: tl.tensor,  # to the first head
    out_stride_h: tl.tensor,
    first_cell: tl.tensor,  # of split 0 of the first head
    num_splits: tl.tensor,
    live: tl.tensor,  # splits that ran
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Weighs the partial results of GROUP heads in the order of the splits, whoever came last.

    Other programs wrote them during this launch, so they are read past the L1 cache."""
    groups = tl.arange(0, triton.next_power_of_2(GROUP))
    dims = tl.arange(0, BLOCK_D)
    cells = (groups[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    acc = tl.zeros([groups.shape[0], BLOCK_D], tl.float32)
    row_max = tl.full([groups.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([groups.shape[0]], tl.float32)
    for first in range(0, live, _JOIN_SPLITS):
        splits = first + tl.arange(0, _JOIN_SPLITS)
        where = first_cell + groups[None, :] * num_splits + splits[:, None]
        ran = (splits < live)[:, None] & (groups < GROUP)[None, :]
        logs = tl.load(lse + where, mask=ran, other=float("-inf"), cache_modifier=".cg")
        tiles = tl.load(
            partial + where[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=ran[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(logs, 0))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(logs - new_max[None, :])
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(tiles * weights[:, :, None], 0)
        row_max = new_max
    ptrs = out_ptrs + groups[:, None] * out_stride_h + dims[None, :]
    tl.store(ptrs, (acc / row_sum[:, None]).to(out_ptrs.dtype.element_ty), mask=cells)


@triton.jit
def finish(
    acc: tl.tensor,  # [BLOCK_G, D] float32
    row_max: tl.tensor,  # [BLOCK_G]
    row_sum: tl.tensor,
    qk_scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # float32 [bs, heads, splits, dim]
    lse: tl.tensor,  # float32 [bs, heads, splits]
    arrived: tl.tensor,  # int32 [bs, KV heads]
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    seq_len: tl.tensor,
    chunk: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Stores what one program of the grid (KV heads, bs, splits) found: to ``out`` if it had the
    whole sequence, else to the scratch, which the last one to arrive joins."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    groups = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    cells = (groups[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    result = acc / row_sum[:, None]
    out_row = out + seq.to(tl.int64) * out_stride_t + kv_head * GROUP * out_stride_h
    if chunk >= seq_len:
        out_ptrs = out_row + groups[:, None] * out_stride_h + dims[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=cells)
    else:
        pair = seq * tl.num_programs(0) + kv_head
        first_cell = pair * GROUP * num_splits
        cell = first_cell + groups * num_splits + tl.program_id(2)
        tl.store(partial + cell[:, None] * HEAD_DIM + dims[None, :], result, mask=cells)
        tl.store(lse + cell, row_max * qk_scale + tl.log2(row_sum), mask=groups < GROUP)
        # All threads have stored before one of them says so, and the release covers them all.
        tl.debug_barrier()
        splits = tl.cdiv(seq_len, chunk)
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == splits - 1:
            _join(
                partial,
                lse,
                out_row,
                out_stride_h,
                first_cell,
                num_splits,
                splits,
                GROUP,
                HEAD_DIM,
                BLOCK_D,
            )
            # for the next launch, which waits for the end of this one
            tl.store(arrived + pair, 0)


# Only pointers to metadata: their alignment may differ between the eager step and the static
# buffers of a graph, and a second compiled variant would stall a request for seconds.
METADATA_ARGS = ["page_table", "req_rows", "seq_lens", "lse"]
# Differ by batch size; as constants they would cost a compilation each.
SPLIT_ARGS = ["num_splits", "min_chunk"]


@triton.jit(do_not_specialize=SPLIT_ARGS, do_not_specialize_on_alignment=METADATA_ARGS)
def decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    arrived: tl.tensor,  # zeros before and after
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EARLY: tl.constexpr,  # attend_ahead, not attend_range
    PDL: tl.constexpr,
) -> None:
    """Grid (KV heads, bs, splits). Heads run fastest: their rows of a slot are neighbours in
    memory. Empty splits come last, where they fill the tail of the launch."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    table_row = page_table + tl.load(req_rows + seq) * table_stride
    chunk = chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    start = tl.program_id(2) * chunk
    if PDL:
        gdc_wait()
    if start >= seq_len:
        return
    end = tl.minimum(start + chunk, seq_len)

    groups = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + groups
    cells = (groups[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q_ptrs = q + seq.to(tl.int64) * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=cells, other=0.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    k_head = k_cache + kv_head * k_stride_h
    v_head = v_cache + kv_head * v_stride_h
    if EARLY:
        offsets = tl.arange(0, BLOCK_N)
        pages = pages_of(table_row, start, offsets, end, PAGE_SIZE, BLOCK_N)
        slots = slots_of(pages, start, offsets, PAGE_SIZE, BLOCK_N)
        pages = pages_of(table_row, start + BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
        live = start + offsets < end
        k, v = load_tile(
            k_head, v_head, k_stride_s, v_stride_s, slots, live, HEAD_DIM, BLOCK_D, True
        )
        acc, row_max, row_sum = attend_ahead(
            q_tile,
            k,
            v,
            acc,
            row_max,
            row_sum,
            k_head,
            v_head,
            k_stride_s,
            v_stride_s,
            table_row,
            pages,
            start,
            end,
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
        )
    else:
        acc, row_max, row_sum = attend_range(
            q_tile,
            acc,
            row_max,
            row_sum,
            k_head,
            v_head,
            k_stride_s,
            v_stride_s,
            table_row,
            start,
            end,
            tl.zeros([BLOCK_G], tl.int32) + end,
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            True,
        )
    finish(
        acc,
        row_max,
        row_sum,
        qk_scale,
        out,
        partial,
        lse,
        arrived,
        out_stride_t,
        out_stride_h,
        seq_len,
        chunk,
        num_splits,
        GROUP,
        BLOCK_G,
        HEAD_DIM,
        BLOCK_D,
    )
