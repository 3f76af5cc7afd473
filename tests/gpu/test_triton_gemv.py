"""The compiled linear layers of one and of a few rows against cuBLAS in float32."""

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


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("shape", [(2048, 2048), (1024, 2048), (3072, 1024), (64, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Behind a kernel that makes the input, as each reads its weights before that has ended."""
    from duograph.kernels.few_rows_triton import few_rows_linear

    n, k = shape
    gen = torch.Generator(device="cuda").manual_seed(rows)
    x = torch.randn(rows, k, device="cuda", generator=gen).to(dtype)
    weight = (torch.randn(n, k, device="cuda", generator=gen) / k**0.5).to(dtype)
    ones = torch.ones(k, device="cuda", dtype=dtype)
    graph = torch.cuda.CUDAGraph()
    few_rows_linear(fused.rms_norm(x, ones, 1e-5), weight)
    with torch.cuda.graph(graph):
        normed = fused.rms_norm(x, ones, 1e-5)
        mine = few_rows_linear(normed, weight)
    for _ in range(3):
        x.copy_(torch.randn(rows, k, device="cuda", generator=gen))
        graph.replay()
        wanted = normed.float() @ weight.float().T
        assert (mine.float() - wanted).norm() / wanted.norm() < 1e-2
        # a row alone, of another size of the batch dimension
        torch.testing.assert_close(few_rows_linear(normed[:1], weight), mine[:1])
