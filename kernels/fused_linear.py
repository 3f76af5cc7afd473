"""Linear layers for a single row, with the norm, gate and residual around it folded in, and for
a few rows of a small weight.

The CUDA-only door to ``gemv_triton`` and ``few_rows_triton``, which says where they pay. Measured
on one H200 (tests/benchmarks/h200.md): at one row the first beats cuBLAS and separate element-wise
kernels in the 0.6B, 1B and 8B shapes; from two rows on it does not. There the second takes 3 to
5 us less than cuBLAS for an output projection of up to 2048 inputs.
"""

from __future__ import annotations

import torch

from duograph.kernels.pdl import has_pdl

BEST_ROWS = 1
_MAX_NORM_WIDTH = 8192  # a program keeps the whole row in registers


def is_available(weight: torch.Tensor) -> bool:
    """True for 16-bit weights [n, k] on CUDA with rows that a program can hold."""
    return weight.is_cuda and weight.dtype.itemsize == 2 and weight.shape[1] <= _MAX_NORM_WIDTH


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``gemv_triton.fused_gemv``."""
    from duograph.kernels.gemv_triton import fused_gemv

    return fused_gemv(
        x,
        weight,
        norm_weight=norm_weight,
        eps=eps,
        gated=gated,
        residual=residual,
        pdl=has_pdl(x.device),
    )


def suits_few_rows(weight: torch.Tensor, rows: int) -> bool:
    """True where ``few_rows_linear`` is the fastest way for ``rows`` rows of input."""
    if not weight.is_cuda or weight.dtype.itemsize != 2 or not has_pdl(weight.device):
        return False
    from duograph.kernels import few_rows_triton

    return BEST_ROWS < rows <= few_rows_triton.MAX_ROWS and few_rows_triton.fits(*weight.shape)


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``few_rows_triton.few_rows_linear``."""
    from duograph.kernels import few_rows_triton

    return few_rows_triton.few_rows_linear(x, weight)
