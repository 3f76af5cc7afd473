"""Several arrays in one copy to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from duograph.runners.upload import upload_together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_in_their_shape_and_type_whatever_happens_to_them_afterwards(
    device: str,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arrays: list[npt.NDArray[Any]] = [
        np.arange(3, dtype=np.int32),
        np.arange(10, dtype=np.int64).reshape(2, 5) - 2**62,
        np.empty(0, np.float32),
        np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2).T,  # not dense
        np.arange(8, dtype=np.int32)[::2],
    ]
    expected = [array.tolist() for array in arrays]
    tensors = upload_together(arrays, torch.device(device))
    for array in arrays:
        array[...] = 7
    assert [tensor.tolist() for tensor in tensors] == expected
    types = [torch.int32, torch.int64, torch.float32, torch.float32, torch.int32]
    assert [tensor.dtype for tensor in tensors] == types
    assert {tensor.device.type for tensor in tensors} == {device}
