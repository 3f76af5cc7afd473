"""Turns a GGUF file into a model folder: config, tokenizer and bfloat16 safetensors.

``python -m duograph.runners.models.gguf IN.gguf OUT_FOLDER`` does the same from a shell. The
folder appears under its name complete or not at all. Torch-free: numpy, and the gguf package's
dequantisers. Weights equal those that transformers dequantises, rounded to bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from duograph.runners.model_config import ModelConfig, ModelError
from duograph.runners.models import gguf_tokenizer
from duograph.runners.models.gguf_header import GGUFFile, TensorInfo

Progress = Callable[[int, int], None]  # tensors done, tensors in all

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(path: str | Path, out_dir: str | Path, progress: Progress | None = None) -> None:
    """Converts ``path`` to the folder ``out_dir``.

    A finished folder is left alone, also when another process makes it meanwhile; an empty
    one is filled.

    Args:
        progress: called with (tensors converted, tensors in all).

    Raises:
        ModelError: the file is damaged or holds a model or tokenizer that is not supported, or
            ``out_dir`` is something else than a model folder.
    """
    source, target = Path(path), Path(out_dir)
    if (target / "config.json").is_file():
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: exists and is no model folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with GGUFFile(source) as file:
            _write_texts(file, work)
            _write_weights(file, work, progress or (lambda done, total: None))
        _sync(work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already if the rename went well


def _write_texts(file: GGUFFile, work: Path) -> None:
    tokenizer = gguf_tokenizer.build_tokenizer(file.path, file.fields)
    tokenizer.save(str(work / "tokenizer.json"))
    config = _config(file)
    tokens: dict[str, Any] = {
        name: config[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if name in config
    }
    _write_json(work / "config.json", config)
    _write_json(work / "generation_config.json", tokens)
    _write_json(
        work / "tokenizer_config.json",
        gguf_tokenizer.tokenizer_config(file.path, file.fields, config["max_position_embeddings"]),
    )
    try:
        ModelConfig.from_folder(work)
    except ModelError as error:
        # The folder is ours and about to vanish: the user knows the GGUF file only.
        raise ModelError(f"{file.path}: {str(error).removeprefix(f'{work}{os.sep}')}") from error


def _config(file: GGUFFile) -> dict[str, Any]:
    """The content of config.json. Values are checked by ModelConfig when it is read back."""
    name = file.fields.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: general.architecture: {name!r} is not one of {known}")

    def key(suffix: str, default: Any = None) -> Any:
        value = file.fields.get(f"{name}.{suffix}", default)
        if value is None:
            raise ModelError(f"{file.path}: {name}.{suffix}: is missing")
        return value

    if key("expert_count", 0):
        raise ModelError(f"{file.path}: {name}.expert_count: mixtures of experts are not supported")
    num_heads = key("attention.head_count")
    head_dim = _head_dim(file, key, num_heads)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": key("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": _short_float(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": key("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": "bfloat16",
    }
    window = key("attention.sliding_window", 0)
    if window:
        if name != "llama":
            raise ModelError(f"{file.path}: {name}.attention.sliding_window: is not supported")
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        config["model_type"] = "mistral"
    scaling = _rope_scaling(file, key, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= _special_ids(file)
    return config


def _head_dim(file: GGUFFile, key: Callable[..., Any], num_heads: Any) -> Any:
    hidden = key("embedding_length")
    if not isinstance(num_heads, int) or not isinstance(hidden, int) or num_heads < 1:
        raise ModelError(f"{file.path}: attention.head_count: {num_heads!r} is not a number > 0")
    head_dim = key("attention.key_length", hidden // num_heads)
    for suffix in ("attention.value_length", "rope.dimension_count"):
        if key(suffix, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {suffix}: only the head size {head_dim} is supported")
    return head_dim


def _rope_scaling(file: GGUFFile, key: Callable[..., Any], head_dim: int) -> dict[str, Any] | None:
    """Linear scaling is a key; Llama 3's is a tensor of divisors, one per frequency, from
    which its parameters are found again."""
    kind = key("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: rope.scaling.type: {kind!r} is not supported")
    if _ROPE_FACTORS not in file.tensors:
        if kind == "none":
            return None
        return {"rope_type": "linear", "factor": key("rope.scaling.factor")}
    stored = _values(file, file.tensors[_ROPE_FACTORS])
    theta = key("rope.freq_base", 10_000.0)
    inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    turns = original * inverse / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / (keep + (1.0 - keep) / factor)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{file.path}: tensor {_ROPE_FACTORS!r}: is not Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _special_ids(file: GGUFFile) -> dict[str, Any]:
    num_tokens = len(gguf_tokenizer.token_list(file.path, file.fields))

    def find(name: str) -> int | None:
        return gguf_tokenizer.special_id(file.path, file.fields, name, num_tokens)

    ids: dict[str, Any] = {}
    ends = [token for token in (find("eos_token_id"), find("eot_token_id")) if token is not None]
    if ends:
        unique = list(dict.fromkeys(ends))
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    for field, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        token = find(name)
        if token is not None:
            ids[field] = token
    return ids


def _write_weights(file: GGUFFile, work: Path, progress: Progress) -> None:
    """model.safetensors, streamed one tensor at a time whatever the model's size.

    Written by hand since the library wants all tensors in memory. The format: the length of a
    JSON header as 8 bytes little-endian, the header, the tensors in its order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in _weights(file):
        start, end = end, end + 2 * math.prod(tensor.shape)
        name, _ = _checkpoint_name(file, tensor.name)
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with (work / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        total = len(_weights(file))
        for done, tensor in enumerate(_weights(file), start=1):
            out.write(_converted(file, tensor).data)
            progress(done, total)


def _weights(file: GGUFFile) -> list[TensorInfo]:
    """Every tensor that is a weight of the model, in file order."""
    return [tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS]


def _converted(file: GGUFFile, tensor: TensorInfo) -> NDArray[np.uint16]:
    """bfloat16 bits of a tensor, rows in the order of a safetensors checkpoint."""
    values = _values(file, tensor)
    part = _checkpoint_name(file, tensor.name)[1]
    if part in ("attn_q", "attn_k") and file.fields["general.architecture"] == "llama":
        heads = file.fields["llama.attention.head_count"]
        if part == "attn_k":
            heads = file.fields.get("llama.attention.head_count_kv", heads)
        values = _half_split(file, tensor, values, heads)
    return _to_bfloat16(file, tensor, values)


def _checkpoint_name(file: GGUFFile, name: str) -> tuple[str, str]:
    """The name in a safetensors checkpoint, and which part of a layer it is."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name], ""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"{file.path}: tensor {name!r} is not known")
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}", match[2]


def _values(file: GGUFFile, tensor: TensorInfo) -> NDArray[np.float32]:
    """The dequantised tensor, float32 of ``tensor.shape``."""
    rows = file.raw(tensor).reshape(-1, tensor.nbytes // math.prod(tensor.shape[:-1]))
    try:
        values = dequantize(rows, tensor.quantization)
    except NotImplementedError:
        kind = tensor.quantization.name
        raise ModelError(f"{file.path}: tensor {tensor.name!r}: type {kind}") from None
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)


def _half_split(
    file: GGUFFile, tensor: TensorInfo, values: NDArray[np.float32], heads: Any
) -> NDArray[np.float32]:
    """Undoes the row order for interleaved rotary pairs: within each head, pairs (2i, 2i + 1)
    become (i, i + head_dim / 2)."""
    if not isinstance(heads, int) or heads < 1 or values.shape[0] % (2 * heads):
        raise ModelError(
            f"{file.path}: tensor {tensor.name!r}: {values.shape[0]} rows for {heads!r} heads"
        )
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _to_bfloat16(
    file: GGUFFile, tensor: TensorInfo, values: NDArray[np.float32]
) -> NDArray[np.uint16]:
    """Bits of the values rounded to nearest, ties to even."""
    if not np.isfinite(values).all():
        raise ModelError(f"{file.path}: tensor {tensor.name!r}: holds NaN or infinity")
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype(np.uint16)


def _short_float(value: Any) -> Any:
    """A float32 that was widened to a double, as its shortest decimal: 1e-05, not 9.99e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Makes the content durable before the rename makes it visible."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Exit status 0, 1 if the file cannot be converted, 2 for wrong arguments. Progress goes
    to stdout as lines "done total"."""
    if len(arguments) != 2:
        print("usage: python -m duograph.runners.models.gguf IN.gguf OUT_FOLDER", file=sys.stderr)
        return 2
    try:
        convert_gguf(
            arguments[0],
            arguments[1],
            progress=lambda done, total: print(done, total, flush=True),
        )
    except (ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
