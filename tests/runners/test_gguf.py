"""GGUF files to model folders: made here by the gguf package's writer, and the real one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from duograph.runners.config import RunnerConfig
from duograph.runners.model_config import ModelConfig, ModelError
from duograph.runners.models.gguf import convert_gguf, main
from duograph.runners.models.gguf_header import GGUFFile
from duograph.runners.models.loader import load_model
from duograph.tests.paged_session import PagedSession
from duograph.tests.runners.tiny_models import SHAPE, make_reference, round_weights

CPU = torch.device("cpu")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of Llama files: halves of each head alternate."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def tokens() -> list[str]:
    """Control tokens, letters of byte-level BPE with space and newline, merged tokens."""
    letters = ["Ġ", "Ċ", *sorted(pre_tokenizers.ByteLevel.alphabet())[:189]]
    return ["<end>", "<start>", "<stop>", *letters, "Ġt", "he", "Ġthe", "<tool>", "12", "un"]


def write_gguf(
    path: Path,
    arch: str,
    reference: Any,
    *,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    pre: str = "smollm",
    quantize: gguf.GGMLQuantizationType | None = None,
    context_length: int = 256,
    tokenizer_model: str = "gpt2",
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    config = reference.config
    writer.add_context_length(context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    vocabulary = tokens()
    writer.add_token_list(vocabulary)
    kinds = [3] * 3 + [1] * (len(vocabulary) - 3)
    kinds[vocabulary.index("<tool>")] = 4
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "1 2", "u n"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    if edit is not None:
        edit(writer)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "llama" and ".q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        if quantize is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(
                gguf_name(name), gguf.quants.quantize(values, quantize), raw_dtype=quantize
            )
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCHS = [
    ("llama", "llama"),
    ("llama", "llama_tied"),
    ("llama", "llama_biases"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3_tied"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "variant"), ARCHS)
def test_a_converted_model_computes_what_the_original_does(
    arch: str, variant: str, tmp_path: Path
) -> None:
    reference = make_reference(variant)
    write_gguf(tmp_path / "m.gguf", arch, reference)
    folder = tmp_path / "out"
    convert_gguf(tmp_path / "m.gguf", folder)
    # bfloat16 rounding, as numpy and torch do it, gives the same bits.
    expected = {name: t.bfloat16() for name, t in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    seen = load_file(folder / "model.safetensors")
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name
    config = RunnerConfig(model_path=str(folder), dtype="float32")
    session = PagedSession(load_model(config, ModelConfig.from_folder(folder), CPU))
    ids = list(range(3, 60))
    with torch.no_grad():
        logits = round_weights(reference)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(session.extend({1: ids}), logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1], ids=str
)
def test_quantised_tensors_are_dequantised_then_rounded(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    reference = make_reference("llama_tied")
    write_gguf(tmp_path / "m.gguf", "llama", reference, quantize=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    seen = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    original = reference.state_dict()[name]
    packed = gguf.quants.quantize(original.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind)).bfloat16()
    assert torch.equal(seen[name], expected)
    assert not torch.equal(expected, original.bfloat16())


def test_the_tokenizer_keeps_merges_digits_and_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_reference("llama_tied"))
    folder = tmp_path / "out"
    convert_gguf(tmp_path / "m.gguf", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = tokens()
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    assert tokenizer.encode("12").tokens == ["1", "2"], "digits are split before merging"
    assert tokenizer.encode("<stop><tool>").ids == [2, vocabulary.index("<tool>")]
    assert tokenizer.decode(tokenizer.encode("un the <tool>").ids) == "un the <tool>"
    assert tokenizer.decode([2]) == "", "control tokens are special"
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.bos_token) == ("<stop>", "<start>")
    text = loaded.apply_chat_template([{"role": "user", "content": "hi 12"}], tokenize=False)
    assert text == "hi 12"
    assert loaded("un 12")["input_ids"] == tokenizer.encode("un 12").ids


def test_a_bos_token_is_added_only_if_the_file_says_so(tmp_path: Path) -> None:
    reference = make_reference("llama_tied")
    write_gguf(
        tmp_path / "m.gguf", "llama", reference, edit=lambda writer: writer.add_add_bos_token(True)
    )
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("un").tokens == ["<start>", "un"]
    assert tokenizer.encode("un", add_special_tokens=False).tokens == ["un"]


def test_config_and_end_tokens_are_written(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(0)
        writer.add_pad_token_id(1)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write_gguf(tmp_path / "m.gguf", "llama", make_reference("llama_tied"), edit=edit)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    config = ModelConfig.from_folder(tmp_path / "out")
    assert config.eos_token_ids == (2, 0)
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)
    assert (config.rms_eps, config.tie_word_embeddings) == (1e-5, True)
    assert (config.hidden_size, config.vocab_size) == (SHAPE["hidden_size"], SHAPE["vocab_size"])
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 1}


def llama3_divisors(factor: float) -> np.ndarray[Any, Any]:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = 5e5 ** -(np.arange(0, 8, 2) / 8)
    divisors: np.ndarray[Any, Any] = (plain / scaled.numpy()).astype(np.float32)
    return divisors


def add_rope_freqs(divisors: np.ndarray[Any, Any], writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", divisors)


def test_llama3_scaling_is_found_again_from_its_divisors(tmp_path: Path) -> None:
    reference = make_reference("llama_tied")
    reference.config.rope_parameters["rope_theta"] = 5e5
    good = llama3_divisors(16.0)
    for name, divisors in (("good", good), ("bad", good * np.linspace(1, 1.5, 4, dtype="f4"))):
        write_gguf(
            tmp_path / f"{name}.gguf",
            "llama",
            reference,
            edit=partial(add_rope_freqs, divisors),
        )
    convert_gguf(tmp_path / "good.gguf", tmp_path / "out")
    rope = ModelConfig.from_folder(tmp_path / "out").rope
    assert (rope.kind, rope.factor, rope.original_context_length) == ("llama3", 16.0, 8192)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*not Llama 3"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "other")


def test_an_unfinished_conversion_leaves_nothing(tmp_path: Path) -> None:
    reference = make_reference("llama_tied")
    write_gguf(tmp_path / "m.gguf", "llama", reference)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_finished_folder_is_kept_and_a_strange_one_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_reference("llama_tied"))
    (tmp_path / "out").mkdir()  # an empty one is filled
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(ModelError, match="mine: exists and is no model folder"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "mine")
    assert (tmp_path / "mine" / "diary.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pre": "unheard-of"}, r"tokenizer\.ggml\.pre: 'unheard-of'"),
        ({"tokenizer_model": "llama"}, r"tokenizer\.ggml\.model: 'llama'"),
        ({"context_length": 0}, "max_position_embeddings"),
        ({"edit": lambda writer: writer.add_expert_count(8)}, "mixtures of experts"),
        ({"edit": lambda writer: writer.add_rope_dimension_count(4)}, r"rope\.dimension_count"),
        (
            {"edit": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            r"rope\.scaling\.type: 'yarn'",
        ),
        ({"edit": lambda writer: writer.add_pad_token_id(10**6)}, "padding_token_id"),
        (
            {"edit": lambda writer: writer.add_tensor("blk.0.ssm_a", np.ones(3, dtype="f4"))},
            r"tensor 'blk\.0\.ssm_a' is not known",
        ),
        (
            {"edit": lambda w: w.add_tensor("output.weight", np.full((200, 64), np.nan, "f4"))},
            r"tensor 'output\.weight': holds NaN",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", make_reference("llama_tied"), **arguments)
    with pytest.raises(ModelError, match=rf"m\.gguf: .*{message}|m\.gguf: {message}"):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "falcon", make_reference("llama_tied"))
    with pytest.raises(ModelError, match=r"general\.architecture: 'falcon' is not one of llama"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def header(num_tensors: int, num_fields: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + rest


def string(text: str, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text.encode()


HUGE = 2**63
HOSTILE = {
    "empty": (b"", "cannot be read"),
    "other magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "cut in the counts": (header(0, 0)[:15], "ends too early"),
    "tensor count": (header(HUGE, 0, bytes(99)), "tensor count"),
    "field count": (header(0, HUGE, bytes(99)), "key-value count"),
    "string length": (header(0, 1, string("k", HUGE) + bytes(20)), "string length"),
    "array length": (
        header(0, 1, string("k") + struct.pack("<IIQ", 9, 10, HUGE) + bytes(20)),
        "array length",
    ),
    "nested arrays": (
        header(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)),
        "element type 9",
    ),
    "value type": (header(0, 1, string("k") + struct.pack("<I", 77) + bytes(9)), "type 77"),
    "key twice": (
        header(0, 2, (string("k") + struct.pack("<IB", 0, 1)) * 2 + bytes(20)),
        "given twice",
    ),
    "alignment 0": (
        header(0, 1, string("general.alignment") + struct.pack("<II", 4, 0)),
        "alignment",
    ),
    "dimensions": (header(1, 0, string("t") + struct.pack("<I", 99) + bytes(30)), "99 dim"),
    "tensor past the end": (
        header(1, 0, string("t") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0)),
        "download may be incomplete",
    ),
    "offset past the end": (
        header(1, 0, string("t") + struct.pack("<IQIQ", 1, 4, 0, HUGE)),
        "download may be incomplete",
    ),
    "zero dimension": (
        header(1, 0, string("t") + struct.pack("<IQIQ", 1, 0, 0, 0)),
        "does not fit",
    ),
    "quantisation type": (
        header(1, 0, string("t") + struct.pack("<IQIQ", 1, 4, 250, 0)),
        "unknown type 250",
    ),
    "broken block": (
        header(1, 0, string("t") + struct.pack("<IQIQ", 1, 33, 3, 0) + bytes(99)),
        "blocks of 32",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_file_name(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"bad\.gguf: .*{message}"):
        convert_gguf(path, tmp_path / "out")


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "m.gguf"
    write_gguf(good, "llama", make_reference("llama_tied"))
    data = good.read_bytes()
    bad = tmp_path / "cut.gguf"
    for size in [*range(0, 4000, 97), len(data) // 2, len(data) - 1]:
        bad.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(bad)


def test_the_command_line_reports_progress_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_reference("llama_tied"))
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(lines)} {len(lines)}"
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "other")]) == 1
    assert "absent.gguf: cannot be read" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.model
def test_the_default_model_splits_text_as_it_should(default_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("def fibonacci(n):\n").ids == [1604, 3987, 46477, 24, 94, 727, 198]
    # Digits are split off first; without that step the second space would join the digit.
    assert tokenizer.encode("  1").ids == tokenizer.encode("  ").ids + tokenizer.encode("1").ids
    config = ModelConfig.from_folder(default_model_folder)
    assert (config.num_parameters, config.eos_token_ids) == (134_515_008, (2,))
