"""Attention backends by name. Triton and FlashInfer are imported only when asked for."""

from __future__ import annotations

import torch

from duograph.kernels.attention.base import AttentionBackend

BACKENDS = ("torch", "triton", "flashinfer")


def create_backend(
    name: str,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionBackend:
    """The attention backend called ``name``, for one rank's heads.

    ``dtype`` is that of queries and pool; only FlashInfer has to know it beforehand.

    Raises:
        ValueError: unknown name, a backend that cannot run on ``device`` or this shape, or query
            heads that are no multiple of the KV heads.
        FlashInferUnavailable: the package is missing or broken.
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
    if name == "flashinfer":
        if device.type != "cuda":
            raise ValueError(f"attention backend flashinfer needs a CUDA device, not {device}")
        from duograph.kernels.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=device,
            dtype=dtype,
        )
    raise ValueError(f"unknown attention backend {name!r}; known are {', '.join(BACKENDS)}")
