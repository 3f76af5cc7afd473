"""The fused decode kernel: rotation, KV write and attention of one query row per sequence.

Splits are those of ``triton_decode``. The program whose stretch holds the last position rotates
and writes the new key, writes the new value, and keeps both in registers, so no program reads
what another one of the same launch wrote. Older keys are read before the wait for the kernel
before: earlier steps wrote them, and a step does not start before those have ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.attention.triton_decode import METADATA_ARGS, SPLIT_ARGS, chunk_of, finish
from duograph.kernels.attention.triton_tiles import attend_ahead, load_tile, pages_of, slots_of


@triton.jit
def _rotated(
    x: tl.tensor,  # [R, D] heads
    mate: tl.tensor,  # [R, D] the other element of each rotated pair
    cos: tl.tensor,  # [1, D] float32
    sin: tl.tensor,  # [1, D] negative in the first half
    norm: tl.tensor,  # [1, D] weights; not read unless NORM
    mate_norm: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """(Normed and) rotated heads in x's dtype, rounded where ``fused.rope_and_cache`` rounds."""
    a = x.to(tl.float32)
    b = mate.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        a = (a * scale * norm.to(tl.float32)).to(x.dtype).to(tl.float32)
        b = (b * scale * mate_norm.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (a * cos + b * sin).to(x.dtype)


@triton.jit
def _pair_tables(
    cos_sin: tl.tensor,  # pointer to the row of a position: HALF cosines, then HALF sines
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """What each dimension of a head needs to be rotated, [1, BLOCK_D] each: the offset to the
    other one of its pair, cosine, sine, and the norm weights of both, for q and k."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = dims < HEAD_DIM
    to_mate = tl.where(dims < HALF, HALF, -HALF)
    cos = tl.load(cos_sin + dims % HALF, mask=inside, other=0.0)
    sin = tl.load(cos_sin + dims % HALF + HALF, mask=inside, other=0.0)
    q_own, q_mate, k_own, k_mate = cos, cos, cos, cos
    if NORM:
        q_own = tl.load(q_norm + dims, mask=inside, other=0.0)
        k_own = tl.load(k_norm + dims, mask=inside, other=0.0)
        q_mate = tl.load(q_norm + dims + to_mate, mask=inside, other=0.0)
        k_mate = tl.load(k_norm + dims + to_mate, mask=inside, other=0.0)
    return to_mate, cos, sin, q_own, q_mate, k_own, k_mate


@triton.jit(
    do_not_specialize=SPLIT_ARGS,
    do_not_specialize_on_alignment=[*METADATA_ARGS, "positions", "out_cache_loc"],
)
def fused_decode_kernel(
    q: tl.tensor,
    k_new: tl.tensor,
    v_new: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    positions: tl.tensor,
    out_cache_loc: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,  # not read unless NORM
    k_norm: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    arrived: tl.tensor,  # zeros before and after
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_new_stride_t: tl.tensor,
    k_new_stride_h: tl.tensor,
    v_new_stride_t: tl.tensor,
    v_new_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    cos_stride: tl.tensor,
    eps: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    qk_scale: tl.tensor,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (KV heads, bs, splits), as ``decode_kernel``."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    token = seq.to(tl.int64)
    # All that describes the step at once, before anything waits for one of them.
    seq_len = tl.load(seq_lens + seq)
    table_row = page_table + tl.load(req_rows + seq) * table_stride
    angles = cos_sin + tl.load(positions + seq) * cos_stride
    slot = tl.load(out_cache_loc + seq)
    chunk = chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    start = tl.program_id(2) * chunk
    if start >= seq_len:
        if PDL:
            gdc_wait()
        return
    end = tl.minimum(start + chunk, seq_len - 1)  # of the keys that are in the pool
    is_last = start + chunk >= seq_len

    groups = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
    k_head = k_cache + kv_head * k_stride_h
    v_head = v_cache + kv_head * v_stride_h
    pages = pages_of(table_row, start, offsets, end, PAGE_SIZE, BLOCK_N)
    slots = slots_of(pages, start, offsets, PAGE_SIZE, BLOCK_N)
    pages = pages_of(table_row, start + BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
    to_mate, cos, sin, q_own, q_other, k_own, k_other = _pair_tables(
        angles, q_norm, k_norm, HEAD_DIM, BLOCK_D, NORM
    )
    live = start + offsets < end
    k, v = load_tile(k_head, v_head, k_stride_s, v_stride_s, slots, live, HEAD_DIM, BLOCK_D, True)
    if PDL:
        gdc_wait()

    cells = (groups[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    new = (dims[None, :] < HEAD_DIM) & is_last
    heads = kv_head * GROUP + groups
    q_ptrs = q + token * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    k_ptrs = k_new + token * k_new_stride_t + kv_head * k_new_stride_h + dims[None, :]
    v_ptrs = v_new + token * v_new_stride_t + kv_head * v_new_stride_h + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=cells, other=0.0)
    q_mate = tl.load(q_ptrs + to_mate, mask=cells, other=0.0)
    k_row = tl.load(k_ptrs, mask=new, other=0.0)
    k_mate = tl.load(k_ptrs + to_mate, mask=new, other=0.0)
    v_row = tl.load(v_ptrs, mask=new, other=0.0).to(v_cache.dtype.element_ty)
    sin = tl.where(to_mate > 0, -sin, sin)
    q_tile = _rotated(q_tile, q_mate, cos, sin, q_own, q_other, eps, HEAD_DIM, NORM)
    k_row = _rotated(k_row, k_mate, cos, sin, k_own, k_other, eps, HEAD_DIM, NORM)
    k_row = k_row.to(k_cache.dtype.element_ty)
    tl.store(k_head + slot * k_stride_s + dims[None, :], k_row, mask=new)
    tl.store(v_head + slot * v_stride_s + dims[None, :], v_row, mask=new)
    # The new key first: every row has seen a key then, even if no older one is left.
    logits = tl.sum(q_tile.to(tl.float32) * k_row.to(tl.float32), 1)
    row_max = tl.where(is_last, logits, float("-inf"))
    row_sum = tl.zeros([BLOCK_G], tl.float32) + tl.where(is_last, 1.0, 0.0)
    # zeros in the splits before the last
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + v_row.to(tl.float32)
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
