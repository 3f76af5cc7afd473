"""The decoder block: attention and gated MLP, each behind a norm, on one residual stream."""

from __future__ import annotations

import torch
from torch import nn

from duograph.kernels import fused
from duograph.runners.layers.attention import Attention
from duograph.runners.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.weights import SINGLE, TPGroup
from duograph.runners.model_config import ModelConfig


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
        out: torch.Tensor = self.down_proj(fused.silu_and_mul(self.gate_up_proj(x)))
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
        self, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] twice: the branch's output, not yet added, and the residual."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, positions)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual

    def forward_row(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for one row on CUDA, norms, gate and additions inside the projections. Takes
        and returns the residual stream itself, [1, hidden_size]."""
        qkv = self.self_attn.qkv_proj.fused(hidden, norm=self.input_layernorm)
        attended = self.self_attn.attend(qkv, positions)
        hidden = self.self_attn.o_proj.fused(attended, residual=hidden)
        gated = self.mlp.gate_up_proj.fused(hidden, norm=self.post_attention_layernorm, gated=True)
        return self.mlp.down_proj.fused(gated, residual=hidden)
