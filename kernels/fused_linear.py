"""A linear layer for a single row, with the norm, gate and residual around it folded in.

The CUDA-only door to ``gemv_triton``, which says where that pays. Measured on one H200
(tests/benchmarks/h200.md): at one row it beats cuBLAS and separate element-wise kernels in the
0.6B, 1B and 8B shapes; from two rows on it does not.
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
