"""The packed 16-bit linear layer against the exact product."""

from __future__ import annotations

import gc

import pytest
import torch

from duograph.kernels import packed_linear
from duograph.kernels.packed_linear import PackedWeight

pytestmark = pytest.mark.skipif(
    not packed_linear.is_available(), reason="this build of torch has no FBGEMM"
)


def run(packed: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    return packed_linear.packed_linear(x, packed.handle, packed.out_features)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 33])
@pytest.mark.parametrize("shape", [(96, 64), (17, 40), (3, 8)])
def test_bfloat16_weights_give_the_float32_product(rows: int, shape: tuple[int, int]) -> None:
    weight = (torch.randn(shape) * 0.05).bfloat16()
    bias = torch.randn(shape[0]).bfloat16()
    x = torch.randn(rows, shape[1])
    expected = x @ weight.float().T + bias.float()
    torch.testing.assert_close(run(PackedWeight(weight, bias), x), expected, atol=1e-5, rtol=1e-5)


def test_the_smallest_bfloat16_weights_keep_their_documented_precision() -> None:
    weight = torch.tensor([[2.0**-14, 1.5 * 2.0**-20, 2.0**-24, 2.0**-30]]).bfloat16()
    seen = run(PackedWeight(weight, None), torch.eye(4)).squeeze(1)
    assert (seen - weight[0].float()).abs().max() <= 2.0**-25
    assert seen[0] == weight[0, 0].float()


@pytest.mark.parametrize("value", [7e4, -1e6, float("inf"), float("nan")])
def test_a_weight_beyond_float16_is_refused(value: float) -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight[2, 3] = value
    assert not packed_linear.fits_float16(weight)
    with pytest.raises(ValueError, match="65504"):
        PackedWeight(weight, None)


def test_a_dropped_weight_is_freed_and_its_handle_never_used_again() -> None:
    first = PackedWeight(torch.randn(8, 8), None)
    handle = first.handle
    del first
    gc.collect()
    second = PackedWeight(torch.randn(8, 8), None)
    assert second.handle != handle
    with pytest.raises(KeyError):
        packed_linear.packed_linear(torch.randn(1, 8), handle, 8)
