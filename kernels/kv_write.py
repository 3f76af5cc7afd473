"""Rows of keys and values into slots of the paged pool.

Plain tensors only; which slot a row belongs to is the caller's business. Slot 0 is the dummy
that padding rows share, so its content is whatever row came last.
"""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Writes row i of ``k`` and ``v`` to slot ``out_cache_loc[i]``.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], any float dtype and row stride.
        k_cache, v_cache: [num_slots, num_kv_heads, head_dim]; rows are converted to its dtype.
        out_cache_loc: int64 [num_tokens].
    """
    k_cache.index_copy_(0, out_cache_loc, k.to(k_cache.dtype))
    v_cache.index_copy_(0, out_cache_loc, v.to(v_cache.dtype))
