"""The opaque ops of an attention layer, and the layer module that calls them.

The ops take no per-step tensor: they find the batch, the pool and the kernels in the forward
context, so that the compiled forward is the same for every step. Only ``attention`` splits the
prefill graph; rotating and writing keys is the same work per row whatever the batch is. Where
the backend can, a decode step does all of it in one op.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from duograph.kernels import fused
from duograph.kernels.attention.fused_decode import FusedDecode, Rotary
from duograph.kernels.custom_op import register_custom_op
from duograph.runners import forward_context
from duograph.runners.batch import ForwardMode
from duograph.runners.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.weights import SINGLE, TPGroup
from duograph.runners.model_config import ModelConfig


@register_custom_op("rope_and_cache", mutates=("q", "k"))
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    layer_id: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norms (given weights [head_dim]) and rotates q [T, heads, head_dim] and k [T, kv_heads,
    head_dim] in place and writes k and v to the layer's pool at the context's
    ``out_cache_loc``. positions: int64 [T]."""
    context = forward_context.current()
    fused.rope_and_cache(
        q,
        k,
        v,
        positions,
        context.cos_sin,
        context.kv_pool.k[layer_id],
        context.kv_pool.v[layer_id],
        context.meta.out_cache_loc,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )


@register_custom_op("attention", mutates=("out",), split_point=True)
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int
) -> None:
    """Writes to ``out`` [T, heads, head_dim] what q attends to in the layer's pool.

    k and v are in the pool already; they are arguments so that the op comes after the write
    in every trace, and for backends that rather read them here.
    """
    context = forward_context.current()
    backend, meta, pool = context.backend, context.meta, context.kv_pool
    scale = q.shape[-1] ** -0.5
    if context.mode is ForwardMode.DECODE:
        backend.decode(q, pool.k[layer_id], pool.v[layer_id], meta, out, scale)
        return
    # ExtendsNewRows; isinstance with a protocol takes 20 to 40 us, this 0.5, and it is every layer
    extend_new_rows = getattr(backend, "extend_new_rows", None)
    if extend_new_rows is not None and extend_new_rows(q, k, v, meta, out, scale):
        return
    backend.extend(q, pool.k[layer_id], pool.v[layer_id], meta, out, scale)


@register_custom_op("fused_decode", mutates=("out",))
def fused_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    layer_id: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """``rope_and_cache`` and then ``attention`` in one launch, for a step in which
    ``decodes_in_one_op()``. q and k stay as they are."""
    context = forward_context.current()
    backend = cast(FusedDecode, context.backend)  # decodes_in_one_op() has looked
    backend.decode_fused(
        q,
        k,
        v,
        Rotary(positions, context.cos_sin, q_norm, k_norm, eps),
        context.kv_pool.k[layer_id],
        context.kv_pool.v[layer_id],
        context.meta,
        out,
        q.shape[-1] ** -0.5,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def decode_rows() -> int:
    """Rows of the decode step that the current forward is, 0 if it is another. A tracer takes the
    answer of the forward that it traces: one trace serves one phase."""
    context = forward_context.peek()
    if context is None or context.mode is not ForwardMode.DECODE:
        return 0
    return context.meta.seq_lens.shape[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def decodes_in_one_op() -> bool:
    """Whether this is a decode step that its backend does faster in one launch; traced as
    ``decode_rows``."""
    rows: int = decode_rows()
    if not rows:
        return False
    # FusedDecode's; no isinstance, for the reason given in attention()
    most: int = getattr(forward_context.current().backend, "max_fused_rows", 0)
    return rows <= most


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions, optionally with q/k norm."""

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
        self.layer_id = layer_id
        self.head_dim = config.head_dim
        self.num_heads = tp.shard(config.num_heads, "num_attention_heads")
        self.num_kv_heads = tp.shard(config.num_kv_heads, "num_key_value_heads")
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedColumnParallelLinear(
            config.hidden_size,
            {
                "q_proj": config.num_heads * config.head_dim,
                "k_proj": kv_size,
                "v_proj": kv_size,
            },
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        self.eps = config.rms_eps
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_eps, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size], positions int64 [T]; returns [T, hidden_size]."""
        attended = self.attend(self.qkv_proj(hidden), positions)
        # Decode only, so that a prefill step gives the same bits in pieces and without.
        if not torch.compiler.is_compiling() and self.o_proj.suits_few_rows(decode_rows()):
            return self.o_proj.few_rows(attended)
        projected: torch.Tensor = self.o_proj(attended)
        return projected

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What lies between the two projections: qkv [T, (heads + 2 kv_heads) * head_dim] to
        [T, heads * head_dim]."""
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        by_head = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split_with_sizes(by_head, (heads, kv_heads, kv_heads), dim=1)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        # Allocated here, in the piece before the split op, so that its address is stable.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes_in_one_op():
            fused_decode(q, k, v, positions, out, self.layer_id, q_norm, k_norm, self.eps)
        else:
            rope_and_cache(q, k, v, positions, self.layer_id, q_norm, k_norm, self.eps)
            attention(q, k, v, out, self.layer_id)
        return out.view(-1, heads * head_dim)
