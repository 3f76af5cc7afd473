"""What an attention backend may offer beyond ``AttentionBackend``: a decode step's rotation, KV
write and attention in one launch. Knows no kernel and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from duograph.kernels.attention.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Rotary:
    """How new queries and keys become those that attend; see ``fused.rope_and_cache``."""

    positions: torch.Tensor  # int64 [bs]
    cos_sin: torch.Tensor  # float32 [context_length, head_dim]: cosines, then sines
    q_norm: torch.Tensor | None = None  # [head_dim], both or none: weights of an RMS norm
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@runtime_checkable
class FusedDecode(Protocol):
    """A backend whose decode takes q, k and v as the projection left them.

    Attributes:
        max_fused_rows: the largest batch at which this is faster than the separate launches.
    """

    max_fused_rows: int

    def decode_fused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """As ``fused.rope_and_cache`` and then ``AttentionBackend.decode``, but q and k stay as
        they are. k and v: [bs, num_kv_heads, head_dim]; ``meta.out_cache_loc`` is where the
        page table has the last position of each sequence."""
