"""A linear layer for one to four rows, with its neighbours in the layer folded in.

At such batches a decode step is a stream of weights, and the time between kernels counts. So
the norm before a projection, or the gate of the MLP, is recomputed by every program while it
loads the small input, and the residual is added on the way out: four launches a layer instead
of eight. With programmatic dependent launch (``pdl``) a kernel starts while the one before it
still runs, and fetches its weights, which no kernel writes, before it waits.

Not used by the models yet; tests/benchmarks/bench_gemv.py compares it with cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 4
_PLAIN: tl.constexpr = tl.constexpr(0)
_NORM: tl.constexpr = tl.constexpr(1)
_SILU: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Weight rows of one program and its warps."""

    block_n: int
    num_warps: int


def default_tile(in_features: int, out_features: int) -> GemvTile:
    """Short rows take more of them, so that about 32 KiB of weights are in flight."""
    block_n = 8 if in_features <= 2048 or out_features > 16384 else 4
    return GemvTile(block_n=block_n, num_warps=8 if in_features > 2048 else 4)


def fused_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """``f(x) @ weight.T (+ residual)`` with float32 sums and one rounding at the end.

    Args:
        x: [rows, k], 1 to 4 rows; [rows, 2k], gate then up, with ``silu``.
        weight: [n, k], contiguous, of x's dtype.
        norm_weight: [k]; f is then ``rms_norm(x, norm_weight, eps)``.
        silu: f is then ``silu_and_mul(x)``.
        residual: [rows, n], added to the product.
        pdl: overlap with the kernel before it in the stream; needs compute capability 9.

    Returns:
        [rows, n] in x's dtype; the residual stream itself when ``residual`` is given.

    Raises:
        ValueError: shapes or layout do not fit, or both norm and silu are asked for.
    """
    n, k = weight.shape
    _check(x, weight, norm_weight, silu, residual)
    rows = x.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    tile = tile or default_tile(k, n)
    mode = _SILU if silu else _PLAIN if norm_weight is None else _NORM
    # The norm needs the whole row before the first product; the others may walk along it.
    block_k = triton.next_power_of_2(k) if norm_weight is not None or k <= 4096 else 2048
    _gemv_kernel[(triton.cdiv(n, tile.block_n),)](
        x,
        weight,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        out,
        eps,
        N=n,
        K=k,
        ROWS=rows,
        ROWS_P2=triton.next_power_of_2(rows),
        MODE=mode,
        RESIDUAL=residual is not None,
        PDL=pdl,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    silu: bool,
    residual: torch.Tensor | None,
) -> None:
    n, k = weight.shape
    rows = x.shape[0]
    if silu and norm_weight is not None:
        raise ValueError("fused_gemv takes a norm or silu, not both")
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"fused_gemv takes 1 to {MAX_ROWS} rows, got {rows}")
    if x.shape[1] != (2 * k if silu else k):
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if residual is not None and residual.shape != (rows, n):
        raise ValueError(f"residual must be {(rows, n)}, got {tuple(residual.shape)}")
    tensors = [x, weight, *(t for t in (norm_weight, residual) if t is not None)]
    if not all(t.is_contiguous() and t.dtype == x.dtype for t in tensors):
        raise ValueError("fused_gemv needs contiguous tensors of one dtype")


@triton.jit
def _input_tile(
    x: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    row: tl.constexpr,
    ks: tl.tensor,
    K: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_K] of f(x), rounded to x's dtype as the unfused chain would."""
    if MODE == _SILU:
        gate = tl.load(x + row * 2 * K + ks, mask=ks < K, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * K + K + ks, mask=ks < K, other=0.0).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(x.dtype.element_ty).to(tl.float32)
        values = silu * up
    else:
        values = tl.load(x + row * K + ks, mask=ks < K, other=0.0).to(tl.float32)
        if MODE == _NORM:
            scale = tl.load(norm_weight + ks, mask=ks < K, other=0.0).to(tl.float32)
            values = values * tl.rsqrt(tl.sum(values * values, 0) / K + eps) * scale
    return values.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_P2: tl.constexpr,
    MODE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (blocks of BLOCK_N weight rows,). Only ``weight`` is read before the wait."""
    if PDL:
        gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = weight + columns.to(tl.int64)[:, None] * K + ks[None, :]
    w_next = tl.load(w_ptrs, mask=inside[:, None] & (ks < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    batch = tl.arange(0, ROWS_P2)
    sums = tl.zeros([BLOCK_N, ROWS_P2], tl.float32)
    for first in range(0, K, BLOCK_K):
        w_tile = w_next.to(tl.float32)
        if K > BLOCK_K:  # the next stretch is on its way while this one is multiplied
            ahead = (first + BLOCK_K + ks < K)[None, :]
            w_next = tl.load(w_ptrs + first + BLOCK_K, mask=inside[:, None] & ahead, other=0.0)
        for row in tl.static_range(ROWS):
            values = _input_tile(x, norm_weight, eps, row, first + ks, K, MODE)
            dots = tl.sum(w_tile * values[None, :], 1)
            sums += tl.where(batch[None, :] == row, dots[:, None], 0.0)
    cells = inside[:, None] & (batch < ROWS)[None, :]
    places = batch[None, :] * N + columns[:, None]
    if RESIDUAL:
        sums += tl.load(residual + places, mask=cells, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=cells)
