"""Attention backends by name. Triton is imported only when it is asked for."""

from __future__ import annotations

import torch

from duograph.kernels.attention.base import AttentionBackend

BACKENDS = ("torch", "triton")


def create_backend(
    name: str, *, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> AttentionBackend:
    """The attention backend called ``name``, for one rank's heads.

    Raises:
        ValueError: unknown name, a backend that cannot run on ``device``, or query heads that
            are no multiple of the KV heads.
    """
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if name == "torch":
        from duograph.kernels.attention.torch import TorchBackend

        return TorchBackend(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=device
        )
    if name == "triton":
        if device.type != "cuda":
            raise ValueError(f"attention backend triton needs a CUDA device, not {device}")
        from duograph.kernels.attention.triton import TritonBackend

        return TritonBackend(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=device
        )
    raise ValueError(f"unknown attention backend {name!r}; known are {', '.join(BACKENDS)}")
