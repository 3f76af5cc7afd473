"""The table of rotary angles (Su et al. 2021), with Llama 3's and linear scaling.

Computed once, in float64 and rounded to float32, and never cast to the model's type: bfloat16
angles lose whole positions at long context.
"""

from __future__ import annotations

import math

import torch

from duograph.runners.model_config import RopeConfig


def cos_sin_cache(
    rope: RopeConfig, *, head_dim: int, context_length: int, device: torch.device
) -> torch.Tensor:
    """float32 [context_length, head_dim]: cosines of each position's angles, then sines."""
    inverse = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device, torch.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float64 [head_dim / 2]: radians per position of each pair.

    Llama 3's scaling stretches wavelengths longer than the original context by ``factor``,
    leaves short ones alone and blends in between (Llama 3 herd of models, 2024).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inverse = rope.theta**-exponents
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind != "llama3":
        return inverse
    wavelengths = 2 * math.pi / inverse
    turns = rope.original_context_length / wavelengths  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inverse + (1.0 - keep) * inverse / rope.factor
