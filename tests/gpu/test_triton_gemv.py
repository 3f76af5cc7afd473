"""The compiled fused GEMV against cuBLAS in float32."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(6144, 4096), (2048, 8192), (4096, 14336), (577, 576)])
@pytest.mark.parametrize("pdl", [False, True])
def test_fused_gemv_chain(rows: int, shape: tuple[int, int], pdl: bool) -> None:
    """Each kind in one chain, so that with pdl every kernel depends on the one before it."""
    from duograph.kernels.gemv_triton import fused_gemv

    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9")
    n, k = shape
    gen = torch.Generator(device="cuda").manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=gen)

    up, down = randn(2 * n, k) / k**0.5, randn(k, n) / n**0.5
    x, norm = randn(rows, k), randn(k).abs()
    half = [t.bfloat16() for t in (x, up, down, norm)]
    wide = [t.float() for t in half]

    gate_up = fused.rms_norm(wide[0], wide[3], 1e-5) @ wide[1].T
    wanted = fused.silu_and_mul(gate_up) @ wide[2].T + wide[0]
    for _ in range(3):
        mine = fused_gemv(half[0], half[1], norm_weight=half[3], eps=1e-5, gated=True, pdl=pdl)
        mine = fused_gemv(mine, half[2], residual=half[0], pdl=pdl)
        error = (mine.float() - wanted).norm() / wanted.norm()
        assert error < 1e-2
