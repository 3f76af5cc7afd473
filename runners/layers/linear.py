"""Linear layers, cut over tensor-parallel ranks from the start (tp_size 1 today).

Column-parallel layers split the output features, row-parallel ones the input features; between
the two no communication is needed. Merged layers hold several checkpoint matrices below each
other, so that one GEMM does the work of three. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from duograph.kernels import fused_linear
from duograph.kernels import packed_linear as packed_kernel
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.weights import SINGLE, TPGroup, WeightSlot


class LinearBase(nn.Module):
    """``y = x @ weight.T + bias`` on one rank's shard.

    On CUDA and in float32 this is F.linear. On CPU with 16-bit weights ``pack`` changes it to
    the packed kernel, for the reason measured in ``kernels/packed_linear.py``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Sizes are this rank's. Weights are uninitialised until loaded."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(out_features, dtype=dtype, device=device), requires_grad=False
            )
        self.packed: packed_kernel.PackedWeight | None = None
        self.handle = -1

    def can_pack(self) -> bool:
        return self.weight is not None and packed_kernel.fits_float16(self.weight)

    def pack(self) -> None:
        assert self.weight is not None, "packed twice"
        self.packed = packed_kernel.PackedWeight(self.weight, self.bias)
        self.handle = self.packed.handle
        self.weight = self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        # The handle first: a parameter is looked up through nn.Module, which costs 2 us a call.
        if self.handle >= 0:
            return packed_kernel.packed_linear(x, self.handle, self.out_features)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[silu_and_mul](self([norm](x))) [+ residual]`` in one kernel, for one row on CUDA;
        see ``kernels/fused_linear.py``. The layer has no bias and is not packed."""
        assert self.weight is not None and self.bias is None
        return fused_linear.fused_linear(
            x,
            self.weight,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            gated=gated,
            residual=residual,
        )

    def suits_few_rows(self, rows: int) -> bool:
        """Whether ``few_rows`` is the faster way for so many rows."""
        if self.weight is None or self.bias is not None:
            return False
        return fused_linear.suits_few_rows(self.weight, rows)

    def few_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``self(x)`` up to rounding, for x of a size that ``suits_few_rows``."""
        assert self.weight is not None
        return fused_linear.few_rows_linear(x, self.weight)

    def _slots(
        self, name: str, first_row: int, rows: int, shard_dim: int | None, tp: TPGroup
    ) -> Iterator[tuple[str, WeightSlot]]:
        """Weight and bias of the checkpoint matrix that is ``rows`` rows from ``first_row``."""
        assert self.weight is not None, "weights are loaded before they are packed"
        yield (
            f"{name}.weight",
            WeightSlot(self.weight.narrow(0, first_row, rows), shard_dim, tp),
        )
        if self.bias is not None:
            # A bias is added once per output row, so only a split of rows splits it.
            bias_dim = 0 if shard_dim == 0 else None
            yield f"{name}.bias", WeightSlot(self.bias.narrow(0, first_row, rows), bias_dim, tp)


class MergedColumnParallelLinear(LinearBase):
    """Several matrices that read the same input, one below the other.

    ``parts`` maps each checkpoint name (last path component) to its total output features; the
    output of this rank is the parts' shards side by side, in this order.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        self.tp = tp
        self.parts = {name: tp.shard(rows, f"rows of {name}") for name, rows in parts.items()}
        super().__init__(
            in_features, sum(self.parts.values()), bias=bias, dtype=dtype, device=device
        )

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        parent = name.rpartition(".")[0]
        first_row = 0
        for part, rows in self.parts.items():
            yield from self._slots(f"{parent}.{part}", first_row, rows, 0, self.tp)
            first_row += rows


class RowParallelLinear(LinearBase):
    """One matrix whose input features are split over the ranks.

    With tp_size > 1 the ranks' outputs have to be summed by the caller and the bias kept on
    rank 0; with one rank the output is complete.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        self.tp = tp
        super().__init__(
            tp.shard(in_features, "input features"),
            out_features,
            bias=bias and tp.rank == 0,
            dtype=dtype,
            device=device,
        )

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        yield from self._slots(name, 0, self.out_features, 1, self.tp)
