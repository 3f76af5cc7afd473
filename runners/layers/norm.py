"""RMS norm as a layer, alone or together with the addition of the residual before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from duograph.kernels import fused
from duograph.runners.layers.weights import WeightSlot


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return fused.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of the sum, and the sum."""
        return fused.add_rms_norm(x, residual, self.weight, self.eps)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``add``, in the memory of its arguments, which must not be read afterwards."""
        return fused.add_rms_norm_(x, residual, self.weight, self.eps)

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{name}.weight", WeightSlot(self.weight)
