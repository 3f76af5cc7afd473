"""Triton kernels of paged attention: split-KV decode (Dao et al. 2023) and causal extend.

Queries that share a KV head are packed into one tile, so every key and value is read once per
group. Decode gives each (KV head, sequence) a fixed number of programs; each derives its own
stretch of the sequence from the length on the device, and ``join_kernel`` weighs the partial
results by their log-sum-exp. Softmax is kept in base 2. Launch shapes are the caller's business.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _chunk_of(
    seq_len: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Tokens per split, a multiple of BLOCK_N. Decode and join must agree on it."""
    chunk = tl.maximum(tl.cdiv(seq_len, num_splits), min_chunk)
    return tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit
def _pages_of(
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
def _slots_of(
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
def _attend_range(
    q: tl.tensor,  # [M, D]
    acc: tl.tensor,  # [M, D] float32
    row_max: tl.tensor,  # [M] unscaled logits
    row_sum: tl.tensor,  # [M]
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    table_row: tl.tensor,
    start: tl.tensor,  # a multiple of BLOCK_N
    end: tl.tensor,
    last_key: tl.tensor,  # [M] last position each row may see
    qk_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Online softmax over the keys ``start`` .. ``end``. Without MASKED every row sees all of
    them and they fill whole tiles. With it, keys from ``end`` on are never loaded: a freed slot
    may hold NaN, and NaN times a zero weight would still poison the row."""
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # Page ids are read one tile ahead: loads of K and V that do not wait for another load of
    # the same iteration are what lets the compiler keep several stages in flight.
    pages = _pages_of(table_row, start, offsets, end, PAGE_SIZE, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        keys = first + offsets
        live = keys < end
        slots = _slots_of(pages, first, offsets, PAGE_SIZE, BLOCK_N)
        pages = _pages_of(table_row, first + BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
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
        logits = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            visible = live[None, :] & (keys[None, :] <= last_key[:, None])
            logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # scaled here, in one fused multiply-add, not by a multiplication of its own
        rescale = tl.exp2((row_max - new_max) * qk_scale)
        weights = tl.exp2(logits * qk_scale - (new_max * qk_scale)[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


# Only pointers to metadata: their alignment may differ between the eager step and the static
# buffers of a graph, and a second compiled variant would stall a request for seconds.
_METADATA_ARGS = ["page_table", "req_rows", "seq_lens"]
# Differ by batch size; as constants they would cost a compilation each.
_SPLIT_ARGS = ["num_splits", "min_chunk"]


@triton.jit(do_not_specialize=_SPLIT_ARGS, do_not_specialize_on_alignment=_METADATA_ARGS)
def decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # float32 [bs, heads, splits, dim]
    lse: tl.tensor,  # float32 [bs, heads, splits]
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
    PDL: tl.constexpr,
) -> None:
    """Grid (KV heads, bs, splits). Heads run fastest: their rows of a slot are neighbours in
    memory. Empty splits come last, where they fill the tail of the launch."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    table_row = page_table + tl.load(req_rows + seq) * table_stride
    chunk = _chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    start = split * chunk
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
    acc, row_max, row_sum = _attend_range(
        q_tile,
        acc,
        row_max,
        row_sum,
        k_cache + kv_head * k_stride_h,
        v_cache + kv_head * v_stride_h,
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

    result = acc / row_sum[:, None]
    if chunk >= seq_len:  # the only split of this sequence: join has nothing to do
        out_ptrs = out + seq.to(tl.int64) * out_stride_t + heads[:, None] * out_stride_h
        tl.store(out_ptrs + dims[None, :], result.to(out.dtype.element_ty), mask=cells)
    else:
        total_heads = tl.num_programs(0) * GROUP
        cell = (seq * total_heads + heads) * num_splits + split
        tl.store(partial + cell[:, None] * HEAD_DIM + dims[None, :], result, mask=cells)
        tl.store(lse + cell, row_max * qk_scale + tl.log2(row_sum), mask=groups < GROUP)


@triton.jit(do_not_specialize=_SPLIT_ARGS, do_not_specialize_on_alignment=["seq_lens", "lse"])
def join_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (blocks of query heads, bs): joins the live splits of each head of one sequence.

    In a batch of short sequences there is nothing to join, and the launch costs by programs."""
    if PDL:
        gdc_launch_dependents()
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    if PDL:
        gdc_wait()
    chunk = _chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    if chunk >= seq_len:
        return
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    # Splits that were not run hold leftovers of another step: they are masked, not weighed.
    live = (splits < tl.cdiv(seq_len, chunk))[None, :] & (heads < NUM_Q_HEADS)[:, None]
    cells = (seq * NUM_Q_HEADS + heads)[:, None] * num_splits + splits[None, :]
    logs = tl.load(lse + cells, mask=live, other=float("-inf"))
    weights = tl.where(live, tl.exp2(logs - tl.max(logs, 1)[:, None]), 0.0)
    weights = weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]
    tiles = tl.load(
        partial + cells[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    joined = tl.sum(tiles * weights[:, :, None], 1)
    out_ptrs = out + seq.to(tl.int64) * out_stride_t + heads[:, None] * out_stride_h
    tl.store(
        out_ptrs + dims[None, :],
        joined.to(out.dtype.element_ty),
        mask=(heads < NUM_Q_HEADS)[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_real_tokens"],
    do_not_specialize_on_alignment=[*_METADATA_ARGS, "query_start_loc"],
)
def extend_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    out: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    num_real_tokens: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> None:
    """Grid (KV heads, row blocks, bs). Row r of a sequence is query token r // GROUP, head
    r % GROUP. Long blocks, those at the end of a sequence, start first."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(2)
    q_start = tl.load(query_start_loc + seq)
    q_end = tl.minimum(tl.load(query_start_loc + seq + 1), num_real_tokens)
    extend_len = q_end - q_start
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if first_row >= extend_len * GROUP:
        return
    seq_len = tl.load(seq_lens + seq)
    prefix_len = seq_len - (tl.load(query_start_loc + seq + 1) - q_start)
    table_row = page_table + tl.load(req_rows + seq) * table_stride

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    cells = (tokens[:, None] < extend_len) & (dims[None, :] < HEAD_DIM)
    token_rows = (q_start + tokens).to(tl.int64)
    q_ptrs = q + token_rows[:, None] * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=cells, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Keys up to the block's first token are seen by every row: no mask is needed there.
    seen_by_all = (prefix_len + first_row // GROUP + 1) // BLOCK_N * BLOCK_N
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, extend_len - 1)
    for masked in tl.static_range(2):
        acc, row_max, row_sum = _attend_range(
            q_tile,
            acc,
            row_max,
            row_sum,
            k_cache + kv_head * k_stride_h,
            v_cache + kv_head * v_stride_h,
            k_stride_s,
            v_stride_s,
            table_row,
            seen_by_all if masked else 0,
            prefix_len + last_token + 1 if masked else seen_by_all,
            prefix_len + tokens,
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            masked == 1,
        )

    result = acc / row_sum[:, None]
    out_ptrs = out + token_rows[:, None] * out_stride_t + heads[:, None] * out_stride_h
    tl.store(out_ptrs + dims[None, :], result.to(out.dtype.element_ty), mask=cells)
