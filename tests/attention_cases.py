"""Random paged-attention problems with a dense float32 answer, shared by the interpreted (CPU)
and the compiled (GPU) tests of the attention backends. Knows no backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from duograph.kernels.attention.base import AttentionMetadata


@dataclass(slots=True)
class Problem:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata
    scale: float
    expected: torch.Tensor  # float32, same shape as q; padding rows hold zeros


def make_problem(
    *,
    seq_lens: list[int],
    extend_lens: list[int] | None = None,  # None makes a decode problem
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    max_pages: int | None = None,
    padding_rows: int = 0,
    seed: int = 0,
) -> Problem:
    """Every slot that belongs to no sequence, the dummy page included, holds NaN, and so do the
    slots of a last page behind the sequence's end. q is a view of a wider tensor, as it is when
    it comes out of a fused qkv projection."""
    gen = torch.Generator().manual_seed(seed)
    bs = len(seq_lens)
    pages_each = [math.ceil(n / page_size) for n in seq_lens]
    columns = max_pages or max(pages_each)
    num_pages = sum(pages_each) + 5
    order = (torch.randperm(num_pages - 1, generator=gen) + 1).tolist()  # never page 0
    table = torch.full((bs + 3, columns), 2**30, dtype=torch.int32)  # wild beyond a row's end
    rows = torch.randperm(bs + 2, generator=gen)[:bs] + 1
    slots = num_pages * page_size
    k_cache = torch.full((slots, num_kv_heads, head_dim), float("nan"))
    v_cache = torch.full((slots, num_kv_heads, head_dim), float("nan"))
    extends = extend_lens or [1] * bs
    total = sum(extends)
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    fused = torch.randn(total + padding_rows, width, generator=gen)
    fused[total:] = float("nan")
    fused = fused.to(dtype)
    q = fused[:, : num_q_heads * head_dim].unflatten(1, (num_q_heads, head_dim))
    expected = torch.zeros(q.shape)
    scale = head_dim**-0.5
    start = 0
    for i, (seq_len, extend_len) in enumerate(zip(seq_lens, extends, strict=True)):
        pages, order = order[: pages_each[i]], order[pages_each[i] :]
        table[rows[i], : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        token = torch.arange(seq_len)
        slot = torch.tensor(pages)[token // page_size] * page_size + token % page_size
        k = torch.randn(seq_len, num_kv_heads, head_dim, generator=gen).to(dtype)
        v = torch.randn(seq_len, num_kv_heads, head_dim, generator=gen).to(dtype)
        k_cache[slot], v_cache[slot] = k.float(), v.float()
        mine = slice(start, start + extend_len)
        expected[mine] = _dense(q[mine].float(), k.float(), v.float(), scale)
        start += extend_len
    starts = torch.tensor([0, *extends]).cumsum(0).to(torch.int32)
    meta = AttentionMetadata(
        page_table=table.to(device),
        req_pool_indices=rows.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        out_cache_loc=torch.zeros(total + padding_rows, dtype=torch.int64, device=device),
        page_size=page_size,
        query_start_loc=starts.to(device) if extend_lens else None,
        max_extend_len=max(extends),
        num_real_tokens=total if padding_rows else None,
    )
    pool = k_cache.to(device, dtype), v_cache.to(device, dtype)
    fused_q = fused.to(device)[:, : num_q_heads * head_dim]
    q_view = fused_q.unflatten(1, (num_q_heads, head_dim))
    return Problem(q_view, *pool, meta, scale, expected)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last len(q) tokens of one sequence over all of it, float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    query_pos = torch.arange(len(k) - len(q), len(k))
    future = torch.arange(len(k))[None, :] > query_pos[:, None]
    weights = torch.softmax(logits.masked_fill(future, float("-inf")), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def tolerance(dtype: torch.dtype) -> float:
    """Absolute error allowed for outputs of order one: a few roundings of the dtype."""
    return {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]


def assert_close(out: torch.Tensor, problem: Problem) -> None:
    torch.testing.assert_close(
        out.float().cpu(), problem.expected, atol=tolerance(out.dtype), rtol=tolerance(out.dtype)
    )
