"""The element-wise chains of a transformer layer: Triton on CUDA, few aten ops elsewhere.

Each function looks at the device of its first tensor and nothing else. The CPU twins are also
the reference that the Triton kernels are tested against. The Triton module is imported on
first use, so a machine without Triton never needs it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from duograph.kernels.kv_write import write_kv


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019).

    ``x`` [..., n], ``weight`` [n]; computed in float32, returned in x's dtype and shape.
    """
    if x.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; both [..., n], both new tensors."""
    if x.is_cuda:
        from duograph.kernels import fused_triton

        return fused_triton.add_rms_norm(x, residual, weight, eps)
    added = x + residual
    return F.rms_norm(added, (x.shape[-1],), weight, eps), added


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
) -> None:
    """Rotates ``q`` and ``k`` in place and writes ``k`` and ``v`` to the pool.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows may be strided, heads are contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim], likewise.
        positions: int64 [num_tokens].
        cos_sin: float32 [context_length, head_dim]: cosines, then sines, of each position.
        k_cache, v_cache: one layer's pool, [num_slots, num_kv_heads, head_dim].
        out_cache_loc: int64 [num_tokens], slot of each row.
    """
    if q.is_cuda:
        from duograph.kernels import fused_triton

        fused_triton.rope_and_cache(q, k, v, positions, cos_sin, k_cache, v_cache, out_cache_loc)
        return
    half = cos_sin.shape[1] // 2
    rows = cos_sin.index_select(0, positions).unsqueeze(1)  # [T, 1, head_dim]
    cos, sin = rows[..., :half], rows[..., half:]
    for heads in _rotated_together(q, k):
        _rotate_half(heads, cos, sin)
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
    """Rotates the pairs (x[i], x[i + head_dim/2]) in place, in float32."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    a, b = first.float(), second.float()
    rotated = (a * cos).addcmul_(b, sin, value=-1.0)
    second.copy_((b * cos).addcmul_(a, sin))
    first.copy_(rotated)
