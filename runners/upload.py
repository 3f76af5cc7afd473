"""Host numbers to device tensors without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes, for vector loads


def upload(
    values: list[int] | list[float] | list[list[int]] | list[list[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor on ``device``. Never blocks on work that the device has queued."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    # The caching host allocator keeps a pinned block until the copies from it have run, so
    # dropping `host` right after an asynchronous copy is safe.
    return host.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Tensors like ``arrays`` on ``device``, which there are views of one block: one allocation
    and one copy for all. Never blocks, as ``upload``; the arrays may change afterwards."""
    if device.type != "cuda":
        return [torch.from_numpy(array.copy()) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    block, at = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        block[at : at + array.nbytes].view(array.dtype)[:] = array.ravel()
        at += size
    parts = host.to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    return [
        part[: array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
