"""The element-wise chains of a transformer layer: Triton on CUDA, few aten ops elsewhere.

Each function looks at the device of its first tensor and nothing else. The CPU twins are also
the reference that the Triton kernels are tested against. The Triton module is imported on
first use, so a machine without Triton never needs it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from duograph.kernels.kv_write import write_kv


def embedding(input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows ``input_ids``, int64 [T], of ``table`` [n, width]: [T, width]. Ids are in [0, n);
    on CUDA nobody looks. There F.embedding takes 7 us for 8 rows."""
    if table.is_cuda:
        from duograph.kernels import embedding_triton

        return embedding_triton.embedding(input_ids, table)
    return F.embedding(input_ids, table)


def embed_rms_norm(
    input_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(rows, weight, eps), rows)``, both new, where ``rows`` [T, width] are those of
    ``embedding`` in the dtype of ``weight`` [width]; on CUDA that is the table's."""
    if table.is_cuda:
        from duograph.kernels import embedding_triton

        return embedding_triton.embed_rms_norm(input_ids, table, weight, eps)
    rows = F.embedding(input_ids, table).to(weight.dtype)
    return _rms_norm(rows, weight, eps), rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019).

    ``x`` [..., n], ``weight`` [n]; computed in float32, returned in x's dtype and shape.
    """
    if x.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; both [..., n], both new tensors."""
    if x.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.add_rms_norm(x, residual, weight, eps)
    added = x + residual
    return _rms_norm(added, weight, eps), added


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``add_rms_norm``, in the memory of ``x`` and ``residual``, which must not be read
    afterwards: long prefill steps hold two tensors less."""
    if x.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.add_rms_norm_(x, residual, weight, eps)
    residual.add_(x)
    return _rms_norm(residual, weight, eps), residual


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 from one vectorised reduction and ops on one value per row: 11 us a call of one
    row, where F.rms_norm's chain over whole rows takes 35 (measured on one AVX2 core)."""
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    size = x.shape[-1]
    squares: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    # eps + squares / size in one op: rsub is other - alpha * input.
    scale = torch.rsub(squares, eps, alpha=-1.0 / size).rsqrt_()
    return (x * scale).mul_(weight)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` where ``gate_up`` [..., 2n] is gate then up; returns [..., n]."""
    if gate_up.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotates ``q`` and ``k`` in place and writes ``k`` and ``v`` to the pool.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows may be strided, heads are contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim], likewise.
        positions: int64 [num_tokens].
        cos_sin: float32 [context_length, head_dim]: cosines, then sines, of each position.
        k_cache, v_cache: one layer's pool, [num_slots, num_kv_heads, head_dim].
        out_cache_loc: int64 [num_tokens], slot of each row.
        q_norm, k_norm: [head_dim], both or none: weights of ``rms_norm`` with ``eps``, which
            every head of q and k goes through before it is rotated.
    """
    if q.is_cuda:
        from duograph.kernels import fused_triton

        fused_triton.rope_and_cache(
            q,
            k,
            v,
            positions,
            cos_sin,
            k_cache,
            v_cache,
            out_cache_loc,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )
        return
    if q_norm is not None and k_norm is not None:
        q.copy_(_rms_norm(q, q_norm, eps))
        k.copy_(_rms_norm(k, k_norm, eps))
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for heads in _rotated_together(q, k):
        if heads.dtype == torch.float32:
            _rotate_half(heads, cos, sin)
        else:
            wide = heads.float()
            _rotate_half(wide, cos, sin)
            heads.copy_(wide)
    write_kv(k, v, k_cache, v_cache, out_cache_loc)


def _rotated_together(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q and k as one view when k's heads follow q's in memory, as in the output of a merged
    qkv projection: half the ops, which is what CPU decode pays for."""
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    adjacent = (
        q.stride() == k.stride()
        and q.dtype == k.dtype
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and k.storage_offset() == q.storage_offset() + heads * head_dim
        and q.stride()[1:] == (head_dim, 1)
    )
    if not adjacent:
        return q, k
    return (q.as_strided((q.shape[0], heads + kv_heads, head_dim), q.stride()),)


def _rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the pairs (x[i], x[i + head_dim/2]) in place. x: float32 [T, heads, head_dim];
    cos, sin: float32 [T, 1, head_dim/2]."""
    first, second = x.chunk(2, dim=-1)
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(first_sin)
