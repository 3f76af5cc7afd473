"""A tokenizer.json and its companions from the vocabulary inside a GGUF file.

Only byte-level BPE vocabularies whose way of splitting text is known here; a file that names
another one is refused, since a wrong split gives wrong ids without any other sign.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from duograph.runners.config_file import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_then_bytes(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


# tokenizer.ggml.pre to the split it stands for.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level()]
    ),
    "llama-bpe": lambda: _split_then_bytes(r"\p{N}{1,3}"),
    "llama3": lambda: _split_then_bytes(r"\p{N}{1,3}"),
    "qwen2": lambda: _split_then_bytes(r"\p{N}"),
}


def build_tokenizer(path: Path, fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF ``fields`` describe. ``path`` is only for messages.

    Raises:
        ModelError: no byte-level BPE, an unknown split, or lists that contradict each other.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{path}: tokenizer.ggml.model: {kind!r} is not supported, only 'gpt2' (byte-level BPE)"
        )
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{path}: tokenizer.ggml.pre: {pre!r} is not one of {known}")
    tokens = token_list(path, fields)
    merges = [_merge(path, merge) for merge in _strings(path, fields, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.tokens: holds the same token twice")
    try:
        # Llama 3 looks a whole word up before it merges; the others have no need to.
        bpe = BPE(vocab, merges, fuse_unk=False, ignore_merges=pre in ("llama-bpe", "llama3"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(path, fields, tokenizer, tokens)
    tokenizer.post_processor = _post_processor(path, fields, tokens)
    return tokenizer


def tokenizer_config(path: Path, fields: dict[str, Any], context_length: int) -> dict[str, Any]:
    """The content of tokenizer_config.json. The class is the one that takes tokenizer.json as
    it is: any named one makes transformers rebuild the splitting rules."""
    tokens = token_list(path, fields)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token = special_id(path, fields, key, len(tokens))
        if token is not None:
            config[name] = tokens[token]
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def token_list(path: Path, fields: dict[str, Any]) -> list[str]:
    """The vocabulary in id order."""
    return _strings(path, fields, "tokenizer.ggml.tokens")


def special_id(path: Path, fields: dict[str, Any], name: str, num_tokens: int) -> int | None:
    """The id under tokenizer.ggml.``name``, or None if the file gives none."""
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise ModelError(f"{path}: tokenizer.ggml.{name}: {value!r} is not in [0, {num_tokens})")
    return value


def _strings(path: Path, fields: dict[str, Any], key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"{path}: {key}: must be a list of strings")
    return value


def _merge(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{path}: tokenizer.ggml.merges: {merge!r} is no pair")
    return left, right


def _add_special_tokens(
    path: Path, fields: dict[str, Any], tokenizer: Tokenizer, tokens: list[str]
) -> None:
    kinds = fields.get("tokenizer.ggml.token_type", [])
    if len(kinds) not in (0, len(tokens)):
        raise ModelError(
            f"{path}: tokenizer.ggml.token_type: {len(kinds)} entries for {len(tokens)} tokens"
        )
    special, defined = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _post_processor(path: Path, fields: dict[str, Any], tokens: list[str]) -> Any:
    bos = special_id(path, fields, "bos_token_id", len(tokens))
    if not fields.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=f"{tokens[bos]} $A",
        pair=f"{tokens[bos]} $A {tokens[bos]} $B",
        special_tokens=[(tokens[bos], bos)],
    )
