"""The extend kernel: causal attention of new query rows over a cached prefix and themselves.

Launch shapes are the caller's business.
"""

from __future__ import annotations

import triton
import triton.language as tl

from duograph.kernels.attention.triton_tiles import attend_range

# Only pointers to metadata: their alignment may differ between the eager step and the static
# buffers of a graph, and a second compiled variant would stall a request for seconds.
_METADATA_ARGS = ["page_table", "req_rows", "seq_lens", "query_start_loc"]


@triton.jit(
    do_not_specialize=["num_real_tokens"],
    do_not_specialize_on_alignment=_METADATA_ARGS,
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
        acc, row_max, row_sum = attend_range(
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
