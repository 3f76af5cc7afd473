"""Tiny random models made by transformers, saved as a user would find them. No download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name: transformers' architecture and what differs from SHAPE
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("Llama", {"head_dim": 32}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "llama_rope_llama3": ("Llama", {"rope_parameters": {"rope_theta": 500.0} | LLAMA3_ROPE}),
    "llama_rope_linear": (
        "Llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_reference(variant: str, seed: int = 0) -> Any:
    """The transformers model in float32. Biases and norms are random too: at their initial
    zeros and ones a model that ignored them would pass."""
    architecture, overrides = VARIANTS[variant]
    config = getattr(transformers, f"{architecture}Config")(**(SHAPE | overrides))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def round_weights(model: Any) -> Any:
    """The float32 model with weights rounded to bfloat16. Not ``model.bfloat16().float()``:
    that would round the rotary frequencies too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def save_reference(variant: str, folder: Path) -> Any:
    """Saves the model to ``folder`` and returns it."""
    model = make_reference(variant)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config.pop(name, None)
        if value is not None:
            config[name] = value
    path.write_text(json.dumps(config))
