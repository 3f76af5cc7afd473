"""Reading and refusing config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duograph.runners.model_config import (
    KNOWN_ARCHITECTURES,
    GenerationDefaults,
    ModelConfig,
    ModelError,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def read(
    folder: Path, changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> ModelConfig:
    config = LLAMA | (changes or {})
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_a_plain_llama_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.context_length, config.dtype) == (8, 4096, "bfloat16")
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (False, False, False)
    assert (config.rope.theta, config.rope.kind) == (10_000.0, "default")
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (7,)


def test_architectures_differ_in_bias_and_norm(tmp_path: Path) -> None:
    flags = {}
    for name in KNOWN_ARCHITECTURES:
        config = read(tmp_path, {"architectures": [name]})
        flags[name] = (config.qkv_bias, config.o_bias, config.qk_norm)
    assert flags == {
        "LlamaForCausalLM": (False, False, False),
        "MistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (False, False, True),
    }
    with_bias = read(tmp_path, {"attention_bias": True})
    assert (with_bias.qkv_bias, with_bias.o_bias) == (True, True)


def test_missing_kv_heads_mean_one_per_query_head(tmp_path: Path) -> None:
    assert read(tmp_path, {"num_key_value_heads": ...}).num_kv_heads == 8


SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, {"rope_theta": 5e5, "rope_scaling": SCALED}).rope
    new = read(tmp_path, {"rope_parameters": SCALED | {"rope_theta": 5e5}}).rope
    assert old == new
    assert (new.kind, new.theta, new.factor) == ("llama3", 5e5, 32.0)
    assert new.original_context_length == 8192
    older = read(tmp_path, {"rope_scaling": {"type": "linear", "factor": 2}}).rope
    assert (older.kind, older.factor) == ("linear", 2.0)
    unscaled = read(tmp_path, {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}})
    assert (unscaled.rope.kind, unscaled.rope.theta) == ("default", 3e4)


def test_generation_config_wins_for_end_tokens_and_gives_defaults(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 0}
    config = read(tmp_path, generation=generation)
    assert config.eos_token_ids == (5, 7, 9)
    defaults = GenerationDefaults.from_folder(tmp_path)
    assert (defaults.temperature, defaults.top_p) == (0.6, 0.9)
    assert (defaults.top_k, defaults.min_p) == (-1, None)
    assert read(tmp_path, generation={"bos_token_id": 1}).eos_token_ids == (7,)
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults()
    read(tmp_path, generation={"do_sample": False, "temperature": 0.6})
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults(temperature=0.0)


@pytest.mark.parametrize(
    ("changes", "context_length"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}, 4096),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            4096,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            512,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 512,
                "layer_types": ["full_attention"] * 4,
            },
            4096,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 512,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            512,
        ),
    ],
)
def test_the_context_never_exceeds_a_window_that_some_layer_uses(
    tmp_path: Path, changes: dict[str, Any], context_length: int
) -> None:
    config = read(tmp_path, changes)
    assert config.context_length == context_length
    assert config.context_clipped_from == (None if context_length == 4096 else 4096)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"vocab_size": ...}, "vocab_size: is missing"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"vocab_size": "1000"}, "vocab_size: must be an integer"),
        ({"vocab_size": True}, "vocab_size: must be an integer"),
        ({"hidden_size": 65}, "hidden_size: 65 is not a multiple"),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 8"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type.*yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": SCALED | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": 3}, "rope_scaling: must be an object"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"dtype": "float64"}, "dtype"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 1000}, "eos_token_id: 1000 is not in"),
        ({"eos_token_id": [1, -2]}, "eos_token_id: -2"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"], "sliding_window": 5}, "layer_types"),
        ({"layer_types": ["mamba"] * 4, "sliding_window": 5}, "layer_types.*mamba"),
    ],
)
def test_a_wrong_field_is_refused_by_file_and_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {named}"):
        read(tmp_path, changes)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        ModelConfig.from_folder(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        ModelConfig.from_folder(tmp_path)
    for content in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            ModelConfig.from_folder(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse: claims a gigabyte
    with pytest.raises(ModelError, match="too long"):
        ModelConfig.from_folder(tmp_path)
    for field, value in (("top_p", 3.0), ("top_p", 0), ("temperature", 2.1), ("top_k", "5")):
        read(tmp_path, generation={field: value})
        with pytest.raises(ModelError, match=rf"generation_config\.json: {field}"):
            GenerationDefaults.from_folder(tmp_path)


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys, duograph.runners.model_config, duograph.runners.models.gguf;"
        "sys.exit('torch' in sys.modules)"
    )
    source = Path(__file__).resolve().parents[2] / ".src"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
