"""Seeded random weights for a model of which only the config exists.

For shapes that no small model has, and for start-up and speed tests. The values are drawn on
the model's device, so 8B parameters take a moment on a GPU. Their text is nonsense.
"""

from __future__ import annotations

import torch

from duograph.runners.layers.weights import model_weight_slots
from duograph.runners.models.llama import CausalLM

DUMMY_SEED = 0


def fill_with_dummy_weights(model: CausalLM, seed: int = DUMMY_SEED) -> None:
    """Normal values with standard deviation 1 / sqrt(input features) for matrices, ones for
    norms, zeros for biases: activations keep a scale of one through any depth, so logits stay
    finite in every dtype. The same seed gives the same weights on the same device type."""
    generator: torch.Generator | None = None
    for name, slot in model_weight_slots(model).items():
        target = slot.target
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            if generator is None:
                generator = torch.Generator(device=target.device).manual_seed(seed)
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)
