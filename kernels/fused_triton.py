"""Triton bodies of ``fused.py``: one launch for each element-wise chain of a layer.

Same names, signatures and rounding steps as the torch twins there. Everything is computed in
float32; where the twin rounds to the tensor's dtype between two ops, so do these. This file
knows no layer or model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.pdl import pdl_launch

_ROPE_HEADS = 8  # heads of one program
_SILU_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``fused.rms_norm``. ``x`` [..., n] may be a view of a fused projection with up to
    three dimensions; the result is contiguous.

    Raises:
        ValueError: the last dimension of ``x`` is not dense.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, inner, stride_outer, stride_inner = _two_level_rows(x)
    _launch_norm(x, None, weight, out, None, eps, (outer, inner, stride_outer, stride_inner))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``fused.add_rms_norm``. ``x`` and ``residual`` [..., n] are contiguous.

    Raises:
        ValueError: an input is not contiguous or the shapes differ.
    """
    out, added = torch.empty_like(x), torch.empty_like(x)
    _launch_add_norm(x, residual, weight, out, added, eps)
    return out, added


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``fused.add_rms_norm_``: a program reads all of its rows before it writes one.

    Raises:
        ValueError: an input is not contiguous or the shapes differ.
    """
    _launch_add_norm(x, residual, weight, x, residual, eps)
    return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``fused.silu_and_mul``. ``gate_up`` [..., 2n] is contiguous.

    Raises:
        ValueError: ``gate_up`` is not contiguous.
    """
    if not gate_up.is_contiguous():
        raise ValueError("silu_and_mul needs a contiguous tensor")
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // width
    if rows:
        _silu_and_mul_kernel[(rows, triton.cdiv(width, _SILU_BLOCK))](
            gate_up, out, width, BLOCK=_SILU_BLOCK, num_warps=4, **pdl_launch(out.device, rows)
        )
    return out


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
    """See ``fused.rope_and_cache``: rotates q and k in place, writes k and v to the pool.

    Raises:
        ValueError: the last dimension of a tensor is not dense.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if any(t.stride(2) != 1 for t in (q, k, v, k_cache, v_cache)):
        raise ValueError("rope_and_cache needs head_dim to be dense in q, k, v and the pool")
    if not tokens:
        return
    q_blocks = triton.cdiv(q_heads, _ROPE_HEADS)
    _rope_and_cache_kernel[(tokens, q_blocks + triton.cdiv(kv_heads, _ROPE_HEADS))](
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        out_cache_loc,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        cos_sin.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        Q_BLOCKS=q_blocks,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=_ROPE_HEADS,
        NORM=q_norm is not None,
        num_warps=4,
        **pdl_launch(q.device, tokens),
    )


def _two_level_rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """(outer, inner, outer stride, inner stride) of the rows of ``x`` [..., n]."""
    if x.stride(-1) != 1:
        raise ValueError("rms_norm needs a dense last dimension")
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    if not x.is_contiguous():
        raise ValueError(f"rms_norm takes views of 2 or 3 dimensions, got {x.dim()}")
    return x.numel() // x.shape[-1], 1, x.shape[-1], 0


def _launch_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    added: torch.Tensor,
    eps: float,
) -> None:
    if x.shape != residual.shape or not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("add_rms_norm needs two contiguous tensors of one shape")
    rows = x.numel() // x.shape[-1]
    _launch_norm(x, residual, weight, out, added, eps, (rows, 1, x.shape[-1], 0))


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    added: torch.Tensor | None,
    eps: float,
    rows: tuple[int, int, int, int],
) -> None:
    outer, inner, stride_outer, stride_inner = rows
    if not outer * inner:
        return
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    block_r = max(1, min(16, 1024 // block)) if inner > 1 else 1
    _norm_kernel[(triton.cdiv(outer * inner, block_r),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if added is None else added,
        outer * inner,
        stride_outer,
        stride_inner,
        eps,
        INNER=inner,
        WIDTH=width,
        BLOCK=block,
        BLOCK_R=block_r,
        ADD=residual is not None,
        num_warps=max(1, min(16, block * block_r // 512)),
        **pdl_launch(x.device, outer),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    added: tl.tensor,
    num_rows: tl.tensor,
    stride_outer: tl.tensor,
    stride_inner: tl.tensor,
    eps: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (row blocks,). ``residual``, ``out`` and ``added`` are contiguous [rows, WIDTH]."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK)[None, :]
    cells = (rows[:, None] < num_rows) & (columns < WIDTH)
    starts = (rows // INNER).to(tl.int64) * stride_outer + (rows % INNER) * stride_inner
    dense = rows.to(tl.int64)[:, None] * WIDTH + columns
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    values = tl.load(x + starts[:, None] + columns, mask=cells, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + dense, mask=cells, other=0.0).to(tl.float32)
        rounded = values.to(added.dtype.element_ty)
        tl.store(added + dense, rounded, mask=cells)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 1) / WIDTH
    normed = values * tl.rsqrt(mean + eps)[:, None] * scale
    tl.store(out + dense, normed.to(out.dtype.element_ty), mask=cells)


@triton.jit
def _silu_and_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, column blocks): only the first dimension may exceed 65535."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cells = columns < width
    start = gate_up + row * 2 * width
    gate = tl.load(start + columns, mask=cells, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=cells, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(up.dtype), mask=cells)


@triton.jit
def _rotate(
    first_ptrs: tl.tensor,  # [H, half]
    half: tl.constexpr,
    cos: tl.tensor,  # [1, half] float32
    sin: tl.tensor,
    cells: tl.tensor,
    dims: tl.tensor,  # [1, half]
    norm: tl.tensor,  # [1, half] pointers to the weights of the first half
    eps: tl.tensor,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Both halves of the (normed and) rotated heads, in the dtype of the pointers. Not stored."""
    first = tl.load(first_ptrs, mask=cells, other=0.0)
    second = tl.load(first_ptrs + half, mask=cells, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a = (a * scale * tl.load(norm, mask=dims < half, other=0.0)).to(first.dtype).to(tl.float32)
        b = b * scale * tl.load(norm + half, mask=dims < half, other=0.0)
        b = b.to(first.dtype).to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_cache_loc"])
def _rope_and_cache_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out_cache_loc: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_h: tl.tensor,
    k_cache_stride_s: tl.tensor,
    k_cache_stride_h: tl.tensor,
    v_cache_stride_s: tl.tensor,
    v_cache_stride_h: tl.tensor,
    cos_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, head blocks): query head blocks first, then those of keys and values."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    angle = cos_sin + tl.load(positions + token) * cos_stride + dims
    cos = tl.load(angle, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=dims < HALF, other=0.0).to(tl.float32)
    slot = tl.load(out_cache_loc + token)
    if PDL:
        gdc_wait()
    if block < Q_BLOCKS:
        heads = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        cells = (heads < Q_HEADS) & (dims < HALF)
        ptrs = q + token * q_stride_t + heads * q_stride_h + dims
        first, second = _rotate(ptrs, HALF, cos, sin, cells, dims, q_norm + dims, eps, NORM)
        tl.store(ptrs, first, mask=cells)
        tl.store(ptrs + HALF, second, mask=cells)
    else:
        heads = ((block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        cells = (heads < KV_HEADS) & (dims < HALF)
        ptrs = k + token * k_stride_t + heads * k_stride_h + dims
        first, second = _rotate(ptrs, HALF, cos, sin, cells, dims, k_norm + dims, eps, NORM)
        tl.store(ptrs, first, mask=cells)
        tl.store(ptrs + HALF, second, mask=cells)
        k_slot = k_cache + slot * k_cache_stride_s + heads * k_cache_stride_h + dims
        tl.store(k_slot, first.to(k_cache.dtype.element_ty), mask=cells)
        tl.store(k_slot + HALF, second.to(k_cache.dtype.element_ty), mask=cells)
        v_row = v + token * v_stride_t + heads * v_stride_h + dims
        v_slot = v_cache + slot * v_cache_stride_s + heads * v_cache_stride_h + dims
        v_first = tl.load(v_row, mask=cells, other=0.0)
        v_second = tl.load(v_row + HALF, mask=cells, other=0.0)
        tl.store(v_slot, v_first.to(v_cache.dtype.element_ty), mask=cells)
        tl.store(v_slot + HALF, v_second.to(v_cache.dtype.element_ty), mask=cells)
