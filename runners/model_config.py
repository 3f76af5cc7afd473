"""What a model folder says about the model, checked before anything is allocated.

Reads config.json and generation_config.json and nothing else: no weights, no tokenizer, no
torch. Every number in these files is a claim by a stranger, so each is checked for type,
range and divisibility here, and the rest of the floor may trust a ``ModelConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from duograph.runners.config_file import ConfigFile, ModelError

__all__ = ["KNOWN_ARCHITECTURES", "GenerationDefaults", "ModelConfig", "ModelError", "RopeConfig"]

_ABOVE_ZERO = 1e-9
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture differs from plain Llama.

    ``qkv_bias`` None means that the config's ``attention_bias`` decides, for o_proj too.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    window_by_default: bool = False  # sliding_window alone is enough to make layers slide


KNOWN_ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(qkv_bias=False, window_by_default=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. ``kind`` is "default", "linear" or "llama3"; the frequency factors
    and the original context only mean something for the last."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults the model's author recommends, within the ranges that a request may
    ask for; None where the files say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @staticmethod
    def from_folder(path: str | Path) -> GenerationDefaults:
        """Reads ``path``/generation_config.json, if there is one. Raises ModelError."""
        return _generation_defaults(_generation_file(Path(path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One dense decoder of the Llama family.

    Attributes:
        context_length: most tokens of prompt and output together. At most the sliding window
            where there is one, because every layer here attends to the whole context.
        context_clipped_from: the length before the sliding window clipped it, else None.
        dtype: "bfloat16", "float16" or "float32", as the weights were saved.
        eos_token_ids: from generation_config.json, else config.json; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    context_clipped_from: int | None = None

    @staticmethod
    def from_folder(path: str | Path) -> ModelConfig:
        """Reads ``path``/config.json and, if there is one, generation_config.json.

        Raises:
            ModelError: the folder or a field is missing, out of range or not supported. The
                message names the file and the field.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such model folder")
        config = ConfigFile.read(folder / "config.json")
        return _parse(config, _generation_file(folder))

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones counted once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        layer += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.o_bias
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        tables = 1 if self.tie_word_embeddings else 2
        return (
            tables * self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size
        )


def _generation_file(folder: Path) -> ConfigFile:
    path = folder / "generation_config.json"
    return ConfigFile.read(path) if path.exists() else ConfigFile(path, {})


def _parse(config: ConfigFile, generation: ConfigFile) -> ModelConfig:
    name = _architecture_name(config)
    architecture = KNOWN_ARCHITECTURES[name]
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size", low=1, high=1 << 20)
    num_layers = config.integer("num_hidden_layers", low=1, high=4096)
    num_heads = config.integer("num_attention_heads", low=1, high=4096)
    num_kv_heads = config.integer("num_key_value_heads", low=1, high=4096, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    head_dim = _head_dim(config, hidden_size, num_heads)
    vocab_size = config.integer("vocab_size", low=1, high=1 << 24)
    context_length = config.integer("max_position_embeddings", low=1, high=1 << 24)
    attention_bias = config.boolean("attention_bias", default=False)
    window = _sliding_window(config, architecture, num_layers)
    clipped = window is not None and window < context_length
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", low=1, high=1 << 22),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=window if clipped and window is not None else context_length,
        context_clipped_from=context_length if clipped else None,
        rms_eps=config.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
        rope=_rope(config, context_length),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.qkv_bias is None else False,
        mlp_bias=config.boolean("mlp_bias", default=False),
        qk_norm=architecture.qk_norm,
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation, vocab_size),
    )


def _architecture_name(config: ConfigFile) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error("architectures", f"must be a list of names, got {names!r}")
    for name in names:
        if name in KNOWN_ARCHITECTURES:
            return str(name)
    known = ", ".join(KNOWN_ARCHITECTURES)
    raise config.error("architectures", f"{names!r} is not supported; known are {known}")


def _refuse_unsupported(config: ConfigFile) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise config.error("hidden_act", f"{activation!r} is not supported, only 'silu'")
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "quantised safetensors are not supported")
    if config.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
        raise config.error("partial_rotary_factor", "only 1.0 is supported")


def _head_dim(config: ConfigFile, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(
            "hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = config.integer("head_dim", low=2, high=1024, default=hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _dtype(config: ConfigFile) -> str:
    field = "dtype" if config.get("dtype") is not None else "torch_dtype"
    dtype = config.get(field)
    if dtype is None:
        return "float32"  # what a config that says nothing means by convention
    if dtype not in DTYPES:
        raise config.error(field, f"{dtype!r} is not supported, only {', '.join(DTYPES)}")
    return str(dtype)


def _sliding_window(config: ConfigFile, architecture: Architecture, num_layers: int) -> int | None:
    """The window if any layer uses one, else None."""
    window = config.get("sliding_window")
    if window is None:
        return None
    window = config.integer("sliding_window", low=1, high=1 << 30)
    layer_types = config.get("layer_types")
    if layer_types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise config.error("layer_types", f"must be a list of {num_layers} names")
        for layer_type in layer_types:
            if layer_type not in known:
                raise config.error("layer_types", f"{layer_type!r} is not one of {known}")
        return window if "sliding_attention" in layer_types else None
    if architecture.window_by_default:
        return window
    if not config.boolean("use_sliding_window", default=False):
        return None
    first = config.integer("max_window_layers", low=0, high=1 << 20, default=0)
    return window if first < num_layers else None


def _rope(config: ConfigFile, context_length: int) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling, and rope_parameters with all in one."""
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    top_theta = config.number("rope_theta", low=1.0, high=1e15, default=10_000.0)
    if scaling is None:
        return RopeConfig(theta=top_theta)
    theta = scaling.number("rope_theta", low=1.0, high=1e15, default=top_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
        raise scaling.error("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3"):
        raise scaling.error(
            "rope_type", f"{kind!r} is not supported; known are default, linear, llama3"
        )
    factor = scaling.number("factor", low=1.0, high=1e6)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low = scaling.number("low_freq_factor", low=1e-6, high=1e6)
    high = scaling.number("high_freq_factor", low=1e-6, high=1e6)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high} must exceed low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=scaling.integer(
            "original_max_position_embeddings", low=1, high=1 << 27, default=context_length
        ),
    )


def _eos_token_ids(config: ConfigFile, generation: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json wins: it lists every end token of a chat model, config.json
    often only the base model's."""
    for source in (generation, config):
        if source.get("eos_token_id") is not None:
            return source.token_ids("eos_token_id", vocab_size)
    return ()


def _generation_defaults(generation: ConfigFile) -> GenerationDefaults:
    if not generation.boolean("do_sample", default=True):
        return GenerationDefaults(temperature=0.0)

    def optional(field: str, low: float, high: float) -> float | None:
        if generation.get(field) is None:
            return None
        return generation.number(field, low=low, high=high)

    top_k: int | None = generation.get("top_k")
    if top_k is not None:
        top_k = generation.integer("top_k", low=-1, high=1 << 24) or -1  # 0 also means off
    return GenerationDefaults(
        temperature=optional("temperature", 0.0, 2.0),
        top_p=optional("top_p", _ABOVE_ZERO, 1.0),
        top_k=top_k,
        min_p=optional("min_p", 0.0, 1.0),
        repetition_penalty=optional("repetition_penalty", _ABOVE_ZERO, 2.0),
    )
