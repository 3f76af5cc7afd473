"""A linear layer for one row (up to four), with its neighbours in the layer folded in.

At batch 1 a decode step is a stream of weights, and the time between kernels counts. So the
norm before a projection is recomputed by every program while it loads the small input, the gate
of the MLP is applied by the program that has both its halves, and the residual is added on the
way out: four launches a layer instead of nine. With programmatic dependent launch (``pdl``) a
kernel starts while the one before it still runs, and fetches its weights, which no kernel
writes, before it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.launch import Launcher
from duograph.kernels.pdl import pdl_options

MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Weight rows of one program and its warps."""

    block_n: int
    num_warps: int


def default_tile(in_features: int, *, norm: bool) -> GemvTile:
    """Measured on one H200 with in_features 1024 to 14336: four rows of weights a program, but
    eight short ones where each program repeats a norm."""
    return GemvTile(block_n=8 if norm and in_features <= 2048 else 4, num_warps=4)


def fused_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """``g(f(x) @ weight.T) (+ residual)`` with float32 sums.

    Args:
        x: [rows, k], 1 to 4 rows.
        weight: [n, k], contiguous, of x's dtype.
        norm_weight: [k]; f is then ``rms_norm(x, norm_weight, eps)``.
        gated: g is then ``silu_and_mul``: the first half of the weight's rows are the gate.
        residual: [rows, n] (n / 2 if gated), added to the result.
        pdl: overlap with the kernel before it in the stream; needs compute capability 9.

    Returns:
        [rows, n], or [rows, n / 2] if gated, in x's dtype; with ``residual`` the residual
        stream itself. One rounding at the end, and with ``gated`` those of the unfused chain.

    Raises:
        ValueError: shapes or layout do not fit.
    """
    n, k = weight.shape
    width = n // 2 if gated else n
    _check(x, weight, norm_weight, gated, residual)
    rows = x.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    norm, add = norm_weight is not None, residual is not None
    blocks = _blocks(width, k, rows, norm, gated, tile)
    constexprs = (width, k, rows, blocks.rows, norm, gated, add, pdl, blocks.n, blocks.k)
    first = x if norm_weight is None else norm_weight  # not read without
    last = x if residual is None else residual
    _launch_gemv(
        blocks.grid,
        (x, weight, first, last, out, eps, *constexprs),
        key=(x.dtype, constexprs, blocks.num_warps),
        aligned=(x, weight, first, last, out),
        num_warps=blocks.num_warps,
        **pdl_options(pdl),
    )
    return out


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Powers of two of one program: output columns, input features, rows. And the launch."""

    n: int
    k: int
    rows: int
    num_warps: int
    grid: tuple[int, int, int]


@cache
def _blocks(
    width: int, k: int, rows: int, norm: bool, gated: bool, tile: GemvTile | None
) -> _Blocks:
    tile = tile or default_tile(k, norm=norm)
    block_n = max(1, tile.block_n // 2) if gated else tile.block_n
    # The norm needs the whole row before the first product; the others may walk along it.
    block_k = triton.next_power_of_2(k) if norm or k <= 4096 else 2048
    grid = (triton.cdiv(width, block_n), 1, 1)
    return _Blocks(block_n, block_k, triton.next_power_of_2(rows), tile.num_warps, grid)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> None:
    n, k = weight.shape
    rows = x.shape[0]
    width = n // 2 if gated else n
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"fused_gemv takes 1 to {MAX_ROWS} rows, got {rows}")
    if x.shape[1] != k or (gated and n % 2):
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if residual is not None and residual.shape != (rows, width):
        raise ValueError(f"residual must be {(rows, width)}, got {tuple(residual.shape)}")
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
    NORM: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_K] of f(x), rounded to x's dtype as the unfused chain would."""
    values = tl.load(x + row * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.load(norm_weight + ks, mask=ks < K, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / K + eps) * scale
        values = values.to(x.dtype.element_ty).to(tl.float32)
    return values


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
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (blocks of BLOCK_N output columns,). Only ``weight`` is read before the wait.

    Column c is weight row c, and weight row N + c too if GATED: gate and up."""
    if PDL:
        gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = weight + columns.to(tl.int64)[:, None] * K + ks[None, :]
    up_ptrs = w_ptrs + N * K
    live = inside[:, None] & (ks < K)[None, :]
    w_next = tl.load(w_ptrs, mask=live, other=0.0)
    if GATED:
        up_next = tl.load(up_ptrs, mask=live, other=0.0)
    if PDL:
        gdc_wait()
    batch = tl.arange(0, ROWS_P2)
    sums = tl.zeros([BLOCK_N, ROWS_P2], tl.float32)
    ups = tl.zeros([BLOCK_N, ROWS_P2], tl.float32)
    for first in range(0, K, BLOCK_K):
        w_tile = w_next.to(tl.float32)
        if GATED:
            up_tile = up_next.to(tl.float32)
        if K > BLOCK_K:  # the next stretch is on its way while this one is multiplied
            ahead = inside[:, None] & (first + BLOCK_K + ks < K)[None, :]
            w_next = tl.load(w_ptrs + first + BLOCK_K, mask=ahead, other=0.0)
            if GATED:
                up_next = tl.load(up_ptrs + first + BLOCK_K, mask=ahead, other=0.0)
        for row in tl.static_range(ROWS):
            values = _input_tile(x, norm_weight, eps, row, first + ks, K, NORM)[None, :]
            sums += tl.where(batch[None, :] == row, tl.sum(w_tile * values, 1)[:, None], 0.0)
            if GATED:
                ups += tl.where(batch[None, :] == row, tl.sum(up_tile * values, 1)[:, None], 0.0)
    cells = inside[:, None] & (batch < ROWS)[None, :]
    places = batch[None, :] * N + columns[:, None]
    if GATED:
        gate = sums.to(out.dtype.element_ty).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
        sums = silu * ups.to(out.dtype.element_ty).to(tl.float32)
    if RESIDUAL:
        sums += tl.load(residual + places, mask=cells, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=cells)


_launch_gemv = Launcher(_gemv_kernel)
