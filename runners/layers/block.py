"""The decoder block: attention and gated MLP, each behind a norm, on one residual stream.

A long prefill step needs most of its memory here, so the block works in place where it can: the
residual stays where it is, and the MLP takes its rows in chunks and leaves the result in its
input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from duograph.kernels import fused
from duograph.kernels.custom_op import register_custom_op
from duograph.runners.layers.attention import Attention
from duograph.runners.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.weights import SINGLE, TPGroup
from duograph.runners.model_config import ModelConfig

_CHUNK_BYTES = 96 << 20  # of the inner tensors of one chunk of rows, if it has more than
_MIN_ROWS = 1024  # below, a GEMM leaves much of a large card idle


def chunk_rows(inner_size: int, itemsize: int) -> int:
    """Rows that the MLP computes at once. On one H200, gate_up, SiLU and down of 8192 rows in
    chunks of 2048 took 2 % longer than at once (1B model), and 7 % in chunks of 1024.

    Never more: graphs of all levels share one pool, and a level a little above one chunk, computed
    at once, needs longer blocks than a long step in chunks has left there.

    ``inner_size``: of the activation, half of gate_up's output.
    """
    rows = _MIN_ROWS
    while 2 * rows * 3 * inner_size * itemsize <= _CHUNK_BYTES:
        rows *= 2
    return rows


@register_custom_op("gated_mlp", mutates=("x",))
def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """Replaces ``x`` [T, hidden_size] by ``down(silu(gate(x)) * up(x))``, some rows at a time.

    Opaque to the tracer, which sees one number of tokens and would make one loop for all.
    gate_up: [2n, hidden_size]; down: [hidden_size, n]; biases: [2n] and [hidden_size].
    """
    for rows in torch.split(x, chunk_rows(down.shape[1], x.itemsize)):
        inner = fused.silu_and_mul(F.linear(rows, gate_up, gate_up_bias))
        if down_bias is None:
            torch.mm(inner, down.t(), out=rows)
        else:
            torch.addmm(down_bias, inner, down.t(), out=rows)
        del inner  # or it would live beside the next one


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            tp=tp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to the same; ``x`` must not be read afterwards."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if torch.compiler.is_compiling() or len(x) > _MIN_ROWS:
            if gate_up.weight is not None and down.weight is not None:  # not packed
                gated_mlp(x, gate_up.weight, down.weight, gate_up.bias, down.bias)
                return x
        out: torch.Tensor = down(fused.silu_and_mul(gate_up(x)))
        return out


class DecoderBlock(nn.Module):
    """The submodules carry the checkpoint's names."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer_id, dtype=dtype, device=device, tp=tp)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device, tp=tp)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] twice: the branch's output, not yet added, and the residual. Neither
        argument may be read afterwards."""
        hidden, residual = self.input_layernorm.add_(hidden, residual)
        return self.from_normed(hidden, residual, positions)

    def from_normed(
        self, hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same behind the first norm: ``hidden`` is what that gives."""
        hidden = self.self_attn(hidden, positions)
        hidden, residual = self.post_attention_layernorm.add_(hidden, residual)
        return self.mlp(hidden), residual

    def forward_row(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for one row on CUDA, norms, gate and additions inside the projections. Takes
        and returns the residual stream itself, [1, hidden_size]."""
        qkv = self.self_attn.qkv_proj.fused(hidden, norm=self.input_layernorm)
        attended = self.self_attn.attend(qkv, positions)
        hidden = self.self_attn.o_proj.fused(attended, residual=hidden)
        gated = self.mlp.gate_up_proj.fused(hidden, norm=self.post_attention_layernorm, gated=True)
        return self.mlp.down_proj.fused(gated, residual=hidden)
