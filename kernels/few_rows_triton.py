"""A linear layer for a few rows whose weights are all under way before its input is there.

At 2 to 16 rows a small projection is launch and latency: the library takes 6 us for 8 MB that
are read in 2. Here every program loads its 16 rows of weights, whole, before it waits for the
kernel that makes the input (programmatic dependent launch), so that they arrive while that one
runs. Each warp multiplies its own stretch of the input features on the tensor cores; the
stretches are summed in float32 at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.pdl import pdl_launch

MAX_ROWS = 16
BLOCK_N = 16  # weight rows of one program
_WARPS = 8
_MIN_STRETCH = 64  # input features of one warp
MAX_IN_FEATURES = 2048  # more of them do not fit the registers and shared memory of a program


def fits(out_features: int, in_features: int) -> bool:
    """Whether programs can hold rows of such a weight: 512, 1024 or 2048 input features."""
    power_of_two = in_features & (in_features - 1) == 0
    enough = _WARPS * _MIN_STRETCH <= in_features <= MAX_IN_FEATURES
    return power_of_two and enough and out_features % BLOCK_N == 0


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with float32 sums, rounded once.

    Args:
        x: [rows, in_features], 1 to 16 rows.
        weight: [out_features, in_features] of x's dtype; see ``fits``.

    Raises:
        ValueError: shapes, dtype or layout do not fit.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"few_rows_linear takes 1 to {MAX_ROWS} rows, got {rows}")
    if weight.shape[1] != in_features or not fits(out_features, in_features):
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if x.dtype != weight.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("few_rows_linear needs contiguous tensors of one dtype")
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    _few_rows_kernel[(out_features // BLOCK_N,)](
        x,
        weight,
        out,
        rows,
        N=out_features,
        K=in_features,
        BLOCK_M=max(8, triton.next_power_of_2(rows)),
        BLOCK_N=BLOCK_N,
        WARPS=_WARPS,
        num_warps=_WARPS,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (N / BLOCK_N,). Only ``weight`` is read before the wait.

    A batched product with one batch entry per warp: a plain one would give every warp all of
    the input features again."""
    if PDL:
        gdc_launch_dependents()
    STRETCH: tl.constexpr = K // WARPS
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, WARPS)[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    weights = tl.load(weight + columns.to(tl.int64)[None, :, None] * K + ks[:, None, :])
    if PDL:
        gdc_wait()
    live = (batch < rows)[None, None, :]
    inputs = tl.load(x + batch[None, None, :] * K + ks[:, :, None], mask=live, other=0.0)
    sums = tl.sum(tl.dot(weights, inputs, input_precision="ieee"), 0)
    places = batch[None, :] * N + columns[:, None]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=(batch < rows)[None, :])
